//! The metric names of each serving engine, and the conversion of scraped metrics to [`EndpointMetrics`].
//!
//! A data-parallel server exposes one series per engine: requests and blocks are summed, and the highest cache usage
//! counts; the requests of each engine are kept as well. Metrics without the three values that every engine reports
//! (waiting, running, cache usage) are rejected, and so are those where such a value is NaN, infinite or negative: an
//! incomplete sum would make the server look idle.
//!
//! Called by [`super::feed`]. Imports `pool` and [`super::exposition`].

mod astrai;

use super::exposition::{Families, Labels, Scan, Skipped};
use attache_pool::{Counter, Counters, EndpointMetrics, Engine, Histogram, LoraState, Rates};
use attache_types::clock::Timestamp;
use std::sync::{Arc, LazyLock};

/// Most adapters that are read from one label; GPU memory has space for a few dozen.
pub(crate) const MAX_ADAPTERS: usize = 1_024;

/// vLLM's label with the number of a series' data-parallel engine.
const ENGINE_LABEL: &str = "engine";
/// Most engines of one server; series with a greater number are ignored.
const MAX_ENGINES: usize = 1_024;
/// Label with the name of the base model.
const MODEL_LABEL: &str = "model_name";

/// The meaning of a metric family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Figure {
    Waiting,
    Running,
    KvUsage,
    /// An info series whose labels have the block size and the number of blocks.
    CacheInfo {
        block_size: &'static str,
        num_blocks: &'static str,
    },
    BlockSize,
    NumBlocks,
    Lora,
    ProcessStart,
    PrefixQueries,
    PrefixHits,
    CpuCacheUsage,
    GpuBusy,
    EngineUtilization,
    Count(Counter),
}

/// One family of an engine, or the part of it with a certain label.
#[derive(Clone, Copy, Debug)]
struct Row {
    figure: Figure,
    family: &'static str,
    only: Option<(&'static str, &'static str)>,
}

const fn row(figure: Figure, family: &'static str) -> Row {
    Row { figure, family, only: None }
}

const fn part(figure: Figure, family: &'static str, label: &'static str, value: &'static str) -> Row {
    Row { figure, family, only: Some((label, value)) }
}

/// The sum of a histogram: its family is `family` with `_sum`.
const fn sum(histogram: Histogram, family: &'static str) -> Row {
    row(Figure::Count(Counter::Sum(histogram)), family)
}

/// The number of values of a histogram: its family is `family` with `_count`.
const fn number(histogram: Histogram, family: &'static str) -> Row {
    row(Figure::Count(Counter::Count(histogram)), family)
}

/// A value that no engine reports itself, and that an exporter may add under AIBrix's name.
const GPU_BUSY: Row = row(Figure::GpuBusy, "gpu_busy_time_ratio");

/// Of several rows for one value, the first with samples counts: new names precede old ones.
const VLLM: &[Row] = &[
    row(Figure::Waiting, "vllm:num_requests_waiting"),
    row(Figure::Running, "vllm:num_requests_running"),
    row(Figure::KvUsage, "vllm:kv_cache_usage_perc"),
    row(Figure::KvUsage, "vllm:gpu_cache_usage_perc"),
    row(Figure::CacheInfo { block_size: "block_size", num_blocks: "num_gpu_blocks" }, "vllm:cache_config_info"),
    row(Figure::Lora, "vllm:lora_requests_info"),
    row(Figure::ProcessStart, "process_start_time_seconds"),
    row(Figure::PrefixQueries, "vllm:prefix_cache_queries_total"),
    row(Figure::PrefixQueries, "vllm:gpu_prefix_cache_queries_total"),
    row(Figure::PrefixHits, "vllm:prefix_cache_hits_total"),
    row(Figure::PrefixHits, "vllm:gpu_prefix_cache_hits_total"),
    row(Figure::CpuCacheUsage, "vllm:cpu_cache_usage_perc"),
    GPU_BUSY,
    row(Figure::Count(Counter::PromptTokens), "vllm:prompt_tokens_total"),
    row(Figure::Count(Counter::GenerationTokens), "vllm:generation_tokens_total"),
    row(Figure::Count(Counter::Finished), "vllm:request_success_total"),
    sum(Histogram::Queue, "vllm:request_queue_time_seconds_sum"),
    number(Histogram::Queue, "vllm:request_queue_time_seconds_count"),
    sum(Histogram::Prefill, "vllm:request_prefill_time_seconds_sum"),
    number(Histogram::Prefill, "vllm:request_prefill_time_seconds_count"),
    sum(Histogram::Decode, "vllm:request_decode_time_seconds_sum"),
    number(Histogram::Decode, "vllm:request_decode_time_seconds_count"),
    sum(Histogram::PromptTokens, "vllm:request_prompt_tokens_sum"),
    number(Histogram::PromptTokens, "vllm:request_prompt_tokens_count"),
    sum(Histogram::GenerationTokens, "vllm:request_generation_tokens_sum"),
    number(Histogram::GenerationTokens, "vllm:request_generation_tokens_count"),
];

