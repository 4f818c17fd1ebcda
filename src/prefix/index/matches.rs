//! The result of a lookup.

use super::cover::Bits;
use super::lookup::Scratch;
use super::{HolderId, NOBODY, ReaderView};
use crate::atomics::Ordering::Relaxed;
use std::cell::Cell;
use std::ops::{Deref, DerefMut};

/// Number of indexes for which a thread keeps a result. Indexes that share a slot must copy their owners again.
const KEPT: usize = 8;

thread_local! {
    /// Unused results, each in the slot of its index: some kilobytes for hundreds of columns, 150 KiB at most. They are
    /// boxed, so that a lookup moves a pointer and not the whole.
    static RESULTS: [Cell<Option<Box<Matches>>>; KEPT] = Default::default();
}

/// How much of a prompt one holder has: blocks from the start without a gap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Depth {
    /// Blocks in GPU memory; for estimated entries, those expected to be there.
    pub gpu: u32,
    /// Blocks in GPU memory or host memory.
    pub cpu: u32,
    /// Blocks on any tier.
    pub any: u32,
}

/// One holder with its part of the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Match {
    /// The cache that holds the blocks.
    pub holder: HolderId,
    /// How many blocks it holds.
    pub depth: Depth,
}

/// Result of a lookup by column, in groups of 64. Reuse it: its buffers stay allocated.
#[derive(Clone, Debug, Default)]
pub struct Matches {
    /// The columns that hold at least one block.
    pub(super) found: Vec<u64>,
    /// Their depths: on any tier if the index has several, else in GPU memory.
    pub(super) depths: Vec<[u32; 64]>,
    /// If the index has several tiers: their depths in GPU memory, and in GPU or host memory.
    pub(super) stricter: Vec<[[u32; 64]; 2]>,
    pub(super) scratch: Scratch,
    pub(super) has_tiers: bool,
    pub(super) owners: Owners,
}

/// The holder of each column, copied from an index when it has changed there.
#[derive(Clone, Debug, Default)]
pub(super) struct Owners {
    /// The identity of the index, or 0.
    of: u64,
    version: u64,
    /// The holder of each column.
    holders: Vec<[u32; 64]>,
    /// The columns that have a holder.
    live: Vec<u64>,
    /// The column of each holder's slot.
    columns: Vec<u16>,
}

impl Owners {
    /// Copies the owners of an index, unless they have this version already. The copy may be torn: if the index's
    /// version has changed afterwards, call [`Self::forget`].
    pub(super) fn follow(&mut self, sh: &ReaderView, version: u64) {
        if self.version == version && self.of == sh.identity {
            return;
        }
        let words = (sh.columns.load(Relaxed) as usize).div_ceil(64);
        self.holders.clear();
        self.live.clear();
        self.columns.clear();
        for (word, owners) in sh.owners.iter().take(words).enumerate() {
            let mut holders = [NOBODY; 64];
            for (holder, owner) in holders.iter_mut().zip(owners) {
                *holder = owner.load(Relaxed);
            }
            let mut live = 0;
            for (i, holder) in holders.iter().enumerate().filter(|(_, holder)| **holder != NOBODY) {
                let slot = HolderId(*holder).slot();
                if self.columns.len() <= slot {
                    self.columns.resize(slot + 1, u16::MAX);
                }
                if let Some(column) = self.columns.get_mut(slot) {
                    *column = (64 * word + i) as u16;
                }
                live |= 1 << i;
            }
            self.holders.push(holders);
            self.live.push(live);
        }
        self.of = sh.identity;
        self.version = version;
    }

    /// Discards a copy that may be torn.
    pub(super) fn forget(&mut self) {
        // Versions of valid copies are even, so this one never matches.
        self.version = u64::MAX;
    }
}

impl Matches {
    /// Clears the result and reserves space for all columns that have owners.
    pub(super) fn start(&mut self, has_tiers: bool) {
        let words = self.owners.holders.len();
        self.found.clear();
        self.found.resize(words, 0);
        self.depths.resize(words, [0; 64]);
        self.stricter.clear();
        if has_tiers {
            self.stricter.resize(words, [[0; 64]; 2]);
        }
        self.has_tiers = has_tiers;
    }

    /// Removes columns that have no holder.
    pub(super) fn finish(&mut self) {
        for (found, live) in self.found.iter_mut().zip(&self.owners.live) {
            *found &= live;
        }
    }

    #[inline]
    #[expect(clippy::indexing_slicing, reason = "a remainder of the length")]
    fn depth_at(&self, word: usize, bit: usize) -> Depth {
        let any = self.depths.get(word).map_or(0, |depths| depths[bit % 64]);
        match self.stricter.get(word) {
            Some([gpu, cpu]) if self.has_tiers => Depth { gpu: gpu[bit % 64], cpu: cpu[bit % 64], any },
            _ => Depth { gpu: any, cpu: any, any },
        }
    }

