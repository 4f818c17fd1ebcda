//! How full a pool is, one file a policy. 1 is full, more is overloaded.
//!
//! All detectors count what this process has dispatched and not seen end. Scraped metrics add the load of other
//! clients; stale ones add nothing and block nothing. The [`Gauge`] adds dispatched requests that are not in the ledger
//! yet, so that a burst between two gauges does not overshoot.

pub mod backlog;
pub mod concurrency;
pub mod recompute;
pub mod slo_load;
pub mod utilization;

use super::item::{Load, Need, Way};
use attache_pool::health::{Availability, HealthPolicy};
use attache_pool::{EndpointState, PoolSnapshot, Roles};
use attache_scheduling::split::SplitPolicy;
use attache_types::clock::Timestamp;
use std::fmt::Debug;
use std::time::Duration;

/// How full the endpoints of one stage (decode or prefill) are.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageSaturation {
    /// Saturation by requests, and what one more request adds.
    pub requests: (f64, f64),
    /// Saturation by tokens, and what one more prompt token adds.
    pub tokens: (f64, f64),
    /// Most that the tokens of one request add: a request uses one endpoint and can't fill another.
    pub request_tokens: f64,
}

impl StageSaturation {
    const FREE: Self = Self { requests: (0.0, 0.0), tokens: (0.0, 0.0), request_tokens: 0.0 };

    fn saturation(&self, pending: Load) -> f64 {
        let by_requests = self.requests.0 + self.requests.1 * f64::from(pending.requests);
        let most = self.request_tokens * f64::from(pending.requests);
        let by_tokens = self.tokens.0 + (self.tokens.1 * pending.tokens as f64).min(most);
        by_requests.max(by_tokens)
    }
}

/// A figure for each way in which a pool can serve requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ways<S = StageSaturation> {
    /// Endpoints that serve whole requests; `None` if there are none.
    pub whole: Option<S>,
    /// Prefill workers and the decode workers that continue from them; `None` if no pair exists.
    pub pair: Option<[S; 2]>,
}

impl<S> Ways<S> {
    /// Only endpoints that serve whole requests.
    pub const fn whole(servers: S) -> Self {
        Self { whole: Some(servers), pair: None }
    }

    /// The same ways, with `of` applied to each figure.
    fn map<T>(self, of: impl Fn(S) -> T + Copy) -> Ways<T> {
        Ways { whole: self.whole.map(of), pair: self.pair.map(|pair| pair.map(of)) }
    }
}

impl Ways {
    /// The saturation for a request that may be served in this `way`; for either way, that of the less full one. A way
    /// without endpoints has none, since the decision will reject the request.
    fn saturation(&self, way: Way, pending: Load) -> f64 {
        let whole = self.whole.map(|servers| servers.saturation(pending));
        let fuller = |[a, b]: [StageSaturation; 2]| a.saturation(pending).max(b.saturation(pending));
        let pair = self.pair.map(fuller);
        let of_way = match way {
            Way::Whole => whole.or(pair),
            Way::Pair => pair.or(whole),
            Way::Either => whole.into_iter().chain(pair).reduce(f64::min),
        };
        of_way.unwrap_or(1.0)
    }
}

/// The saturation of a pool at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gauge {
    /// Saturation by each way of serving requests.
    pub ways: Ways,
    /// Saturation for long work, if that differs.
    pub long: Option<Long>,
    /// What a further prompt delays, if prompts may be held back for that.
    pub delay: Option<Delay>,
}

/// The requests that a further prompt delays, on the server where it delays them least; see [`recompute`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Delay {
    /// Part of the computed blocks that were computed before, 0..1.
    pub share: f64,
    /// Requests of the server.
    pub requests: f64,
    /// Seconds that they need to end, in the mean; above 0.
    pub remaining: f64,
    /// A request waits for this many times its own work at most.
    pub stretch: f64,
    /// Seconds that a request waits at most, however long its work is.
    pub longest: f64,
}

impl Delay {
    /// 1 or more while a request should wait.
    fn saturation(&self, pending: Load, need: Need) -> f64 {
        let requests = self.requests + f64::from(pending.requests);
        let stretch = self.stretch.min(self.longest / need.work);
        let work = (need.work - need.waited / stretch).max(0.0);
        self.share * requests * work / self.remaining
    }
}

/// The saturation of a pool for requests with long prefills.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Long {
    /// Prefill time in seconds from which a request is long.
    pub from: f64,
    /// As in [`Gauge::ways`]; never less full.
    pub ways: Ways,
}

impl Gauge {
    /// A pool without endpoints, or one that takes no request.
    pub const FULL: Self = Self { ways: Ways { whole: None, pair: None }, long: None, delay: None };
    /// A pool that takes every request.
    pub const FREE: Self = Self { ways: Ways::whole(StageSaturation::FREE), long: None, delay: None };

