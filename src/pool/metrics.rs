//! Scraped metrics of a model server, independent of its engine.

use super::rates::{Counters, Rates};
use attache_types::clock::Timestamp;
use std::sync::Arc;

/// The LoRA adapters of a server, from its metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
pub struct LoraState {
    /// Number of adapters that fit in GPU memory at once; 0 when the server does not report it.
    pub max: u32,
    /// Adapters with a running request, sorted.
    pub running: Vec<Arc<str>>,
    /// Adapters with a waiting request, sorted. An adapter may have running requests too.
    pub waiting: Vec<Arc<str>>,
}

impl LoraState {
    /// The state of a server with space for `max` adapters; names in any order.
    #[must_use]
    pub fn new(max: u32, mut running: Vec<Arc<str>>, mut waiting: Vec<Arc<str>>) -> Self {
        for names in [&mut running, &mut waiting] {
            names.sort_unstable();
            names.dedup();
        }
        Self { max, running, waiting }
    }

    /// The number of slots that the adapters occupy, or will: one for each adapter that runs, waits or does both.
    #[must_use]
    pub fn used_slots(&self) -> usize {
        let only_waits = self.waiting.iter().filter(|name| self.running.binary_search(name).is_err());
        self.running.len() + only_waits.count()
    }

    /// Whether `model` is an adapter that the server would have to load first. An unknown name may be the base model's,
    /// so only a server whose slots are all used by other adapters is known to lack it.
    #[must_use]
    pub fn lacks(&self, model: &str) -> bool {
        let loaded = self.running.iter().chain(&self.waiting).any(|name| **name == *model);
        !loaded && self.max > 0 && self.used_slots() >= self.max as usize
    }
}

/// Metrics of one scrape of one endpoint, summed over its engines.
#[derive(Clone, Debug, Default, PartialEq, serde::Deserialize, serde::Serialize)]
pub struct EndpointMetrics {
    /// Time of the scrape.
    pub scraped_at: Timestamp,
    /// Number of waiting requests, all engines together.
    pub waiting: u32,
    /// Number of requests in the batch, all engines together.
    pub running: u32,
    /// Waiting and running requests of each data-parallel engine, by its number; empty with one engine, or if the
    /// metrics do not distinguish engines.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<u32>,
    /// Usage of the KV cache in GPU memory, 0..=1; of several engines, the highest.
    pub kv_usage: f32,
    /// Usage of the KV cache in host memory, 0..=1; of several engines, the highest. Only vLLM's V0 engine reports it.
    pub cpu_cache_usage: Option<f32>,
    /// Part of the time in which the GPU was computing, 0..=1; of several GPUs, the highest.
    pub gpu_busy: Option<f64>,
    /// The engine's own measure of its utilization; of several engines, the highest. Only xLLM reports it.
    pub engine_utilization: Option<f64>,
    /// Name of the base model, where the metrics have it as a label.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<Arc<str>>,
    /// The LoRA adapters, when the server reports them.
    pub lora: Option<LoraState>,
    /// Number of tokens in a KV block.
    pub block_size: Option<u32>,
    /// Number of KV blocks of the server, all engines together.
    pub num_blocks: Option<u32>,
    /// Unix time at which the server's process started, in seconds. A greater value than before means a restart.
    pub process_start: Option<f64>,
    /// Prompt tokens looked up in the prefix cache since the process started.
    pub prefix_queries: Option<f64>,
    /// Prompt tokens found in the prefix cache since the process started.
    pub prefix_hits: Option<f64>,
    /// Counters of the server since its process started.
    pub counters: Counters,
    /// Rates of the server over roughly the last minute.
    pub rates: Rates,
    /// Requests that our ledger had in flight when the scrape started; the scraped load includes them.
    pub in_flight_at_scrape: u32,
    /// Requests that we had in flight on each data-parallel engine when the scrape started, as far
    /// as we chose the engine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks_at_scrape: Vec<u32>,
}

/// The metrics that every decision reads, small enough to be stored next to the endpoint's live state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reported {
    /// As [`EndpointMetrics::scraped_at`].
    pub scraped_at: Timestamp,
    /// As [`EndpointMetrics::waiting`].
    pub waiting: u32,
    /// As [`EndpointMetrics::running`].
    pub running: u32,
    /// As [`EndpointMetrics::kv_usage`].
    pub kv_usage: f32,
    /// Number of requests on the server that our ledger does not have: `waiting + running
    /// − in_flight_at_scrape`, at least 0.
    pub others: u32,
    /// Capacity of the server's KV cache in tokens, all engines together; 0 when unknown.
    pub cache_tokens: u32,
    /// Number of data-parallel engines, each with its own cache.
    pub engines: u32,
    /// Whether [`EndpointMetrics::lora`] is set.
    pub has_adapters: bool,
}

impl EndpointMetrics {
    /// Returns the metrics that every decision reads.
    #[must_use]
    pub fn reported(&self) -> Reported {
        Reported {
            scraped_at: self.scraped_at,
            waiting: self.waiting,
            running: self.running,
            kv_usage: self.kv_usage,
            others: self.waiting.saturating_add(self.running).saturating_sub(self.in_flight_at_scrape),
            cache_tokens: self.block_size.zip(self.num_blocks).map_or(0, |(size, blocks)| size.saturating_mul(blocks)),
            engines: u32::try_from(self.ranks.len()).unwrap_or(u32::MAX).max(1),
            has_adapters: self.lora.is_some(),
        }
    }
}
