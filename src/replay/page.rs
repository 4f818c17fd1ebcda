//! What a simulated server reports of itself, as the scraper would have read it off its metrics page.

use attache_pool::rates::{Counter, Counters, Histogram, RateWindow};
use attache_pool::{EndpointMetrics, metrics::LoraState};
use attache_sim::engine::{Engine, EngineConfig, Load};
use attache_sim::stats::{self, EngineStats};
use attache_types::clock::Timestamp;
use std::sync::Arc;

/// State from which the metrics of one server are derived.
#[derive(Debug, Default)]
pub(super) struct MetricsHistory {
    window: RateWindow,
    process_start: Option<f64>,
}

impl MetricsHistory {
    /// The metrics page of a process with these engines at `now`, and whether another process wrote the previous one.
    /// The process started at `started`. Several engines count together, as in a scrape.
    pub(super) fn read(
        &mut self,
        engines: &[Engine],
        config: &EngineConfig,
        started: Timestamp,
        now: Timestamp,
    ) -> (EndpointMetrics, bool) {
        let process_start = started.0 as f64 / 1e9;
        let restarted = self.process_start.replace(process_start).is_some_and(|before| before < process_start);
        if restarted {
            self.window.reset();
        }
        let loads: Vec<Load> = engines.iter().map(Engine::load).collect();
        let requests = |count: fn(&Load) -> usize| count_of(loads.iter().map(count).sum());
        let stats: Vec<&EngineStats> = engines.iter().map(Engine::stats).collect();
        let counters = counters(&stats);
        let metrics = EndpointMetrics {
            scraped_at: now,
            waiting: requests(|load| load.waiting),
            running: requests(|load| load.running),
            ranks: match loads.as_slice() {
                [_] => Vec::new(),
                ranks => ranks.iter().map(|load| count_of(load.waiting + load.running)).collect(),
            },
            #[expect(clippy::cast_possible_truncation, reason = "a part of one")]
            kv_usage: loads.iter().map(|load| load.kv_usage as f32).fold(0.0, f32::max),
            lora: (config.max_loras > 0).then(|| loras(engines, config.max_loras)),
            block_size: Some(config.block_size),
            num_blocks: Some(config.num_blocks.saturating_mul(count_of(engines.len()))),
            process_start: Some(process_start),
            prefix_queries: Some(sum(&stats, |stats| stats.prefix_queries as f64)),
            prefix_hits: Some(sum(&stats, |stats| stats.prefix_hits as f64)),
            rates: self.window.observe(now, &counters),
            counters,
            ..EndpointMetrics::default()
        };
        (metrics, restarted)
    }
}

fn count_of(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

fn sum(stats: &[&EngineStats], of: impl Fn(&EngineStats) -> f64) -> f64 {
    stats.iter().map(|stats| of(stats)).sum()
}

/// The adapters of all engines; each engine holds `max`.
fn loras(engines: &[Engine], max: u32) -> LoraState {
    let (mut running, mut waiting) = (Vec::new(), Vec::new());
    let add = |all: &mut Vec<Arc<str>>, names: Vec<Arc<str>>| {
        for name in names {
            if !all.contains(&name) {
                all.push(name);
            }
        }
    };
    for (active, queued) in engines.iter().map(Engine::loras) {
        add(&mut running, active);
        add(&mut waiting, queued);
    }
    LoraState::new(max, running, waiting)
}

/// Reads a histogram of an engine.
type ReadHistogram = fn(&EngineStats) -> &stats::Histogram;

fn counters(stats: &[&EngineStats]) -> Counters {
    let mut counters = Counters::default();
    counters.set(Counter::PromptTokens, sum(stats, |stats| stats.prompt_tokens as f64));
    counters.set(Counter::GenerationTokens, sum(stats, |stats| stats.generation_tokens as f64));
    counters.set(Counter::Finished, sum(stats, |stats| (stats.finished_stop + stats.finished_length) as f64));
    let histograms: [(Histogram, ReadHistogram); 7] = [
        (Histogram::Queue, |stats| &stats.queue),
        (Histogram::Prefill, |stats| &stats.prefill),
        (Histogram::Decode, |stats| &stats.decode),
        (Histogram::FirstToken, |stats| &stats.ttft),
        (Histogram::Latency, |stats| &stats.e2e),
        (Histogram::PromptTokens, |stats| &stats.request_prompt_tokens),
        (Histogram::GenerationTokens, |stats| &stats.request_generation_tokens),
    ];
    for (name, histogram) in histograms {
        counters.set(Counter::Sum(name), sum(stats, |stats| histogram(stats).sum()));
        counters.set(Counter::Count(name), sum(stats, |stats| histogram(stats).count() as f64));
    }
    counters
}
