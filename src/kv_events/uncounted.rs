//! Blocks whose number of copies is unknown, because the engine reported them again without an origin.
//!
//! vLLM stores a second copy of a block when two requests compute the same prompt at once. It also reports blocks again
//! that a request with `kv_cache_report_mode: full` reuses. Without an origin, both reports are alike: the blocks from
//! the start of a prompt on. The index counts each as a copy. If one was none, the index keeps the block after its last
//! removal.
//!
//! The numbers here are those of reports minus removals. When as many removals as reports have arrived, all of them
//! were copies, and the block is gone for the engine too.

use ahash::AHashMap;
use attache_prefix::index::StoredBlock;
use attache_prefix::key::EngineHash;

/// Most blocks that are followed, 2 MiB for an engine. Beyond it, only a cleared cache ends the uncertainty.
const MAX_BLOCKS: usize = 65_536;

/// The blocks of one engine.
#[derive(Debug, Default)]
pub(super) struct Uncounted {
    reports: AHashMap<EngineHash, u32>,
    is_full: bool,
}

impl Uncounted {
    pub(super) fn is_empty(&self) -> bool {
        self.reports.is_empty() && !self.is_full
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// The first `again` of `blocks` were reported again. `may_be_reused`: it is unknown whether as copies.
    pub(super) fn stored_again(&mut self, blocks: &[StoredBlock], again: u32, may_be_reused: bool) {
        for block in blocks.iter().take(again as usize) {
            if let Some(reports) = self.reports.get_mut(&block.hash) {
                *reports = reports.saturating_add(1);
            } else if may_be_reused && self.reports.len() < MAX_BLOCKS {
                self.reports.insert(block.hash, 2);
            } else {
                self.is_full |= may_be_reused;
            }
        }
    }

    /// Blocks were removed. With `counted`, the engine has said how many copies remain.
    pub(super) fn removed(&mut self, hashes: &[EngineHash], counted: bool) {
        if self.reports.is_empty() {
            return;
        }
        for hash in hashes {
            let Some(reports) = self.reports.get_mut(hash) else { continue };
            *reports -= 1;
            if *reports == 0 || counted {
                self.reports.remove(hash);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attache_prefix::key::BlockKey;

    fn blocks(hashes: std::ops::Range<u64>) -> Vec<StoredBlock> {
        hashes.map(|h| StoredBlock { hash: EngineHash(h), key: BlockKey(h) }).collect()
    }

    #[test]
    fn uncertainty_ends_with_the_last_removal_or_a_count() {
        let mut uncounted = Uncounted::default();
        let names: Vec<_> = (0..3).map(EngineHash).collect();
        uncounted.stored_again(&blocks(0..3), 3, false);
        assert!(uncounted.is_empty(), "these are copies");
        uncounted.stored_again(&blocks(0..3), 2, true);
        uncounted.removed(&names, false);
        assert!(!uncounted.is_empty(), "one report of each is left");
        uncounted.stored_again(&blocks(0..1), 1, false);
        uncounted.removed(&names, false);
        assert!(!uncounted.is_empty(), "the first block was stored once more");
        uncounted.removed(&names[..1], false);
        assert!(uncounted.is_empty());
        uncounted.stored_again(&blocks(0..3), 3, true);
        uncounted.removed(&names, true);
        assert!(uncounted.is_empty(), "the engine counts them");
    }

    #[test]
    fn followed_blocks_are_bounded() {
        let mut uncounted = Uncounted::default();
        let many = blocks(0..MAX_BLOCKS as u64 + 1);
        uncounted.stored_again(&many, u32::MAX, true);
        let names: Vec<_> = many.iter().map(|b| b.hash).collect();
        uncounted.removed(&names, true);
        assert!(uncounted.reports.is_empty() && !uncounted.is_empty());
        uncounted.clear();
        assert!(uncounted.is_empty());
    }
}
