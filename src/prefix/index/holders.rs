//! The holders: their columns, their block counts on each tier, and data that belongs to one holder alone.

use super::HolderId;
use super::arena::Addr;
use super::cover::{COUNTED, Column, ENGINE};
use super::in_use::PromptInUse;
use super::table::WordTable;
use std::collections::VecDeque;

/// Data of one holder alone.
#[derive(Debug)]
pub(super) struct Aside {
    /// The holder's names for blocks whose common name is different.
    pub(super) names: WordTable,
    /// Copies beyond the first, by (run, block, plane).
    pub(super) copies: WordTable,
}

#[derive(Debug, Default)]
pub(super) struct Holder {
    pub(super) generation: u16,
    pub(super) present: bool,
    pub(super) column: Option<Column>,
    pub(super) blocks: [u32; COUNTED.len()],
    pub(super) aside: Option<Box<Aside>>,
    /// Bytes outside the arena of its blocks behind gaps.
    pub(super) behind: usize,
    /// Blocks of it were refused or evicted for lack of memory since it was last cleared.
    pub(super) is_short: bool,
    /// Whether its estimates count as those of a server of its own.
    pub(super) has_share: bool,
    /// Limit of its estimated blocks.
    pub(super) capacity: u32,
    /// Its segments of estimated blocks, the most recently used first.
    pub(super) newest: Addr,
    pub(super) oldest: Addr,
    /// Prompts that its server works on.
    pub(super) in_use: Vec<PromptInUse>,
    /// Estimated blocks that were evicted for its capacity.
    pub(super) evicted: u64,
}

impl Holder {
    /// Size of what its engine has reported: blocks on all tiers, own names and further copies.
    pub(super) fn reported(&self) -> u64 {
        let own = self.aside.as_deref().map_or(0, |aside| aside.names.len() + aside.copies.len());
        self.reported_blocks() + own as u64
    }

    /// Number of blocks that its engine has reported, on all tiers.
    pub(super) fn reported_blocks(&self) -> u64 {
        ENGINE.iter().filter_map(|plane| self.blocks.get(*plane)).map(|blocks| u64::from(*blocks)).sum()
    }
}

#[derive(Debug)]
pub(super) struct Holders {
    all: Vec<Holder>,
    /// Slots for reuse; the longest unused comes first.
    free: VecDeque<usize>,
    max: usize,
}

impl Holders {
    pub(super) fn new(max: u32) -> Self {
        let max = max as usize;
        Self { all: Vec::with_capacity(max), free: VecDeque::with_capacity(max), max }
    }

    pub(super) fn fixed_bytes(max: u32) -> usize {
        max as usize * (size_of::<Holder>() + size_of::<usize>())
    }

    /// Adds a holder; returns its slot and its id.
    pub(super) fn add(&mut self) -> Option<(usize, HolderId)> {
        let slot = if self.all.len() < self.max {
            self.all.push(Holder::default());
            self.all.len() - 1
        } else {
            self.free.pop_front()?
        };
        let holder = self.all.get_mut(slot)?;
        let generation = holder.generation;
        *holder = Holder { generation, present: true, has_share: true, capacity: u32::MAX, ..Holder::default() };
        Some((slot, HolderId(u32::from(generation) << 16 | slot as u32)))
    }

    pub(super) fn remove(&mut self, slot: usize) {
        let Some(holder) = self.all.get_mut(slot) else { return };
        holder.present = false;
        holder.column = None;
        // A slot whose generations are used up is not reused.
        if let Some(next) = holder.generation.checked_add(1) {
            holder.generation = next;
            self.free.push_back(slot);
        }
    }

    /// Returns the slot of a holder that still exists.
    pub(super) fn slot(&self, holder: HolderId) -> Option<usize> {
        let slot = holder.slot();
        let found = self.all.get(slot)?;
        (found.present && u32::from(found.generation) == holder.0 >> 16).then_some(slot)
    }

    pub(super) fn get(&self, slot: usize) -> Option<&Holder> {
        self.all.get(slot)
    }

    pub(super) fn get_mut(&mut self, slot: usize) -> Option<&mut Holder> {
        self.all.get_mut(slot)
    }

    pub(super) fn with_aside(&self) -> impl Iterator<Item = &Aside> {
        self.all.iter().filter_map(|h| h.aside.as_deref())
    }

    pub(super) fn present(&self) -> impl Iterator<Item = &Holder> {
        self.all.iter().filter(|h| h.present)
    }

    pub(super) fn live(&self) -> usize {
        self.all.iter().filter(|h| h.present).count()
    }

    pub(super) fn count(&mut self, slot: usize, plane: usize, more: u32, less: u32) {
        if let Some(blocks) = self.all.get_mut(slot).and_then(|h| h.blocks.get_mut(plane)) {
            *blocks = (*blocks + more).saturating_sub(less);
        }
    }
}
