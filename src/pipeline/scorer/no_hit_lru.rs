//! `no-hit-lru-scorer`: an uncached prompt goes to the endpoint whose last uncached prompt is the oldest.
//!
//! ```text
//! any endpoint holds a part of the prompt: 0.5 for all
//! else: 1 − (endpoints whose last uncached prompt is older) / (n − 1), at least 0; without any uncached prompt yet: 1
//! ```
//!
//! New prefixes spread evenly over the caches in this way. llm-d gives endpoints that never had an uncached prompt 1,
//! 0.5, … in arbitrary order; here they are equal. When not: caches differ in size. Source: llm-d
//! `no-hit-lru-scorer`.

use ahash::AHashMap;
use attache_pool::Endpoint;
use attache_scheduling::plugin::{Inert, Plugin, Scorer, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext, Reads, Signal};
use attache_types::ids::EndpointId;
use attache_types::parameters;
use parking_lot::Mutex;
use serde_json::Value;
use smallvec::SmallVec;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "no-hit-lru-scorer",
    aliases: &[],
    kind: "scorer",
    summary: "Spreads prompts that no endpoint holds over the endpoints in rotation.",
    source: "llm-d `no-hit-lru-scorer`",
    parameters: section::<Params>,
    build: |value| {
        let Params { capacity } = params(value)?;
        Ok(Plugin::Scorer(Arc::new(NoHitLru { capacity, last_uncached: Mutex::default() })))
    },
};

parameters! {
    struct Params {
        /// Endpoints whose last uncached prompt is recorded. 1,024 is llm-d's default.
        "lruSize" => capacity: usize { default: 1_024; range: 1..; unit: "endpoints"; },
        ignored {
            /// Without effect: a pool has one index of prefixes.
            "prefixMatchInfoProducerName": Value, "prefixPluginType": Value, "prefixPluginName": Value,
        }
    }
}

/// Parameters that change nothing.
pub(crate) const INERT: &[Inert] = &[Inert {
    plugins: &[PLUGIN.name],
    keys: &["prefixPluginType", "prefixPluginName"],
    when: |_| true,
    why: "a pool has one index of prefixes",
}];

#[derive(Debug)]
struct NoHitLru {
    capacity: usize,
    last_uncached: Mutex<LastUncached>,
}

/// The last uncached prompt of each endpoint, by its number among the uncached prompts, from 1.
#[derive(Debug, Default)]
struct LastUncached {
    last: AHashMap<EndpointId, u64>,
    count: u64,
}

impl LastUncached {
    fn record(&mut self, endpoint: EndpointId, capacity: usize) {
        self.count += 1;
        if self.last.len() >= capacity && !self.last.contains_key(&endpoint) {
            let oldest = self.last.iter().min_by_key(|(_, turn)| **turn).map(|(id, _)| *id);
            oldest.map(|id| self.last.remove(&id));
        }
        self.last.insert(endpoint, self.count);
    }
}

impl Scorer for NoHitLru {
    fn score(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f32]) {
        if candidates.iter().any(|c| c.cached.any > 0) {
            out.fill(0.5);
            return;
        }
        let last_uncached = self.last_uncached.lock();
        let turn = |c: &Candidate<'_>| last_uncached.last.get(&c.state.endpoint.id).copied().unwrap_or(0);
        let numbers: SmallVec<[u64; 64]> = candidates.iter().map(turn).collect();
        drop(last_uncached);
        let mut order: SmallVec<[u64; 64]> = numbers.clone();
        order.sort_unstable();
        let last = candidates.len().saturating_sub(1).max(1) as f32;
        for (score, turn) in out.iter_mut().zip(&numbers) {
            *score = 1.0 - order.partition_point(|t| t < turn) as f32 / last;
        }
    }

    fn picked(&self, cx: &PickContext<'_>, endpoint: &Endpoint) {
        let held = |id| cx.prefix.is_some_and(|found| found.depth(id).any > 0);
        if !held(endpoint.id) && !cx.snapshot.endpoints.iter().any(|s| held(s.endpoint.id)) {
            self.last_uncached.lock().record(endpoint.id, self.capacity);
        }
    }

    fn lacks(&self, cx: &PickContext<'_>, _: &[Candidate<'_>]) -> Option<Signal> {
        cx.prefix.is_none().then_some(Signal::Prefix)
    }

    fn reads(&self) -> Reads {
        Reads::PREFIX
    }
}
