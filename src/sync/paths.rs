//! Paths of blocks that all pickers know, so that a message names a common prefix by one digest.
//!
//! Block keys are not chained: a key says nothing about the blocks before it. A message must therefore carry all keys
//! from the first one on, or name a path that the receivers have. Senders and receivers keep every path that they
//! sent or received, so both sides usually agree. A receiver that lacks a path asks for it (`Resend.requests`). Pure.

use ahash::AHashMap;
use attache_prefix::key::BlockKey;
use std::sync::Arc;

/// Every path is kept under the digests of its prefixes whose length is a multiple of this.
const STRIDE: usize = 8;
/// Most blocks in a generation of paths: 2 MiB of keys. Two generations are kept.
const GENERATION_BLOCKS: usize = 1 << 18;

/// A path by reference to a prefix that the receivers know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shortened<'k> {
    /// Digest of the known prefix; 0 without one.
    pub(crate) base: u64,
    /// Length of the known prefix, blocks.
    pub(crate) base_blocks: u32,
    /// Keys behind it.
    pub(crate) rest: &'k [BlockKey],
}

#[derive(Clone, Debug)]
struct Prefix {
    path: Arc<[BlockKey]>,
    blocks: u32,
}

/// The recent paths, in two generations: when the younger one is full, it replaces the older one.
#[derive(Debug, Default)]
pub(crate) struct PathBook {
    young: AHashMap<u64, Prefix>,
    old: AHashMap<u64, Prefix>,
    young_blocks: usize,
}

/// Digests of the prefixes of `keys` under which a path is kept, with their lengths, shortest first.
fn digests(keys: &[BlockKey]) -> impl DoubleEndedIterator<Item = (u64, usize)> {
    let mut digest = 0x9e37_79b9_7f4a_7c15_u64;
    let step = |(at, key): (usize, &BlockKey)| {
        digest = mix(digest ^ key.0);
        let blocks = at + 1;
        blocks.is_multiple_of(STRIDE).then_some((digest.max(1), blocks))
    };
    keys.iter().enumerate().filter_map(step).collect::<Vec<_>>().into_iter()
}

/// A bijective mix of 64 bits.
pub(crate) fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    let x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^ (x >> 32)
}

impl PathBook {
    /// Shortens `keys` to what follows the longest known prefix, and keeps the path for later messages.
    pub(crate) fn shorten<'k>(&mut self, keys: &'k [BlockKey]) -> Shortened<'k> {
        let found = digests(keys).rev().find(|(digest, blocks)| {
            let prefix = self.get(*digest);
            prefix.is_some_and(|prefix| prefix.blocks as usize == *blocks)
        });
        self.keep(keys);
        let (base, blocks) = found.unwrap_or_default();
        Shortened {
            base,
            base_blocks: u32::try_from(blocks).unwrap_or(0),
            rest: keys.get(blocks..).unwrap_or_default(),
        }
    }

    /// All keys of a shortened path; `None` if its base is unknown. Keeps the path for later messages.
    pub(crate) fn extend(&mut self, base: u64, base_blocks: u32, rest: &[u64]) -> Option<Vec<BlockKey>> {
        let mut keys = Vec::with_capacity(base_blocks as usize + rest.len());
        if base_blocks > 0 {
            let prefix = self.get(base).filter(|prefix| prefix.blocks == base_blocks)?;
            keys.extend_from_slice(prefix.path.get(..base_blocks as usize)?);
        }
        keys.extend(rest.iter().copied().map(BlockKey));
        self.keep(&keys);
        Some(keys)
    }

    /// Keeps a path.
    pub(crate) fn keep(&mut self, keys: &[BlockKey]) {
        let Some((last, _)) = digests(keys).next_back() else { return };
        if self.young.contains_key(&last) {
            return;
        }
        if self.young_blocks + keys.len() > GENERATION_BLOCKS {
            self.old = std::mem::take(&mut self.young);
            self.young_blocks = 0;
        }
        let path: Arc<[BlockKey]> = keys.into();
        self.young_blocks += keys.len();
        for (digest, blocks) in digests(keys) {
            let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
            self.young.entry(digest).or_insert_with(|| Prefix { path: path.clone(), blocks });
        }
    }

    fn get(&self, digest: u64) -> Option<&Prefix> {
        self.young.get(&digest).or_else(|| self.old.get(&digest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn keys(of: impl IntoIterator<Item = u64>) -> Vec<BlockKey> {
        of.into_iter().map(BlockKey).collect()
    }

    fn raw(keys: &[BlockKey]) -> Vec<u64> {
        keys.iter().map(|key| key.0).collect()
    }

    #[test]
    fn path_that_extends_a_known_one_is_sent_without_its_prefix() {
        let mut book = PathBook::default();
        let first = keys(0..20);
        assert_eq!(book.shorten(&first), Shortened { base: 0, base_blocks: 0, rest: &first });
        let next = keys(0..30);
        let shortened = book.shorten(&next);
        // Prefixes are known in steps of 8 blocks.
        assert_eq!((shortened.base_blocks, shortened.rest), (16, &next[16..]));
        let other = keys((0..10).chain(100..110));
        let shortened = book.shorten(&other);
        assert_eq!((shortened.base_blocks, shortened.rest), (8, &other[8..]));
    }

    #[test]
    fn unknown_base_is_reported() {
        assert_eq!(PathBook::default().extend(7, 8, &[1]), None);
    }

    #[test]
    fn full_book_forgets_the_paths_of_the_generation_before_the_last() {
        let (mut sender, path) = (PathBook::default(), keys(0..64));
        let _ = sender.shorten(&path);
        for i in 0..(3 * GENERATION_BLOCKS as u64 / 1024) {
            let _ = sender.shorten(&keys((1_000_000 + i * 1024)..(1_001_024 + i * 1024)));
        }
        assert_eq!(sender.shorten(&path).base_blocks, 0);
    }

    proptest! {
        #[test]
        fn receivers_that_saw_the_same_messages_read_all_keys(
            paths in prop::collection::vec(prop::collection::vec(0u64..3, 0..40), 1..40),
        ) {
            let (mut sender, mut receiver) = (PathBook::default(), PathBook::default());
            for path in paths {
                // Keys are positions and contents, so equal prefixes are frequent.
                let path = keys(path.into_iter().zip(0..).map(|(content, at)| at * 8 + content));
                let sent = sender.shorten(&path);
                let read = receiver.extend(sent.base, sent.base_blocks, &raw(sent.rest));
                prop_assert_eq!(read, Some(path));
            }
        }
    }
}