const SGLANG: &[Row] = &[
    row(Figure::Waiting, "sglang:num_queue_reqs"),
    row(Figure::Running, "sglang:num_running_reqs"),
    row(Figure::KvUsage, "sglang:token_usage"),
    row(Figure::CacheInfo { block_size: "page_size", num_blocks: "num_pages" }, "sglang:cache_config_info"),
    row(Figure::ProcessStart, "process_start_time_seconds"),
    row(Figure::PrefixQueries, "sglang:prompt_tokens_total"),
    row(Figure::PrefixHits, "sglang:cached_tokens_total"),
    GPU_BUSY,
    row(Figure::Count(Counter::PromptTokens), "sglang:prompt_tokens_total"),
    row(Figure::Count(Counter::GenerationTokens), "sglang:generation_tokens_total"),
    row(Figure::Count(Counter::Finished), "sglang:num_requests_total"),
    sum(Histogram::Queue, "sglang:queue_time_seconds_sum"),
    number(Histogram::Queue, "sglang:queue_time_seconds_count"),
    sum(Histogram::FirstToken, "sglang:time_to_first_token_seconds_sum"),
    number(Histogram::FirstToken, "sglang:time_to_first_token_seconds_count"),
    sum(Histogram::Latency, "sglang:e2e_request_latency_seconds_sum"),
    number(Histogram::Latency, "sglang:e2e_request_latency_seconds_count"),
    sum(Histogram::PromptTokens, "sglang:prompt_tokens_histogram_sum"),
    number(Histogram::PromptTokens, "sglang:prompt_tokens_histogram_count"),
    sum(Histogram::GenerationTokens, "sglang:generation_tokens_histogram_sum"),
    number(Histogram::GenerationTokens, "sglang:generation_tokens_histogram_count"),
];

const TRTLLM_SERVE: &[Row] = &[
    row(Figure::Waiting, "trtllm_num_requests_waiting"),
    row(Figure::Running, "trtllm_num_requests_running"),
    row(Figure::KvUsage, "trtllm_kv_cache_utilization"),
    row(Figure::BlockSize, "trtllm_kv_cache_tokens_per_block"),
    row(Figure::NumBlocks, "trtllm_kv_cache_max_blocks"),
    row(Figure::ProcessStart, "process_start_time_seconds"),
    GPU_BUSY,
    row(Figure::Count(Counter::PromptTokens), "trtllm_prompt_tokens_total"),
    row(Figure::Count(Counter::GenerationTokens), "trtllm_generation_tokens_total"),
    row(Figure::Count(Counter::Finished), "trtllm_request_success_total"),
    sum(Histogram::Queue, "trtllm_request_queue_time_seconds_sum"),
    number(Histogram::Queue, "trtllm_request_queue_time_seconds_count"),
    sum(Histogram::FirstToken, "trtllm_time_to_first_token_seconds_sum"),
    number(Histogram::FirstToken, "trtllm_time_to_first_token_seconds_count"),
    sum(Histogram::Latency, "trtllm_e2e_request_latency_seconds_sum"),
    number(Histogram::Latency, "trtllm_e2e_request_latency_seconds_count"),
];

