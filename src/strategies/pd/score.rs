//! The score policies of `pd`, less is better.
//!
//! ```text
//! prefill   prefix_cache    (100 - percent held) · 0.1 + requests / most requests
//!           least_request   requests
//!           conductor       requests · mean prefill, ms + transfer + compute, ms
//!                           transfer = 0.005 · held + 1, of any held; compute = 0.001 · lacking^1.5 + 5, of any lacking
//! decode    free            100 - KV cache in use, percent, rounded; at least 0.1
//!           load_balancing  (running weight · requests / most + throughput weight · (1 - tokens/s / most)) / (free / most free)
//!           least_request   requests
//!           conductor       token, ms · (1 + 1 / max(requests, 1)), half as much again with more than 90 % of the cache in use
//!                           token = 1000 / tokens/s, 20 where that is 0
//!           a server without a page, where others have one: 1 + what was sent to it
//! ```
//!
//! Called by `pd` alone.

use attache_scheduling::{Candidate, PickContext};
use serde::Deserialize;
use smallvec::SmallVec;

/// What a share of the prompt weighs beside load: a tenth of a request's share for a percent, as in AIBrix.
const PERCENT_WEIGHT: f64 = 0.1;
/// Milliseconds that a held token takes.
const TRANSFER_PER_TOKEN: f64 = 0.005;
/// Milliseconds that any held tokens take.
const TRANSFER_ANY: f64 = 1.0;
/// Milliseconds of a lacking token, before the exponent.
const COMPUTE_PER_TOKEN: f64 = 0.001;
/// Attention makes long prompts more than proportionally slow.
const COMPUTE_EXPONENT: f64 = 1.5;
/// Milliseconds that any lacking tokens take.
const COMPUTE_ANY: f64 = 5.0;
/// Tokens of a prompt whose compute time stands in for a mean that nobody has measured.
const USUAL_PROMPT: f64 = 512.0;
/// Milliseconds a token where none was made.
const USUAL_TOKEN: f64 = 20.0;
/// Part of the KV cache above which a server is slow.
const FULL: f64 = 0.9;
/// How much slower.
const FULL_PENALTY: f64 = 1.5;
/// Percent that are free of a full cache, so that it can be divided by.
const LEAST_FREE: f64 = 0.1;

/// How prefill servers are scored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum PrefillPolicy {
    /// AIBrix's own default.
    #[default]
    PrefixCache,
    LeastRequest,
    Conductor,
}

/// How decode servers are scored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum DecodePolicy {
    /// AIBrix's own default.
    #[default]
    LoadBalancing,
    LeastRequest,
    Conductor,
}

/// Of `load_balancing`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Weights {
    pub(super) running: f64,
    pub(super) throughput: f64,
}

/// What decode servers have to do, and the most of each figure among them.
#[derive(Clone, Debug)]
pub(super) struct Loads {
    loads: SmallVec<[Load; 16]>,
    most: Load,
    /// Some have a page.
    any_known: bool,
}

#[derive(Clone, Copy, Debug)]
struct Load {
    requests: f64,
    /// Tokens a second.
    throughput: f64,
    /// Percent of the KV cache.
    free: f64,
}

/// Tokens generated a second, where the server says so.
pub(super) fn reported_throughput(candidate: &Candidate<'_>) -> Option<f64> {
    candidate.metrics().and_then(|m| m.rates.generation_tokens)
}

