//! How full a pool is, one file a policy: 1 when it is full, more when it is beyond.
//!
//! All of them rest on what this picker has sent and not seen end. A page of metrics adds what others have sent; one that is too old adds nothing
//! and stalls nothing. What was let through and is in no ledger yet is added by the [`Gauge`], so that a burst between two looks at the pool
//! does not overshoot.

pub mod backlog;
pub mod concurrency;
pub mod slo_load;
pub mod utilization;

use super::item::{Load, Need, Way};
use attache_pool::health::{Availability, HealthPolicy};
use attache_pool::{EndpointState, PoolSnapshot, Roles};
use attache_scheduling::split::SplitPolicy;
use attache_types::clock::Timestamp;
use std::fmt::Debug;
use std::time::Duration;

/// How full the endpoints are that do the same.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stage {
    /// By requests, and what one more adds.
    pub requests: (f64, f64),
    /// By tokens, and what one more of a prompt adds.
    pub tokens: (f64, f64),
    /// What the tokens of a request add at most: those that go to one endpoint can't fill another.
    pub request_tokens: f64,
}

impl Stage {
    fn saturation(&self, pending: Load) -> f64 {
        let by_requests = self.requests.0 + self.requests.1 * f64::from(pending.requests);
        let most = self.request_tokens * f64::from(pending.requests);
        let by_tokens = self.tokens.0 + (self.tokens.1 * pending.tokens as f64).min(most);
        by_requests.max(by_tokens)
    }
}

/// The ways in which the servers of a pool serve requests, with a figure for the servers of each.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ways<S = Stage> {
    /// Servers that serve whole requests; `None` where no server does.
    pub whole: Option<S>,
    /// Servers that compute prompts for others, and the decode servers that continue from there; `None` where no pair exists.
    pub pair: Option<[S; 2]>,
}

impl<S> Ways<S> {
    /// One server serves each request.
    pub const fn whole(servers: S) -> Self {
        Self { whole: Some(servers), pair: None }
    }

    /// The same ways with another figure.
    fn map<T>(self, of: impl Fn(S) -> T + Copy) -> Ways<T> {
        Ways { whole: self.whole.map(of), pair: self.pair.map(|pair| pair.map(of)) }
    }
}

impl Ways {
    /// The saturation for a request that may be served in this `way`: that of the less full way where it may be served in either. A way
    /// for which the pool has no servers says nothing: the decision will tell the client.
    fn saturation(&self, way: Way, pending: Load) -> f64 {
        let whole = self.whole.map(|servers| servers.saturation(pending));
        let fuller = |[a, b]: [Stage; 2]| a.saturation(pending).max(b.saturation(pending));
        let pair = self.pair.map(fuller);
        let of_way = match way {
            Way::Whole => whole.or(pair),
            Way::Pair => pair.or(whole),
            Way::Either => whole.into_iter().chain(pair).reduce(f64::min),
        };
        of_way.unwrap_or(1.0)
    }
}

/// How full a pool is at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gauge {
    /// By the ways in which requests are served.
    pub ways: Ways,
    /// How full it is for long work, where that is not the same.
    pub long: Option<Long>,
}

/// How full a pool is for requests that take long themselves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Long {
    /// Seconds of an endpoint from which work is long.
    pub from: f64,
    /// As in [`Gauge::ways`]; never less full.
    pub ways: Ways,
}

impl Gauge {
    /// A pool without endpoints, or one that takes nothing.
    pub const FULL: Self = Self { ways: Ways { whole: None, pair: None }, long: None };

    /// Its saturation when `pending` is there as well, for a request with this `need`. The least for [`Need::default`].
    #[must_use]
    pub fn saturation(&self, pending: Load, need: Need) -> f64 {
        let long = self.long.as_ref().filter(|long| need.work >= long.from);
        long.map_or(&self.ways, |long| &long.ways).saturation(need.way, pending)
    }
}

