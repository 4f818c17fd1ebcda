//! Columns and their reuse. A holder that is cleared gets a new column at once. Later writes sweep the old column run
//! by run, and it is reused when no run has it any more.

use super::arena::Addr;
use super::cover::{Column, bit, set_bit};
use super::run::{ALIASED, BEHIND, Run};
use super::writer::Writer;
use super::{NOBODY, ReaderView};
use crate::atomics::{
    Ordering::{Relaxed, Release},
    fence,
};

/// Headers and segments that one write sweeps for each retired column.
const SWEEP_STEP: usize = 32;
/// Names that one write checks while some may be dead, and how many of them a page counts for.
const PURGE_STEP: usize = 256;
const PAGE_STEP: usize = 128;
/// Names that are checked at once where memory is exhausted.
const PURGED_AT_ONCE: usize = 64 * PAGE_STEP;
/// Fewest dead names that start a search for them.
const FEW_NAMES: usize = 1024;

/// The columns in use and those that are being swept.
#[derive(Debug)]
pub(super) struct Columns {
    /// Columns that belong to a holder.
    pub(super) live: Vec<u64>,
    /// Columns that belong to a holder or are not swept yet.
    used: Vec<u64>,
    /// The holder's slot of each live column.
    slots: Vec<usize>,
    max: u32,
    /// Retired columns that the next pass will sweep, each with the newest of its segments of estimated blocks.
    waiting: Vec<(Column, Addr)>,
    sweeping: Vec<(Column, Addr)>,
    /// Headers that this pass has swept.
    cursor: usize,
    /// The next page of names to check for dead ones, and the number of passes left.
    purge: (usize, u8),
    /// Number of names that remained after the last complete pass.
    names_left: usize,
}

impl Columns {
    pub(super) fn new(max: u32) -> Self {
        let words = max.div_ceil(64) as usize;
        Self {
            live: vec![0; words],
            used: vec![0; words],
            slots: Vec::with_capacity(max as usize),
            max,
            waiting: Vec::new(),
            sweeping: Vec::new(),
            cursor: 0,
            purge: (0, 0),
            names_left: 0,
        }
    }

    pub(super) fn fixed_bytes(max: u32) -> usize {
        max as usize / 4 + max as usize * size_of::<usize>()
    }

    pub(super) fn any_retired(&self) -> bool {
        !self.waiting.is_empty() || !self.sweeping.is_empty()
    }

    pub(super) fn slot(&self, column: Column) -> usize {
        self.slots.get(usize::from(column)).copied().unwrap_or(usize::MAX)
    }

    fn take(&mut self, slot: usize) -> Option<Column> {
        let word = self.used.iter().position(|w| *w != u64::MAX)?;
        let column = 64 * word as u32 + self.used.get(word)?.trailing_ones();
        if column >= self.max {
            return None;
        }
        let column = column as Column;
        set_bit(&mut self.used, column, true);
        set_bit(&mut self.live, column, true);
        if self.slots.len() <= usize::from(column) {
            self.slots.resize(usize::from(column) + 1, usize::MAX);
        }
        if let Some(s) = self.slots.get_mut(usize::from(column)) {
            *s = slot;
        }
        Some(column)
    }
}

impl ReaderView {
    /// Assigns a column to a holder, or to none. Writer only.
    fn set_owner(&self, column: Column, holder: u32) {
        let owners = self.owners.get(usize::from(column) / 64);
        let Some(owner) = owners.and_then(|owners| owners.get(usize::from(column) % 64)) else { return };
        let version = self.owners_version.load(Relaxed);
        self.owners_version.store(version.wrapping_add(1), Relaxed);
        fence(Release);
        owner.store(holder, Relaxed);
        self.owners_version.store(version.wrapping_add(2), Release);
    }
}

impl Writer {
    /// Takes a clean column for a holder; sweeps one now if none is clean.
    pub(super) fn take_column(&mut self, sh: &ReaderView, slot: usize, holder: u32) -> Option<Column> {
        let mut column = self.columns.take(slot);
        if column.is_none() && self.columns.any_retired() {
            while self.columns.any_retired() {
                self.sweep(sh, usize::MAX);
            }
            column = self.columns.take(slot);
        }
        if let Some(column) = column {
            sh.columns.fetch_max(u32::from(column) + 1, Relaxed);
            sh.set_owner(column, holder);
        }
        column
    }

