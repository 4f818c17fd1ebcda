//! What a simulated server reports of itself, as the scraper would have read it off its metrics page.

use attache_pool::rates::{Counter, Counters, Histogram, RateWindow};
use attache_pool::{EndpointMetrics, metrics::LoraState};
use attache_sim::engine::Engine;
use attache_sim::stats;
use attache_types::clock::Timestamp;

/// State from which the metrics of one server are derived.
#[derive(Debug, Default)]
pub(super) struct MetricsHistory {
    window: RateWindow,
    process_start: Option<f64>,
}

impl MetricsHistory {
    /// The page that `engine`, whose process started at `started`, shows at `now`; and whether another
    /// process wrote the one before.
    pub(super) fn read(
        &mut self,
        engine: &Engine,
        started: Timestamp,
        in_flight: u32,
        now: Timestamp,
    ) -> (EndpointMetrics, bool) {
        let (load, config) = (engine.load(), engine.config());
        let process_start = started.0 as f64 / 1e9;
        let restarted = self.process_start.replace(process_start).is_some_and(|before| before < process_start);
        if restarted {
            self.window.reset();
        }
        let counters = counters(engine.stats());
        let (running, waiting) = engine.loras();
        let metrics = EndpointMetrics {
            scraped_at: now,
            waiting: u32::try_from(load.waiting).unwrap_or(u32::MAX),
            running: u32::try_from(load.running).unwrap_or(u32::MAX),
            #[expect(clippy::cast_possible_truncation, reason = "a part of one")]
            kv_usage: load.kv_usage as f32,
            lora: (config.max_loras > 0).then_some(LoraState { max: config.max_loras, running, waiting }),
            block_size: Some(config.block_size),
            num_blocks: Some(config.num_blocks),
            process_start: Some(process_start),
            prefix_queries: Some(engine.stats().prefix_queries as f64),
            prefix_hits: Some(engine.stats().prefix_hits as f64),
            rates: self.window.observe(now, &counters),
            counters,
            in_flight_at_scrape: in_flight,
            ..EndpointMetrics::default()
        };
        (metrics, restarted)
    }
}

fn counters(stats: &stats::EngineStats) -> Counters {
    let mut counters = Counters::default();
    counters.set(Counter::PromptTokens, stats.prompt_tokens as f64);
    counters.set(Counter::GenerationTokens, stats.generation_tokens as f64);
    counters.set(Counter::Finished, (stats.finished_stop + stats.finished_length) as f64);
    for (name, histogram) in [
        (Histogram::Queue, &stats.queue),
        (Histogram::Prefill, &stats.prefill),
        (Histogram::Decode, &stats.decode),
        (Histogram::FirstToken, &stats.ttft),
        (Histogram::Latency, &stats.e2e),
        (Histogram::PromptTokens, &stats.request_prompt_tokens),
        (Histogram::GenerationTokens, &stats.request_generation_tokens),
    ] {
        counters.set(Counter::Sum(name), histogram.sum());
        counters.set(Counter::Count(name), histogram.count() as f64);
    }
    counters
}
