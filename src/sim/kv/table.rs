//! Which block holds what: hashes to numbers of blocks, in a table of fixed size. Private to the cache.
//!
//! Open addressing with linear probing; a removal moves those behind it up, so nothing is left of what is gone. A slot
//! is one word, the upper half of the hash and the block's number, and at most half of the slots are taken, so a
//! question reads one line of memory nearly always. The whole hash is in the block, and is read where the upper half
//! agrees. A [`BlockHash`] is a hash already, of a simulator's own prompts: its upper bits are the place as they are.

use super::BlockHash;
use prefetch_index::prefetch_index;

/// Upper half of a hash of all ones and block `u32::MAX`, which no cache has.
const EMPTY: u64 = u64::MAX;

/// The table. Slots are indexed by places, which are all below `slots.len()`, a power of two.
#[derive(Debug)]
pub(super) struct BlockTable {
    slots: Vec<u64>,
    /// Bits of a place, at most 32.
    bits: u32,
}

impl BlockTable {
    /// Empty, with room for `blocks` blocks.
    pub(super) fn new(blocks: u32) -> Self {
        // Twice as many slots, but for sizes that no machine has.
        let bits = (u64::from(blocks) * 2).next_power_of_two().trailing_zeros().clamp(1, 32);
        Self { slots: vec![EMPTY; 1 << bits], bits }
    }

    /// The block that holds `hash`; `is` says whether a block does.
    pub(super) fn get(&self, hash: BlockHash, is: impl Fn(u32) -> bool) -> Option<u32> {
        let mut place = self.home(hash.0);
        loop {
            let slot = self.slots[place];
            if slot == EMPTY {
                return None;
            }
            if slot >> 32 == hash.0 >> 32 && is(block(slot)) {
                return Some(block(slot));
            }
            place = self.next(place);
        }
    }

    /// Adds a hash that is not there.
    pub(super) fn insert(&mut self, hash: BlockHash, id: u32) {
        let mut place = self.home(hash.0);
        while self.slots[place] != EMPTY {
            place = self.next(place);
        }
        self.slots[place] = slot(hash, id);
    }

    /// Block `new` holds what `old` held.
    pub(super) fn replace(&mut self, hash: BlockHash, old: u32, new: u32) {
        if let Some(place) = self.place(hash, old) {
            self.slots[place] = slot(hash, new);
        }
    }

    /// Removes a hash and the block that holds it.
    pub(super) fn remove(&mut self, hash: BlockHash, id: u32) {
        let Some(mut hole) = self.place(hash, id) else { return };
        let mut place = self.next(hole);
        loop {
            let slot = self.slots[place];
            if slot == EMPTY {
                break;
            }
            // It may move up unless it would stand before its home.
            let mask = self.slots.len() - 1;
            let from_home = place.wrapping_sub(self.home(slot)) & mask;
            if from_home >= place.wrapping_sub(hole) & mask {
                self.slots[hole] = slot;
                hole = place;
            }
            place = self.next(place);
        }
        self.slots[hole] = EMPTY;
    }

    /// Removes all entries and keeps the memory.
    pub(super) fn clear(&mut self) {
        self.slots.fill(EMPTY);
    }

    /// The blocks that are there, in no order.
    pub(super) fn blocks(&self) -> impl Iterator<Item = u32> {
        self.slots.iter().filter(|slot| **slot != EMPTY).map(|slot| block(*slot))
    }

    /// Brings the place of a hash near, as it will be asked for soon.
    pub(super) fn prefetch(&self, hash: BlockHash) {
        prefetch_index(&self.slots, self.home(hash.0));
    }

    fn place(&self, hash: BlockHash, id: u32) -> Option<usize> {
        let wanted = slot(hash, id);
        let mut place = self.home(hash.0);
        while self.slots[place] != wanted {
            if self.slots[place] == EMPTY {
                return None;
            }
            place = self.next(place);
        }
        Some(place)
    }

    /// Of a hash or of a slot: both begin with the same 32 bits.
    fn home(&self, hash: u64) -> usize {
        (hash >> (64 - self.bits)) as usize
    }

    fn next(&self, place: usize) -> usize {
        (place + 1) & (self.slots.len() - 1)
    }
}

fn slot(hash: BlockHash, id: u32) -> u64 {
    hash.0 >> 32 << 32 | u64::from(id)
}

#[expect(clippy::cast_possible_truncation, reason = "the lower half of a slot")]
fn block(slot: u64) -> u32 {
    slot as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// Few homes, upper halves that agree, and homes at the end of the table, where probing goes on at its beginning.
    fn hash(pick: u8) -> BlockHash {
        let upper = [0, 1, 0x7FFF_FFFF, 0xFFFF_FFFE, 0xFFFF_FFFF][usize::from(pick % 5)];
        BlockHash(upper << 32 | u64::from(pick / 5))
    }

    proptest! {
        #[test]
        fn it_holds_what_a_map_holds(steps in prop::collection::vec((0..60u8, any::<bool>()), 0..200)) {
            let (mut table, mut map) = (BlockTable::new(16), BTreeMap::<BlockHash, u32>::new());
            let mut holds = [BlockHash(0); 16];
            for (pick, replaces) in steps {
                let hash = hash(pick);
                let free = (0..16).find(|id| !map.values().any(|used| used == id));
                match (map.get(&hash).copied(), free) {
                    (Some(id), Some(new)) if replaces => {
                        table.replace(hash, id, new);
                        holds[new as usize] = hash;
                        map.insert(hash, new);
                    }
                    (Some(id), _) => {
                        table.remove(hash, id);
                        map.remove(&hash);
                    }
                    (None, Some(id)) => {
                        table.insert(hash, id);
                        holds[id as usize] = hash;
                        map.insert(hash, id);
                    }
                    (None, None) => {}
                }
                for hash in (0..60).map(self::hash) {
                    prop_assert_eq!(table.get(hash, |id| holds[id as usize] == hash), map.get(&hash).copied());
                }
                let mut blocks: Vec<_> = table.blocks().collect();
                let mut all: Vec<_> = map.values().copied().collect();
                blocks.sort_unstable();
                all.sort_unstable();
                prop_assert_eq!(blocks, all);
            }
        }
    }

    #[test]
    fn tables_of_any_size_can_be_made() {
        for blocks in [0, 1, 2, 3, 1_000] {
            let mut table = BlockTable::new(blocks);
            assert!(table.slots.len() as u32 >= (2 * blocks).max(2) && table.slots.len().is_power_of_two());
            (0..blocks).for_each(|id| table.insert(BlockHash(u64::MAX), id));
            assert_eq!(table.get(BlockHash(0), |_| true), None);
            table.clear();
            assert_eq!(table.blocks().count(), 0);
        }
    }
}
