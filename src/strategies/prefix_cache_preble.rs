//! `prefix-cache-preble`: exploits a prefix that covers most of the prompt, else explores the endpoint with the least
//! recent work.
//!
//! ```text
//! requests differ by more than `imbalance`: only the endpoints with the fewest requests count, unless `gate: false`
//! longest cached prefix > matchThreshold x prompt:  of its holders, the one with the fewest requests in the window
//! else:  the least  work in the window + prefill(uncached tokens of this prompt)
//! work of a request = prefill(uncached tokens, prompt) + response tokens x 0.15 s, on the endpoint that served it
//! ```
//!
//! `prefill` is a regression over times that were measured on one kind of GPU ([`cost`]). Cached tokens are read from
//! the pool's prefix index.
//! Preble keeps a radix tree of its own and spreads a prompt's work over all holders. Tokens that admission would
//! evict are not counted.
//!
//! When not: servers unlike the two GPUs and the 7B model that were measured. Then the ratio of prefill time to
//! decode time is wrong.
//!
//! With `compat: true` the decision is that of AIBrix 0.4:
//! - Its radix tree ([`tree`]) records which endpoint computed what.
//! - Each node's prefill counts for all endpoints that computed it, by its miss rate.
//! - The gate is off unless `gate: true`.
//! - A response counts `decodingLength` tokens even if the request allows fewer.
//! - The regressions are exactly AIBrix's.
//!
//! With `evictionLoopInterval` (milliseconds), requests leave the window only at the end of an interval, as in
//! AIBrix, whose loop runs every 1000 ms. By default they leave it at once.
//!
//! Source: AIBrix `prefix-cache-preble`; Srivatsa et al., "Preble: Efficient Distributed Prompt Scheduling for LLM
//! Serving" (2024).

use ahash::AHashMap;
use attache_pool::Endpoint;
use attache_scheduling::digest::Digest;
use attache_scheduling::plugin::{Better, Inert, params, section};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::window::{SlidingSum, Window};
use attache_scheduling::{Candidate, PickContext, Ranking, Reads, Signal, Strategy};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use attache_types::parameters;
use attache_types::rng::PickRng;
use cost::Gpu;
use exact::Exact;
use parking_lot::Mutex;
use rand::RngExt;
use serde_json::Value;
use smallvec::SmallVec;
use std::time::Duration;

pub mod cost;
mod exact;
mod tree;

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "prefix-cache-preble",
    summary: "Follows a prefix that covers most of the prompt, else the endpoint with the least work in the last \
              minutes.",
    source: "AIBrix `prefix-cache-preble`, Preble (2024)",
    parameters: section::<Params>,
    build: |value, _| params::<Params>(value).map(|p| Box::new(p.build()) as Box<dyn Strategy>),
};

/// Decode time of one response token: 0.15 s.
const SECONDS_PER_TOKEN: f64 = 0.15;
const NANOS_PER_MILLISECOND: u64 = 1_000_000;

parameters! {
    struct Params {
        /// GPU whose measured prefill times are used.
        "targetGPU" => target_gpu: Gpu { default: Gpu::V100; },
        /// Expected length of a response. Without `compat`, at most what the request allows.
        "decodingLength" => decoding_length: u32 { default: 45; unit: "tokens"; },
        /// Length of the window whose requests count as recent work.
        "slidingWindowPeriod" => sliding_window_period: u32 { default: 3; range: 1..; unit: "minutes"; },
        /// Time between two updates of the window. 0: it is updated with every decision. AIBrix has 1000.
        "evictionLoopInterval" => eviction_loop_interval: u32 { default: 0; unit: "milliseconds"; },
        /// Cached share of the prompt above which only the endpoints that hold it are considered.
        "matchThreshold" => match_threshold: f64 { default: 0.5; range: 0.0..=1.0; unit: "share"; },
        /// With `gate`: difference between the most and the fewest requests above which only the endpoints with the
        /// fewest are considered.
        "imbalance" => imbalance: u32 { default: 8; unit: "requests"; },
        /// Whether `imbalance` is applied.
        "gate" => gate: Option<bool> { absent: "`true`, and `false` with `compat`"; },
        /// Whether to decide as AIBrix 0.4, with its own radix tree of prompts.
        "compat" => compat: bool { default: false; },
    }
}

