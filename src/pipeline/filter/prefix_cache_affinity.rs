//! `prefix-cache-affinity-filter`: endpoints that hold nearly the whole prompt, until they are too busy ("sticky
//! until saturated").
//!
//! ```text
//! sticky = cached / prompt >= affinityThreshold
//! with probability explorationProbability, and if none is sticky: all stay
//! min TTFT of the sticky − min TTFT of the others > maxTTFTPenaltyMs > 0: all stay
//! min prompt tokens in flight of the sticky − min of the others > maxTokensInFlightPenalty > 0: all stay
//! else: the sticky
//! TTFT, ms = prefillThroughput: prompt tokens in flight / peakPrefillThroughput * 1000
//!            latencyPredictor:  predicted; if nothing is known of either side, all stay
//! ```
//!
//! The defaults are llm-d's. GIE v1.5 uses predictions, explores with probability 0.01 and allows a penalty of 5,000
//! ms; set these to get its behaviour.
//! When not: a scorer after this filter also weighs the prefix; it would favour the sticky endpoints again after the
//! filter gave them up. Source: llm-d v0.10, GIE v1.5.

use super::{happens, keep_or_all};
use attache_scheduling::facts::prediction::predict;
use attache_scheduling::plugin::{Filter, Inert, ParamError, Plugin, params};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext, Reads, Signal};
use attache_types::rng::PickRng;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "prefix-cache-affinity-filter",
    aliases: &[],
    kind: "filter",
    summary: "Keeps endpoints that hold most of the prompt, unless the wait for them is too long.",
    source: "llm-d and GIE `prefix-cache-affinity-filter`",
    build: |value| params::<Params>(value)?.build().map(|p| Plugin::Filter(Arc::new(p))),
};

/// 0.8, the default of both.
pub const DEFAULT_AFFINITY_THRESHOLD: f64 = 0.80;
/// 0, llm-d's default; GIE's is 0.01.
pub const DEFAULT_EXPLORATION_PROBABILITY: f64 = 0.0;
/// 18 s, llm-d's default; GIE's is 5 s.
pub const DEFAULT_MAX_TTFT_PENALTY_MS: f64 = 18_000.0;
/// 0: only times count, as in llm-d; some versions of llm-d have this limit.
pub const DEFAULT_MAX_TOKENS_IN_FLIGHT_PENALTY: f64 = 0.0;
/// 15,928 tokens per second: llm-d's measurement of a 32B model on two H100.
pub const DEFAULT_PEAK_PREFILL_THROUGHPUT: f64 = 15_928.0;

fn predicts(parameters: &Value) -> bool {
    parameters.get("ttftSource").is_some_and(|source| source == "latencyPredictor")
}

fn has_no_time_limit(parameters: &Value) -> bool {
    parameters.get("maxTTFTPenaltyMs").and_then(Value::as_f64) == Some(0.0)
}

/// Parameters that change nothing.
pub(crate) const INERT: &[Inert] = &[
    Inert {
        plugins: &[PLUGIN.name],
        keys: &["ttftSource", "peakPrefillThroughput"],
        when: has_no_time_limit,
        why: "with `maxTTFTPenaltyMs: 0` no times are compared",
    },
    Inert {
        plugins: &[PLUGIN.name],
        keys: &["peakPrefillThroughput"],
        when: |all| predicts(all) && !has_no_time_limit(all),
        why: "it needs `ttftSource: prefillThroughput`; here times are predicted",
    },
];

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
enum TtftSource {
    PrefillThroughput,
    LatencyPredictor,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Params {
    affinity_threshold: f64,
    exploration_probability: f64,
    #[serde(rename = "maxTTFTPenaltyMs")]
    max_ttft_penalty_ms: f64,
    max_tokens_in_flight_penalty: f64,
    ttft_source: TtftSource,
    peak_prefill_throughput: f64,
    // Accepted without effect: there is one index, one ledger and one predictor.
    #[serde(rename = "prefixMatchInfoProducerName")]
    _prefix: Option<IgnoredAny>,
    #[serde(rename = "inFlightLoadProducerName")]
    _load: Option<IgnoredAny>,
    #[serde(rename = "latencyPredictionInfoProducerName")]
    _latency: Option<IgnoredAny>,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            affinity_threshold: DEFAULT_AFFINITY_THRESHOLD,
            exploration_probability: DEFAULT_EXPLORATION_PROBABILITY,
            max_ttft_penalty_ms: DEFAULT_MAX_TTFT_PENALTY_MS,
            max_tokens_in_flight_penalty: DEFAULT_MAX_TOKENS_IN_FLIGHT_PENALTY,
            ttft_source: TtftSource::PrefillThroughput,
            peak_prefill_throughput: DEFAULT_PEAK_PREFILL_THROUGHPUT,
            _prefix: None,
            _load: None,
            _latency: None,
        }
    }
}

