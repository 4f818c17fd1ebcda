//! Who is turned away at once, before anything is decided about the request, one file a policy.

pub mod latency_slo;
pub mod probabilistic;

use attache_scheduling::{Candidate, PickContext};
use attache_types::rng::PickRng;
use std::fmt::Debug;

/// Turns requests away.
pub trait Admitter: Send + Sync + Debug {
    /// Whether the request may come in. `candidates` are the endpoints that may serve it.
    fn admits(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng) -> bool;
}

#[cfg(test)]
mod tests;