fn has_no_gate(parameters: &Value) -> bool {
    let is_on = |key: &str| parameters.get(key).and_then(Value::as_bool);
    !is_on("gate").unwrap_or(is_on("compat") != Some(true))
}

/// Parameters that change nothing.
pub(crate) const INERT: &[Inert] = &[Inert {
    plugins: &[PLUGIN.name],
    keys: &["imbalance"],
    when: has_no_gate,
    why: "it needs `gate: true`, the default without `compat`",
}];

impl Params {
    fn build(self) -> Preble {
        let length = Duration::from_secs(60).saturating_mul(self.sliding_window_period);
        let exact = self.compat.then(|| Exact::new(&self, length));
        Preble { params: self, window: Window::new(length), work: Mutex::default(), exact }
    }
}

/// RecentWork and requests that one endpoint was sent within the window.
#[derive(Debug, Default)]
struct RecentWork {
    nanos: SlidingSum,
    requests: SlidingSum,
}

#[derive(Debug)]
struct Preble {
    params: Params,
    window: Window,
    work: Mutex<AHashMap<EndpointId, RecentWork>>,
    /// The decision of AIBrix 0.4; `Some` with `compat`.
    exact: Option<Exact>,
}

/// The fewest requests of a candidate, and whether the most exceed them by more than `gate`.
fn spread(candidates: &[Candidate<'_>], requests: impl Fn(&Candidate<'_>) -> u32, gate: Option<u32>) -> (u32, bool) {
    let fewest = candidates.iter().map(&requests).min().unwrap_or(0);
    let most = candidates.iter().map(&requests).max().unwrap_or(0);
    (fewest, gate.is_some_and(|gate| most - fewest > gate))
}

/// Sort key of a candidate; the lowest comes first.
#[derive(Clone, Copy, Debug, PartialEq)]
struct SortKey {
    /// Excluded by the gate; sorts last.
    outside: bool,
    key: f64,
    drawn: u32,
    at: usize,
}

/// The time to which the window has advanced; it advances every `interval` milliseconds.
fn moment(interval: u32, now: Timestamp) -> Timestamp {
    let interval = u64::from(interval) * NANOS_PER_MILLISECOND;
    Timestamp(now.0 - now.0.checked_rem(interval).unwrap_or(0))
}

impl Preble {
    /// Seconds to prefill the prompt on an endpoint that holds `held` tokens of it.
    fn prefill(&self, cx: &PickContext<'_>, held: u32) -> f64 {
        let prompt = cx.request.prompt_tokens;
        self.params.target_gpu.prefill(prompt.saturating_sub(held), prompt, false)
    }

    /// Seconds of work and number of requests within the window, for each candidate.
    fn loads(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>]) -> SmallVec<[(f64, u64); 16]> {
        let slot = self.window.slot(moment(self.params.eviction_loop_interval, cx.now));
        let mut work = self.work.lock();
        let mut load = |c: &Candidate<'_>| {
            let Some(work) = work.get_mut(&c.state.endpoint.id) else { return (0.0, 0) };
            work.nanos.expire(slot);
            work.requests.expire(slot);
            (work.nanos.total() as f64 / 1e9, work.requests.total())
        };
        candidates.iter().map(&mut load).collect()
    }

    /// Cost of a candidate for exploration, in seconds.
    fn explored(&self, cx: &PickContext<'_>, candidate: &Candidate<'_>, work: f64) -> f64 {
        work + self.prefill(cx, candidate.cached.any)
    }

    /// Largest allowed difference in requests; `None` if the gate is off.
    fn gate(&self) -> Option<u32> {
        let on = self.params.gate.unwrap_or(!self.params.compat);
        on.then_some(self.params.imbalance)
    }
}

