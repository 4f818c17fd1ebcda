//! The history of pools on the status page: rates, percentiles and queues of the last half hour and the last six hours.
//!
//! | series | step | samples |
//! |---|---|---|
//! | fine | 5 s | 360: 30 minutes |
//! | coarse | 1 min | 360: 6 hours |
//!
//! A sample has eleven 32-bit numbers, so a pool takes 32 KB, and at most [`MAX_POOLS`] pools have a history: 8 MB. A
//! coarse sample is computed from the counters of its whole minute, since percentiles can't be averaged. Its depths and
//! requests in flight are the highest that were seen.

use super::{AdminState, json};
use crate::pools::PoolView;
use crate::pools::work::PoolWork;
use crate::rates::{Minute, Rates, Tally};
use attache_telemetry::metrics::{Metrics, PoolTotals};
use attache_types::clock::{Clock, Timestamp};
use axum::Router;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::MissedTickBehavior;

/// Time between two fine samples.
const STEP: Duration = Duration::from_secs(5);
/// Fine samples of a coarse one.
const COARSE: u64 = 12;
/// Fine samples of half a minute.
const RECENT: usize = 6;
/// Samples of each series.
const KEPT: usize = 360;
/// Most pools with a history, the first by name.
const MAX_POOLS: usize = 256;

/// The columns of a sample: rates are per second, times in milliseconds.
const COLUMNS: [&str; 11] = [
    "requests",
    "errors",
    "rejections",
    "ttft_p50",
    "ttft_p95",
    "ttft_p99",
    "duration_p50",
    "duration_p95",
    "queued",
    "in_flight",
    "hit_ratio",
];

/// The routes of the history. Their query keys are `step` and `after`.
pub(super) fn pages() -> Router<AdminState> {
    Router::new().route("/api/history", get(history))
}

/// One sample in the order of [`COLUMNS`]; NaN where nothing was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Sample([f32; COLUMNS.len()]);

/// Counters and gauges of a pool at one time.
#[derive(Clone, Copy, Debug, Default)]
struct Reading {
    at: Timestamp,
    totals: PoolTotals,
    rejections: u64,
    queued: f64,
    in_flight: f64,
}

impl Reading {
    fn of(view: &PoolView, rejections: u64, at: Timestamp) -> Self {
        let endpoints = &view.store.load().endpoints;
        Self {
            at,
            totals: view.metrics.totals(),
            rejections,
            queued: view.queue.requests.get() as f64,
            in_flight: endpoints.iter().map(|state| f64::from(state.endpoint.ledger.in_flight())).sum(),
        }
    }

    /// The sample from `earlier` until now. `queued` and `in_flight` are the highest depths in that time.
    fn since(&self, earlier: &Self, queued: f64, in_flight: f64) -> Sample {
        let (now, before) = (&self.totals, &earlier.totals);
        let seconds = self.at.since(earlier.at).as_secs_f64();
        // A pool of the same name that was deleted and created again starts from zero.
        let grown = |now: u64, before: u64| if now < before { now } else { now - before } as f64;
        let rate = |now, before| if seconds > 0.0 { grown(now, before) / seconds } else { f64::NAN };
        let (ttft, duration) = (now.ttft.since(&before.ttft), now.duration.since(&before.duration));
        let ms = |seconds: Option<f64>| seconds.map_or(f64::NAN, |seconds| seconds * 1e3);
        let prompts = grown(now.prompt_tokens, before.prompt_tokens);
        let hits = grown(now.cached_tokens, before.cached_tokens);
        let values = [
            rate(now.requests, before.requests),
            rate(now.errors, before.errors),
            rate(self.rejections, earlier.rejections),
            ms(ttft.quantile(0.5)),
            ms(ttft.quantile(0.95)),
            ms(ttft.quantile(0.99)),
            ms(duration.quantile(0.5)),
            ms(duration.quantile(0.95)),
            queued,
            in_flight,
            if prompts > 0.0 { (hits / prompts).min(1.0) } else { f64::NAN },
        ];
        Sample(values.map(|value| value as f32))
    }
}

