//! Our own identity of a block: what its tokens are, under the root that its cache is separated by.
//!
//! A key says what stands in one block; the index follows keys from the root, so a block is found only behind the blocks before it
//! and keys need no chaining. The first block's key also holds the [`Root`], so that caches which an engine keeps apart never meet.

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

/// What stands in one block of a prompt; the first block's also tells under which [`Root`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct BlockKey(pub u64);

/// An engine's own name for a block and everything before it, as its KV events tell (the last 8 bytes, big-endian, of a digest).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct EngineHash(pub u64);

/// What separates the caches of one engine. Fields that are `None` or empty separate nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Root<'a> {
    /// The LoRA adapter, or the model where a pool serves several.
    pub name: &'a str,
    /// The request's `cache_salt`.
    pub cache_salt: Option<&'a str>,
    /// Who asks, where tenants must not find each other's prefixes.
    pub tenant: Option<&'a str>,
}

/// How keys are made: equal spaces give equal keys to equal content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeySpace {
    seed: u64,
}

impl KeySpace {
    /// A space of its own for each `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// The root's part in the first block's key.
    #[must_use]
    pub fn root(self, root: &Root<'_>) -> u64 {
        let mut hasher = Xxh3::with_seed(self.seed);
        for field in [Some(root.name), root.cache_salt, root.tenant] {
            // Length first, so that no two roots run into each other; absent and empty are the same.
            let field = field.unwrap_or_default();
            hasher.update(&(field.len() as u64).to_le_bytes());
            hasher.update(field.as_bytes());
        }
        hasher.digest()
    }

    /// The key of the first block, which holds `content` (token ids as little-endian bytes, or text).
    #[must_use]
    pub fn first(self, root: u64, content: &[u8]) -> BlockKey {
        BlockKey(xxh3_64_with_seed(content, self.seed ^ root))
    }

    /// The key of any later block.
    #[must_use]
    #[inline]
    pub fn next(self, content: &[u8]) -> BlockKey {
        BlockKey(xxh3_64_with_seed(content, self.seed))
    }

    /// The key of a block that also holds something which is no token: an image by its hash and its place in the block.
    #[must_use]
    pub fn with_extra(self, key: BlockKey, extra: &[u8]) -> BlockKey {
        BlockKey(xxh3_64_with_seed(extra, key.0))
    }
}

/// The keys of a prompt, made as far as they are asked for.
pub trait BlockKeys {
    /// The keys made so far, at least `n` of them unless the prompt has fewer.
    fn upto(&mut self, n: usize) -> &[BlockKey];
}

impl BlockKeys for &[BlockKey] {
    fn upto(&mut self, _: usize) -> &[BlockKey] {
        self
    }
}
