//! What a model server reports about itself.

use super::rates::{Counters, Rates};
use attache_types::clock::Timestamp;
use std::sync::Arc;

/// The LoRA adapters of a server, as its metrics tell.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
pub struct LoraState {
    /// Adapters that fit in GPU memory at once; 0 when the server does not say.
    pub max: u32,
    /// Adapters with a running request.
    pub running: Vec<Arc<str>>,
    /// Adapters with a waiting request.
    pub waiting: Vec<Arc<str>>,
}

impl LoraState {
    /// Whether `model` is an adapter that would have to be loaded first. A name that no adapter of the server has been seen with may be the
    /// base model's, so only a server whose slots are all taken by others is known to lack it.
    #[must_use]
    pub fn lacks(&self, model: &str) -> bool {
        let loaded = self.running.iter().chain(&self.waiting).any(|name| **name == *model);
        !loaded && self.max > 0 && self.running.len() >= self.max as usize
    }
}

/// One scrape of one endpoint, series of several engines on one page already added up.
#[derive(Clone, Debug, Default, PartialEq, serde::Deserialize, serde::Serialize)]
pub struct EndpointMetrics {
    /// When the page was read.
    pub scraped_at: Timestamp,
    /// Requests waiting for a slot, all engines of the page together.
    pub waiting: u32,
    /// Requests in the batch, all engines of the page together.
    pub running: u32,
    /// Requests waiting and running on each data-parallel engine of the page, by its number; empty where there is one, or they are not told apart.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<u32>,
    /// KV cache in use, 0..=1; the fullest engine of the page.
    pub kv_usage: f32,
    /// KV cache in host memory in use, 0..=1; the fullest engine of the page. vLLM's V0 engine only.
    pub cpu_cache_usage: Option<f32>,
    /// Part of the time in which the GPU computed; the busiest of the page.
    pub gpu_busy: Option<f64>,
    /// How much of the engine is in use, in its own measure; the busiest of the page. xLLM only.
    pub engine_utilization: Option<f64>,
    /// Adapters, when the server reports them.
    pub lora: Option<LoraState>,
    /// Tokens in a KV block.
    pub block_size: Option<u32>,
    /// KV blocks of the server, all engines of the page together.
    pub num_blocks: Option<u32>,
    /// Unix time at which the server's process started, seconds: a greater one than before is a restart.
    pub process_start: Option<f64>,
    /// Prompt tokens looked up in the prefix cache since the process started.
    pub prefix_queries: Option<f64>,
    /// Prompt tokens found there.
    pub prefix_hits: Option<f64>,
    /// What the server has counted since its process started.
    pub counters: Counters,
    /// What it did in the last minute or so.
    pub rates: Rates,
    /// What our own ledger held in flight when the page was asked for: the reported load already contains these.
    pub in_flight_at_scrape: u32,
    /// The same of each data-parallel engine, as far as we have chosen them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks_at_scrape: Vec<u32>,
}

/// The figures of a page that every decision reads, small enough to lie with the endpoint's other figures.
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
    /// Requests there that our own ledger does not hold: `waiting + running − in_flight_at_scrape`, at least 0.
    pub others: u32,
    /// Tokens that the server's KV cache has room for, that of all its engines; 0 when it does not say.
    pub cache_tokens: u32,
    /// Data-parallel engines of the page, each with a cache of its own.
    pub engines: u32,
    /// [`EndpointMetrics::lora`] is there.
    pub has_adapters: bool,
}

impl EndpointMetrics {
    /// The figures that every decision reads.
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
