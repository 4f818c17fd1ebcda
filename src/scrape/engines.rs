//! The metric names of each serving engine, and the conversion of scraped metrics to [`EndpointMetrics`].
//!
//! A data-parallel server exposes one series per engine: requests and blocks are summed, and the highest cache usage
//! counts; the requests of each engine are kept as well. `tally` says which series of a value count. Metrics without
//! the three values that every engine reports (waiting, running, cache usage) are rejected, and so are those where such
//! a value is NaN, infinite or negative: an incomplete sum would make the server look idle.
//!
//! Called by [`super::feed`]. Imports `pool` and [`super::exposition`].

mod astrai;
mod rows;
mod tally;

use super::exposition::{Families, Labels, Scan, Skipped};
use attache_pool::{Counters, EndpointMetrics, Engine, LoraState, Rates};
use attache_types::clock::Timestamp;
use rows::{Figure, Row, SGLANG, TRITON, TRTLLM_SERVE, VLLM, XLLM};
use std::fmt;
use std::sync::{Arc, LazyLock};
use tally::{Series, Tally};

/// Most adapters that are read from one label; GPU memory has space for a few dozen.
pub(crate) const MAX_ADAPTERS: usize = 1_024;

/// vLLM's label with the number of a series' data-parallel engine.
const ENGINE_LABEL: &str = "engine";
/// Most engines of one server; series with a greater number are ignored.
const MAX_ENGINES: usize = 1_024;
/// Label with the name of the base model.
const MODEL_LABEL: &str = "model_name";

/// The families of one engine, prepared for scanning.
#[derive(Debug)]
pub struct EngineMap {
    engine: Engine,
    rows: &'static [Row],
    families: Families,
    /// For each family, the rows that use it.
    rows_of: Vec<Vec<usize>>,
}

static MAPS: LazyLock<[EngineMap; 5]> = LazyLock::new(|| {
    [
        EngineMap::new(Engine::Vllm, VLLM),
        EngineMap::new(Engine::Sglang, SGLANG),
        EngineMap::new(Engine::TrtllmServe, TRTLLM_SERVE),
        EngineMap::new(Engine::Triton, TRITON),
        EngineMap::new(Engine::Xllm, XLLM),
    ]
});
/// AstrAI's metrics are JSON, without families.
static ASTRAI: LazyLock<EngineMap> = LazyLock::new(|| EngineMap::new(Engine::Astrai, &[]));

/// The name of a sample: its family, and the label that selects a part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleName {
    family: &'static str,
    part: Option<(&'static str, &'static str)>,
}

impl SampleName {
    /// A family without parts.
    #[must_use]
    pub const fn of(family: &'static str) -> Self {
        Self { family, part: None }
    }
}

impl From<&Row> for SampleName {
    fn from(row: &Row) -> Self {
        Self { family: row.family, part: row.only }
    }
}

impl fmt::Display for SampleName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.part {
            None => f.write_str(self.family),
            Some((label, value)) => write!(f, "{}{{{label}=\"{value}\"}}", self.family),
        }
    }
}

