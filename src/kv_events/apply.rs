//! Applies batches of KV events of one holder to the index.

use super::feed::Destination;
use super::orphans::Orphans;
use super::size::{OwnSize, PoolSize};
use super::stats::{Count, KvEventStats};
use super::uncounted::Uncounted;
use attache_prefix::adapters::Adapters;
use attache_prefix::index::{HolderId, Origin, PrefixIndex, StoredBlock, Tier};
use attache_prefix::key::EngineHash;
use attache_prefix::recomputed::Recomputed;
use attache_prefix::residents::Residents;
use attache_prefix::trust::Doubt;
use attache_prefix::wire::{Copied, Decoder, Refusal, Removed, Sink, Stored};
use attache_record::{KvChange, KvTape};
use attache_types::clock::Clock;
use attache_types::ids::EndpointId;
use std::sync::Arc;

/// Effect of a batch on what is known about the holder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct BatchEffect {
    /// Whether the engine has dropped all blocks: from here on, everything is known.
    pub(super) cleared: bool,
    /// The reason for which events were lost, after the last clearing in the batch.
    pub(super) doubt: Option<Doubt>,
}

/// Applies the batches of one engine.
#[derive(Debug)]
pub(super) struct Applier {
    decoder: Decoder,
    book: Book,
}

/// State of a holder outside the index.
#[derive(Debug)]
struct Book {
    endpoint: EndpointId,
    clock: Clock,
    residents: Arc<Residents>,
    index: Arc<PrefixIndex>,
    holder: HolderId,
    recomputed: Arc<Recomputed>,
    tape: KvTape,
    orphans: Orphans,
    stats: Arc<KvEventStats>,
    size: OwnSize,
    /// One bit per group without prefix caching. Groups are few; those beyond the 64th count as the 64th.
    partial_groups: u64,
    /// Number of copies of blocks in the index.
    held: u64,
    /// Number of copies stored in the index since it was last cleared.
    stored: u64,
    /// Blocks with an unknown number of copies.
    uncounted: Uncounted,
    outcome: BatchEffect,
}

impl Applier {
    /// Applies the events of the cache of `size` to `to`.
    pub(super) fn new(
        to: &Destination,
        max_orphan_blocks: usize,
        size: OwnSize,
        stats: Arc<KvEventStats>,
        clock: Clock,
    ) -> Self {
        let Destination { index, residents, recomputed, tape, .. } = to.clone();
        let (endpoint, holder) = (size.endpoint(), size.cache());
        let book = Book {
            endpoint,
            clock,
            residents,
            index,
            holder,
            recomputed,
            tape,
            orphans: Orphans::new(max_orphan_blocks),
            stats,
            size,
            partial_groups: 0,
            held: 0,
            stored: 0,
            uncounted: Uncounted::default(),
            outcome: BatchEffect::default(),
        };
        Self { decoder: Decoder::new(to.keys), book }
    }

    /// Applies one batch.
    pub(super) fn apply(&mut self, payload: &[u8]) -> BatchEffect {
        self.book.outcome = BatchEffect::default();
        match self.decoder.decode(payload, &mut self.book) {
            Ok(batch) => {
                self.book.stats.add(Count::Events, u64::from(batch.events));
                self.book.stats.add(Count::UnknownEvents, u64::from(batch.unknown));
            }
            Err(error) => {
                tracing::debug!(%error, bytes = payload.len(), "batch of KV events can't be decoded");
                self.book.stats.add(Count::DecodeErrors, 1);
                self.book.outcome.doubt = Some(Doubt::Undecodable);
            }
        }
        self.book.outcome
    }

    /// Removes all blocks of the holder, since they are no longer known.
    pub(super) fn clear(&mut self) {
        self.book.clear();
    }

    /// Resets the state after a restart of the engine, which may have other settings now.
    pub(super) fn restart(&mut self) {
        self.book.clear();
        self.book.partial_groups = 0;
        self.book.size.forget();
    }

    /// Returns the number of copies of blocks in the index.
    pub(super) fn held(&self) -> u64 {
        self.book.held
    }

    /// Returns the number of copies stored in the index since it was last cleared.
    pub(super) fn stored(&self) -> u64 {
        self.book.stored
    }

    /// Whether the engine's blocks have the pool's block size now; `None` when it has not reported a block.
    pub(super) fn fits(&self) -> Option<bool> {
        self.book.size.fits()
    }

