//! `mm-embeddings-cache-scorer`: the share of the request's images, sounds and videos that the endpoint encoded
//! recently.
//!
//! ```text
//! score = items of the request that the endpoint encoded and that are still recorded / items of the request; 0 without
//! ```
//!
//! An item is identified by the hash of its reference: the URL, or the data itself. The last `itemsPerServer` items
//! of each endpoint are recorded; set it to about the capacity of the encoder cache.
//! If a profile for `encode` picks several servers, each counts as having encoded all items. When not: items are
//! never repeated, since then all score 0. Source: llm-d `mm-embeddings-cache-scorer` with
//! `mm-embeddings-cache-producer`.

use ahash::AHashMap;
use attache_pool::Endpoint;
use attache_scheduling::facts::media;
use attache_scheduling::plugin::{Plugin, Scorer, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext, Reads};
use attache_types::ids::EndpointId;
use attache_types::parameters;
use parking_lot::Mutex;
use quick_cache::unsync::Cache;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "mm-embeddings-cache-scorer",
    aliases: &[],
    kind: "scorer",
    summary: "Prefers endpoints that have encoded the request's images, sounds and videos before.",
    source: "llm-d `mm-embeddings-cache-scorer`",
    parameters: section::<Params>,
    build: |value| {
        let Params { capacity } = params(value)?;
        Ok(Plugin::Scorer(Arc::new(EmbeddingsCache { capacity, servers: Mutex::default() })))
    },
};

/// 1,000,000 items, about 32 MB for each server.
pub const MAX_ITEMS_PER_SERVER: usize = 1_000_000;

parameters! {
    struct Params {
        /// Media items that are recorded for each endpoint, the most recent ones. 2,048 are 4 GiB of embeddings at 2
        /// MiB each.
        "itemsPerServer" => capacity: usize { default: 2_048; range: 1..=MAX_ITEMS_PER_SERVER; unit: "items"; },
    }
}

#[derive(Debug)]
struct EmbeddingsCache {
    capacity: usize,
    /// Hashes of the items that each server encoded; the least recently used are evicted first.
    servers: Mutex<AHashMap<EndpointId, Cache<u64, ()>>>,
}

impl Scorer for EmbeddingsCache {
    fn score(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f32]) {
        let Some(items) = media::hashes(cx).filter(|items| !items.is_empty()) else {
            out.fill(0.0);
            return;
        };
        let servers = self.servers.lock();
        for (score, candidate) in out.iter_mut().zip(candidates) {
            let known = servers.get(&candidate.state.endpoint.id);
            let held = known.map_or(0, |known| items.iter().filter(|item| known.peek(*item).is_some()).count());
            *score = held as f32 / items.len() as f32;
        }
    }

    fn picked(&self, cx: &PickContext<'_>, endpoint: &Endpoint) {
        let Some(items) = media::hashes(cx).filter(|items| !items.is_empty()) else { return };
        let mut servers = self.servers.lock();
        if servers.len() > cx.snapshot.endpoints.len() {
            servers.retain(|id, _| cx.snapshot.endpoints.iter().any(|state| state.endpoint.id == *id));
        }
        let known = servers.entry(endpoint.id).or_insert_with(|| Cache::new(self.capacity));
        for item in &items {
            // The lookup marks a recorded item as recently used.
            if known.get(item).is_none() {
                known.insert(*item, ());
            }
        }
    }

    fn forget(&self, lost: &[EndpointId]) {
        self.servers.lock().retain(|id, _| !lost.contains(id));
    }

    fn reads(&self) -> Reads {
        Reads::PROMPT
    }
}
