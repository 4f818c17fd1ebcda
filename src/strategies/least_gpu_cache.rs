//! `least-gpu-cache`: the endpoint with the most free KV cache on the GPU.
//!
//! ```text
//! score = KV cache usage on the GPU; the lowest wins, ties at random
//! ```
//!
//! Differs from `least-kv-cache` only where a server also reports a cache in host memory. When not: see there.
//! Source: AIBrix `least-gpu-cache`, which reads only `gpu_cache_usage_perc`, a name that vLLM dropped; here either
//! name counts.

use attache_scheduling::plugin::{Better, FigureFallback, FigureParams, params, section};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::{Candidate, PickContext, Strategy};

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "least-gpu-cache",
    summary: "Picks the endpoint with the least KV cache in use on the GPU.",
    source: "AIBrix `least-gpu-cache`",
    parameters: section::<FigureParams>,
    build: |value, _| params(value).map(|params| Box::new(LeastGpuCache(params)) as Box<dyn Strategy>),
};

#[derive(Debug)]
struct LeastGpuCache(FigureParams);

impl Strategy for LeastGpuCache {
    fn scores(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f64]) -> Option<Better> {
        for (score, candidate) in out.iter_mut().zip(candidates) {
            *score = candidate.metrics().map_or(f64::NAN, |m| f64::from(m.kv_usage));
        }
        Some(Better::Lower)
    }

    fn fallback(&self) -> FigureFallback {
        self.0.fallback
    }
}
