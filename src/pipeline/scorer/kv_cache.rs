//! `kv-cache-utilization-scorer`: the free share of the KV cache, `1 − usage`.
//!
//! An endpoint without fresh metrics scores 0. When not: caches that are kept full on purpose. Prefix caching counts
//! cached blocks as free in vLLM, but not in every engine. Source: GIE `kv-cache-utilization-scorer`.

use super::no_metrics;
use attache_scheduling::plugin::{NoParams, Plugin, Scorer, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext, Signal};
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "kv-cache-utilization-scorer",
    aliases: &[],
    kind: "scorer",
    summary: "Prefers endpoints with more free KV cache.",
    source: "GIE `kv-cache-utilization-scorer`",
    parameters: section::<NoParams>,
    build: |value| params::<NoParams>(value).map(|NoParams {}| Plugin::Scorer(Arc::new(KvCache))),
};

#[derive(Debug)]
struct KvCache;

impl Scorer for KvCache {
    fn score(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f32]) {
        for (score, candidate) in out.iter_mut().zip(candidates) {
            *score = if candidate.kv_usage.is_nan() { 0.0 } else { 1.0 - candidate.kv_usage };
        }
    }

    fn lacks(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>]) -> Option<Signal> {
        no_metrics(candidates)
    }
}