/// The reason for which metrics cannot be used. The previous ones stay in use until they are stale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PageError {
    /// There is no sample of a value that every engine reports: the response is not metrics,
    /// or belongs to another engine.
    #[error("the page has no sample of {0}")]
    Missing(SampleName),
    /// A sample of such a value is not a finite number of at least 0.
    #[error("a sample of {0} is not a finite number of at least 0")]
    Unusable(SampleName),
    /// The page is JSON, which this engine serves at another path than its metrics.
    #[error(
        "the page is JSON instead of Prometheus text: this engine serves metrics at {0}; check `metrics.path` and `engine`"
    )]
    Json(&'static str),
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

    fn new(engine: Engine, rows: &'static [Row]) -> Self {
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
        Self { engine, rows, families: Families::new(&names), rows_of }
    }

    /// Converts metrics that were requested when the ledger had `in_flight_at_scrape`
    /// requests, and received at `scraped_at`.
    ///
    /// # Errors
    /// [`PageError`] when a value that every engine reports is missing or invalid.
    pub fn read(&self, page: &[u8], scraped_at: Timestamp, in_flight_at_scrape: u32) -> Result<Reading, PageError> {
        if self.engine == Engine::Astrai {
            let metrics = EndpointMetrics { scraped_at, in_flight_at_scrape, ..astrai::read(page)? };
            return Ok(Reading { metrics, skipped: Skipped::default() });
        }
        if matches!(page.trim_ascii_start().first(), Some(b'[' | b'{')) {
            return Err(PageError::Json(self.engine.metrics_path()));
        }
        let mut series = Series::default();
        let mut block_size = None;
        let mut lora: Option<(f64, Labels<'_>)> = None;
        let mut ranks = Vec::new();
        let mut model: Option<Arc<str>> = None;
        let mut scan = Scan::new(page, &self.families);
        for sample in scan.by_ref() {
            for &i in self.rows_of.get(sample.family).into_iter().flatten() {
                let Some(row) = self.rows.get(i) else { continue };
                // Without readable labels, an invalid line may be any part of its family.
                let is_other = |(label, wanted): (&str, &str)| match sample.labels.get(label) {
                    Some(value) => value != wanted,
                    None => sample.value.is_some(),
                };
                if row.only.is_some_and(is_other) {
                    continue;
                }
                match (row.figure, sample.value) {
                    (Figure::CacheInfo { block_size: size, num_blocks }, Some(_)) => {
                        let number = |label| sample.labels.get(label).and_then(|text| text.parse::<u32>().ok());
                        block_size = block_size.max(number(size));
                        if let Some(blocks) = number(num_blocks) {
                            series.add(i, sample.labels, Some(num_blocks), Some(blocks.into()));
                        }
                        continue;
                    }
                    (Figure::CacheInfo { .. }, None) => continue,
                    (Figure::Lora, Some(value)) if lora.is_none_or(|(newest, _)| value > newest) => {
                        lora = Some((value, sample.labels));
                    }
                    (Figure::Waiting | Figure::Running, Some(value)) => {
                        add_to_rank(&mut ranks, sample.labels, value);
                        model = model.or_else(|| sample.labels.get(MODEL_LABEL).map(|name| Arc::from(&*name)));
                    }
                    _ => {}
                }
                series.add(i, sample.labels, None, sample.value);
            }
        }
        let skipped = scan.skipped();
        let tallies = series.tallies(self.rows.len());
        // Ranks are distinguished if all of them are present; other nodes' engines are not ranks of this one.
        let ranks: Option<Vec<u32>> = ranks.into_iter().collect();
        let ranks = ranks.filter(|ranks| ranks.len() > 1).unwrap_or_default();
        let optional = |figure| self.first(&tallies, figure);
        let blocks = || self.first_of(&tallies, |figure| matches!(figure, Figure::CacheInfo { .. }));
        let metrics = EndpointMetrics {
            scraped_at,
            waiting: count(self.waiting(&tallies)?),
            running: count(self.running(&tallies)?),
            ranks,
            kv_usage: fraction(self.kv_usage(&tallies)?),
            cpu_cache_usage: optional(Figure::CpuCacheUsage).map(|t| fraction(t.max)),
            gpu_busy: optional(Figure::GpuBusy).map(|t| t.max),
            engine_utilization: optional(Figure::EngineUtilization).map(|t| t.max),
            model,
            lora: lora.map(|(_, labels)| lora_state(labels)),
            block_size: block_size.or_else(|| optional(Figure::BlockSize).map(|t| count(t.max))),
            num_blocks: blocks().or_else(|| optional(Figure::NumBlocks)).map(|t| count(t.sum)),
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

    /// The values that routing uses if they are there, and that this engine usually reports, but not in `metrics`: block
    /// size, number of blocks, start of the process. Each by the name of its first family.
    #[must_use]
    pub fn unreported(&self, metrics: &EndpointMetrics) -> Vec<SampleName> {
        let is_size = |figure| matches!(figure, Figure::CacheInfo { .. } | Figure::BlockSize);
        let is_number = |figure| matches!(figure, Figure::CacheInfo { .. } | Figure::NumBlocks);
        let name_of = |is_wanted: &dyn Fn(Figure) -> bool| self.rows.iter().find(|row| is_wanted(row.figure));
        let missing = [
            name_of(&is_size).filter(|_| metrics.block_size.is_none()),
            name_of(&is_number).filter(|_| metrics.num_blocks.is_none()),
            name_of(&|figure| figure == Figure::ProcessStart).filter(|_| metrics.process_start.is_none()),
        ];
        let mut names: Vec<SampleName> = Vec::new();
        for name in missing.into_iter().flatten().map(SampleName::from) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }

    /// Requests that wait: in the queue, and before it on servers that prefill or decode for others.
    fn waiting(&self, tallies: &[Tally]) -> Result<f64, PageError> {
        let queue = self.required(tallies, Figure::Waiting).map(|t| t.sum).or_else(|error| {
            let derived = self.first(tallies, Figure::Active).zip(self.first(tallies, Figure::Running));
            match (error, derived) {
                (PageError::Missing(_), Some((active, running))) => Ok((active.sum - running.sum).max(0.0)),
                _ => Err(error),
            }
        });
        let before = [Figure::BootstrapQueue, Figure::PreallocQueue, Figure::TransferQueue];
        before.into_iter().try_fold(queue?, |sum, figure| Ok(sum + self.unless_missing(tallies, figure)?))
    }

    /// Requests in the batch, and those whose KV blocks are being sent.
    fn running(&self, tallies: &[Tally]) -> Result<f64, PageError> {
        Ok(self.required(tallies, Figure::Running)?.sum + self.unless_missing(tallies, Figure::InflightQueue)?)
    }

    fn kv_usage(&self, tallies: &[Tally]) -> Result<f64, PageError> {
        self.required(tallies, Figure::KvUsage).map(|t| t.max).or_else(|error| {
            let derived = self.first(tallies, Figure::UsedBlocks).zip(self.first(tallies, Figure::NumBlocks));
            match (error, derived) {
                (PageError::Missing(_), Some((used, all))) => Ok(used.sum / all.sum.max(1.0)),
                _ => Err(error),
            }
        })
    }

    /// Returns the tally of the first row for `figure` that has samples, all of them valid.
    fn first(&self, tallies: &[Tally], figure: Figure) -> Option<Tally> {
        self.first_of(tallies, |known| known == figure)
    }

    fn first_of(&self, tallies: &[Tally], is_wanted: impl Fn(Figure) -> bool) -> Option<Tally> {
        let mut rows = self.rows.iter().zip(tallies);
        rows.find(|(row, t)| is_wanted(row.figure) && t.seen && !t.unusable).map(|(_, t)| *t)
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
        let mut rows = self.rows.iter().zip(tallies).filter(|(row, _)| row.figure == figure).peekable();
        let name = rows.peek().map_or(SampleName::of(""), |(row, _)| SampleName::from(*row));
        match rows.find(|(_, t)| t.seen) {
            Some((row, t)) if t.unusable => Err(PageError::Unusable(row.into())),
            Some((_, t)) => Ok(*t),
            None => Err(PageError::Missing(name)),
        }
    }

    /// The sum of a value that only some servers report.
    fn unless_missing(&self, tallies: &[Tally], figure: Figure) -> Result<f64, PageError> {
        match self.required(tallies, figure) {
            Err(PageError::Missing(_)) => Ok(0.0),
            read => read.map(|t| t.sum),
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
    let (mut max, mut running, mut waiting) = (0, Vec::new(), Vec::new());
    for (name, value) in labels {
        match name {
            "max_lora" => max = value.trim().parse().unwrap_or(0),
            "running_lora_adapters" => running = adapters(&value),
            "waiting_lora_adapters" => waiting = adapters(&value),
            _ => {}
        }
    }
    LoraState::new(max, running, waiting)
}

/// Returns the names in a comma-separated label.
fn adapters(list: &str) -> Vec<Arc<str>> {
    list.split(',').map(str::trim).filter(|n| !n.is_empty()).take(MAX_ADAPTERS).map(Arc::from).collect()
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
