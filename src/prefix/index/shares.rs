//! Shares of KV caches when memory is exhausted, and eviction of blocks that engines reported.
//!
//! A share is an equal part of all blocks. A cache may hold more while others hold less. When memory is exhausted, a
//! cache over its share loses its own blocks for those that it adds. Otherwise the caches over their shares lose blocks,
//! or the estimates if these are over their shares together.
//!
//! Reported blocks have no list by age, which would take more memory than they do. A hand passes over all runs instead,
//! as in the CLOCK algorithm: it spares a run once that a prompt has used since it last passed, and ends of runs go
//! before the blocks in front of them. New runs take the headers behind the hand, so it meets them last.

use super::EngineHash;
use super::ReaderView;
use super::arena::Addr;
use super::cover::{Bits, Column, ENGINE, GUESS};
use super::run::{ALIASED, BEHIND, MAX_RUN, Run, RunPosition, USED};
use super::store::{copy_key, resolve};
use super::writer::{HEADERS, HolderPlane, Writer};
use crate::atomics::Ordering::Relaxed;
use crate::key::BlockKey;

/// Most runs that the hand passes for one eviction, first for ends of runs alone. It limits how long the writer holds
/// the lock.
const MOST_PASSED: usize = 4096;
/// Most blocks that a cache loses of one run at once.
const EVICTED_AT_ONCE: u32 = 256;
/// Own names of a holder that need no blocks.
const FEW_OWN_NAMES: u64 = 1024;
/// Evictions after which shares are computed again.
const RENEW_EVERY: u8 = 64;

/// Shares at one moment, and the position of the hand.
#[derive(Debug, Default)]
pub(super) struct Shares {
    /// Blocks of one share.
    share: u64,
    /// Whether estimates have more than the shares of their holders together.
    estimates_exceed: bool,
    /// Whether a cache has more reported blocks than its share.
    reports_exceed: bool,
    /// Evictions until these are computed again.
    left: u8,
    hand: usize,
    /// Scratch of [`Writer::losers`].
    losers: Vec<Column>,
    /// The holder whose reported blocks are being stored.
    pub(super) storing: Option<usize>,
}

impl Writer {
    /// Frees memory for a store. Returns false when no run may be evicted.
    pub(super) fn make_room(&mut self, sh: &ReaderView) -> bool {
        if std::mem::take(&mut self.is_aside_short) {
            // Runs use none of the memory outside the arena.
            return false;
        }
        if self.has_many_dead_names() && self.purge_dead_names(sh) {
            return true;
        }
        self.renew_shares();
        let storing = self.shares.storing;
        if let Some(slot) = storing.filter(|slot| self.is_over_share(*slot)) {
            return self.evict_reported(sh, Some(slot));
        }
        let estimates_first = self.shares.estimates_exceed || !self.shares.reports_exceed;
        let evicted = (!estimates_first && self.evict_reported(sh, None))
            || self.evict_estimated(sh)
            || (estimates_first && self.evict_reported(sh, None));
        evicted || storing.is_some_and(|slot| self.evict_reported(sh, Some(slot)))
    }

    fn renew_shares(&mut self) {
        if self.shares.left > 0 {
            self.shares.left -= 1;
            return;
        }
        let (mut all, mut holders, mut estimated, mut estimating, mut most) = (0, 0, 0, 0, 0);
        for holder in self.holders.present() {
            let reported = holder.reported();
            let guessed = u64::from(holder.blocks[GUESS]);
            all += reported + guessed;
            estimated += guessed;
            estimating += u64::from(guessed > 0 && holder.has_share);
            holders += u64::from(reported > 0);
            most = reported.max(most);
        }
        let share = all / (holders + estimating).max(1);
        self.shares.share = share;
        self.shares.estimates_exceed = estimated > estimating * share;
        self.shares.reports_exceed = most > share;
        self.shares.left = RENEW_EVERY;
    }

    fn is_over_share(&self, slot: usize) -> bool {
        self.holders.get(slot).is_some_and(|holder| holder.reported() > self.shares.share)
    }

    /// Forgets a holder's own names when they are more than an engine can have, which names a block once. Blocks
    /// without a name stay until they are evicted.
    pub(super) fn limit_own_names(&mut self, sh: &ReaderView, slot: usize) {
        let Some(holder) = self.holders.get_mut(slot) else { return };
        let blocks = holder.reported_blocks();
        if let Some(aside) = holder.aside.as_deref_mut()
            && aside.names.len() as u64 > 2 * blocks + FEW_OWN_NAMES
        {
            aside.names.release(&sh.arena, &mut self.space);
            self.fall_short(sh, slot);
        }
    }

    /// Evicts the reported blocks of one run from `only`, or from all caches over their share. Returns false when the
    /// hand has found none.
    fn evict_reported(&mut self, sh: &ReaderView, only: Option<usize>) -> bool {
        if only.is_none() && !self.shares.reports_exceed {
            return false;
        }
        let headers = self.header_pages.len() * HEADERS as usize;
        // Blocks in front of others are of use only together with them, so ends go first.
        for with_heads in [false, true] {
            for _ in 0..headers.min(MOST_PASSED) {
                let at = if self.shares.hand < headers { self.shares.hand } else { 0 };
                self.shares.hand = at + 1;
                let page = self.header_pages.get(at / HEADERS as usize).copied().unwrap_or(0);
                let run = page + (at % HEADERS as usize) as Addr * 8;
                if self.evict_from(sh, run, only, with_heads) {
                    return true;
                }
            }
        }
        false
    }