    /// Returns what `holder` has of the prompt; zeros for nothing.
    #[inline]
    #[must_use]
    pub fn depth(&self, holder: HolderId) -> Depth {
        let column = usize::from(self.owners.columns.get(holder.slot()).copied().unwrap_or(u16::MAX));
        let (word, bit) = (column / 64, column % 64);
        let is_its = self.owners.holders.get(word).is_some_and(|holders| holders.get(bit) == Some(&holder.0));
        if is_its && self.found.get(word).is_some_and(|found| found >> bit & 1 != 0) {
            self.depth_at(word, bit)
        } else {
            Depth::default()
        }
    }

    /// Returns the deepest match of any holder, in blocks.
    #[must_use]
    pub fn deepest(&self) -> u32 {
        self.iter().map(|m| m.depth.any).max().unwrap_or(0)
    }

    /// Iterates over all holders with at least one block of the prompt, in no order.
    #[expect(clippy::indexing_slicing, reason = "a remainder of the length")]
    pub fn iter(&self) -> impl Iterator<Item = Match> + '_ {
        self.found.iter().zip(&self.owners.holders).enumerate().flat_map(move |(word, (found, holders))| {
            Bits(*found).map(move |bit| Match { holder: HolderId(holders[bit % 64]), depth: self.depth_at(word, bit) })
        })
    }
}

/// A result that returns to its thread on Drop, so that the next lookup in the same index finds its buffers
/// and the owners of columns.
#[derive(Debug)]
pub struct Kept(
    /// `None` only during the drop.
    Option<Box<Matches>>,
);

/// The slot where the result of an index is kept.
#[expect(clippy::indexing_slicing, reason = "a remainder of the length")]
fn place(results: &[Cell<Option<Box<Matches>>>; KEPT], identity: u64) -> &Cell<Option<Box<Matches>>> {
    &results[identity as usize % KEPT]
}

impl Kept {
    /// Takes this thread's result for an index, or creates one. A result of another index is dropped, since its
    /// buffers may be far larger.
    pub(super) fn of(identity: u64) -> Self {
        let kept = RESULTS.try_with(|results| place(results, identity).take()).ok().flatten();
        Self(Some(kept.filter(|kept| kept.owners.of == identity).unwrap_or_default()))
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Some(matches) = self.0.take() {
            // A thread that ends keeps nothing.
            let _ = RESULTS.try_with(|results| place(results, matches.owners.of).set(Some(matches)));
        }
    }
}

impl Deref for Kept {
    type Target = Matches;

    #[inline]
    #[expect(clippy::expect_used, reason = "only the drop takes it")]
    fn deref(&self) -> &Matches {
        self.0.as_ref().expect("set until the drop")
    }
}

impl DerefMut for Kept {
    #[inline]
    #[expect(clippy::expect_used, reason = "only the drop takes it")]
    fn deref_mut(&mut self) -> &mut Matches {
        self.0.as_mut().expect("set until the drop")
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{index, key, named};
    use super::super::{PrefixIndex, Tier};
    use super::*;

    /// The version of the owners that this thread has kept for an index.
    fn kept(index: &PrefixIndex) -> Option<u64> {
        let found = Kept::of(index.shared.identity);
        (found.owners.of == index.shared.identity).then_some(found.owners.version)
    }

    #[test]
    fn each_thread_keeps_one_result_per_index() {
        let indexes = [index(1 << 20), index(1 << 20)];
        let prompt: Vec<_> = (0..5).map(key).collect();
        let holders = indexes.each_ref().map(|index| index.add_holder());
        for (index, (holder, blocks)) in indexes.iter().zip(holders.into_iter().zip([2, 4])) {
            index.store(holder, Tier::Gpu, None, &named(&prompt[..blocks], 0)).unwrap();
        }
        let find = |which: usize| indexes[which].find(&mut prompt.as_slice()).depth(holders[which]).any;
        assert_eq!([0, 1, 0, 1].map(find), [2, 4, 2, 4]);
        let version = |which: usize| indexes[which].shared.owners_version.load(Relaxed);
        assert_eq!([0, 1].map(|which| kept(&indexes[which])), [0, 1].map(|which| Some(version(which))));
        indexes[0].remove_holder(holders[0]);
        assert_eq!([0, 1].map(find), [0, 4], "the kept result is refreshed");
        assert_eq!(kept(&indexes[0]), Some(version(0)));
    }

    #[test]
    fn concurrent_results_are_independent() {
        let index = index(1 << 20);
        let holder = index.add_holder();
        let (long, short): (Vec<_>, Vec<_>) = ((0..9).map(key).collect(), (0..3).map(key).collect());
        index.store(holder, Tier::Gpu, None, &named(&long, 0)).unwrap();
        let [first, second] = [&long, &short].map(|keys| index.find(&mut keys.as_slice()));
        assert_eq!([first.depth(holder).any, second.depth(holder).any], [9, 3]);
    }
}