    /// Returns the block size of the engine and the pool's, in tokens, if they differ.
    pub(super) fn sizes(&self) -> Option<(u32, &PoolSize)> {
        let size = &self.book.size;
        Some((size.reported().filter(|_| size.fits() == Some(false))?, size.pool()))
    }

    /// The names of LoRA adapters that the pool's servers report.
    pub(super) fn adapters(&self) -> &Adapters {
        self.book.residents.adapters()
    }

    /// Whether the index lacks blocks of the engine because it is full.
    pub(super) fn is_short(&self) -> bool {
        self.book.index.is_short(self.book.holder)
    }

    /// As [`PrefixIndex::shortages`].
    pub(super) fn shortages(&self) -> u64 {
        self.book.index.shortages()
    }

    /// Whether the index may list blocks of which the engine has dropped the last copy.
    pub(super) fn has_uncounted(&self) -> bool {
        !self.book.uncounted.is_empty()
    }

    /// Whether stored blocks are waiting for a parent that was never reported.
    pub(super) fn has_orphans(&self) -> bool {
        !self.book.orphans.is_empty()
    }
}

impl Drop for Applier {
    fn drop(&mut self) {
        let Book { index, holder, tape, .. } = &self.book;
        tape.change(|| index.remove_holder(*holder), |()| Some(KvChange::Gone { cache: holder.0 }));
    }
}

impl Book {
    fn clear(&mut self) {
        let cache = self.holder.0;
        self.tape.change(|| self.index.clear(self.holder), |()| Some(KvChange::Cleared { cache }));
        self.stats.add(Count::OrphansDropped, self.orphans.clear());
        self.held = 0;
        self.stored = 0;
        self.uncounted.clear();
    }

    fn is_of_size(&self, size: u64) -> bool {
        size == u64::from(self.size.pool().get())
    }

    /// Stores blocks behind `parent`, or queues them until it arrives. Returns whether they are in the index.
    fn store(&mut self, parent: Option<EngineHash>, tier: Tier, blocks: &[StoredBlock], said: Option<Origin>) -> bool {
        let (cache, origin) = (self.holder.0, said.unwrap_or_default());
        let stored = self.tape.change(
            || self.index.report(self.holder, tier, parent, blocks, origin),
            |stored| stored.is_ok().then(|| KvChange::Stored { cache, tier, parent, blocks: blocks.to_vec(), origin }),
        );
        match (stored, parent) {
            (Ok(effect), _) => {
                let counted = if origin == Origin::New { blocks.len() } else { effect.new as usize };
                self.count(counted);
                if tier == Tier::Gpu && origin == Origin::New {
                    self.recomputed.stored(blocks, effect.first, self.clock.now());
                }
                if tier == Tier::Gpu && effect.again > 0 {
                    // Reports of reused blocks begin at the start of a prompt.
                    let may_be_reused = said.is_none() && parent.is_none();
                    self.uncounted.stored_again(blocks, effect.again, may_be_reused);
                }
                true
            }
            (Err(_), Some(parent)) => {
                let dropped = self.orphans.park(parent, tier, blocks, origin);
                self.stats.add(Count::OrphansParked, 1);
                self.stats.add(Count::OrphansDropped, dropped);
                false
            }
            (Err(_), None) => false,
        }
    }

    /// Stores blocks on another tier too, up to the first that the holder has on no tier. Returns how many.
    fn copy(
        &mut self,
        tier: Tier,
        hashes: impl IntoIterator<Item = EngineHash, IntoIter: Clone>,
        origin: Option<Origin>,
    ) -> usize {
        let (cache, hashes, origin) = (self.holder.0, hashes.into_iter(), origin.unwrap_or_default());
        let known = self.tape.change(
            || self.index.copy(self.holder, tier, hashes.clone(), origin),
            |known| {
                let hashes = || hashes.clone().take(*known).collect();
                (*known > 0).then(|| KvChange::Copied { cache, tier, hashes: hashes(), origin })
            },
        );
        if origin == Origin::New {
            self.count(known);
        }
        known
    }

    fn count(&mut self, blocks: usize) {
        let n = blocks as u64;
        self.held += n;
        self.stored += n;
        self.stats.add(Count::BlocksStored, n);
    }

