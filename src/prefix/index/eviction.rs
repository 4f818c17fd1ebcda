//! Eviction of estimated blocks: over the memory limit, the maximum of blocks, or a holder's capacity.

use super::ReaderView;
use super::arena::{Addr, order_for};
use super::cover::{Column, GUESS};
use super::guess::{NODE_WORDS, OF_ALL, OF_HOLDER, PASSED_AT_ONCE, key};
use super::list::List;
use super::run::{MAX_RUN, Run};
use super::tenants::OF_TENANT;
use super::writer::{HolderPlane, Writer};

impl Writer {
    /// Evicts the estimated blocks of one run from all holders.
    fn evict(&mut self, sh: &ReaderView, node: Addr) -> u32 {
        let run = sh.arena.low(node);
        self.cover.read(&sh.arena, Run::at(&sh.arena, run), &self.columns.live);
        let columns: Vec<(Column, u32)> = self
            .cover
            .all()
            .filter(|(_, plane, _)| *plane == GUESS)
            .map(|(column, _, cutoff)| (column, cutoff))
            .collect();
        for (column, _) in &columns {
            self.forget(sh, run, *column);
        }
        if columns.is_empty() {
            self.forget_node(sh, run);
            self.clean(sh, run);
        }
        columns.iter().map(|(_, blocks)| *blocks).sum()
    }

    pub(super) fn is_in_use(&self, run: Addr) -> bool {
        run == self.guesses.pinned || self.guesses.path.iter().any(|(r, _)| *r == run)
    }

    /// Returns the first node from the oldest on that is not in use. The prompt being recorded
    /// may itself be the oldest.
    fn oldest_unused(&self, sh: &ReaderView, list: List, oldest: Addr) -> Option<Addr> {
        let mut node = oldest;
        while node != 0 && self.is_in_use(sh.arena.low(node)) {
            node = sh.arena.low(node + list.0);
        }
        (node != 0).then_some(node)
    }

    /// Evicts the least recently used run of the tenant that is furthest over its share, or else of all
    /// tenants. A run that another tenant uses, and whose share has capacity for it, is billed to that tenant
    /// instead, up to [`PASSED_AT_ONCE`] times.
    ///
    /// Returns false when no run may be evicted, for example when a prompt that takes its tenant over its share
    /// would evict other tenants' runs.
    pub(super) fn evict_estimated(&mut self, sh: &ReaderView) -> bool {
        let greedy = self.oldest_of_greediest(sh);
        let oldest = self.oldest_unused(sh, OF_ALL, self.guesses.all.oldest);
        let Some(node) = greedy.or(oldest.filter(|_| !self.is_greedy(sh))) else { return false };
        let blocks = u64::from(self.evict(sh, node));
        if Some(node) == oldest {
            self.stats.evicted_for_budget += blocks;
        } else {
            self.stats.evicted_for_tenant += blocks;
        }
        true
    }

    /// Evicts estimated blocks until the index has no more than its maximum of blocks, or none may be evicted.
    pub(super) fn keep_max_blocks(&mut self, sh: &ReaderView) {
        while self.max_blocks.is_some_and(|most| self.stats.blocks as u64 > most) && self.evict_estimated(sh) {}
    }

    /// Returns the oldest unused run of the tenant that is furthest over its share and has one. Runs
    /// before it change their tenant.
    fn oldest_of_greediest(&mut self, sh: &ReaderView) -> Option<Addr> {
        let mut left = PASSED_AT_ONCE;
        for tenant in self.greedy(sh) {
            while self.due(sh, tenant) > self.share()
                && let Some(node) = self.oldest_unused(sh, OF_TENANT, self.oldest_run(sh, tenant))
            {
                if left == 0 || !self.pass_on(sh, node) {
                    return Some(node);
                }
                left -= 1;
            }
        }
        None
    }

    /// Evicts a holder's oldest estimated blocks until it is within its capacity, those of prompts in use last.
    pub(super) fn keep_capacity(&mut self, sh: &ReaderView, slot: usize) {
        while let Some(holder) = self.holders.get(slot)
            && let Some(over) = holder.blocks[GUESS].checked_sub(holder.capacity)
            && over > 0
            && holder.oldest != 0
        {
            let oldest = holder.oldest;
            if self.spare_in_use(sh, slot, oldest) {
                continue;
            }
            let evicted = u64::from(self.shorten_oldest(sh, slot, oldest, over));
            self.stats.evicted_for_capacity += evicted;
            if let Some(holder) = self.holders.get_mut(slot) {
                holder.evicted += evicted;
            }
        }
    }

    /// Removes up to `blocks` blocks from the end of a holder's oldest segment. Returns how many.
    fn shorten_oldest(&mut self, sh: &ReaderView, slot: usize, segment: Addr, blocks: u32) -> u32 {
        let (run, column) = (sh.arena.low(segment), sh.arena.high(segment) as Column);
        let (from, to) = (sh.arena.low(segment + 1), sh.arena.high(segment + 1));
        let left = to.saturating_sub(blocks).max(from);
        if left == from {
            self.unlink_segment(sh, slot, segment);
            self.cut_chain(sh, run, column, segment);
            self.space.free(&sh.arena, segment, order_for(NODE_WORDS));
        } else {
            sh.arena.set_high(segment + 1, left);
        }
        let had = self.drop_range(sh, run, HolderPlane { plane: GUESS, column }, (left, MAX_RUN));
        self.count(slot, GUESS, 0, had);
        self.charge(sh, run);
        had
    }

    /// Removes the deepest segment of a run from the column's chain.
    fn cut_chain(&mut self, sh: &ReaderView, run: Addr, column: Column, segment: Addr) {
        let first = self.guesses.table.get(&sh.arena, key(run, column)).unwrap_or(0) as Addr;
        if first == segment {
            self.guesses.table.remove(&sh.arena, key(run, column));
            return;
        }
        let mut at = first;
        while at != 0 && sh.arena.low(at + 3) != segment {
            at = sh.arena.low(at + 3);
        }
        if at != 0 {
            sh.arena.set_low(at + 3, sh.arena.low(segment + 3));
        }
    }

    /// Frees one segment of a retired column. Returns the next one.
    pub(super) fn drop_retired_guess(&mut self, sh: &ReaderView, column: Column, segment: Addr) -> Addr {
        let next = sh.arena.high(segment + OF_HOLDER.0);
        let run = sh.arena.low(segment);
        self.guesses.table.remove(&sh.arena, key(run, column));
        self.space.free(&sh.arena, segment, order_for(NODE_WORDS));
        self.clean(sh, run);
        self.charge(sh, run);
        next
    }
}
