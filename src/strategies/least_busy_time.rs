//! `least-busy-time`: the endpoint whose GPU computed for the smallest part of the time.
//!
//! ```text
//! score = gpu_busy_time_ratio; the least wins, ties at random
//! ```
//!
//! No engine reports that series by itself: an exporter beside the server has to add it to the page. Without it on any page this is
//! `least-request`, and says so; with `fallback: random` it draws. When not: always, unless there is such an exporter; a busy GPU may still have room in its batch.
//! Source: AIBrix `least-busy-time`, where nothing collects the series and every pick is a random one.

use attache_scheduling::plugin::{Better, FigureFallback, FigureParams, params};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::{Candidate, PickContext, Strategy};

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "least-busy-time",
    summary: "Picks the endpoint with the lowest `gpu_busy_time_ratio`.",
    source: "AIBrix `least-busy-time`",
    build: |value, _| params(value).map(|params| Box::new(LeastBusyTime(params)) as Box<dyn Strategy>),
};

#[derive(Debug)]
struct LeastBusyTime(FigureParams);

impl Strategy for LeastBusyTime {
    fn scores(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f64]) -> Option<Better> {
        for (score, candidate) in out.iter_mut().zip(candidates) {
            *score = candidate.metrics().and_then(|m| m.gpu_busy).unwrap_or(f64::NAN);
        }
        Some(Better::Lower)
    }

    fn fallback(&self) -> FigureFallback {
        self.0.fallback
    }
}
