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
use attache_scheduling::plugin::{ParamError, Plugin, Scorer, params};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext, Reads};
use attache_types::ids::EndpointId;
use parking_lot::Mutex;
use quick_cache::unsync::Cache;
use serde::Deserialize;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "mm-embeddings-cache-scorer",
    aliases: &[],
    kind: "scorer",
    summary: "Prefers endpoints that have encoded the request's images, sounds and videos before.",
    source: "llm-d `mm-embeddings-cache-scorer`",
    build: |value| params::<Params>(value)?.build().map(|p| Plugin::Scorer(Arc::new(p))),
};

/// 2,048 items, llm-d's default: 4 GiB of embeddings at 2 MiB each.
pub const DEFAULT_ITEMS_PER_SERVER: usize = 2_048;
/// 1,000,000 items, about 32 MB for each server.
pub const MAX_ITEMS_PER_SERVER: usize = 1_000_000;

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Params {
    items_per_server: usize,
}

impl Default for Params {
    fn default() -> Self {
        Self { items_per_server: DEFAULT_ITEMS_PER_SERVER }
    }
}

impl Params {
    fn build(self) -> Result<EmbeddingsCache, ParamError> {
        if !(1..=MAX_ITEMS_PER_SERVER).contains(&self.items_per_server) {
            let allowed = format!("1 to {MAX_ITEMS_PER_SERVER} is allowed");
            return Err(ParamError::value("itemsPerServer", self.items_per_server, &allowed));
        }
        Ok(EmbeddingsCache { capacity: self.items_per_server, servers: Mutex::default() })
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
