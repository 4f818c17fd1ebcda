//! Stored blocks that wait for their parent.

use ahash::AHashMap;
use attache_prefix::index::{Origin, StoredBlock, Tier};
use attache_prefix::key::EngineHash;
use std::collections::BTreeMap;

/// A store event whose parent the index does not have.
#[derive(Debug)]
pub(super) struct Orphan {
    pub(super) parent: EngineHash,
    pub(super) tier: Tier,
    pub(super) blocks: Vec<StoredBlock>,
    pub(super) origin: Origin,
}

/// The orphans of one holder by age; the oldest are dropped when there are too many.
#[derive(Debug)]
pub(super) struct Orphans {
    max_blocks: usize,
    blocks: usize,
    next_id: u64,
    by_age: BTreeMap<u64, Orphan>,
    by_parent: AHashMap<EngineHash, Vec<u64>>,
    /// The orphans that contain a block, which may be removed before its parent arrives.
    by_block: AHashMap<EngineHash, Vec<u64>>,
}

impl Orphans {
    /// Creates an empty queue for at most `max_blocks` blocks in total.
    pub(super) fn new(max_blocks: usize) -> Self {
        Self {
            max_blocks,
            blocks: 0,
            next_id: 0,
            by_age: BTreeMap::new(),
            by_parent: AHashMap::new(),
            by_block: AHashMap::new(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_age.is_empty()
    }

    /// Adds an orphan. Returns how many were dropped for it (including itself, if it is too large).
    pub(super) fn park(&mut self, parent: EngineHash, tier: Tier, blocks: &[StoredBlock], origin: Origin) -> u64 {
        let mut dropped = 0;
        while self.blocks + blocks.len() > self.max_blocks {
            let Some(oldest) = self.by_age.keys().next().copied() else { return dropped + 1 };
            self.take(oldest);
            dropped += 1;
        }
        let id = self.next_id;
        self.next_id += 1;
        self.blocks += blocks.len();
        self.by_parent.entry(parent).or_default().push(id);
        for block in blocks {
            self.by_block.entry(block.hash).or_default().push(id);
        }
        self.by_age.insert(id, Orphan { parent, tier, blocks: blocks.to_vec(), origin });
        dropped
    }

    /// Takes the oldest orphan that waits for `parent`.
    pub(super) fn child(&mut self, parent: EngineHash) -> Option<Orphan> {
        let id = self.by_parent.get(&parent)?.first().copied()?;
        self.take(id)
    }

    /// Removes a block, and cuts off everything queued behind it. Returns how many orphans were dropped completely.
    pub(super) fn remove(&mut self, hash: EngineHash, tier: Tier) -> u64 {
        let Some(ids) = self.by_block.get(&hash) else { return 0 };
        let holds = |id: &&u64| self.by_age.get(id).is_some_and(|o| o.tier == tier);
        let Some(id) = ids.iter().find(holds).copied() else { return 0 };
        let Some(mut orphan) = self.take(id) else { return 0 };
        let at = orphan.blocks.iter().position(|b| b.hash == hash).unwrap_or(0);
        orphan.blocks.truncate(at);
        if orphan.blocks.is_empty() {
            return 1;
        }
        self.park(orphan.parent, orphan.tier, &orphan.blocks, orphan.origin)
    }

    /// Removes all orphans; returns how many there were.
    pub(super) fn clear(&mut self) -> u64 {
        let dropped = self.by_age.len() as u64;
        *self = Self::new(self.max_blocks);
        dropped
    }

    fn take(&mut self, id: u64) -> Option<Orphan> {
        let orphan = self.by_age.remove(&id)?;
        self.blocks -= orphan.blocks.len();
        unlist(&mut self.by_parent, orphan.parent, id);
        for block in &orphan.blocks {
            unlist(&mut self.by_block, block.hash, id);
        }
        Some(orphan)
    }
}

fn unlist(lists: &mut AHashMap<EngineHash, Vec<u64>>, hash: EngineHash, id: u64) {
    if let Some(ids) = lists.get_mut(&hash) {
        if let Some(at) = ids.iter().position(|i| *i == id) {
            ids.remove(at);
        }
        if ids.is_empty() {
            lists.remove(&hash);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attache_prefix::key::BlockKey;

    fn blocks(hashes: &[u64]) -> Vec<StoredBlock> {
        hashes.iter().map(|h| StoredBlock { hash: EngineHash(*h), key: BlockKey(*h) }).collect()
    }

    fn hashes(orphan: Option<Orphan>) -> Vec<u64> {
        orphan.map(|o| o.blocks.iter().map(|b| b.hash.0).collect()).unwrap_or_default()
    }

    #[test]
    fn children_are_returned_oldest_first() {
        let mut orphans = Orphans::new(100);
        assert_eq!(orphans.park(EngineHash(1), Tier::Gpu, &blocks(&[10, 11]), Origin::New), 0);
        assert_eq!(orphans.park(EngineHash(1), Tier::Cpu, &blocks(&[20]), Origin::New), 0);
        assert_eq!(hashes(orphans.child(EngineHash(2))), [0u64; 0]);
        assert_eq!(hashes(orphans.child(EngineHash(1))), [10, 11]);
        assert_eq!(hashes(orphans.child(EngineHash(1))), [20]);
        assert!(orphans.is_empty() && orphans.by_block.is_empty() && orphans.by_parent.is_empty());
    }

    #[test]
    fn oldest_orphans_are_dropped_over_the_limit() {
        let mut orphans = Orphans::new(4);
        orphans.park(EngineHash(1), Tier::Gpu, &blocks(&[10, 11]), Origin::New);
        orphans.park(EngineHash(2), Tier::Gpu, &blocks(&[20]), Origin::New);
        assert_eq!(orphans.park(EngineHash(3), Tier::Gpu, &blocks(&[30, 31, 32]), Origin::New), 1);
        assert_eq!(hashes(orphans.child(EngineHash(1))), [0u64; 0]);
        assert_eq!(hashes(orphans.child(EngineHash(2))), [20]);
        assert_eq!(
            orphans.park(EngineHash(4), Tier::Gpu, &blocks(&[40, 41, 42, 43, 44]), Origin::New),
            2,
            "the last and itself"
        );
        assert_eq!(orphans.blocks, 0);
    }

    #[test]
    fn removed_block_cuts_off_the_blocks_behind_it() {
        let mut orphans = Orphans::new(100);
        orphans.park(EngineHash(1), Tier::Gpu, &blocks(&[10, 11, 12]), Origin::New);
        assert_eq!(orphans.remove(EngineHash(11), Tier::Cpu), 0, "another tier's copy");
        assert_eq!(orphans.remove(EngineHash(12), Tier::Gpu), 0);
        assert_eq!(orphans.remove(EngineHash(11), Tier::Gpu), 0);
        assert_eq!(hashes(orphans.child(EngineHash(1))), [10]);
        orphans.park(EngineHash(1), Tier::Gpu, &blocks(&[10]), Origin::New);
        assert_eq!(orphans.remove(EngineHash(10), Tier::Gpu), 1);
        assert!(orphans.is_empty());
        orphans.park(EngineHash(1), Tier::Gpu, &blocks(&[10]), Origin::New);
        assert_eq!(orphans.clear(), 1);
        assert_eq!(orphans.blocks, 0);
    }
}
