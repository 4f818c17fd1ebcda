//! What engines tell of their caches, and how it reaches the index. Called by [`super::World`]; pure.
//!
//! As production hears it: a batch that does not follow the one before shows a gap; the server is not believed from then on until a replay,
//! which takes the way to the engine and back, has brought what is missing, and what comes meanwhile waits for that.

use super::{Link, World};
use crate::front::root;
use crate::queue::Due;
use attache_prefix::index::{StoredBlock, Tier};
use attache_prefix::key::{BlockKey, EngineHash};
use attache_prefix::trust::Trust;
use attache_sim::kv::KvEvent;
use attache_types::clock::Timestamp;
use attache_types::rng;
use rand::RngExt;
use std::time::Duration;

/// What is heard of one cache.
#[derive(Debug)]
pub(crate) enum Hearsay {
    /// Batches are missing before the one that has come: a replay is asked for.
    Gap,
    /// All that was told up to now.
    Told(Vec<KvEvent>),
    /// Another process publishes from now on, with an empty cache.
    Anew,
}

impl Link {
    /// A batch of `events`, told at `at`, goes off; when, and what, is heard of it.
    fn send(&mut self, at: Timestamp, events: Vec<KvEvent>, delay: Duration) -> Vec<(Timestamp, Hearsay)> {
        let arrives = at.after(delay);
        let mut heard = Vec::new();
        if !self.missed.is_empty() {
            heard.push((arrives, Hearsay::Gap));
            self.replayed = self.replayed.max(arrives.after(2 * delay));
        }
        let mut all = std::mem::take(&mut self.missed);
        all.extend(events);
        heard.push((arrives.max(self.replayed), Hearsay::Told(all)));
        heard
    }
}

impl World<'_> {
    /// Sends off what an engine has told of its cache.
    pub(super) fn publish_kv(&mut self, i: usize) {
        let Some(hearing) = self.hearing.kv_events.clone() else { return };
        let Some(server) = self.servers.get_mut(i) else { return };
        let batches = server.engine.take_kv_batches();
        let Some(link) = &mut server.events else { return };
        for batch in batches {
            link.sequence += 1;
            let mut draw = rng::for_request(self.seed ^ i as u64, link.sequence);
            if hearing.loss > 0.0 && draw.random_bool(hearing.loss.min(1.0)) {
                link.missed.extend(batch.events);
                continue;
            }
            for (at, heard) in link.send(batch.at, batch.events, hearing.delay) {
                self.queue.push(at, Due::Events(i, heard));
            }
        }
    }

    /// A server's process is another one: what the old one has told is heard before that.
    pub(super) fn restart_kv(&mut self, i: usize, now: Timestamp) {
        let Some(hearing) = &self.hearing.kv_events else { return };
        if let Some(link) = self.servers.get_mut(i).and_then(|s| s.events.as_mut()) {
            link.missed.clear();
            self.queue.push(now.after(hearing.delay).max(link.replayed), Due::Events(i, Hearsay::Anew));
        }
    }

    /// Does what follows from what is heard at `now`.
    pub(super) fn hear(&self, i: usize, heard: &Hearsay, now: Timestamp) {
        let Some(link) = self.servers.get(i).and_then(|s| s.events.as_ref()) else { return };
        match heard {
            Hearsay::Gap => _ = link.trust.set(Trust::Syncing),
            Hearsay::Told(events) => {
                self.tell_events(link, events);
                // Another replay may be under way.
                if link.replayed <= now {
                    link.trust.set(Trust::Exact);
                }
            }
            Hearsay::Anew => {
                self.front.cache.index().clear(link.holder);
                link.trust.set(Trust::Exact);
            }
        }
    }

    /// Puts into the index what has arrived.
    fn tell_events(&self, link: &Link, events: &[KvEvent]) {
        let index = self.front.cache.index();
        for event in events {
            match event {
                KvEvent::Stored { parent, blocks, lora, .. } => {
                    let turn = if parent.is_none() { root(lora.as_deref()) } else { 0 };
                    let stored = |(n, block): (usize, &attache_sim::kv::KvBlock)| StoredBlock {
                        hash: EngineHash(block.hash.0),
                        key: BlockKey(if n == 0 { block.content ^ turn } else { block.content }),
                    };
                    let blocks: Vec<StoredBlock> = blocks.iter().enumerate().map(stored).collect();
                    // What follows a block that was dropped meanwhile can't be found any more by the engine either.
                    let _ = index.store(link.holder, Tier::Gpu, parent.map(|p| EngineHash(p.0)), &blocks);
                }
                KvEvent::Removed { hash } => index.remove(link.holder, Tier::Gpu, &[EngineHash(hash.0)]),
                KvEvent::Cleared => index.clear(link.holder),
            }
        }
    }
}

#[cfg(test)]
mod tests;
