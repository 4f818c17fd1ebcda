//! What engines tell of their caches, and how it reaches the index. Called by [`super::World`]; pure.

use super::World;
use crate::prefix::index::{StoredBlock, Tier};
use crate::prefix::key::{BlockKey, EngineHash};
use crate::replay::front::root;
use crate::replay::queue::Due;
use crate::rng;
use crate::sim::kv::KvEvent;
use rand::RngExt;

impl World<'_> {
    /// Sends off what an engine has told of its cache.
    pub(super) fn publish_kv(&mut self, i: usize) {
        let Some(hearing) = self.hearing.kv_events.clone() else { return };
        let Some(server) = self.servers.get_mut(i) else { return };
        let batches = server.engine.take_kv_batches();
        let Some(link) = &mut server.events else { return };
        let mut sent = Vec::new();
        for batch in batches {
            link.sequence += 1;
            let mut draw = rng::for_request(self.seed ^ i as u64, link.sequence);
            if hearing.loss > 0.0 && draw.random_bool(hearing.loss.min(1.0)) {
                link.missed.extend(batch.events);
                continue;
            }
            let mut events = std::mem::take(&mut link.missed);
            events.extend(batch.events);
            sent.push((batch.at.after(hearing.delay), events));
        }
        for (at, events) in sent {
            self.queue.push(at, Due::Events(i, events));
        }
    }

    /// Puts into the index what has arrived.
    pub(super) fn tell_events(&mut self, i: usize, events: &[KvEvent]) {
        let Some(link) = self.servers.get(i).and_then(|s| s.events.as_ref()) else { return };
        let index = self.front.cache.index();
        for event in events {
            match event {
                KvEvent::Stored { parent, blocks, lora, .. } => {
                    let turn = if parent.is_none() { root(lora.as_deref()) } else { 0 };
                    let stored = |(n, block): (usize, &crate::sim::kv::KvBlock)| StoredBlock {
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
