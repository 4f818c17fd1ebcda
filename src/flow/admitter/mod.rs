//! Policies that reject requests on arrival, before any decision, one file a policy.

pub mod latency_slo;
pub mod probabilistic;

use attache_scheduling::{Candidate, PickContext};
use attache_types::rng::PickRng;
use std::fmt::Debug;

/// Rejects requests on arrival.
pub trait Admitter: Send + Sync + Debug {
    /// Whether the request is admitted. `candidates` are the endpoints that may serve it.
    fn admits(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng) -> bool;
}

#[cfg(test)]
mod tests;
