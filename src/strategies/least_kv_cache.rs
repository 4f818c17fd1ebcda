//! `least-kv-cache`: the endpoint with the most room in its KV cache.
//!
//! ```text
//! score = KV cache in use on the GPU + in host memory; the least wins, ties at random
//! ```
//!
//! What is in use there counts under its old name (`gpu_cache_usage_perc`) or its new one (`kv_cache_usage_perc`); host memory counts
//! as empty where it isn't reported, which is everywhere but in vLLM's V0 engine. When not: few long requests, since requests that were
//! just sent there hold no cache yet and several decisions fall alike.
//! Source: AIBrix `least-kv-cache`, which skips every server that does not report both, and so draws at random on today's vLLM.

use attache_pool::EndpointMetrics;
use attache_scheduling::plugin::{Better, FigureFallback, FigureParams, params};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::{Candidate, PickContext, Strategy};

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "least-kv-cache",
    summary: "Picks the endpoint with the least KV cache in use, on the GPU and in host memory together.",
    source: "AIBrix `least-kv-cache`",
    build: |value, _| params(value).map(|params| Box::new(LeastKvCache(params)) as Box<dyn Strategy>),
};

#[derive(Debug)]
struct LeastKvCache(FigureParams);

/// KV cache in use on the GPU and in host memory, 0..=2.
pub(super) fn usage(metrics: &EndpointMetrics) -> f64 {
    f64::from(metrics.kv_usage) + f64::from(metrics.cpu_cache_usage.unwrap_or(0.0))
}

impl Strategy for LeastKvCache {
    fn scores(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f64]) -> Option<Better> {
        for (score, candidate) in out.iter_mut().zip(candidates) {
            *score = candidate.metrics().map_or(f64::NAN, usage);
        }
        Some(Better::Lower)
    }

    fn fallback(&self) -> FigureFallback {
        self.0.fallback
    }
}
