//! `least-busy-time`: the endpoint whose GPU was busy for the smallest share of the time.
//!
//! ```text
//! score = gpu_busy_time_ratio; the lowest wins, ties at random
//! ```
//!
//! No inference engine exports that metric. An exporter beside the model server has to add it to the scraped metrics.
//! If no endpoint has it, the strategy falls back to `least-request` and reports degraded mode; `fallback: random`
//! picks at random.
//! When not: without such an exporter. A busy GPU may also have free slots in its batch.
//! Source: AIBrix `least-busy-time`, where no component collects the metric and every pick is random.

use attache_scheduling::plugin::{Better, FigureFallback, FigureParams, params, section};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::{Candidate, PickContext, Strategy};

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "least-busy-time",
    summary: "Picks the endpoint with the lowest `gpu_busy_time_ratio`.",
    source: "AIBrix `least-busy-time`",
    parameters: section::<FigureParams>,
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
