//! What a lookup has found.

use super::cover::Bits;
use super::lookup::Scratch;
use super::{HolderId, NOBODY, Shared};
use crate::atomics::Ordering::Relaxed;
use std::cell::Cell;
use std::ops::{Deref, DerefMut};

/// Indexes that a thread keeps a result for. An index whose place another one takes has to copy its owners again.
const KEPT: usize = 8;

thread_local! {
    /// Results that nobody needs, each at the place of its index: some kilobytes for hundreds of columns, 150 KiB for the most that there can be.
    /// Boxed, so that a look-up moves a pointer in and out and not the whole.
    static RESULTS: [Cell<Option<Box<Matches>>>; KEPT] = Default::default();
}

/// How much of a prompt one holder has, in blocks from the start, without a hole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Depth {
    /// In GPU memory (or, in approximate mode, believed to be).
    pub gpu: u32,
    /// In GPU or host memory.
    pub cpu: u32,
    /// Anywhere.
    pub any: u32,
}

/// One holder and what it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Match {
    /// Who.
    pub holder: HolderId,
    /// How much.
    pub depth: Depth,
}

/// What a lookup found, by column, 64 of them together. Reuse it: its buffers stay.
#[derive(Clone, Debug, Default)]
pub struct Matches {
    /// The columns that hold anything.
    pub(super) found: Vec<u64>,
    /// How much those have: anywhere, if there are tiers, else in GPU memory.
    pub(super) depths: Vec<[u32; 64]>,
    /// If there are tiers, how much they have in GPU memory, and there or in host memory.
    pub(super) stricter: Vec<[[u32; 64]; 2]>,
    pub(super) scratch: Scratch,
    pub(super) has_tiers: bool,
    pub(super) owners: Owners,
}

/// Whose each column is, copied from an index when it has changed there.
#[derive(Clone, Debug, Default)]
pub(super) struct Owners {
    /// The identity of the index, or 0.
    of: u64,
    version: u64,
    /// By column.
    holders: Vec<[u32; 64]>,
    /// The columns that are somebody's.
    live: Vec<u64>,
    /// By a holder's slot.
    columns: Vec<u16>,
}

impl Owners {
    /// Copies the owners of an index, if they are not those of this version already. They may be torn unless it is still the same
    /// afterwards: else [`Self::forget`] them.
    pub(super) fn follow(&mut self, sh: &Shared, version: u64) {
        if self.version == version && self.of == sh.identity {
            return;
        }
        let words = (sh.columns.load(Relaxed) as usize).div_ceil(64);
        self.holders.clear();
        self.live.clear();
        self.columns.clear();
        for (word, owners) in sh.owners.iter().take(words).enumerate() {
            let holders: [u32; 64] = std::array::from_fn(|i| owners[i].load(Relaxed));
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

    /// What was copied may be torn.
    pub(super) fn forget(&mut self) {
        // Those that are read are even.
        self.version = u64::MAX;
    }
}

impl Matches {
    /// Empties it and makes room for all columns that have owners.
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

    /// Leaves out columns that are nobody's.
    pub(super) fn finish(&mut self) {
        for (found, live) in self.found.iter_mut().zip(&self.owners.live) {
            *found &= live;
        }
    }

    #[inline]
    fn depth_at(&self, word: usize, bit: usize) -> Depth {
        let any = self.depths.get(word).map_or(0, |depths| depths[bit % 64]);
        match self.stricter.get(word) {
            Some([gpu, cpu]) if self.has_tiers => Depth { gpu: gpu[bit % 64], cpu: cpu[bit % 64], any },
            _ => Depth { gpu: any, cpu: any, any },
        }
    }

    /// What `holder` has; zeros when nothing.
    #[inline]
    #[must_use]
    pub fn depth(&self, holder: HolderId) -> Depth {
        let column = usize::from(self.owners.columns.get(holder.slot()).copied().unwrap_or(u16::MAX));
        let (word, bit) = (column / 64, column % 64);
        let is_its = self.owners.holders.get(word).is_some_and(|holders| holders[bit] == holder.0);
        if is_its && self.found.get(word).is_some_and(|found| found >> bit & 1 != 0) {
            self.depth_at(word, bit)
        } else {
            Depth::default()
        }
    }

    /// The deepest match of any holder, in blocks.
    #[must_use]
    pub fn deepest(&self) -> u32 {
        self.iter().map(|m| m.depth.any).max().unwrap_or(0)
    }

    /// All who hold anything of the prompt, in no order.
    pub fn iter(&self) -> impl Iterator<Item = Match> + '_ {
        self.found.iter().zip(&self.owners.holders).enumerate().flat_map(move |(word, (found, holders))| {
            Bits(*found).map(move |bit| Match { holder: HolderId(holders[bit % 64]), depth: self.depth_at(word, bit) })
        })
    }
}

/// A result that its thread keeps when it is dropped, so that the next look-up in the same index finds its buffers and who owns which column.
#[derive(Debug)]
pub struct Kept(
    /// Gone only in the drop.
    Option<Box<Matches>>,
);

/// Where the result of an index is kept.
fn place(results: &[Cell<Option<Box<Matches>>>; KEPT], identity: u64) -> &Cell<Option<Box<Matches>>> {
    &results[identity as usize % KEPT]
}

impl Kept {
    /// The one that this thread has kept for an index, or a new one. What another index has left is let go: its buffers may be far larger.
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
    fn deref(&self) -> &Matches {
        self.0.as_ref().expect("only the drop takes it")
    }
}

impl DerefMut for Kept {
    #[inline]
    fn deref_mut(&mut self) -> &mut Matches {
        self.0.as_mut().expect("only the drop takes it")
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
    fn a_thread_keeps_its_results_by_index() {
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
        assert_eq!([0, 1].map(find), [0, 4], "what was kept is of before");
        assert_eq!(kept(&indexes[0]), Some(version(0)));
    }

    #[test]
    fn results_of_one_time_are_apart() {
        let index = index(1 << 20);
        let holder = index.add_holder();
        let (long, short): (Vec<_>, Vec<_>) = ((0..9).map(key).collect(), (0..3).map(key).collect());
        index.store(holder, Tier::Gpu, None, &named(&long, 0)).unwrap();
        let [first, second] = [&long, &short].map(|keys| index.find(&mut keys.as_slice()));
        assert_eq!([first.depth(holder).any, second.depth(holder).any], [9, 3]);
    }
}