    /// Stores blocks that were waiting for `blocks`, and those that were waiting for them.
    fn adopt(&mut self, blocks: &[StoredBlock]) {
        let mut parents: Vec<EngineHash> = blocks.iter().map(|b| b.hash).collect();
        while let Some(parent) = parents.pop() {
            while let Some(orphan) = self.orphans.child(parent) {
                if !self.store(Some(orphan.parent), orphan.tier, &orphan.blocks, Some(orphan.origin)) {
                    // The parent has been removed again; the orphan keeps waiting.
                    break;
                }
                self.stats.add(Count::OrphansAdopted, 1);
                parents.extend(orphan.blocks.iter().map(|b| b.hash));
            }
        }
    }

    fn is_partial(&self, group: Option<u32>) -> bool {
        group.is_some_and(|g| self.partial_groups & group_bit(g) != 0)
    }
}

fn group_bit(group: u32) -> u64 {
    1 << group.min(u64::BITS - 1)
}

impl Sink for Book {
    fn stored(&mut self, event: Stored<'_>) {
        if self.is_partial(event.group) {
            return;
        }
        if let Some(adapter) = event.lora {
            self.residents.adapters().used(self.endpoint, adapter, self.clock.now());
        }
        if event.tier != Tier::Gpu {
            if !self.is_of_size(u64::from(event.block_size)) {
                // Other tiers may have other block sizes (LMCache's chunks); that does not
                // affect the engine's own blocks.
                return;
            }
        } else if !self.size.report(event.block_size) {
            self.outcome.doubt = Some(Doubt::BlockSize);
            return;
        }
        let (mut parent, mut blocks) = (event.parent, event.blocks);
        if event.tier != Tier::Gpu {
            // vLLM omits the `extra_keys` of blocks that it offloads, so the name identifies a block
            // more reliably than its tokens.
            let known = self.copy(event.tier, blocks.iter().map(|b| b.hash), event.origin);
            let (copied, rest) = blocks.split_at_checked(known).unwrap_or((blocks, &[]));
            parent = copied.last().map(|b| b.hash).or(parent);
            blocks = rest;
        }
        if !blocks.is_empty() && self.store(parent, event.tier, blocks, event.origin) && !self.orphans.is_empty() {
            self.adopt(blocks);
        }
    }

    fn copied(&mut self, event: Copied<'_>) {
        // A name that stands for several blocks could not be removed later, since its removal does not
        // say how many they are.
        let is_one_block = event.block_size == 0 || self.is_of_size(event.block_size);
        if self.is_partial(event.group) || !is_one_block {
            return;
        }
        let mut rest = event.hashes;
        while !rest.is_empty() {
            let known = self.copy(event.tier, rest.iter().copied(), event.origin);
            rest = rest.get(known + 1..).unwrap_or_default();
        }
    }

    fn stored_apart(&mut self, group: Option<u32>) {
        self.partial_groups |= group.map_or(0, group_bit);
    }

    fn removed(&mut self, event: Removed<'_>) {
        if self.is_partial(event.group) {
            return;
        }
        let (cache, tier) = (self.holder.0, event.tier);
        self.tape.change(
            || self.index.remove_to(self.holder, tier, event.hashes, event.remaining),
            |()| {
                let (hashes, remaining) = (event.hashes.to_vec(), event.remaining.map(<[u32]>::to_vec));
                Some(KvChange::Removed { cache, tier, hashes, remaining })
            },
        );
        if tier == Tier::Gpu {
            self.uncounted.removed(event.hashes, event.remaining.is_some());
        }
        let n = event.hashes.len() as u64;
        self.held = self.held.saturating_sub(n);
        self.stats.add(Count::BlocksRemoved, n);
        if !self.orphans.is_empty() {
            let dropped = event.hashes.iter().map(|h| self.orphans.remove(*h, event.tier)).sum();
            self.stats.add(Count::OrphansDropped, dropped);
        }
    }

    fn cleared(&mut self) {
        self.clear();
        self.outcome = BatchEffect { cleared: true, doubt: None };
    }

    fn refused(&mut self, reason: Refusal) {
        tracing::debug!(%reason, "KV event refused");
        self.stats.add(Count::RefusedEvents, 1);
        self.outcome.doubt = Some(Doubt::Undecodable);
    }
}

#[cfg(test)]
mod tests;
