//! What a lookup has found.

use super::lookup::Scratch;
use super::{HolderId, NOBODY};

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

/// What a lookup found. Reuse it: its buffers stay.
#[derive(Clone, Debug, Default)]
pub struct Matches {
    /// Holders and their depth in GPU memory. As long as there may be holders; the first `count` are found.
    pub(super) found: Vec<(HolderId, u32)>,
    /// The other depths of each, if there are tiers.
    pub(super) further: Vec<[u32; 2]>,
    /// For each holder's slot, where it may stand in `found`.
    pub(super) places: Vec<u16>,
    pub(super) scratch: Scratch,
    pub(super) count: usize,
    pub(super) has_tiers: bool,
}

impl Matches {
    /// Empties it and makes room for holders of so many columns and slots.
    pub(super) fn start(&mut self, columns: usize, slots: usize) {
        self.count = 0;
        if self.found.len() < columns {
            self.found.resize(columns, (HolderId(NOBODY), 0));
        }
        if self.places.len() < slots {
            self.places.resize(slots, 0);
        }
    }

    #[inline]
    fn all(&self) -> &[(HolderId, u32)] {
        self.found.get(..self.count).unwrap_or_default()
    }

    #[inline]
    fn depth_at(&self, place: usize, gpu: u32) -> Depth {
        let further = if self.has_tiers { self.further.get(place).copied() } else { None };
        let [cpu, any] = further.unwrap_or([gpu; 2]);
        Depth { gpu, cpu, any }
    }

    /// What `holder` has; zeros when nothing.
    #[inline]
    #[must_use]
    pub fn depth(&self, holder: HolderId) -> Depth {
        let place = usize::from(self.places.get(holder.slot()).copied().unwrap_or(u16::MAX));
        match self.all().get(place) {
            Some((found, gpu)) if *found == holder => self.depth_at(place, *gpu),
            _ => Depth::default(),
        }
    }

    /// The deepest match of any holder, in blocks.
    #[must_use]
    pub fn deepest(&self) -> u32 {
        self.iter().map(|m| m.depth.any).max().unwrap_or(0)
    }

    /// All who hold anything of the prompt, in no order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Match> + '_ {
        let all = self.all().iter().enumerate();
        all.map(|(place, (holder, gpu))| Match { holder: *holder, depth: self.depth_at(place, *gpu) })
    }
}
