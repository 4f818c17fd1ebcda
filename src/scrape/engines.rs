//! What each serving engine calls the figures that routing needs, and how a page becomes [`EndpointMetrics`].
//!
//! A data-parallel server shows one series per engine on one page: requests and blocks are added up, of the cache usages the
//! fullest engine counts. A page without the three figures that every engine reports (waiting, running, cache usage) is refused, and
//! so is one on which such a figure is NaN, infinite or negative: half a sum would look like an idle server.
//!
//! Called by [`super::feed`]. Imports `pool` and [`super::exposition`].

use super::exposition::{Families, Labels, Scan, Skipped};
use crate::clock::Timestamp;
use crate::pool::{EndpointMetrics, Engine, LoraState};
use std::sync::{Arc, LazyLock};

/// Most adapters that are read from one label; GPU memory holds a few dozen at best.
pub const MAX_ADAPTERS: usize = 1_024;

/// What a family means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Figure {
    Waiting,
    Running,
    KvUsage,
    /// An info series whose labels carry the block size and the number of blocks.
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
}

/// One family (or the part of it with a certain label) of an engine.
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

/// Of several rows for one figure the first that is on the page counts: new spellings stand before old ones.
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
];

const SGLANG: &[Row] = &[
    row(Figure::Waiting, "sglang:num_queue_reqs"),
    row(Figure::Running, "sglang:num_running_reqs"),
    row(Figure::KvUsage, "sglang:token_usage"),
    row(Figure::CacheInfo { block_size: "page_size", num_blocks: "num_pages" }, "sglang:cache_config_info"),
    row(Figure::ProcessStart, "process_start_time_seconds"),
    row(Figure::PrefixQueries, "sglang:prompt_tokens_total"),
    row(Figure::PrefixHits, "sglang:cached_tokens_total"),
];

const TRTLLM_SERVE: &[Row] = &[
    row(Figure::Waiting, "trtllm_num_requests_waiting"),
    row(Figure::Running, "trtllm_num_requests_running"),
    row(Figure::KvUsage, "trtllm_kv_cache_utilization"),
    row(Figure::BlockSize, "trtllm_kv_cache_tokens_per_block"),
    row(Figure::NumBlocks, "trtllm_kv_cache_max_blocks"),
    row(Figure::ProcessStart, "process_start_time_seconds"),
];

const TRITON_REQUESTS: &str = "nv_trt_llm_request_metrics";
const TRITON_BLOCKS: &str = "nv_trt_llm_kv_cache_block_metrics";
const TRITON: &[Row] = &[
    part(Figure::Waiting, TRITON_REQUESTS, "request_type", "waiting"),
    part(Figure::Running, TRITON_REQUESTS, "request_type", "scheduled"),
    part(Figure::KvUsage, TRITON_BLOCKS, "kv_cache_block_type", "fraction"),
    part(Figure::BlockSize, TRITON_BLOCKS, "kv_cache_block_type", "tokens_per"),
    part(Figure::NumBlocks, TRITON_BLOCKS, "kv_cache_block_type", "max"),
];

/// The families of one engine, prepared for scanning.
#[derive(Debug)]
pub struct EngineMap {
    rows: &'static [Row],
    families: Families,
    /// For each family the rows that it feeds.
    rows_of: Vec<Vec<usize>>,
}

static MAPS: LazyLock<[EngineMap; 4]> = LazyLock::new(|| [VLLM, SGLANG, TRTLLM_SERVE, TRITON].map(EngineMap::new));

/// The page can't be used; the one before it stays until it is stale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PageError {
    /// The page has no sample of a figure that every engine reports: not a metrics page, or another engine's.
    #[error("the page has no sample of {family}")]
    Missing {
        /// The family's present name.
        family: &'static str,
    },
    /// A sample of such a figure is not a finite number of at least 0.
    #[error("a sample of {family} is not a finite number of at least 0")]
    Unusable {
        /// The family's name.
        family: &'static str,
    },
}

/// What a page said.
#[derive(Clone, Debug, PartialEq)]
pub struct Reading {
    /// The figures; `scraped_at` and `in_flight_at_scrape` as given.
    pub metrics: EndpointMetrics,
    /// What was passed over.
    pub skipped: Skipped,
}

/// The samples of one row, put together.
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
    /// The names of `engine`; `None` for one without metrics.
    #[must_use]
    pub fn of(engine: Engine) -> Option<&'static EngineMap> {
        let [vllm, sglang, trtllm_serve, triton] = &*MAPS;
        match engine {
            Engine::Vllm => Some(vllm),
            Engine::Sglang => Some(sglang),
            Engine::TrtllmServe => Some(trtllm_serve),
            Engine::Triton => Some(triton),
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
        Self { rows, families: Families::new(&names), rows_of }
    }

    /// Reads a page that was asked for when the ledger held `in_flight_at_scrape` requests and that was in at `scraped_at`.
    ///
    /// # Errors
    /// When a figure that every engine reports is missing or unusable.
    pub fn read(&self, page: &[u8], scraped_at: Timestamp, in_flight_at_scrape: u32) -> Result<Reading, PageError> {
        let mut tallies = vec![Tally::default(); self.rows.len()];
        let mut blocks = Blocks::default();
        let mut lora: Option<(f64, Labels<'_>)> = None;
        let mut scan = Scan::new(page, &self.families);
        for sample in scan.by_ref() {
            for &i in self.rows_of.get(sample.family).into_iter().flatten() {
                let (Some(row), Some(tally)) = (self.rows.get(i), tallies.get_mut(i)) else { continue };
                // Without labels that can be read, a bad line may be any part of its family.
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
                    Figure::CacheInfo { block_size, num_blocks } => blocks.add(sample.labels, block_size, num_blocks),
                    Figure::Lora if lora.is_none_or(|(newest, _)| value > newest) => {
                        lora = Some((value, sample.labels));
                    }
                    _ => {}
                }
            }
        }
        let skipped = scan.skipped();
        let optional = |figure| self.first(&tallies, figure);
        let metrics = EndpointMetrics {
            scraped_at,
            waiting: count(self.required(&tallies, Figure::Waiting)?.sum),
            running: count(self.required(&tallies, Figure::Running)?.sum),
            kv_usage: fraction(self.required(&tallies, Figure::KvUsage)?.max),
            lora: lora.map(|(_, labels)| lora_state(labels)),
            block_size: blocks.size.or_else(|| optional(Figure::BlockSize).map(|t| count(t.max))),
            num_blocks: blocks.number.or_else(|| optional(Figure::NumBlocks).map(|t| count(t.sum))),
            process_start: optional(Figure::ProcessStart).map(|t| t.max),
            prefix_queries: optional(Figure::PrefixQueries).map(|t| t.sum),
            prefix_hits: optional(Figure::PrefixHits).map(|t| t.sum),
            in_flight_at_scrape,
        };
        Ok(Reading { metrics, skipped })
    }

    /// The tally of the first row for `figure` that has samples, all of them usable.
    fn first(&self, tallies: &[Tally], figure: Figure) -> Option<Tally> {
        let mut rows = self.rows.iter().zip(tallies);
        rows.find(|(row, t)| row.figure == figure && t.seen && !t.unusable).map(|(_, t)| *t)
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

/// Size and number of blocks from info labels. A label that holds no number (`None`) says nothing.
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

/// Names from a comma-separated label, sorted, because servers list them in any order.
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