    fn evict_from(&mut self, sh: &ReaderView, run: Addr, only: Option<usize>, with_heads: bool) -> bool {
        let header = Run::at(&sh.arena, run);
        if header.is_free() || run == sh.root {
            return false;
        }
        let losers = self.losers(sh, run, only);
        let evicted = self.evict_columns(sh, run, &losers, with_heads);
        self.shares.losers = losers;
        evicted
    }

    fn evict_columns(&mut self, sh: &ReaderView, run: Addr, losers: &[Column], with_heads: bool) -> bool {
        let header = Run::at(&sh.arena, run);
        let len = header.shape().len;
        let from = if with_heads { 0 } else { header.needed() }.max(len.saturating_sub(EVICTED_AT_ONCE));
        if losers.is_empty() || from >= len || self.is_in_use(run) {
            return false;
        }
        if header.has(USED) {
            header.clear_flags(USED);
            return false;
        }
        // The names of the blocks stay, until their pages need room.
        header.set_flags(ALIASED);
        let mut evicted = 0;
        for column in losers.iter().copied() {
            let (slot, before) = (self.columns.slot(column), self.total(self.columns.slot(column)));
            let mut lost = 0;
            for plane in ENGINE {
                self.drop_copies(sh, slot, run, (from, len), plane);
                if !header.is_free() {
                    let dropped = self.drop_range(sh, run, HolderPlane { plane, column }, (from, MAX_RUN));
                    self.count(slot, plane, 0, dropped);
                    lost += dropped;
                }
            }
            sh.weights.cut(slot, lost, before);
            evicted += lost;
            if lost > 0 {
                self.fall_short(sh, slot);
                self.limit_own_names(sh, slot);
            }
        }
        self.stats.evicted_reported += u64::from(evicted);
        evicted > 0
    }

    /// The columns with reported blocks of a run that may lose them.
    fn losers(&mut self, sh: &ReaderView, run: Addr, only: Option<usize>) -> Vec<Column> {
        let header = Run::at(&sh.arena, run);
        let mut columns = std::mem::take(&mut self.shares.losers);
        columns.clear();
        if header.cover() == 0 && !header.has(BEHIND) {
            let live = self.columns.live.first().copied().unwrap_or(0);
            columns.extend(Bits(header.gpu() & live).map(|column| column as Column));
        } else {
            self.cover.read(&sh.arena, header, &self.columns.live);
            let reported = self.cover.all().filter(|(_, plane, _)| ENGINE.contains(plane)).map(|(column, _, _)| column);
            columns.extend(reported.chain(self.behind_of(run).map(|((_, column, _), _)| *column)));
            columns.sort_unstable();
            columns.dedup();
        }
        columns.retain(|column| {
            let slot = self.columns.slot(*column);
            only.map_or_else(|| self.is_over_share(slot), |only| only == slot)
        });
        columns
    }

    /// Forgets how many further copies a holder has of blocks of a run.
    fn drop_copies(&mut self, sh: &ReaderView, slot: usize, run: Addr, (from, to): (u32, u32), plane: usize) {
        let Some(aside) = self.holders.get_mut(slot).and_then(|h| h.aside.as_deref_mut()) else { return };
        if aside.copies.len() > 0 {
            for offset in from..to {
                aside.copies.remove(&sh.arena, copy_key(RunPosition { run, offset }, plane));
            }
        }
    }

    /// Records that a holder has blocks which the index lacks for want of memory.
    pub(super) fn fall_short(&mut self, sh: &ReaderView, slot: usize) {
        if let Some(holder) = self.holders.get_mut(slot)
            && !std::mem::replace(&mut holder.is_short, true)
        {
            // There is one writer.
            sh.shortages.store(sh.shortages.load(Relaxed) + 1, Relaxed);
        }
    }

    /// Counts reported blocks that found no memory.
    pub(super) fn refuse(&mut self, sh: &ReaderView, slot: usize, blocks: u64) {
        self.stats.refused_blocks += blocks;
        self.fall_short(sh, slot);
    }

    /// Removes dead names from the pages where `hash` belongs. Returns whether there were any.
    pub(super) fn purge_near(&mut self, sh: &ReaderView, slot: usize, hash: EngineHash) -> bool {
        let Self { names, behind, columns, .. } = self;
        let live = columns.live.as_slice();
        let common = names.retain_near(&sh.arena, hash.0, |value| super::store::is_held(sh, behind, live, value));
        self.purge_own_near(sh, slot, hash) || common
    }

    fn purge_own_near(&mut self, sh: &ReaderView, slot: usize, hash: EngineHash) -> bool {
        let Some(column) = self.holders.get(slot).and_then(|h| h.column) else { return false };
        let near: Vec<(u64, u64)> =
            self.own(slot).map(|a| a.names.near(&sh.arena, hash.0).collect()).unwrap_or_default();
        let mut dead = near;
        dead.retain(|(_, value)| {
            !resolve(sh, *value).is_some_and(|at| {
                ENGINE.into_iter().any(|plane| self.holds(sh, at.run, at.offset, HolderPlane { plane, column }))
            })
        });
        let Some(aside) = self.holders.get_mut(slot).and_then(|h| h.aside.as_deref_mut()) else { return false };
        for (name, _) in &dead {
            aside.names.remove(&sh.arena, *name);
        }
        !dead.is_empty()
    }

    /// Marks the runs that a prompt matches as used.
    pub(super) fn mark_used(&self, sh: &ReaderView, keys: &[BlockKey]) {
        self.matching(sh, keys, |run, _| Run::at(&sh.arena, run).set_flags(USED));
    }
}