/// What a detector looks at.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The pool.
    pub pool: &'a PoolSnapshot,
    /// Who of it is ejected.
    pub health: &'a HealthPolicy,
    /// How its requests are split, if they are.
    pub split: Option<&'a SplitPolicy>,
    /// Pages older than this say nothing.
    pub stale_after: Duration,
    /// The moment.
    pub now: Timestamp,
}

impl<'a> View<'a> {
    fn open(&self, roles: Roles) -> impl Iterator<Item = &'a EndpointState> {
        let Self { pool, health, now, .. } = *self;
        let is_open = move |e: &&EndpointState| e.live().health.availability(now, health) != Availability::Ejected;
        pool.endpoints.iter().filter(move |e| e.serves(roles)).filter(is_open)
    }

    /// When an endpoint is thought to have computed the next prompt of those whose answers come whole, of which nobody hears before their end.
    fn computes_in(&self) -> Option<Duration> {
        let speeds = self.pool.endpoints.iter().map(|e| &e.live().speed);
        let soonest = speeds.filter_map(|speed| speed.computes_in(self.now)).reduce(f64::min)?;
        Duration::try_from_secs_f64(soonest).ok()
    }

    /// The endpoints that make answers and are not ejected. As decisions have it: when all are ejected, none is.
    pub(crate) fn answering(&self) -> Vec<&'a EndpointState> {
        let open: Vec<_> = self.open(Roles::DECODE).collect();
        if !open.is_empty() {
            return open;
        }
        self.pool.endpoints.iter().filter(|e| e.serves(Roles::DECODE)).collect()
    }
}

/// How full a pool is.
pub trait Detector: Send + Sync + Debug {
    /// Looks at the endpoints that take requests.
    fn gauge(&self, view: &View<'_>) -> Gauge;

    /// How soon the pool may be less full though nothing tells of it; `None` when only what is told makes it so.
    fn changes_in(&self, _view: &View<'_>) -> Option<Duration> {
        None
    }
}

/// The gauge of a pool from that of its endpoints: `of` looks at those of one stage.
fn by_stage(view: &View<'_>, of: impl Fn(&[&EndpointState]) -> Stage) -> Gauge {
    Gauge { ways: by_way(view, of), long: None }
}

/// What `of` makes of the endpoints of each stage, by the ways in which requests are served. Pairs exist where some endpoints compute prompts only.
/// Endpoints that are ejected get nothing, and are no room.
fn by_way<S: Copy>(view: &View<'_>, of: impl Fn(&[&EndpointState]) -> S) -> Ways<S> {
    let some = |endpoints: &[&EndpointState]| (!endpoints.is_empty()).then(|| of(endpoints));
    let decode = view.answering();
    // To those that only compute prompts nothing is sent where all are ejected.
    let mut prefill: Vec<_> = view.open(Roles::PREFILL).collect();
    let is_split = prefill.iter().any(|e| !e.serves(Roles::DECODE));
    let Some(split) = view.split.filter(|split| !split.whole) else {
        let whole = some(&decode);
        return Ways { whole, pair: whole.filter(|_| is_split).map(|decode| [of(&prefill), decode]) };
    };
    // A server for whole requests is not part of a pair.
    let (whole, paired): (Vec<_>, Vec<_>) = decode.iter().copied().partition(|e| split.serves_whole(&e.endpoint));
    prefill.retain(|e| !split.serves_whole(&e.endpoint));
    let pair = some(&prefill).zip(some(&paired)).map(<[S; 2]>::from);
    // Without any server or pair the decision rejects the request; it need not wait in the queue for that.
    let whole = if pair.is_none() && whole.is_empty() { decode } else { whole };
    Ways { whole: some(&whole), pair }
}

/// The mean of a figure.
fn mean(endpoints: &[&EndpointState], figure: impl Fn(&EndpointState) -> f64) -> f64 {
    endpoints.iter().map(|e| figure(e)).sum::<f64>() / endpoints.len().max(1) as f64
}

#[cfg(test)]
mod tests;
