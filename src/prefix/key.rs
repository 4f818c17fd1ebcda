//! Attaché's own identity of a block: a hash of its content, under the root that separates caches.
//!
//! A key covers the content of one block. The index follows keys from the root and finds a block only behind its
//! predecessors, so keys need no chaining. The first block's key also includes the [`Root`], so that caches which an
//! engine keeps apart never match.

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

/// Hash of the content of one block of a prompt. That of the first block also includes the [`Root`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct BlockKey(pub u64);

/// An engine's own hash of a block and all blocks before it, from its KV events: the last 8
/// bytes of a digest, big-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct EngineHash(pub u64);

/// The attributes that separate the caches of one engine. `None` and empty mean no separation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Root<'a> {
    /// The LoRA adapter, or the model where a pool serves several.
    pub name: &'a str,
    /// The request's `cache_salt` field.
    pub cache_salt: Option<&'a str>,
    /// The tenant, where tenants must not find each other's prefixes.
    pub tenant: Option<&'a str>,
}

/// Makes keys. Equal spaces give equal keys for equal content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeySpace {
    seed: u64,
}

impl KeySpace {
    /// A key space; different seeds give unrelated keys.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// Returns the root's part of the first block's key.
    #[must_use]
    pub fn root(self, root: &Root<'_>) -> u64 {
        let mut hasher = Xxh3::with_seed(self.seed);
        for field in [Some(root.name), root.cache_salt, root.tenant] {
            // The length comes first, so that different roots never hash the same bytes. Absent and empty are the same.
            let field = field.unwrap_or_default();
            hasher.update(&(field.len() as u64).to_le_bytes());
            hasher.update(field.as_bytes());
        }
        hasher.digest()
    }

    /// Returns the key of the first block, which holds `content` (token ids as little-endian bytes, or text).
    #[must_use]
    pub fn first(self, root: u64, content: &[u8]) -> BlockKey {
        BlockKey(xxh3_64_with_seed(content, self.seed ^ root))
    }

    /// Returns the key of any later block.
    #[must_use]
    #[inline]
    pub fn next(self, content: &[u8]) -> BlockKey {
        BlockKey(xxh3_64_with_seed(content, self.seed))
    }

    /// Returns the key of a block that also holds something other than tokens, such as an image by its hash and
    /// its position in the block.
    #[must_use]
    pub fn with_extra(self, key: BlockKey, extra: &[u8]) -> BlockKey {
        BlockKey(xxh3_64_with_seed(extra, key.0))
    }
}

/// The keys of a prompt, computed only as far as they are requested.
pub trait BlockKeys {
    /// Returns the keys computed so far: at least `n`, unless the prompt has fewer.
    fn upto(&mut self, n: usize) -> &[BlockKey];
}

impl BlockKeys for &[BlockKey] {
    fn upto(&mut self, _: usize) -> &[BlockKey] {
        self
    }
}
