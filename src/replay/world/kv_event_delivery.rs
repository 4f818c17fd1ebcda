//! KV events on their way from engines to the prefix index, with delay, loss and
//! replay. Called by [`super::World`]; pure.
//!
//! As in production: a batch that does not follow the previous one shows a gap. From then on the server's events are
//! not trusted until a replay has brought the missing batches. The request for a replay and its response take one delay
//! each, and batches that arrive meanwhile wait for it.

use super::World;
use crate::front::root;
use crate::queue::SimEvent;
use attache_prefix::index::{HolderId, Origin, StoredBlock, Tier};
use attache_prefix::key::{BlockKey, EngineHash};
use attache_prefix::trust::{Trust, TrustCell};
use attache_sim::engine::{Engine, KvBatch};
use attache_sim::kv::KvEvent;
use attache_types::clock::Timestamp;
use attache_types::rng;
use rand::RngExt;
use std::sync::Arc;
use std::time::Duration;

/// News of one cache, as it arrives at the picker.
#[derive(Debug)]
pub(crate) enum KvNews {
    /// Batches are missing before the one that arrived; a replay is requested.
    Gap,
    /// Events up to now, without gaps.
    Events(Vec<KvEvent>),
    /// The server restarted and publishes from an empty cache.
    Restarted,
}

/// The path of one engine's KV events to the prefix index.
#[derive(Debug)]
pub(super) struct KvEventLink {
    pub(super) holder: HolderId,
    pub(super) trust: Arc<TrustCell>,
    /// Events of lost batches, which the next replay brings.
    missed: Vec<KvEvent>,
    /// Arrival of the last replay that was requested.
    replayed: Timestamp,
    sequence: u64,
}

impl KvEventLink {
    /// A path without messages. The cache of its engine is empty.
    pub(super) fn new(holder: HolderId) -> Self {
        let trust = Arc::new(TrustCell::default());
        trust.set(Trust::Exact);
        Self { holder, trust, missed: Vec::new(), replayed: Timestamp(0), sequence: 0 }
    }

    /// Sends a batch of `events`, published at `at`. Returns what arrives of it, and when.
    fn send(&mut self, at: Timestamp, events: Vec<KvEvent>, delay: Duration) -> Vec<(Timestamp, KvNews)> {
        let arrives = at.after(delay);
        let mut heard = Vec::new();
        if !self.missed.is_empty() {
            heard.push((arrives, KvNews::Gap));
            self.replayed = self.replayed.max(arrives.after(2 * delay));
        }
        let mut all = std::mem::take(&mut self.missed);
        all.extend(events);
        heard.push((arrives.max(self.replayed), KvNews::Events(all)));
        heard
    }
}

impl World<'_> {
    /// Sends the events that the engines of a server have published.
    pub(super) fn publish_kv(&mut self, i: usize) {
        let Some(signals) = self.signals.kv_events.clone() else { return };
        let Some(server) = self.servers.get_mut(i) else { return };
        let batches: Vec<Vec<KvBatch>> = server.engines.iter_mut().map(Engine::take_kv_batches).collect();
        for ((rank, link), batches) in server.events.iter_mut().enumerate().zip(batches) {
            let stream = self.seed ^ i as u64 ^ (rank as u64) << 32;
            for batch in batches {
                link.sequence += 1;
                let mut draw = rng::for_request(stream, link.sequence);
                if signals.loss > 0.0 && draw.random_bool(signals.loss.min(1.0)) {
                    link.missed.extend(batch.events);
                    continue;
                }
                for (at, heard) in link.send(batch.at, batch.events, signals.delay) {
                    self.queue.push(at, SimEvent::Events(i, rank, heard));
                }
            }
        }
    }

    /// A server restarted. The events of its old process arrive before the news of that.
    pub(super) fn restart_kv(&mut self, i: usize, now: Timestamp) {
        let (Some(signals), Some(server)) = (&self.signals.kv_events, self.servers.get_mut(i)) else { return };
        for (rank, link) in server.events.iter_mut().enumerate() {
            link.missed.clear();
            let at = now.after(signals.delay).max(link.replayed);
            self.queue.push(at, SimEvent::Events(i, rank, KvNews::Restarted));
        }
    }

    /// Applies news that arrive at `now`.
    pub(super) fn hear(&self, i: usize, rank: usize, heard: &KvNews, now: Timestamp) {
        let Some(link) = self.servers.get(i).and_then(|s| s.events.get(rank)) else { return };
        match heard {
            KvNews::Gap => _ = link.trust.set(Trust::Syncing),
            KvNews::Events(events) => {
                self.tell_events(link, events, now);
                // Another replay may be in progress.
                if link.replayed <= now {
                    link.trust.set(Trust::Exact);
                }
            }
            KvNews::Restarted => {
                self.pickers.first().cache.index().clear(link.holder);
                link.trust.set(Trust::Exact);
            }
        }
    }

    /// Applies events to the index.
    fn tell_events(&self, link: &KvEventLink, events: &[KvEvent], now: Timestamp) {
        let cache = &self.pickers.first().cache;
        let index = cache.index();
        for event in events {
            match event {
                KvEvent::Stored { parent, blocks, lora, .. } => {
                    let turn = if parent.is_none() { root(lora.as_deref()) } else { 0 };
                    let stored = |(n, block): (usize, &attache_sim::kv::KvBlock)| StoredBlock {
                        hash: EngineHash(block.hash.0),
                        key: BlockKey(if n == 0 { block.content ^ turn } else { block.content }),
                    };
                    let blocks: Vec<StoredBlock> = blocks.iter().enumerate().map(stored).collect();
                    // Blocks behind one that was evicted meanwhile can't be found by the engine either.
                    let parent = parent.map(|p| EngineHash(p.0));
                    if let Ok(stored) = index.report(link.holder, Tier::Gpu, parent, &blocks, Origin::New) {
                        cache.recomputed_blocks().stored(&blocks, stored.first, now);
                    }
                }
                KvEvent::Removed { hash } => index.remove(link.holder, Tier::Gpu, &[EngineHash(hash.0)]),
                KvEvent::Cleared => index.clear(link.holder),
            }
        }
    }
}

#[cfg(test)]
mod tests;
