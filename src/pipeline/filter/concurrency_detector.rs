//! `concurrency-detector`: endpoints on which this Attaché replica has requests or tokens in flight below a limit.
//!
//! ```text
//! filter = load < floor(capacity * (1 + headroom)), both kinds with `hybrid`; if none is left, all stay
//! load   = requests: sent and not ended; tokens: uncached prompt tokens of requests without a first response byte
//! ```
//!
//! It reacts at once; scraped metrics lag by a scrape interval. When not: other clients use the same servers, since
//! their requests are not counted. `flow::saturation` computes how full these capacities make the whole pool. Source:
//! GIE and llm-d.

use super::keep_or_all;
use attache_scheduling::facts::concurrency::{ConcurrencyLimits, ConcurrencyParams};
use attache_scheduling::plugin::{Filter, Plugin, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext};
use attache_types::rng::PickRng;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "concurrency-detector",
    aliases: &[],
    kind: "filter",
    summary: "Keeps endpoints on which this replica has requests or tokens in flight below a limit.",
    source: "GIE and llm-d `concurrency-detector`",
    parameters: section::<ConcurrencyParams>,
    build: |value| ConcurrencyLimits::new(value).map(|limits| Plugin::Filter(Arc::new(ConcurrencyDetector(limits)))),
};

#[derive(Debug)]
struct ConcurrencyDetector(ConcurrencyLimits);

impl Filter for ConcurrencyDetector {
    fn keep(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], _: &mut PickRng, keep: &mut [bool]) {
        keep_or_all(keep, |i| candidates.get(i).is_some_and(|c| self.0.has_capacity(&c.state.endpoint)));
    }
}