const TRITON_REQUESTS: &str = "nv_trt_llm_request_metrics";
const TRITON_BLOCKS: &str = "nv_trt_llm_kv_cache_block_metrics";
const TRITON: &[Row] = &[
    part(Figure::Waiting, TRITON_REQUESTS, "request_type", "waiting"),
    part(Figure::Running, TRITON_REQUESTS, "request_type", "scheduled"),
    part(Figure::KvUsage, TRITON_BLOCKS, "kv_cache_block_type", "fraction"),
    part(Figure::BlockSize, TRITON_BLOCKS, "kv_cache_block_type", "tokens_per"),
    part(Figure::NumBlocks, TRITON_BLOCKS, "kv_cache_block_type", "max"),
    GPU_BUSY,
];

/// xLLM's metric names have no prefix.
const XLLM: &[Row] = &[
    row(Figure::Waiting, "num_waiting_requests"),
    row(Figure::Running, "num_running_requests"),
    row(Figure::KvUsage, "kv_cache_utilization"),
    row(Figure::KvUsage, "kv_cache_utilization_perc"),
    row(Figure::ProcessStart, "process_start_time_seconds"),
    row(Figure::EngineUtilization, "engine_utilization"),
    GPU_BUSY,
    row(Figure::Count(Counter::PromptTokens), "num_processing_tokens_total_prompt"),
    row(Figure::Count(Counter::GenerationTokens), "num_processing_tokens_total_generated"),
];

/// The families of one engine, prepared for scanning.
#[derive(Debug)]
pub struct EngineMap {
    /// Whether the metrics are AstrAI's JSON, without families.
    is_json: bool,
    rows: &'static [Row],
    families: Families,
    /// For each family, the rows that use it.
    rows_of: Vec<Vec<usize>>,
}

static MAPS: LazyLock<[EngineMap; 5]> =
    LazyLock::new(|| [VLLM, SGLANG, TRTLLM_SERVE, TRITON, XLLM].map(EngineMap::new));
static ASTRAI: LazyLock<EngineMap> = LazyLock::new(|| EngineMap { is_json: true, ..EngineMap::new(&[]) });

/// The reason for which metrics cannot be used. The previous ones stay in use until they are stale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PageError {
    /// There is no sample of a value that every engine reports: the response is not metrics,
    /// or belongs to another engine.
    #[error("the page has no sample of {family}")]
    Missing {
        /// The current name of the family.
        family: &'static str,
    },
    /// A sample of such a value is not a finite number of at least 0.
    #[error("a sample of {family} is not a finite number of at least 0")]
    Unusable {
        /// The name of the family.
        family: &'static str,
    },
}

/// The metrics of one scrape with the number of skipped lines.
#[derive(Clone, Debug, PartialEq)]
pub struct Reading {
    /// The values. `scraped_at` and `in_flight_at_scrape` are set; the caller computes `ranks_at_scrape` and `rates`
    /// from this scrape and earlier ones.
    pub metrics: EndpointMetrics,
    /// How many lines and samples the scanner skipped.
    pub skipped: Skipped,
}

/// The combined samples of one row.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    seen: bool,
    unusable: bool,
    sum: f64,
    max: f64,
}

impl Tally {
    fn add(&mut self, value: f64) {
        self.seen = true;
        self.sum += value;
        self.max = self.max.max(value);
    }
}

