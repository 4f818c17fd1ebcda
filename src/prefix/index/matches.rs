//! What a lookup has found.

use super::HolderId;
use super::lookup::Scratch;

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
    pub(super) found: Vec<Match>,
    /// For each holder's slot, where it may stand in `found`.
    pub(super) places: Vec<u32>,
    pub(super) scratch: Scratch,
}

impl Matches {
    pub(super) fn start(&mut self) {
        self.found.clear();
    }

    /// What `holder` has; zeros when nothing.
    #[must_use]
    pub fn depth(&self, holder: HolderId) -> Depth {
        let place = self.places.get(holder.slot()).copied().unwrap_or(u32::MAX);
        self.found.get(place as usize).filter(|m| m.holder == holder).map_or_else(Depth::default, |m| m.depth)
    }

    /// The deepest match of any holder, in blocks.
    #[must_use]
    pub fn deepest(&self) -> u32 {
        self.found.iter().map(|m| m.depth.any).max().unwrap_or(0)
    }

    /// All who hold anything of the prompt, in no order.
    #[must_use]
    pub fn all(&self) -> &[Match] {
        &self.found
    }

    /// Calls `f` for each holder that has anything of the prompt.
    pub fn for_each(&self, mut f: impl FnMut(HolderId, Depth)) {
        self.found.iter().for_each(|m| f(m.holder, m.depth));
    }
}
