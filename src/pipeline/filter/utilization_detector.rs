//! `utilization-detector`: endpoints whose scraped queue depth and KV cache usage are within their limits.
//!
//! ```text
//! filter = queue <= queueDepthThreshold * (1 + headroom) and kv <= min(1, kvCacheUtilThreshold * (1 + headroom))
//!          and fresh metrics; if none is left, all stay
//! ```
//!
//! Metrics are fresh for `metricsStalenessThreshold`, by default the pool's own staleness limit. The default of GIE
//! and llm-d, 200 ms, would exclude every idle endpoint, because Attaché scrapes idle endpoints less often.
//! When not: bursts between two scrapes, which scraped metrics do not show; `concurrency-detector` counts at once.
//! `flow::saturation` computes how full these limits make the whole pool. Source: GIE and llm-d.

use super::keep_or_all;
use attache_scheduling::facts::utilization::UtilizationLimits;
use attache_scheduling::plugin::{Filter, Plugin, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext, Signal};
use attache_types::rng::PickRng;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "utilization-detector",
    aliases: &[],
    kind: "filter",
    summary: "Keeps endpoints whose reported queue and KV cache are not over their limits.",
    source: "GIE and llm-d `utilization-detector`",
    parameters: section::<UtilizationLimits>,
    build: |value| params(value).map(|limits| Plugin::Filter(Arc::new(UtilizationDetector(limits)))),
};

#[derive(Debug)]
struct UtilizationDetector(UtilizationLimits);

impl Filter for UtilizationDetector {
    fn keep(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], _: &mut PickRng, keep: &mut [bool]) {
        let page =
            |c: &Candidate<'_>| self.0.fresh(c.state, cx.now, cx.stale_after).is_some_and(|m| self.0.has_capacity(m));
        keep_or_all(keep, |i| candidates.get(i).is_some_and(page));
    }

    fn lacks(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>]) -> Option<Signal> {
        let blind = candidates.iter().all(|c| self.0.fresh(c.state, cx.now, cx.stale_after).is_none());
        blind.then_some(Signal::Metrics)
    }
}