impl Params {
    fn build(self) -> Result<PrefixCacheAffinity, ParamError> {
        let part = |name, value: f64| match value {
            0.0..=1.0 => Ok(value),
            _ => Err(ParamError::value(name, value, "0 to 1 is allowed")),
        };
        for (name, penalty) in [
            ("maxTTFTPenaltyMs", self.max_ttft_penalty_ms),
            ("maxTokensInFlightPenalty", self.max_tokens_in_flight_penalty),
        ] {
            if !(0.0..f64::INFINITY).contains(&penalty) {
                return Err(ParamError::value(name, penalty, "0 or more is allowed"));
            }
        }
        let throughput = self.peak_prefill_throughput;
        if !(throughput.is_finite() && throughput > 0.0) {
            return Err(ParamError::value("peakPrefillThroughput", throughput, "more than 0 is allowed"));
        }
        Ok(PrefixCacheAffinity {
            threshold: part("affinityThreshold", self.affinity_threshold)?,
            exploration: part("explorationProbability", self.exploration_probability)?,
            penalty_ms: self.max_ttft_penalty_ms,
            penalty_tokens: self.max_tokens_in_flight_penalty,
            source: self.ttft_source,
            tokens_per_ms: throughput / 1_000.0,
        })
    }
}

#[derive(Debug)]
struct PrefixCacheAffinity {
    threshold: f64,
    exploration: f64,
    penalty_ms: f64,
    penalty_tokens: f64,
    source: TtftSource,
    tokens_per_ms: f64,
}

impl PrefixCacheAffinity {
    fn is_sticky(&self, cx: &PickContext<'_>, candidate: &Candidate<'_>) -> bool {
        let total = f64::from(cx.request.prompt_tokens.max(1));
        f64::from(candidate.cached.any) / total >= self.threshold
    }

    fn ttft_ms(&self, cx: &PickContext<'_>, candidate: &Candidate<'_>) -> Option<f64> {
        match self.source {
            TtftSource::PrefillThroughput => Some(in_flight_tokens(candidate) / self.tokens_per_ms),
            TtftSource::LatencyPredictor => predict(cx, candidate).map(|p| p.ttft_ms),
        }
    }

    /// Whether the best sticky endpoint is within both penalties.
    fn is_worth_it(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>]) -> bool {
        let tokens = |c: &Candidate<'_>| Some(in_flight_tokens(c));
        self.is_within(self.penalty_ms, cx, candidates, |c| self.ttft_ms(cx, c))
            && self.is_within(self.penalty_tokens, cx, candidates, tokens)
    }

    /// Whether the lowest `load` of a sticky endpoint is at most `most` above the lowest of the others; always true
    /// if `most` is 0.
    fn is_within(
        &self,
        most: f64,
        cx: &PickContext<'_>,
        candidates: &[Candidate<'_>],
        load: impl Fn(&Candidate<'_>) -> Option<f64>,
    ) -> bool {
        if most == 0.0 {
            return true;
        }
        let best = |sticky: bool| {
            let side = candidates.iter().filter(|c| self.is_sticky(cx, c) == sticky);
            side.filter_map(&load).min_by(f64::total_cmp)
        };
        match (best(true), best(false)) {
            (Some(sticky), Some(other)) => sticky - other <= most,
            // One side is empty, so all stay anyway, or its load is unknown.
            _ => false,
        }
    }
}

/// Uncached prompt tokens that this replica has in flight there, until the first byte of each response.
fn in_flight_tokens(candidate: &Candidate<'_>) -> f64 {
    candidate.state.live().ledger.prefill_tokens() as f64
}

impl Filter for PrefixCacheAffinity {
    fn keep(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, keep: &mut [bool]) {
        if candidates.len() < 2 || happens(self.exploration, rng) || !self.is_worth_it(cx, candidates) {
            return;
        }
        keep_or_all(keep, |i| candidates.get(i).is_some_and(|c| self.is_sticky(cx, c)));
    }

    fn lacks(&self, cx: &PickContext<'_>, _: &[Candidate<'_>]) -> Option<Signal> {
        cx.prefix.is_none().then_some(Signal::Prefix)
    }

    fn reads(&self) -> Reads {
        Reads::PREFIX
    }
}
