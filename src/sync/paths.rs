//! Paths of blocks that all pickers know, so that a message names a common prefix by one digest.
//!
//! Block keys are not chained: a key says nothing about the blocks before it. A message must therefore carry all keys
//! from the first one on, or name a path that the receivers have. Senders and receivers keep every path that they
//! sent or received, so both sides usually agree. A receiver that lacks a path asks for it (`Resend.requests`). Pure.

use ahash::AHashMap;
use attache_prefix::key::BlockKey;
use smallvec::SmallVec;

/// A path is kept in chunks of this many blocks; a rest that is shorter is not kept.
const CHUNK: usize = 8;
/// Most blocks in a generation of chunks, about 8 MiB. Two generations are kept.
const GENERATION_BLOCKS: usize = 1 << 19;
/// Odd factors of the keys of a chunk: their products do not depend on each other, so a processor computes them at
/// once.
#[expect(clippy::indexing_slicing, reason = "the compiler computes it")]
const FACTORS: [u64; CHUNK] = {
    let mut factors = [0x9e37_79b9_7f4a_7c15_u64; CHUNK];
    let mut at = 1;
    while at < CHUNK {
        factors[at] = factors[at - 1].wrapping_mul(0xd6e8_feb8_6659_fd93);
        at += 1;
    }
    factors
};
/// Longest path that is read. At 16 tokens a block, these are two million tokens.
const MAX_PATH_BLOCKS: usize = 1 << 17;

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

/// The last blocks of a prefix.
#[derive(Clone, Debug)]
struct Chunk {
    /// Digest of the blocks before these; 0 at the beginning of a path.
    before: u64,
    /// Length of the prefix with these, blocks.
    blocks: u32,
    keys: [BlockKey; CHUNK],
}

/// The recent paths, in two generations: when the younger one is full, it replaces the older one. Chunks are kept under
/// the digest of the prefix that they end, so that paths share their common prefix. The younger generation has all
/// chunks before each of its chunks.
#[derive(Debug, Default)]
pub(crate) struct PathBook {
    young: AHashMap<u64, Chunk>,
    old: AHashMap<u64, Chunk>,
}

/// Digests of the prefixes that whole chunks make, shortest first.
type Digests = SmallVec<[u64; 128]>;

/// Appends the digests of all prefixes of `keys` that are longer than those of `digests`.
fn digest_rest(keys: &[BlockKey], digests: &mut Digests) {
    let mut digest = digests.last().copied().unwrap_or(0);
    for chunk in keys.as_chunks::<CHUNK>().0.iter().skip(digests.len()) {
        let products = chunk.iter().zip(FACTORS).map(|(key, factor)| key.0.wrapping_mul(factor));
        digest = mix(digest ^ products.fold(0, u64::wrapping_add)).max(1);
        digests.push(digest);
    }
}

fn digests(keys: &[BlockKey]) -> Digests {
    let mut digests = Digests::new();
    digest_rest(keys, &mut digests);
    digests
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
        let digests = digests(keys);
        let known = digests.iter().rev().find_map(|digest| Some((*digest, self.get(*digest)?.blocks)));
        self.insert(keys, &digests);
        let (base, base_blocks) = known.unwrap_or_default();
        Shortened { base, base_blocks, rest: keys.get(base_blocks as usize..).unwrap_or_default() }
    }

    /// All keys of a shortened path; `None` if its base is unknown. Keeps the path for later messages.
    pub(crate) fn extend(&mut self, base: u64, base_blocks: u32, rest: &[u64]) -> Option<Vec<BlockKey>> {
        let (mut keys, mut digests) = (Vec::new(), Digests::new());
        if base_blocks > 0 {
            self.read(base, base_blocks, rest.len(), &mut keys, &mut digests)?;
        }
        keys.extend(rest.iter().copied().map(BlockKey));
        digest_rest(&keys, &mut digests);
        self.insert(&keys, &digests);
        Some(keys)
    }

    /// Reads a known prefix into empty `keys` and `digests`, with capacity for `more` keys.
    fn read(
        &self,
        mut digest: u64,
        blocks: u32,
        more: usize,
        keys: &mut Vec<BlockKey>,
        digests: &mut Digests,
    ) -> Option<()> {
        let blocks = blocks as usize;
        self.get(digest).filter(|last| last.blocks as usize == blocks && blocks + more <= MAX_PATH_BLOCKS)?;
        keys.reserve_exact(blocks + more);
        keys.resize(blocks, BlockKey(0));
        digests.resize(blocks / CHUNK, 0);
        for (place, known) in keys.as_chunks_mut().0.iter_mut().zip(digests).rev() {
            let chunk = self.get(digest)?;
            (*place, *known) = (chunk.keys, digest);
            digest = chunk.before;
        }
        Some(())
    }

    /// Keeps a path.
    pub(crate) fn keep(&mut self, keys: &[BlockKey]) {
        self.insert(keys, &digests(keys));
    }

    /// Keeps a path with these digests.
    fn insert(&mut self, keys: &[BlockKey], digests: &[u64]) {
        let mut known = digests.iter().rposition(|digest| self.young.contains_key(digest)).map_or(0, |at| at + 1);
        if (self.young.len() + digests.len() - known) * CHUNK > GENERATION_BLOCKS {
            // Reuses the memory of the older one, so that no later insertion has to grow the table.
            std::mem::swap(&mut self.young, &mut self.old);
            self.young.clear();
            known = 0;
        }
        let mut before = known.checked_sub(1).and_then(|last| digests.get(last)).copied().unwrap_or(0);
        let chunks = digests.iter().zip(keys.as_chunks().0).zip((1u32..).map(|number| number * CHUNK as u32));
        for ((digest, keys), blocks) in chunks.skip(known) {
            self.young.insert(*digest, Chunk { before, blocks, keys: *keys });
            before = *digest;
        }
    }

    fn get(&self, digest: u64) -> Option<&Chunk> {
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
    fn base_of_another_length_is_unknown() {
        let mut book = PathBook::default();
        let base = book.shorten(&keys(0..8)).base;
        assert_eq!(base, 0);
        let base = book.shorten(&keys(0..16)).base;
        assert_eq!(book.extend(base, 8, &[9]), Some(keys((0..8).chain([9]))));
        for blocks in [7, 16, u32::MAX] {
            assert_eq!(book.extend(base, blocks, &[]), None);
        }
    }

    #[test]
    fn common_prefix_of_paths_is_kept_once() {
        let (mut book, common) = (PathBook::default(), 0..1024);
        let first = keys(common.clone().chain(5_000..5_008));
        let _ = book.shorten(&first);
        for turn in 0..GENERATION_BLOCKS as u64 / 16 {
            let _ = book.shorten(&keys(common.clone().chain((0..8).map(|block| 10_000 + turn * 8 + block))));
        }
        assert_eq!(book.shorten(&first).base_blocks as usize, first.len());
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
