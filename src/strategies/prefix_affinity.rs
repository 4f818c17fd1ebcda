//! `prefix-affinity`: the endpoint that was sent the longest prefix of the prompt, unless it has more requests than
//! the others.
//!
//! ```text
//! chain      xxh64 of the first `maxDepth` blocks of `windowBytes` bytes. Each block is hashed together with the hash
//!            before it, the first one with the hash of the model's name.
//! hot        the endpoint that was sent the longest prefix; its ratio is that length over the chain's length
//! eligible   requests <= fewest + balanceAbsThreshold  and  requests <= fewest · balanceRelThreshold + 1
//! pick       hot, when it is eligible and ratio >= minPrefixMatch
//!            else the eligible endpoint with the lowest sum of 0.5^(age / half life) over its recorded blocks
//! ```
//!
//! A prefix is recorded when the request is sent and expires after `ttlSeconds`. If Envoy sends the request to
//! another endpoint, the record moves there; the picked endpoint keeps what other requests recorded.
//! When an endpoint is removed or its model server restarts, its entries are dropped at once.
//! A hot endpoint that is passed over for its load counts in `attache_diverted_total` (by pool) and in
//! `attache_model_diverted_total` (by model).
//! The admin API and `modelPolicies` change the thresholds per model. With `round_robin`, a model uses the fallback
//! order and records nothing.
//!
//! ```text
//! fallback   fewest requests, then the one that was used the longest ago, then the least KV cache in use
//! ```
//!
//! The fallback order also applies to requests without a prompt, and between endpoints of equal weight. In this order
//! an idle endpoint always comes before a busy one.
//!
//! If several endpoints were sent the same prefix, the hot one is the one with the fewest requests. Only endpoints
//! that may serve the request are considered.
//!
//! `compat: true` behaves as LocalAI: the last endpoint that was sent a prefix owns it. If that endpoint may not
//! serve the request, no endpoint is hot.
//! Of the eligible endpoints, the one with the lowest weight comes first even if another one is idle, and ties go to
//! the lowest id.
//!
//! Memory is bounded by `maxEntries`, oldest first; LocalAI bounds it by time alone.
//!
//! When not: Attaché knows the servers' tokens or reads their KV events. Then `prefix-cache` knows what is cached,
//! not only what was sent.
//! Prompts that are equal in the first 16 KiB count as the same. Tools, media and responses are ignored.
//! Source: LocalAI's prefix-cache routing (pull request 10071).

pub(super) mod chain;
mod memory;

use super::floor::{self, Floor};
use attache_pool::Endpoint;
use attache_protocol::Prompt;
use attache_scheduling::digest::Digest;
use attache_scheduling::plugin::{params, section};
use attache_scheduling::policy::RoutePolicy;
use attache_scheduling::registry::Descriptor;
use attache_scheduling::{Candidate, PickContext, Ranking, Reads, Signal, Strategy};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use attache_types::parameters;
use attache_types::rng::PickRng;
use chain::Chain;
use memory::{HotEndpoint, Memory, Retention};
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use smallvec::SmallVec;
use std::time::Duration;

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "prefix-affinity",
    summary: "Picks the endpoint that was sent the longest prefix of the prompt, unless it has more requests than \
              others; else the one that was sent least.",
    source: "LocalAI prefix-cache routing",
    parameters: section::<Params>,
    build: |value, _| params::<Params>(value).map(|p| Box::new(p.build()) as Box<dyn Strategy>),
};

/// Upper limit of `maxEntries`, about 9 GB of memory: rejects typing errors.
const MOST_ENTRIES: u32 = 100_000_000;

