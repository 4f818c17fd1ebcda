//! How full a pool is, one file a policy: 1 when it is full, more when it is beyond.
//!
//! All of them rest on what this picker has sent and not seen end. A page of metrics adds what others have sent; one that is too old adds nothing
//! and stalls nothing. What was let through and is in no ledger yet is added by the [`Gauge`], so that a burst between two looks at the pool
//! does not overshoot.

pub mod backlog;
pub mod concurrency;
pub mod utilization;

use super::item::Load;
use crate::clock::Timestamp;
use crate::pool::{EndpointState, PoolSnapshot, Roles};
use std::fmt::Debug;
use std::time::Duration;

/// How full a pool is at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Gauge {
    /// What the fuller side of a pool that splits requests is at, or what nothing that is sent now changes.
    pub base: f64,
    /// By requests, and what one more adds.
    pub requests: (f64, f64),
    /// By tokens, and what one more of a prompt adds.
    pub tokens: (f64, f64),
}

impl Gauge {
    /// A pool without endpoints, or one that takes nothing.
    pub const FULL: Self = Self { base: 1.0, requests: (0.0, 0.0), tokens: (0.0, 0.0) };

    /// Its saturation when `pending` is there as well.
    #[must_use]
    pub fn saturation(&self, pending: Load) -> f64 {
        let by_requests = self.requests.0 + self.requests.1 * f64::from(pending.requests);
        let by_tokens = self.tokens.0 + self.tokens.1 * pending.tokens as f64;
        self.base.max(by_requests).max(by_tokens)
    }
}

/// What a detector looks at.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The pool.
    pub pool: &'a PoolSnapshot,
    /// Pages older than this say nothing.
    pub stale_after: Duration,
    /// The moment.
    pub now: Timestamp,
}

/// How full a pool is.
pub trait Detector: Send + Sync + Debug {
    /// Looks at the endpoints that take requests.
    fn gauge(&self, view: &View<'_>) -> Gauge;
}

/// The gauge of a pool from that of its endpoints: `of` gives, for endpoints of one stage, their number and each of them. Where some compute
/// prompts only and others make answers only, the fuller stage counts.
fn by_stage(view: &View<'_>, of: impl Fn(&[&EndpointState]) -> Gauge) -> Gauge {
    let serving =
        |roles: Roles| -> Vec<&EndpointState> { view.pool.endpoints.iter().filter(|e| e.serves(roles)).collect() };
    let (prefill, decode) = (serving(Roles::PREFILL), serving(Roles::DECODE));
    if decode.is_empty() {
        return Gauge::FULL;
    }
    let decoders = of(&decode);
    let is_split = prefill.iter().any(|e| !e.serves(Roles::DECODE));
    if !is_split {
        return decoders;
    }
    let prefillers = of(&prefill);
    let fuller = if prefillers.saturation(Load::default()) > decoders.saturation(Load::default()) {
        prefillers
    } else {
        decoders
    };
    Gauge { base: prefillers.base.max(decoders.base), ..fuller }
}

/// The mean of a figure.
fn mean(endpoints: &[&EndpointState], figure: impl Fn(&EndpointState) -> f64) -> f64 {
    endpoints.iter().map(|e| figure(e)).sum::<f64>() / endpoints.len().max(1) as f64
}

#[cfg(test)]
mod tests;
