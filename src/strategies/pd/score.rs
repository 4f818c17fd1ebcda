//! The score policies of `pd`; lower is better.
//!
//! ```text
//! prefill   prefix_cache    (100 - percent cached) · 0.1 + requests / most requests
//!           least_request   requests
//!           conductor       requests · mean prefill, ms + transfer + compute, ms
//!                           transfer = 0.005 · cached tokens + 1, 0 if none is cached
//!                           compute = 0.001 · uncached tokens^1.5 + 5, 0 if all are cached
//! decode    free            100 - KV cache usage, percent, rounded; at least 0.1
//!           load_balancing  (running weight · requests / most + throughput weight · (1 - tokens/s / most))
//!                           / (free / most free)
//!           least_request   requests
//!           conductor       token, ms · (1 + 1 / max(requests, 1)); times 1.5 if more than 90 % of the cache is in use
//!                           token = 1000 / tokens/s, 20 where that is 0
//!           a server without metrics, where others have them: 1 + requests that Attaché has in flight there
//! ```
//!
//! Used by `pd` alone.

use attache_scheduling::{Candidate, PickContext};
use attache_types::keywords;
use smallvec::SmallVec;

/// Score per percent of the prompt that is not cached, relative to a request share of 1; as in AIBrix.
const PERCENT_WEIGHT: f64 = 0.1;
/// Milliseconds to transfer one cached token.
const TRANSFER_PER_TOKEN: f64 = 0.005;
/// Milliseconds that any transfer takes.
const TRANSFER_ANY: f64 = 1.0;
/// Milliseconds to compute one uncached token, before the exponent.
const COMPUTE_PER_TOKEN: f64 = 0.001;
/// Attention makes the time of a prompt grow faster than its length.
const COMPUTE_EXPONENT: f64 = 1.5;
/// Milliseconds that any computation takes.
const COMPUTE_ANY: f64 = 5.0;
/// Prompt length, in tokens, whose compute time is the mean prefill of a server without measurements.
const USUAL_PROMPT: f64 = 512.0;
/// Milliseconds per token of a server that generates none.
const USUAL_TOKEN: f64 = 20.0;
/// Share of the KV cache in use above which a server is slow.
const FULL: f64 = 0.9;
/// Factor of the token time of such a server.
const FULL_PENALTY: f64 = 1.5;
/// Lower bound of the free percentage, to divide by.
const LEAST_FREE: f64 = 0.1;

/// How prefill servers are scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PrefillPolicy {
    /// AIBrix's own default.
    PrefixCache,
    LeastRequest,
    Conductor,
}

/// How decode servers are scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DecodePolicy {
    /// AIBrix's own default.
    LoadBalancing,
    LeastRequest,
    Conductor,
}

keywords! {
    PrefillPolicy: "prefix_cache" => PrefixCache, "least_request" => LeastRequest, "conductor" => Conductor;
    DecodePolicy: "load_balancing" => LoadBalancing, "least_request" => LeastRequest, "conductor" => Conductor;
}

/// BalanceWeights of the decode policy `load_balancing`.
#[derive(Clone, Copy, Debug)]
pub(super) struct BalanceWeights {
    pub(super) running: f64,
    pub(super) throughput: f64,
}

/// DecodeLoads of the decode servers, and the greatest value of each figure.
#[derive(Clone, Debug)]
pub(super) struct DecodeLoads {
    loads: SmallVec<[DecodeLoad; 16]>,
    most: DecodeLoad,
    /// Whether any of them has metrics.
    any_known: bool,
}

#[derive(Clone, Copy, Debug)]
struct DecodeLoad {
    requests: f64,
    /// Generated tokens per second.
    throughput: f64,
    /// Free share of the KV cache, in percent.
    free: f64,
}

/// Tokens generated per second, where the server reports them.
pub(super) fn reported_throughput(candidate: &Candidate<'_>) -> Option<f64> {
    candidate.metrics().and_then(|m| m.rates.generation_tokens)
}

/// Requests above which a prefill server is skipped: the mean plus `factor` sample standard deviations.
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
    /// The score of one server; `most` is the greatest number of requests of any server on this side.
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

impl DecodeLoads {
    pub(super) fn of(side: &[Candidate<'_>]) -> Self {
        let load = |c: &Candidate<'_>| {
            let used = if c.kv_usage.is_nan() { 0.0 } else { f64::from(c.kv_usage) };
            DecodeLoad {
                requests: f64::from(c.requests),
                throughput: reported_throughput(c).unwrap_or(0.0),
                free: (100.0 - used * 100.0).round().max(LEAST_FREE),
            }
        };
        let loads: SmallVec<[DecodeLoad; 16]> = side.iter().map(load).collect();
        let least = DecodeLoad { requests: 1.0, throughput: 1.0, free: 1.0 };
        let most = loads.iter().fold(least, |most, load| DecodeLoad {
            requests: most.requests.max(load.requests),
            throughput: most.throughput.max(load.throughput),
            free: most.free.max(load.free),
        });
        Self { loads, most, any_known: side.iter().any(|c| c.metrics().is_some()) }
    }

    /// Requests of the server at `position`; NaN if there is none.
    pub(super) fn requests(&self, position: usize) -> f64 {
        self.loads.get(position).map_or(f64::NAN, |load| load.requests)
    }

    /// The load of one server alone, still relative to the greatest values of all.
    pub(super) fn only(&self, position: usize) -> Self {
        let loads = self.loads.get(position).copied().into_iter().collect();
        Self { loads, most: self.most, any_known: self.any_known }
    }
}

impl DecodePolicy {
    /// The scores of `side`, in its order; `loads` must be the loads of `side`.
    pub(super) fn scores(
        self,
        side: &[Candidate<'_>],
        loads: &DecodeLoads,
        weights: BalanceWeights,
    ) -> SmallVec<[f64; 16]> {
        let score = |(candidate, load): (&Candidate<'_>, &DecodeLoad)| {
            if loads.any_known && candidate.metrics().is_none() {
                return 1.0 + f64::from(candidate.state.endpoint.ledger.in_flight());
            }
            self.score(load, &loads.most, weights)
        };
        side.iter().zip(&loads.loads).map(score).collect()
    }

    fn score(self, load: &DecodeLoad, most: &DecodeLoad, weights: BalanceWeights) -> f64 {
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