parameters! {
    // The defaults are LocalAI's, except that of `maxEntries`.
    struct Params {
        /// `prefix_cache`: by prefix and load. `round_robin`: fewest requests, then least recently used; no prefix is
        /// recorded.
        "routePolicy" => route_policy: RoutePolicy { default: RoutePolicy::default(); },
        /// Share of a prompt's blocks that must match before a prefix decides.
        "minPrefixMatch" => min_prefix_match: f64 { default: 0.3; range: 0.0..=1.0; unit: "share"; },
        /// Requests by which an endpoint may exceed the fewest. `balanceRelThreshold` must hold too.
        "balanceAbsThreshold" => balance_abs_threshold: u32 { default: 2; unit: "requests"; },
        /// Multiple of the fewest requests, plus 1, up to which an endpoint is eligible.
        "balanceRelThreshold" => balance_rel_threshold: f64 { default: 1.5; range: 1.0..; unit: "factor"; },
        /// Time from the last request of a prefix until it expires. 300 seconds are about how long a loaded server
        /// keeps it cached.
        "ttlSeconds" => ttl_seconds: u64 { default: 300; range: 1..; unit: "seconds"; },
        /// Time in which a recorded block loses half of its weight. 0: weights do not decay.
        "halfLifeSeconds" => half_life_seconds: u64 { default: 120; unit: "seconds"; },
        /// Size of a block of the prompt, in bytes. 256 bytes are about 64 tokens.
        "windowBytes" => window_bytes: usize { default: 256; range: 1..=65_536; unit: "bytes"; },
        /// Number of blocks, from the start of the prompt, that are compared.
        "maxDepth" => max_depth: usize { default: 64; range: 1..=1_024; unit: "blocks"; },
        /// Number of recorded blocks, about 90 bytes each. A million blocks are about 16,000 prompts of full length.
        "maxEntries" => max_entries: u32 { default: 1_000_000; range: 1..=MOST_ENTRIES; unit: "blocks"; },
        /// Whether to decide as LocalAI: a block has only the endpoint that was sent it last, and idle endpoints are
        /// not preferred.
        "compat" => compat: bool { default: false; },
    }
}

impl Params {
    fn build(self) -> PrefixAffinity {
        let memory = RwLock::new(Memory::new(Retention {
            ttl: Duration::from_secs(self.ttl_seconds),
            half_life: Duration::from_secs(self.half_life_seconds),
            max_entries: self.max_entries,
            last_writer: self.compat,
        }));
        PrefixAffinity { params: self, memory }
    }
}

#[derive(Debug)]
struct PrefixAffinity {
    params: Params,
    memory: RwLock<Memory>,
}

/// The thresholds for one request.
#[derive(Clone, Copy, Debug)]
struct Thresholds {
    on: bool,
    min_match: f64,
    abs: u32,
    rel: f64,
}

impl Thresholds {
    /// The most requests that an endpoint may have when the least loaded one has `fewest`.
    fn bound(self, fewest: u32) -> f64 {
        let fewest = f64::from(fewest);
        (fewest + f64::from(self.abs)).min(fewest * self.rel + 1.0)
    }
}

impl PrefixAffinity {
    /// The strategy's parameters, overridden by the model's policy.
    fn rules(&self, cx: &PickContext<'_>) -> Thresholds {
        let (p, model) = (&self.params, cx.policy);
        Thresholds {
            on: model.route_policy.unwrap_or(p.route_policy) == RoutePolicy::PrefixCache,
            min_match: model.min_prefix_match.unwrap_or(p.min_prefix_match),
            abs: model.balance_abs_threshold.unwrap_or(p.balance_abs_threshold),
            rel: model.balance_rel_threshold.unwrap_or(p.balance_rel_threshold),
        }
    }

    fn chain(&self, cx: &PickContext<'_>) -> Chain {
        let Params { window_bytes, max_depth, .. } = self.params;
        let name = || format!("prefix-affinity {window_bytes} {max_depth}");
        let of = |prompt: &Prompt<'_>| chain::of_prompt(cx.request.model, prompt, window_bytes, max_depth);
        cx.request.digest(name, of).unwrap_or_default()
    }

    /// Read access to the memory, after expired entries are dropped.
    fn memory(&self, now: Timestamp) -> RwLockReadGuard<'_, Memory> {
        let memory = self.memory.read();
        if !memory.is_stale(now) {
            return memory;
        }
        drop(memory);
        let mut memory = self.memory.write();
        memory.expire(now);
        RwLockWriteGuard::downgrade(memory)
    }
}

/// Sort key of a candidate without a hot prefix: ineligible, busy, weight of what it was sent, fallback order,
/// position.
type ColdKey = ((bool, bool), f64, floor::FloorKey, usize);

