//! Removal of coverage from runs: runs are shortened, and freed when they have no holders and children.

use super::ReaderView;
use super::arena::{Addr, Order, order_for};
use super::cover::{self, COUNTED, GUESS, LEVELS, REACH};
use super::run::{ALIASED, BEHIND, FROZEN, GUESSED, Run, RunShape};
use super::writer::{HolderPlane, Writer};

impl Writer {
    /// Writes `self.cover` of a run back after a removal: cuts off blocks without holders, frees an empty run.
    ///
    /// Returns false when there was no memory for the part of `dropper`; then it holds nothing of the run any more.
    pub(super) fn settle(&mut self, sh: &ReaderView, run: Addr, dropper: Option<HolderPlane>) -> bool {
        let header = Run::at(&sh.arena, run);
        let shape = header.shape();
        let mut held = self.cover.deepest(&COUNTED, None);
        if shape.flags & BEHIND != 0 {
            let behind = self.behind_of(run).flat_map(|(_, r)| r.iter().map(|(_, to)| *to)).max();
            match behind {
                Some(to) => held = held.max(to),
                None => header.clear_flags(BEHIND),
            }
        }
        if shape.flags & GUESSED != 0 && self.cover.deepest(&[GUESS], None) == 0 {
            self.forget_node(sh, run);
        }
        if header.children() == 0 && held == 0 {
            self.free_run(sh, run);
            return true;
        }
        let len = held.max(header.needed());
        header.open();
        if len < shape.len {
            self.cover.resize(len);
        }
        let written = self.cover.write(&sh.arena, &mut self.space, header);
        if written.is_ok() && len < shape.len {
            self.shorten(sh, header, len);
        }
        header.close();
        if written.is_err() {
            // A gap takes a word, and columns that hold all of a shortened run may take many. The run keeps its length.
            self.keep_less(sh, run, dropper.map(|claim| (claim, 0)));
        }
        written.is_ok()
    }

    /// Removes columns from a run that are not live, and all blocks of one column's part on a plane behind a cutoff,
    /// which is its own or 0. It needs no memory, since entries are only removed.
    pub(super) fn keep_less(&mut self, sh: &ReaderView, run: Addr, part: Option<(HolderPlane, u32)>) {
        let header = Run::at(&sh.arena, run);
        self.cover.read(&sh.arena, header, &self.columns.live);
        if let Some((claim, cutoff)) = part {
            self.behind_remove(run, claim);
            self.cover.set(claim.plane, claim.column, cutoff);
            (0..LEVELS.len()).for_each(|level| self.cover.set(REACH + level, claim.column, 0));
        }
        header.open();
        let _ = self.cover.write(&sh.arena, &mut self.space, header);
        header.close();
    }

    pub(super) fn shorten(&mut self, sh: &ReaderView, header: Run<'_>, len: u32) {
        let shape = header.shape();
        let order: Order = order_for(len.div_ceil(2)).min(shape.order);
        let lost_names = shape.flags & ALIASED != 0 || self.columns.any_retired();
        let flags = if lost_names { shape.flags | FROZEN } else { shape.flags };
        header.set_shape(RunShape { len, order, flags, ..shape });
        self.space.shrink(&sh.arena, header.tags(), shape.order, order);
        self.stats.blocks -= (shape.len - len) as usize;
    }

    /// Frees a run without holders and children, and its ancestors that only existed for it.
    pub(super) fn free_run(&mut self, sh: &ReaderView, run: Addr) {
        let mut at = run;
        loop {
            let header = Run::at(&sh.arena, at);
            let shape = header.shape();
            let parent = header.place().run;
            sh.children.remove(&sh.arena, at);
            header.open();
            cover::drop_beside(&sh.arena, &mut self.space, header);
            self.space.free(&sh.arena, header.tags(), shape.order);
            header.vacate();
            header.close();
            self.return_header(sh, at);
            self.stats.runs -= 1;
            self.stats.blocks -= shape.len as usize;
            let before = Run::at(&sh.arena, parent);
            before.set_children(before.children() - 1);
            if before.children() > 0 || parent == sh.root {
                return;
            }
            before.set_last_fork(0);
            let shape = before.shape();
            before.set_shape(RunShape { forks: 0, ..shape });
            self.cover.read(&sh.arena, before, &self.columns.live);
            let held = self.cover.deepest(&COUNTED, None);
            if held > 0 || shape.flags & (BEHIND | GUESSED) != 0 {
                if held < shape.len {
                    self.settle(sh, parent, None);
                }
                return;
            }
            at = parent;
        }
    }
}
