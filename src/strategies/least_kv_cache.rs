//! `least-kv-cache`: the endpoint with the most free KV cache.
//!
//! ```text
//! score = KV cache usage on the GPU + KV cache usage in host memory; the lowest wins, ties at random
//! ```
//!
//! GPU usage is read from `gpu_cache_usage_perc` or from its newer name, `kv_cache_usage_perc`. Host memory counts as
//! empty where it is not reported; only vLLM's V0 engine reports it.
//! When not: few long requests. A request that was just sent holds no cache yet, so several decisions in a row pick
//! the same endpoint.
//! Source: AIBrix `least-kv-cache`. AIBrix skips servers that do not report both metrics, and therefore picks at
//! random on current vLLM.

use attache_pool::EndpointMetrics;
use attache_scheduling::plugin::{Better, FigureFallback, FigureParams, params, section};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::{Candidate, PickContext, Strategy};

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "least-kv-cache",
    summary: "Picks the endpoint with the least KV cache in use, on the GPU and in host memory together.",
    source: "AIBrix `least-kv-cache`",
    parameters: section::<FigureParams>,
    build: |value, _| params(value).map(|params| Box::new(LeastKvCache(params)) as Box<dyn Strategy>),
};

#[derive(Debug)]
struct LeastKvCache(FigureParams);

/// KV cache usage on the GPU plus that in host memory, 0 to 2.
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
