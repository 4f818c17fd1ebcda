//! Removal of blocks that engines report as dropped, and of the names that stood for them.

use super::arena::Addr;
use super::cover::{ENGINE, GPU};
use super::run::{ALIASED, BEHIND, Run, RunPosition};
use super::store::{copy_key, pack, resolve};
use super::table::{BATCH, WordTable};
use super::writer::{HolderPlane, Writer};
use super::{EngineHash, ReaderView};

impl Writer {
    /// Removes blocks that an engine has dropped, of which it still has `remaining` copies if it says so. Returns how
    /// many the holder had.
    pub(super) fn remove(
        &mut self,
        sh: &ReaderView,
        slot: usize,
        claim: HolderPlane,
        hashes: &[EngineHash],
        remaining: Option<&[u32]>,
    ) -> u32 {
        let mut dropped = 0;
        let mut pending: Option<PendingRemoval> = None;
        let has_aside = self.own(slot).is_some();
        // Without copies, every block goes, whether the engine says so or not.
        let remaining = remaining.filter(|counts| has_aside || counts.iter().any(|count| *count > 0));
        let has_copies = has_aside || remaining.is_some();
        let spots_of = |w: &Self, hashes: &[EngineHash]| w.names.spots(&sh.arena, hashes.iter().map(|h| h.0));
        let mut next = spots_of(self, hashes);
        for (done, part) in hashes.chunks(BATCH).enumerate() {
            let behind = hashes.get((done + 1) * BATCH..).unwrap_or_default();
            let spots = if behind.is_empty() { next } else { std::mem::replace(&mut next, spots_of(self, behind)) };
            let mut at = 0;
            loop {
                if let Some(p) = pending.as_mut().filter(|p| !has_copies && p.from > p.others) {
                    // Consecutive blocks from the tail on, which no other holder has: their
                    // common names are removed together.
                    let hashes = part.iter().skip(at).take((p.from - p.others) as usize).map(|hash| hash.0);
                    let removed = self.names.remove_falling(&spots, at, hashes, p.value - 1);
                    (p.from, p.value) = (p.from - removed as u32, p.value - removed as u64);
                    at += removed;
                }
                let Some(hash) = part.get(at) else { break };
                at += 1;
                let common = WordTable::find(self.names.prepared(&sh.arena, &spots, at - 1, hash.0), hash.0);
                let value = common.map(|found| found.value);
                let Some((place, is_own)) = self.named_and_held(sh, slot, claim, (*hash, value), &pending) else {
                    continue;
                };
                let left = remaining.and_then(|counts| counts.get(done * BATCH + at - 1).copied());
                if has_copies && self.drop_copy(sh, slot, claim, place, left) {
                    continue;
                }
                match &mut pending {
                    Some(p) if p.run == place.run && p.from == place.offset + 1 => {
                        (p.from, p.value) = (place.offset, p.value - 1);
                    }
                    _ => {
                        dropped += self.flush(sh, slot, claim, pending.take());
                        let others = self.others(sh, place.run, claim);
                        let value = pack(place.run, Run::at(&sh.arena, place.run).shape().generation, place.offset);
                        pending = Some(PendingRemoval {
                            run: place.run,
                            from: place.offset,
                            to: place.offset + 1,
                            others,
                            value,
                        });
                    }
                }
                if is_own {
                    self.forget_own_name(sh, slot, place, claim, *hash);
                } else if let Some(found) = common
                    && pending.as_ref().is_some_and(|p| place.offset >= p.others)
                {
                    self.names.remove_found(found);
                }
            }
        }
        dropped + self.flush(sh, slot, claim, pending)
    }