/// Samples with one step, the oldest first.
#[derive(Debug)]
struct Series {
    /// The reading at the end of the last sample.
    last: Reading,
    /// The highest depths since then.
    queued: f64,
    in_flight: f64,
    samples: VecDeque<Sample>,
}

impl Series {
    fn starting(first: Reading) -> Self {
        Self { last: first, queued: 0.0, in_flight: 0.0, samples: VecDeque::new() }
    }

    /// Takes a reading, which ends a sample if `ends`.
    fn read(&mut self, reading: Reading, ends: bool) {
        self.queued = self.queued.max(reading.queued);
        self.in_flight = self.in_flight.max(reading.in_flight);
        if !ends {
            return;
        }
        if self.samples.len() == KEPT {
            self.samples.pop_front();
        }
        self.samples.push_back(reading.since(&self.last, self.queued, self.in_flight));
        *self = Self { samples: std::mem::take(&mut self.samples), ..Self::starting(reading) };
    }

    /// The mean hit ratio of the latest [`RECENT`] samples, and of those before.
    fn hit_ratios(&self) -> Option<HitRatios> {
        let ratios: Vec<f32> = self.samples.iter().filter_map(|sample| sample.0.last().copied()).collect();
        let (before, recent) = ratios.split_at_checked(ratios.len().checked_sub(RECENT)?)?;
        Some(HitRatios { recent: mean(recent, RECENT / 2)?, before: mean(before, RECENT)? })
    }

    /// The last `count` samples, as one list for each column.
    fn columns(&self, count: usize) -> Value {
        let samples = || self.samples.iter().skip(self.samples.len().saturating_sub(count));
        let column = |index: usize| samples().map(|sample| short(sample.0.get(index).copied())).collect::<Value>();
        COLUMNS.iter().enumerate().map(|(i, name)| ((*name).to_owned(), column(i))).collect::<Map<_, _>>().into()
    }
}

/// The mean of the values that were measured; `None` if fewer than `least` were.
fn mean(values: &[f32], least: usize) -> Option<f64> {
    let measured: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).map(f64::from).collect();
    (measured.len() >= least).then(|| measured.iter().sum::<f64>() / measured.len() as f64)
}

/// The part of prompts that servers found in their caches, 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct HitRatios {
    /// Of the last half minute.
    pub(crate) recent: f64,
    /// Of the half hour before.
    pub(crate) before: f64,
}

/// A number with at most three decimals, or null.
fn short(value: Option<f32>) -> Value {
    match value.map(f64::from) {
        Some(value) if value.is_finite() => json!((value * 1e3).round() / 1e3),
        _ => Value::Null,
    }
}

#[derive(Debug)]
struct PoolHistory {
    fine: Series,
    coarse: Series,
    /// The latest [`RECENT`] readings, the oldest first.
    work: VecDeque<PoolWork>,
}

impl PoolHistory {
    fn starting(first: Reading) -> Self {
        Self { fine: Series::starting(first), coarse: Series::starting(first), work: VecDeque::new() }
    }

    fn add_work(&mut self, work: PoolWork) {
        if self.work.len() == RECENT {
            self.work.pop_front();
        }
        self.work.push_back(work);
    }
}

#[derive(Debug, Default)]
struct Records {
    /// Number of readings so far.
    readings: u64,
    pools: BTreeMap<Arc<str>, PoolHistory>,
    rates: Rates,
}

/// The history of all pools.
#[derive(Debug, Default)]
pub struct History(Mutex<Records>);