    /// The saturation with the `pending` load added, for a request with this `need`. The least for [`Need::default`].
    #[must_use]
    pub fn saturation(&self, pending: Load, need: Need) -> f64 {
        let long = self.long.as_ref().filter(|long| need.work >= long.from);
        let by_load = long.map_or(&self.ways, |long| &long.ways).saturation(need.way, pending);
        self.delay.map_or(by_load, |delay| by_load.max(delay.saturation(pending, need)))
    }
}

/// The pool that a detector measures, with the settings it needs.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// Endpoints and their metrics.
    pub pool: &'a PoolSnapshot,
    /// Decides which endpoints are ejected.
    pub health: &'a HealthPolicy,
    /// How requests are split between prefill and decode; `None` if they are not.
    pub split: Option<&'a SplitPolicy>,
    /// Metrics older than this are ignored.
    pub stale_after: Duration,
    /// Time of the measurement.
    pub now: Timestamp,
}

impl<'a> View<'a> {
    fn open(&self, roles: Roles) -> impl Iterator<Item = &'a EndpointState> {
        let Self { pool, health, now, .. } = *self;
        let is_open = move |e: &&EndpointState| e.live().health.availability(now, health) != Availability::Ejected;
        pool.endpoints.iter().filter(move |e| e.serves(roles)).filter(is_open)
    }

    /// When an endpoint is expected to have prefilled the next of its requests whose responses do not stream and
    /// so show no first token.
    fn computes_in(&self) -> Option<Duration> {
        let speeds = self.pool.endpoints.iter().map(|e| &e.live().speed);
        let soonest = speeds.filter_map(|speed| speed.computes_in(self.now)).reduce(f64::min)?;
        Duration::try_from_secs_f64(soonest).ok()
    }

    /// The endpoints that decode and are not ejected. As in decisions, none counts as ejected if all are.
    pub(crate) fn answering(&self) -> Vec<&'a EndpointState> {
        let open: Vec<_> = self.open(Roles::DECODE).collect();
        if !open.is_empty() {
            return open;
        }
        self.pool.endpoints.iter().filter(|e| e.serves(Roles::DECODE)).collect()
    }
}

/// Measures how full a pool is.
pub trait Detector: Send + Sync + Debug {
    /// Measures the endpoints that take requests.
    fn gauge(&self, view: &View<'_>) -> Gauge;

    /// When the pool may become less full without any event; `None` if only events change it.
    fn changes_in(&self, _view: &View<'_>) -> Option<Duration> {
        None
    }
}

/// The gauge of a pool, where `of` measures the endpoints of one stage.
fn by_stage(view: &View<'_>, of: impl Fn(&[&EndpointState]) -> StageSaturation) -> Gauge {
    Gauge { ways: by_way(view, of), long: None, delay: None }
}

/// The figure that `of` gives for the endpoints of each stage, by way of serving. Pairs exist if some endpoints only
/// prefill. Ejected endpoints get no requests, so they add no capacity.
fn by_way<S: Copy>(view: &View<'_>, of: impl Fn(&[&EndpointState]) -> S) -> Ways<S> {
    let some = |endpoints: &[&EndpointState]| (!endpoints.is_empty()).then(|| of(endpoints));
    let decode = view.answering();
    // If all workers that only prefill are ejected, none of them gets requests.
    let mut prefill: Vec<_> = view.open(Roles::PREFILL).collect();
    let is_split = prefill.iter().any(|e| !e.serves(Roles::DECODE));
    let Some(split) = view.split.filter(|split| !split.whole) else {
        let whole = some(&decode);
        return Ways { whole, pair: whole.filter(|_| is_split).map(|decode| [of(&prefill), decode]) };
    };
    // An endpoint that serves whole requests is not part of a pair.
    let (whole, paired): (Vec<_>, Vec<_>) = decode.iter().copied().partition(|e| split.serves_whole(&e.endpoint));
    prefill.retain(|e| !split.serves_whole(&e.endpoint));
    let pair = some(&prefill).zip(some(&paired)).map(<[S; 2]>::from);
    // Without any endpoint or pair, the decision rejects the request; it need not wait in the queue for that.
    let whole = if pair.is_none() && whole.is_empty() { decode } else { whole };
    Ways { whole: some(&whole), pair }
}

/// The mean fullness of the endpoints, where `of` gives that of one: 1 is full. An endpoint counts as full at most: its
/// queue takes no capacity from the others. With `compat`, as in GIE and llm-d, it counts as it is.
fn mean(endpoints: &[&EndpointState], compat: bool, of: impl Fn(&EndpointState) -> f64) -> f64 {
    let most = if compat { f64::INFINITY } else { 1.0 };
    endpoints.iter().map(|e| of(e).min(most)).sum::<f64>() / endpoints.len().max(1) as f64
}

#[cfg(test)]
mod tests;