/// Prefill servers with more requests than this are left out: the mean and so many (sample) standard deviations.
pub(super) fn bound(side: &[Candidate<'_>], factor: f64) -> f64 {
    let n = side.len() as f64;
    let mean = side.iter().map(|c| f64::from(c.requests)).sum::<f64>() / n;
    let squares: f64 = side.iter().map(|c| (f64::from(c.requests) - mean).powi(2)).sum();
    let deviation = if side.len() > 1 { (squares / (n - 1.0)).sqrt() } else { 0.0 };
    mean + factor * deviation
}

fn compute(tokens: f64) -> f64 {
    if tokens > 0.0 { COMPUTE_PER_TOKEN * tokens.powf(COMPUTE_EXPONENT) + COMPUTE_ANY } else { 0.0 }
}

impl PrefillPolicy {
    /// The score of one server among those of which the busiest has `most` requests.
    pub(super) fn score(self, cx: &PickContext<'_>, candidate: &Candidate<'_>, most: f64) -> f64 {
        let requests = f64::from(candidate.requests);
        match self {
            PrefillPolicy::PrefixCache => {
                let tokens = u64::from(cx.request.prompt_tokens.max(1));
                let percent = (u64::from(candidate.cached.any) * 100 / tokens).min(100);
                (100 - percent) as f64 * PERCENT_WEIGHT + requests / most
            }
            PrefillPolicy::LeastRequest => requests,
            PrefillPolicy::Conductor => {
                let measured = candidate.metrics().and_then(|m| m.rates.means.prefill_seconds);
                let mean = measured.map_or_else(|| compute(USUAL_PROMPT), |seconds| seconds * 1e3);
                let held = f64::from(candidate.cached.any.min(cx.request.prompt_tokens));
                let lacking = f64::from(cx.request.prompt_tokens) - held;
                let transfer = if held > 0.0 { TRANSFER_PER_TOKEN * held + TRANSFER_ANY } else { 0.0 };
                requests * mean + transfer + compute(lacking)
            }
        }
    }
}

impl Loads {
    pub(super) fn of(side: &[Candidate<'_>]) -> Self {
        let load = |c: &Candidate<'_>| {
            let used = if c.kv_usage.is_nan() { 0.0 } else { f64::from(c.kv_usage) };
            Load {
                requests: f64::from(c.requests),
                throughput: reported_throughput(c).unwrap_or(0.0),
                free: (100.0 - used * 100.0).round().max(LEAST_FREE),
            }
        };
        let loads: SmallVec<[Load; 16]> = side.iter().map(load).collect();
        let least = Load { requests: 1.0, throughput: 1.0, free: 1.0 };
        let most = loads.iter().fold(least, |most, load| Load {
            requests: most.requests.max(load.requests),
            throughput: most.throughput.max(load.throughput),
            free: most.free.max(load.free),
        });
        Self { loads, most, any_known: side.iter().any(|c| c.metrics().is_some()) }
    }

    /// The requests of the one at `position`.
    pub(super) fn requests(&self, position: usize) -> f64 {
        self.loads.get(position).map_or(f64::NAN, |load| load.requests)
    }

    /// That of one alone, compared with what all have.
    pub(super) fn only(&self, position: usize) -> Self {
        let loads = self.loads.get(position).copied().into_iter().collect();
        Self { loads, most: self.most, any_known: self.any_known }
    }
}

impl DecodePolicy {
    /// The scores of `side`, whose loads are `loads`.
    pub(super) fn scores(self, side: &[Candidate<'_>], loads: &Loads, weights: Weights) -> SmallVec<[f64; 16]> {
        let score = |(candidate, load): (&Candidate<'_>, &Load)| {
            if loads.any_known && candidate.metrics().is_none() {
                return 1.0 + f64::from(candidate.state.endpoint.ledger.in_flight());
            }
            self.score(load, &loads.most, weights)
        };
        side.iter().zip(&loads.loads).map(score).collect()
    }

    fn score(self, load: &Load, most: &Load, weights: Weights) -> f64 {
        match self {
            DecodePolicy::LeastRequest => load.requests,
            DecodePolicy::LoadBalancing => {
                let running = weights.running * load.requests / most.requests;
                let throughput = weights.throughput * (1.0 - load.throughput / most.throughput);
                (running + throughput) / (load.free / most.free)
            }
            DecodePolicy::Conductor => {
                let token = if load.throughput > 0.0 { 1e3 / load.throughput } else { USUAL_TOKEN };
                let estimated = token * (1.0 + 1.0 / load.requests.max(1.0));
                if 1.0 - load.free / 100.0 > FULL { estimated * FULL_PENALTY } else { estimated }
            }
        }
    }
}