impl History {
    /// Reads all pools every five seconds, and calls `read` after each reading but the first, at which servers have had no
    /// time to respond; never returns.
    pub async fn follow(
        &self,
        views: impl Fn() -> Arc<Vec<PoolView>>,
        read: impl Fn(&[PoolView]),
        metrics: &Metrics,
        clock: Clock,
    ) {
        let mut ticks = tokio::time::interval(STEP);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks.tick().await;
        self.read(&views(), Tally::of(metrics, clock.now()));
        loop {
            ticks.tick().await;
            let views = views();
            self.read(&views, Tally::of(metrics, clock.now()));
            read(&views);
        }
    }

    /// Takes one reading of all pools. Pools that are not among `views` lose their history.
    pub(crate) fn read(&self, views: &[PoolView], tally: Tally) {
        let rejected = |pool: &str| tally.rejections_of(pool);
        let mut records = self.0.lock();
        records.readings += 1;
        let ends_coarse = records.readings.is_multiple_of(COARSE);
        records.pools.retain(|name, _| views.iter().any(|view| view.name == *name));
        for view in views {
            let reading = Reading::of(view, rejected(&view.name), tally.at);
            if let Some(history) = records.pools.get_mut(&view.name) {
                history.fine.read(reading, true);
                history.coarse.read(reading, ends_coarse);
                history.add_work(PoolWork::of(view, tally.at));
            } else if records.pools.len() < MAX_POOLS {
                records.pools.insert(view.name.clone(), PoolHistory::starting(reading));
            }
        }
        records.rates.add(tally);
    }

    /// Calls `read` with the counts of the last minute.
    pub(crate) fn with_rates<T>(&self, read: impl FnOnce(&Rates) -> T) -> T {
        read(&self.0.lock().rates)
    }

    /// The hit ratios of a pool; `None` if it had few requests lately or before.
    pub(crate) fn hit_ratios(&self, pool: &str) -> Option<HitRatios> {
        self.0.lock().pools.get(pool)?.fine.hit_ratios()
    }

    /// The readings of the last half minute of a pool, the oldest first; none until the history is that long.
    pub(crate) fn work(&self, pool: &str) -> Vec<PoolWork> {
        let records = self.0.lock();
        let work = records.pools.get(pool).map(|history| &history.work).filter(|work| work.len() == RECENT);
        work.into_iter().flatten().cloned().collect()
    }

    /// What was counted in the last minute.
    pub(crate) fn minute(&self, metrics: &Metrics, now: Timestamp) -> Minute {
        self.with_rates(|rates| rates.minute(&Tally::of(metrics, now)))
    }

    /// The samples after the sample number `after`, as JSON. All lists end with the sample number `sequence`.
    fn to_json(&self, coarse: bool, after: u64) -> Value {
        let records = self.0.lock();
        let (step, sequence) = if coarse { (STEP * 12, records.readings / COARSE) } else { (STEP, records.readings) };
        let count = usize::try_from(sequence.saturating_sub(after)).unwrap_or(usize::MAX);
        let series = |history: &PoolHistory| {
            let series = if coarse { &history.coarse } else { &history.fine };
            series.columns(count)
        };
        let pools = records.pools.iter().map(|(name, history)| (name.to_string(), series(history)));
        json!({
            "step_seconds": step.as_secs(),
            "sequence": sequence,
            "pools": pools.collect::<Map<_, _>>(),
        })
    }
}

#[derive(serde::Deserialize)]
struct HistoryQuery {
    step: Option<String>,
    after: Option<String>,
}

async fn history(State(state): State<AdminState>, Query(query): Query<HistoryQuery>) -> Response {
    let refused = |text: String| (StatusCode::BAD_REQUEST, text).into_response();
    let coarse = match query.step.as_deref() {
        None | Some("5") => false,
        Some("60") => true,
        Some(other) => return refused(format!("the query key `step` is `{other}`; allowed are 5 and 60, seconds\n")),
    };
    let Ok(after) = query.after.as_deref().unwrap_or("0").parse::<u64>() else {
        let got = query.after.unwrap_or_default();
        return refused(format!("the query key `after` is `{got}`; it is a `sequence` of an earlier response\n"));
    };
    json(&state.history.to_json(coarse, after))
}
