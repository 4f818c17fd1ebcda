//! How full a pool is, one file a policy: 1 when it is full, more when it is beyond.
//!
//! All of them rest on what this picker has sent and not seen end. A page of metrics adds what others have sent; one that is too old adds nothing
//! and stalls nothing. What was let through and is in no ledger yet is added by the [`Gauge`], so that a burst between two looks at the pool
//! does not overshoot.

pub mod backlog;
pub mod concurrency;
pub mod slo_load;
pub mod utilization;

use super::item::Load;
use crate::clock::Timestamp;
use crate::pool::health::{Availability, HealthPolicy};
use crate::pool::{EndpointState, PoolSnapshot, Roles};
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

/// How full a pool is at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Gauge {
    /// Those that make answers, and those that only compute prompts, which are empty where there are none.
    pub stages: [Stage; 2],
    /// How full it is for long work, where that is not the same.
    pub long: Option<Long>,
}

/// How full a pool is for requests that take long themselves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Long {
    /// Seconds of an endpoint from which work is long.
    pub from: f64,
    /// As in [`Gauge::stages`]; never less full.
    pub stages: [Stage; 2],
}

impl Gauge {
    /// A pool without endpoints, or one that takes nothing.
    pub const FULL: Self =
        Self { stages: [Stage { requests: (1.0, 0.0), tokens: (0.0, 0.0), request_tokens: 0.0 }; 2], long: None };

    /// Its saturation when `pending` is there as well, for a request that takes `work` seconds of an endpoint: that of the stage which is fuller
    /// then. The least for a `work` of 0.
    #[must_use]
    pub fn saturation(&self, pending: Load, work: f64) -> f64 {
        let stages = self.long.as_ref().filter(|long| work >= long.from).map_or(&self.stages, |long| &long.stages);
        stages.iter().fold(0.0, |fullest, stage| stage.saturation(pending).max(fullest))
    }
}

/// What a detector looks at.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The pool.
    pub pool: &'a PoolSnapshot,
    /// Who of it is ejected.
    pub health: &'a HealthPolicy,
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
    pub(in crate::flow) fn answering(&self) -> Vec<&'a EndpointState> {
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
    stages(view, of).map_or(Gauge::FULL, |stages| Gauge { stages, long: None })
}

/// What `of` makes of the endpoints of each stage; `None` when nobody makes answers. Where some compute prompts only, they are a stage of
/// their own. Endpoints that are ejected get nothing, and are no room.
fn stages<S: Default>(view: &View<'_>, of: impl Fn(&[&EndpointState]) -> S) -> Option<[S; 2]> {
    let decode = view.answering();
    if decode.is_empty() {
        return None;
    }
    // To those that only compute prompts nothing is sent where all are ejected.
    let prefill: Vec<_> = view.open(Roles::PREFILL).collect();
    let is_split = prefill.iter().any(|e| !e.serves(Roles::DECODE));
    Some([of(&decode), if is_split { of(&prefill) } else { S::default() }])
}

/// The mean of a figure.
fn mean(endpoints: &[&EndpointState], figure: impl Fn(&EndpointState) -> f64) -> f64 {
    endpoints.iter().map(|e| figure(e)).sum::<f64>() / endpoints.len().max(1) as f64
}

#[cfg(test)]
mod tests;
