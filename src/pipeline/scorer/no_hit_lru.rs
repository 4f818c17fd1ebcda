//! `no-hit-lru-scorer`: a prompt that nobody holds goes to the endpoint whose last such prompt lies furthest back.
//!
//! ```text
//! somebody holds a part of the prompt: 0.5 for all
//! else: 1 − (endpoints without a cold prompt yet + those whose last one is older) / (n − 1), at least 0; the former all 1
//! ```
//!
//! New prefixes spread evenly over the caches that way. The original gives endpoints that never had a cold prompt 1, 0.5, … in the order
//! in which they happen to stand; here they are equal. When not: caches differ in size. Source: llm-d `no-hit-lru-scorer`.

use ahash::AHashMap;
use attache_pool::Endpoint;
use attache_scheduling::plugin::{ParamError, Plugin, Scorer, params};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext, Reads, Signal};
use attache_types::ids::EndpointId;
use parking_lot::Mutex;
use serde::Deserialize;
use serde::de::IgnoredAny;
use smallvec::SmallVec;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "no-hit-lru-scorer",
    aliases: &[],
    kind: "scorer",
    summary: "Spreads prompts that nobody holds over the endpoints in turn.",
    source: "llm-d `no-hit-lru-scorer`",
    build: |value| params::<Params>(value)?.build().map(|p| Plugin::Scorer(Arc::new(p))),
};

/// 1,024 endpoints, as llm-d has it.
pub const DEFAULT_LRU_SIZE: usize = 1_024;

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Params {
    lru_size: usize,
    // There is one index; the last two were never read by the original either.
    #[serde(rename = "prefixMatchInfoProducerName")]
    _prefix: Option<IgnoredAny>,
    #[serde(rename = "prefixPluginType")]
    _plugin_type: Option<IgnoredAny>,
    #[serde(rename = "prefixPluginName")]
    _plugin_name: Option<IgnoredAny>,
}

impl Default for Params {
    fn default() -> Self {
        Self { lru_size: DEFAULT_LRU_SIZE, _prefix: None, _plugin_type: None, _plugin_name: None }
    }
}

impl Params {
    fn build(self) -> Result<NoHitLru, ParamError> {
        if self.lru_size == 0 {
            return Err(ParamError::value("lruSize", 0, "at least 1 is needed"));
        }
        Ok(NoHitLru { capacity: self.lru_size, turns: Mutex::default() })
    }
}

#[derive(Debug)]
struct NoHitLru {
    capacity: usize,
    turns: Mutex<Turns>,
}

/// When each endpoint last got a cold prompt: its number among the cold prompts, from 1.
#[derive(Debug, Default)]
struct Turns {
    last: AHashMap<EndpointId, u64>,
    count: u64,
}

impl Turns {
    fn taken(&mut self, endpoint: EndpointId, capacity: usize) {
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
        let turns = self.turns.lock();
        let turn = |c: &Candidate<'_>| turns.last.get(&c.state.endpoint.id).copied().unwrap_or(0);
        let taken: SmallVec<[u64; 64]> = candidates.iter().map(turn).collect();
        drop(turns);
        let mut order: SmallVec<[u64; 64]> = taken.clone();
        order.sort_unstable();
        let last = candidates.len().saturating_sub(1).max(1) as f32;
        for (score, turn) in out.iter_mut().zip(&taken) {
            *score = 1.0 - order.partition_point(|t| t < turn) as f32 / last;
        }
    }

    fn picked(&self, cx: &PickContext<'_>, endpoint: &Endpoint) {
        let held = |id| cx.prefix.is_some_and(|found| found.depth(id).any > 0);
        if !held(endpoint.id) && !cx.snapshot.endpoints.iter().any(|s| held(s.endpoint.id)) {
            self.turns.lock().taken(endpoint.id, self.capacity);
        }
    }

    fn lacks(&self, cx: &PickContext<'_>, _: &[Candidate<'_>]) -> Option<Signal> {
        cx.prefix.is_none().then_some(Signal::Prefix)
    }

    fn reads(&self) -> Reads {
        Reads::PREFIX
    }
}