    /// Returns how many blocks of a run other columns hold, or this holder on another tier.
    fn others(&mut self, sh: &ReaderView, run: Addr, claim: HolderPlane) -> u32 {
        let header = Run::at(&sh.arena, run);
        let live = self.columns.live.first().copied().unwrap_or(0);
        let own = if claim.plane == GPU { 1u64.checked_shl(u32::from(claim.column)).unwrap_or(0) } else { 0 };
        if header.cover() == 0 && !header.has(BEHIND) {
            return if header.gpu() & live & !own != 0 { header.shape().len } else { 0 };
        }
        if header.has(BEHIND) {
            // In the gaps of other holders, dead names remain.
            header.set_flags(ALIASED);
        }
        self.cover.read(&sh.arena, header, &self.columns.live);
        let others = self.cover.deepest(&ENGINE, Some((claim.column, claim.plane)));
        let mine = (run, claim.column, claim.plane as u8);
        let behind = self.behind_of(run).filter(|(key, _)| **key != mine);
        others.max(behind.flat_map(|(_, r)| r.iter().map(|r| r.1)).max().unwrap_or(0))
    }

    /// Returns the block of a name if the holder has it on the tier, and whether the name is the holder's own. The
    /// holder's own name precedes the common one.
    fn named_and_held(
        &mut self,
        sh: &ReaderView,
        slot: usize,
        claim: HolderPlane,
        (hash, common): (EngineHash, Option<u64>),
        pending: &Option<PendingRemoval>,
    ) -> Option<(RunPosition, bool)> {
        let own = self.own(slot).and_then(|a| a.names.get(&sh.arena, hash.0)).and_then(|v| resolve(sh, v));
        let is_own = own.is_some();
        let place = own.or_else(|| common.and_then(|v| resolve(sh, v)))?;
        let is_pending = pending.as_ref().is_some_and(|p| p.run == place.run && (p.from..p.to).contains(&place.offset));
        (!is_pending && self.holds(sh, place.run, place.offset, claim)).then_some((place, is_own))
    }

    /// Removes one copy of the block, or all but `left` if the engine says that these remain. Returns true if others
    /// remain.
    fn drop_copy(
        &mut self,
        sh: &ReaderView,
        slot: usize,
        claim: HolderPlane,
        place: RunPosition,
        left: Option<u32>,
    ) -> bool {
        let key = copy_key(place, claim.plane);
        let known = self.own(slot).and_then(|aside| aside.copies.get(&sh.arena, key));
        // The number of copies besides the first one; `None` if no copy remains.
        let others = match left {
            Some(left) => u64::from(left).checked_sub(1),
            None => known.map(|more| more - 1),
        };
        if let Some(others @ 1..) = others {
            if known != Some(others) && self.set_own(sh, slot, |a| &mut a.copies, key, others).is_err() {
                // Without memory for the count of copies, the next removal drops the block. That does no harm.
                self.is_aside_short = false;
            }
        } else if known.is_some()
            && let Some(aside) = self.holders.get_mut(slot).and_then(|h| h.aside.as_deref_mut())
        {
            aside.copies.remove(&sh.arena, key);
        }
        others.is_some()
    }

    /// Removes a holder's own name, unless it has the block on another tier.
    fn forget_own_name(
        &mut self,
        sh: &ReaderView,
        slot: usize,
        place: RunPosition,
        claim: HolderPlane,
        hash: EngineHash,
    ) {
        let elsewhere = ENGINE.into_iter().any(|plane| {
            plane != claim.plane && self.holds(sh, place.run, place.offset, HolderPlane { plane, ..claim })
        });
        if let Some(aside) = self.holders.get_mut(slot).and_then(|h| h.aside.as_deref_mut())
            && !elsewhere
        {
            aside.names.remove(&sh.arena, hash.0);
        }
    }

    fn flush(&mut self, sh: &ReaderView, slot: usize, claim: HolderPlane, pending: Option<PendingRemoval>) -> u32 {
        let Some(p) = pending else { return 0 };
        let dropped = self.drop_range(sh, p.run, claim, (p.from, p.to));
        self.count(slot, claim.plane, 0, dropped);
        dropped
    }
}

/// Blocks of one run that are removed together.
struct PendingRemoval {
    run: Addr,
    from: u32,
    to: u32,
    /// Blocks below this are held by others too, so their names stay.
    others: u32,
    /// The value of the name of the block at `from`.
    value: u64,
}