/// The endpoint that was sent the longest prefix, if that is at least `min_match` of the chain.
fn hot(
    memory: &Memory,
    chain: &[u64],
    now: Timestamp,
    candidates: &[Candidate<'_>],
    min_match: f64,
) -> Option<HotEndpoint> {
    let mut by_id: SmallVec<[(EndpointId, usize, u32); 32]> =
        candidates.iter().enumerate().map(|(i, c)| (c.state.endpoint.id, i, c.requests)).collect();
    by_id.sort_unstable();
    let candidate = |id| {
        let at = by_id.binary_search_by_key(&id, |(id, ..)| *id).ok()?;
        by_id.get(at).map(|(_, position, requests)| (*position, *requests))
    };
    let hot = memory.hot(chain, now, candidate)?;
    (hot.depth as f64 / chain.len() as f64 >= min_match).then_some(hot)
}

impl Strategy for PrefixAffinity {
    fn rank(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        let rules = self.rules(cx);
        if !rules.on {
            return Floor.rank(cx, candidates, rng, ranking);
        }
        let chain = self.chain(cx);
        if chain.is_empty() {
            ranking.lacks(Signal::Prompt);
            return Floor.rank(cx, candidates, rng, ranking);
        }
        let bound = rules.bound(candidates.iter().map(|c| c.requests).min().unwrap_or(0));
        let eligible = |c: &Candidate<'_>| f64::from(c.requests) <= bound;
        let memory = self.memory(cx.now);
        let hot = hot(&memory, &chain, cx.now, candidates, rules.min_match);
        let of_hot = |i| hot.filter(|h| h.candidate == i).map_or(0.0, |h| h.depth as f64 / chain.len() as f64);
        ranking.note("match", 0.0, candidates, of_hot);
        ranking.note("free slots", 0.0, candidates, |i| {
            candidates.get(i).map_or(f64::NAN, |c| bound - f64::from(c.requests))
        });
        ranking.because("was sent the least recently");
        match hot.and_then(|h| candidates.get(h.candidate)) {
            Some(hot) if eligible(hot) => {
                ranking.because("was sent the longest prefix");
                ranking.push(&hot.state.endpoint);
            }
            Some(_) => ranking.divert(),
            None => {}
        }
        if ranking.is_full() && !ranking.is_explained() {
            return;
        }
        let model = chain::of_model(cx.request.model);
        let weight = |c: &Candidate<'_>| memory.weight(model, c.state.endpoint.id, cx.now);
        ranking.note("sent recently", 0.0, candidates, |i| candidates.get(i).map_or(f64::NAN, weight));
        // An idle endpoint comes before every busy one.
        let idle_first = |c: &Candidate<'_>| !self.params.compat && c.requests > 0;
        let mut cold: SmallVec<[ColdKey; 32]> = SmallVec::new();
        cold.extend(candidates.iter().enumerate().map(|(i, c)| {
            let order = if self.params.compat { floor::FloorKey::of_id(c) } else { floor::FloorKey::of(c) };
            ((!eligible(c), idle_first(c)), weight(c), order, i)
        }));
        drop(memory);
        cold.sort_unstable_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)).then(a.2.cmp(&b.2)));
        for candidate in cold.iter().filter_map(|(.., i)| candidates.get(*i)).take(ranking.wanted() + 1) {
            ranking.push(&candidate.state.endpoint);
        }
    }

    fn picked(&self, cx: &PickContext<'_>, endpoint: &Endpoint) -> Option<Digest> {
        let chain = self.rules(cx).on.then(|| self.chain(cx)).filter(|chain| !chain.is_empty())?;
        self.memory.write().observe(chain::of_model(cx.request.model), &chain, endpoint.id, cx.now);
        Some(chain)
    }

    fn observe(&self, model: &str, trail: &Digest, endpoint: EndpointId, now: Timestamp) {
        self.memory.write().observe(chain::of_model(model), trail, endpoint, now);
    }

    fn moved(&self, model: &str, trail: &Digest, from: EndpointId, to: EndpointId, now: Timestamp) {
        let mut memory = self.memory.write();
        memory.retract(trail, from, now);
        memory.observe(chain::of_model(model), trail, to, now);
    }

    fn forget(&self, lost: &[EndpointId]) {
        self.memory.write().forget(lost);
    }

    fn reads(&self) -> Reads {
        Reads::PROMPT
    }
}

#[cfg(test)]
mod tests;