impl EngineMap {
    /// Returns the names of `engine`; `None` for one without metrics.
    #[must_use]
    pub fn of(engine: Engine) -> Option<&'static EngineMap> {
        let [vllm, sglang, trtllm_serve, triton, xllm] = &*MAPS;
        match engine {
            Engine::Vllm => Some(vllm),
            Engine::Sglang => Some(sglang),
            Engine::TrtllmServe => Some(trtllm_serve),
            Engine::Triton => Some(triton),
            Engine::Xllm => Some(xllm),
            Engine::Astrai => Some(&ASTRAI),
            Engine::None => None,
        }
    }

    fn new(rows: &'static [Row]) -> Self {
        let mut names: Vec<&'static str> = Vec::new();
        for row in rows {
            if !names.contains(&row.family) {
                names.push(row.family);
            }
        }
        let rows_of = names
            .iter()
            .map(|name| (0..).zip(rows).filter(|(_, r)| r.family == *name).map(|(i, _)| i).collect())
            .collect();
        Self { is_json: false, rows, families: Families::new(&names), rows_of }
    }

    /// Converts metrics that were requested when the ledger had `in_flight_at_scrape`
    /// requests, and received at `scraped_at`.
    ///
    /// # Errors
    /// [`PageError`] when a value that every engine reports is missing or invalid.
    pub fn read(&self, page: &[u8], scraped_at: Timestamp, in_flight_at_scrape: u32) -> Result<Reading, PageError> {
        if self.is_json {
            let metrics = EndpointMetrics { scraped_at, in_flight_at_scrape, ..astrai::read(page)? };
            return Ok(Reading { metrics, skipped: Skipped::default() });
        }
        let mut tallies = vec![Tally::default(); self.rows.len()];
        let mut blocks = Blocks::default();
        let mut lora: Option<(f64, Labels<'_>)> = None;
        let mut ranks = Vec::new();
        let mut model: Option<Arc<str>> = None;
        let mut scan = Scan::new(page, &self.families);
        for sample in scan.by_ref() {
            for &i in self.rows_of.get(sample.family).into_iter().flatten() {
                let (Some(row), Some(tally)) = (self.rows.get(i), tallies.get_mut(i)) else { continue };
                // Without readable labels, an invalid line may be any part of its family.
                let other_part = |(label, value)| sample.labels.get(label).is_some_and(|v| v != value);
                let Some(value) = sample.value else {
                    tally.unusable |= !row.only.is_some_and(other_part);
                    continue;
                };
                if row.only.is_some_and(|(label, wanted)| sample.labels.get(label).as_deref() != Some(wanted)) {
                    continue;
                }
                tally.add(value);
                match row.figure {
                    Figure::Waiting | Figure::Running => {
                        add_to_rank(&mut ranks, sample.labels, value);
                        model = model.or_else(|| sample.labels.get(MODEL_LABEL).map(|name| Arc::from(&*name)));
                    }
                    Figure::CacheInfo { block_size, num_blocks } => blocks.add(sample.labels, block_size, num_blocks),
                    Figure::Lora if lora.is_none_or(|(newest, _)| value > newest) => {
                        lora = Some((value, sample.labels));
                    }
                    _ => {}
                }
            }
        }
        let skipped = scan.skipped();
        // Ranks are distinguished if all of them are present; other nodes' engines are not ranks of this one.
        let ranks: Option<Vec<u32>> = ranks.into_iter().collect();
        let ranks = ranks.filter(|ranks| ranks.len() > 1).unwrap_or_default();
        let optional = |figure| self.first(&tallies, figure);
        let metrics = EndpointMetrics {
            scraped_at,
            waiting: count(self.required(&tallies, Figure::Waiting)?.sum),
            running: count(self.required(&tallies, Figure::Running)?.sum),
            ranks,
            kv_usage: fraction(self.required(&tallies, Figure::KvUsage)?.max),
            cpu_cache_usage: optional(Figure::CpuCacheUsage).map(|t| fraction(t.max)),
            gpu_busy: optional(Figure::GpuBusy).map(|t| t.max),
            engine_utilization: optional(Figure::EngineUtilization).map(|t| t.max),
            model,
            lora: lora.map(|(_, labels)| lora_state(labels)),
            block_size: blocks.size.or_else(|| optional(Figure::BlockSize).map(|t| count(t.max))),
            num_blocks: blocks.number.or_else(|| optional(Figure::NumBlocks).map(|t| count(t.sum))),
            process_start: optional(Figure::ProcessStart).map(|t| t.max),
            prefix_queries: optional(Figure::PrefixQueries).map(|t| t.sum),
            prefix_hits: optional(Figure::PrefixHits).map(|t| t.sum),
            counters: self.counters(&tallies),
            rates: Rates::default(),
            in_flight_at_scrape,
            ranks_at_scrape: Vec::new(),
        };
        Ok(Reading { metrics, skipped })
    }

    /// Returns the tally of the first row for `figure` that has samples, all of them valid.
    fn first(&self, tallies: &[Tally], figure: Figure) -> Option<Tally> {
        let mut rows = self.rows.iter().zip(tallies);
        rows.find(|(row, t)| row.figure == figure && t.seen && !t.unusable).map(|(_, t)| *t)
    }

    /// Of several rows for one counter, the first with samples, all of them valid, counts here too.
    fn counters(&self, tallies: &[Tally]) -> Counters {
        let mut counters = Counters::default();
        for (row, tally) in self.rows.iter().zip(tallies).rev().filter(|(_, t)| t.seen && !t.unusable) {
            if let Figure::Count(counter) = row.figure {
                counters.set(counter, tally.sum);
            }
        }
        counters
    }

    fn required(&self, tallies: &[Tally], figure: Figure) -> Result<Tally, PageError> {
        let rows = || self.rows.iter().zip(tallies).filter(|(row, _)| row.figure == figure);
        let on_page = rows().find(|(_, t)| t.seen || t.unusable);
        match (on_page, rows().next()) {
            (Some((row, t)), _) if t.unusable => Err(PageError::Unusable { family: row.family }),
            (Some((_, t)), _) => Ok(*t),
            (None, row) => Err(PageError::Missing { family: row.map_or("", |(row, _)| row.family) }),
        }
    }
}