    /// Retires a column: readers skip it from now on.
    pub(super) fn retire(&mut self, sh: &ReaderView, column: Column, newest_guess: Addr) {
        sh.set_owner(column, NOBODY);
        set_bit(&mut self.columns.live, column, false);
        self.columns.waiting.push((column, newest_guess));
    }

    /// Sweeps a part of the retired columns; larger writes sweep more.
    pub(super) fn sweep_some(&mut self, sh: &ReaderView, blocks: usize) {
        if self.columns.any_retired() {
            let columns = self.columns.waiting.len() + self.columns.sweeping.len();
            self.sweep(sh, (SWEEP_STEP + blocks / 8) * columns);
        } else if self.columns.purge.1 > 0 || self.names.is_sparse() {
            self.purge_names(sh, PURGE_STEP + 4 * blocks);
        } else if self.has_dead_names() {
            self.columns.purge.1 = 2;
        }
    }

    /// Whether dead names have accumulated. This happens where holders name a block differently: the common
    /// name outlives its holder for the sake of others, who use their own names. A block has one common name,
    /// or a few over time.
    fn has_dead_names(&self) -> bool {
        let expected = self.stats.blocks.max(self.columns.names_left);
        self.names.len() > FEW_NAMES + expected + expected / 4
    }

    /// Whether a ninth of the common names or more may be dead: evicted blocks leave theirs.
    pub(super) fn has_many_dead_names(&self) -> bool {
        self.names.len() > FEW_NAMES + self.stats.blocks + self.stats.blocks / 8
    }

    /// Checks the next pages of names for dead ones. Returns whether there were any.
    pub(super) fn purge_dead_names(&mut self, sh: &ReaderView) -> bool {
        let before = self.names.len();
        self.purge_names(sh, PURGED_AT_ONCE);
        self.names.len() < before
    }

    fn sweep(&mut self, sh: &ReaderView, steps: usize) {
        if self.columns.sweeping.is_empty() {
            self.columns.sweeping = std::mem::take(&mut self.columns.waiting);
            self.columns.cursor = 0;
        }
        let mut left = steps;
        while left > 0 {
            let Some((column, guess)) = self.columns.sweeping.iter().copied().find(|(_, g)| *g != 0) else { break };
            let next = self.drop_retired_guess(sh, column, guess);
            for (c, g) in &mut self.columns.sweeping {
                if *c == column {
                    *g = next;
                }
            }
            left -= 1;
        }
        let headers = self.header_pages.len() * 64;
        while left > 0 && self.columns.cursor < headers {
            let page = self.header_pages.get(self.columns.cursor / 64).copied().unwrap_or(0);
            self.clean(sh, page + (self.columns.cursor % 64) as u32 * 8);
            self.columns.cursor += 1;
            left -= 1;
        }
        if left > 0 {
            self.finish_pass();
        }
    }

    fn finish_pass(&mut self) {
        for (column, _) in std::mem::take(&mut self.columns.sweeping) {
            set_bit(&mut self.columns.used, column, false);
        }
        let mut freed = 0;
        self.behind.retain(|(_, column, _), ranges| {
            let keep = bit(&self.columns.live, *column);
            if !keep {
                freed += super::writer::ASIDE_ENTRY + size_of_val(&**ranges);
            }
            keep
        });
        self.aside -= freed;
        // The rest of this pass, and a complete one.
        self.columns.purge.1 = 2;
    }

    /// Removes retired columns from one run.
    pub(super) fn clean(&mut self, sh: &ReaderView, run: Addr) {
        let header = Run::at(&sh.arena, run);
        if header.is_free() || run == sh.root {
            return;
        }
        let live = self.columns.live.first().copied().unwrap_or(0);
        if header.cover() == 0 && !header.has(BEHIND) && (header.gpu() | header.guess()) & !live == 0 {
            return;
        }
        header.set_flags(ALIASED);
        self.cover.read(&sh.arena, header, &self.columns.live);
        self.settle(sh, run, None);
    }

    fn purge_names(&mut self, sh: &ReaderView, slots: usize) {
        let Self { names, space, behind, columns, .. } = self;
        let live = columns.live.as_slice();
        let mut seen = 0;
        while seen < slots {
            seen += PAGE_STEP;
            let keep = |value| super::store::is_held(sh, behind, live, value);
            match names.retain_page(&sh.arena, space, columns.purge.0, keep) {
                Some(next) => columns.purge.0 = next,
                None => {
                    columns.purge = (0, columns.purge.1.saturating_sub(1));
                    columns.names_left = names.len();
                    break;
                }
            }
        }
    }
}
