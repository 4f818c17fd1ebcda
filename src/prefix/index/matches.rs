//! What a lookup has found.

use super::cover::Bits;
use super::lookup::Scratch;
use super::{HolderId, NOBODY, Shared};
use crate::prefix::atomics::Ordering::Relaxed;
use std::sync::Arc;

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
    of: Option<Arc<()>>,
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
        if self.version == version && self.of.as_ref().is_some_and(|of| Arc::ptr_eq(of, &sh.identity)) {
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
        self.of = Some(Arc::clone(&sh.identity));
        self.version = version;
    }

    /// What was copied may be torn.
    pub(super) fn forget(&mut self) {
        self.of = None;
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