/// Size and number of blocks from info labels; `None` if a label is not a number.
#[derive(Debug, Default)]
struct Blocks {
    size: Option<u32>,
    number: Option<u32>,
}

impl Blocks {
    fn add(&mut self, labels: Labels<'_>, size: &str, number: &str) {
        for (name, value) in labels {
            let Ok(value) = value.parse::<u32>() else { continue };
            if name == size {
                self.size = Some(self.size.unwrap_or(0).max(value));
            } else if name == number {
                self.number = Some(self.number.unwrap_or(0).saturating_add(value));
            }
        }
    }
}

/// Adds requests to those of the engine that the labels name.
fn add_to_rank(ranks: &mut Vec<Option<u32>>, labels: Labels<'_>, requests: f64) {
    let rank = labels.get(ENGINE_LABEL).and_then(|rank| rank.parse::<usize>().ok());
    let Some(rank) = rank.filter(|rank| *rank < MAX_ENGINES) else { return };
    if ranks.len() <= rank {
        ranks.resize(rank + 1, None);
    }
    if let Some(there) = ranks.get_mut(rank) {
        *there = Some(there.unwrap_or(0).saturating_add(count(requests)));
    }
}

fn lora_state(labels: Labels<'_>) -> LoraState {
    let mut state = LoraState::default();
    for (name, value) in labels {
        match name {
            "max_lora" => state.max = value.trim().parse().unwrap_or(0),
            "running_lora_adapters" => state.running = adapters(&value),
            "waiting_lora_adapters" => state.waiting = adapters(&value),
            _ => {}
        }
    }
    state
}

/// Returns the names in a comma-separated label, sorted, because servers list them in any order.
fn adapters(list: &str) -> Vec<Arc<str>> {
    let mut names: Vec<Arc<str>> =
        list.split(',').map(str::trim).filter(|n| !n.is_empty()).take(MAX_ADAPTERS).map(Arc::from).collect();
    names.sort_unstable();
    names.dedup();
    names
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to the range of u32")]
fn count(value: f64) -> u32 {
    value.clamp(0.0, f64::from(u32::MAX)) as u32
}

#[expect(clippy::cast_possible_truncation, reason = "clamped to 0..=1")]
fn fraction(value: f64) -> f32 {
    value.clamp(0.0, 1.0) as f32
}

#[cfg(test)]
mod tests;