impl Strategy for Preble {
    fn rank(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        if let Some(exact) = &self.exact {
            return exact.rank(cx, candidates, self.gate(), rng, ranking);
        }
        if cx.prefix.is_none() {
            ranking.lacks(Signal::Prefix);
        }
        let (fewest, gated) = spread(candidates, |c| c.requests, self.gate());
        let outside = |c: &Candidate<'_>| gated && c.requests != fewest;
        let longest = candidates.iter().filter(|c| !outside(c)).map(|c| c.cached.any).max().unwrap_or(0);
        let threshold = self.params.match_threshold * f64::from(cx.request.prompt_tokens);
        let exploits = longest > 0 && f64::from(longest) > threshold;
        let loads = self.loads(cx, candidates);
        let cost = |i: usize| match (candidates.get(i), loads.get(i)) {
            (Some(c), Some((work, _))) => self.explored(cx, c, *work),
            _ => f64::NAN,
        };
        ranking.note("work, seconds", 1.0, candidates, cost);
        ranking.because(match (exploits, gated) {
            (true, _) => "holds most of the prompt, with the fewest requests of those",
            (false, true) => "least work among those with the fewest requests",
            (false, false) => "least work",
        });
        let mut order: SmallVec<[(bool, SortKey); 16]> = SmallVec::with_capacity(candidates.len());
        for (at, (c, (_, requests))) in candidates.iter().zip(&loads).enumerate() {
            let holds = exploits && c.cached.any == longest;
            let key = if holds { *requests as f64 } else { cost(at) };
            order.push((!holds, SortKey { outside: outside(c), key, drawn: rng.random(), at }));
        }
        order.sort_unstable_by(|(a_last, a), (b_last, b)| {
            let order = a.outside.cmp(&b.outside).then(a_last.cmp(b_last));
            order.then(a.key.total_cmp(&b.key)).then(a.drawn.cmp(&b.drawn))
        });
        for candidate in order.iter().filter_map(|(_, p)| candidates.get(p.at)).take(ranking.wanted()) {
            ranking.push(&candidate.state.endpoint);
        }
    }

    fn scores(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f64]) -> Option<Better> {
        if let Some(exact) = &self.exact {
            exact.costs(cx, candidates, out);
            return Some(Better::Lower);
        }
        let loads = self.loads(cx, candidates);
        for ((score, candidate), (work, _)) in out.iter_mut().zip(candidates).zip(loads) {
            *score = self.explored(cx, candidate, work);
        }
        Some(Better::Lower)
    }

    fn picked(&self, cx: &PickContext<'_>, endpoint: &Endpoint) -> Option<Digest> {
        if let Some(exact) = &self.exact {
            exact.picked(cx, endpoint);
            return None;
        }
        let held = cx.prefix.map_or(0, |found| found.tokens(found.depth(endpoint.id).any));
        let allowed = cx.request.max_tokens.unwrap_or(u32::MAX);
        let answer = f64::from(self.params.decoding_length.min(allowed)) * SECONDS_PER_TOKEN;
        let nanos = ((self.prefill(cx, held) + answer) * 1e9) as u64;
        let slot = self.window.slot(moment(self.params.eviction_loop_interval, cx.now));
        let mut all = self.work.lock();
        let work = all.entry(endpoint.id).or_default();
        for (sum, amount) in [(&mut work.nanos, nanos), (&mut work.requests, 1)] {
            sum.expire(slot);
            sum.add(slot, amount);
        }
        // Drops endpoints that left the pool, once the map outgrows it.
        if all.len() > 2 * cx.snapshot.endpoints.len().max(1) {
            all.retain(|_, work| work.requests.expires().is_some_and(|at| at > slot));
        }
        None
    }

    fn forget(&self, lost: &[EndpointId]) {
        if let Some(exact) = &self.exact {
            exact.forget(lost);
        }
    }

    fn reads(&self) -> Reads {
        if self.exact.is_some() { Reads::PROMPT } else { Reads::PREFIX }
    }
}

#[cfg(test)]
mod tests;
