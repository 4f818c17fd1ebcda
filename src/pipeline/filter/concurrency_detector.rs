//! `concurrency-detector`: endpoints on which this picker has not too much in flight.
//!
//! ```text
//! filter = load < floor(capacity * (1 + headroom)), both kinds with `hybrid`; when nobody is left, all stay
//! load   = requests: sent and not ended; tokens: prompt tokens sent to endpoints that have not begun to answer
//! ```
//!
//! It acts at once, where reported figures lag by a scrape. When not: other pickers or clients use the same servers; their requests are not
//! seen. How full these capacities make a pool as a whole is `flow::saturation`'s. Source: GIE and llm-d.

use super::keep_or_all;
use attache_scheduling::facts::concurrency::ConcurrencyLimits;
use attache_scheduling::plugin::{Filter, Plugin};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext};
use attache_types::rng::PickRng;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "concurrency-detector",
    aliases: &[],
    kind: "filter",
    summary: "Keeps endpoints on which this picker has not too many requests or tokens in flight.",
    source: "GIE and llm-d `concurrency-detector`",
    build: |value| ConcurrencyLimits::new(value).map(|limits| Plugin::Filter(Arc::new(ConcurrencyDetector(limits)))),
};

#[derive(Debug)]
struct ConcurrencyDetector(ConcurrencyLimits);

impl Filter for ConcurrencyDetector {
    fn keep(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], _: &mut PickRng, keep: &mut [bool]) {
        keep_or_all(keep, |i| candidates.get(i).is_some_and(|c| self.0.has_room(&c.state.endpoint)));
    }
}
