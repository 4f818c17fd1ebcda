//! `least-utilization`: the endpoint whose engine reports the lowest utilization.
//!
//! ```text
//! score = engine_utilization; the lowest wins, ties at random
//! ```
//!
//! Only xLLM exports that metric. If no endpoint has it, the strategy falls back to `least-request` and reports
//! degraded mode; `fallback: random` picks at random.
//! When not: pools without xLLM. Source: AIBrix `least-utilization`.

use attache_scheduling::plugin::{Better, FigureFallback, FigureParams, params, section};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::{Candidate, PickContext, Strategy};

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "least-utilization",
    summary: "Picks the endpoint with the lowest `engine_utilization`, which xLLM reports.",
    source: "AIBrix `least-utilization`",
    parameters: section::<FigureParams>,
    build: |value, _| params(value).map(|params| Box::new(LeastUtilization(params)) as Box<dyn Strategy>),
};

#[derive(Debug)]
struct LeastUtilization(FigureParams);

impl Strategy for LeastUtilization {
    fn scores(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f64]) -> Option<Better> {
        for (score, candidate) in out.iter_mut().zip(candidates) {
            *score = candidate.metrics().and_then(|m| m.engine_utilization).unwrap_or(f64::NAN);
        }
        Some(Better::Lower)
    }

    fn fallback(&self) -> FigureFallback {
        self.0.fallback
    }
}
