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
use attache_scheduling::plugin::{Filter, Inert, Plugin, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext, Reads, Signal};
use attache_types::declare::above;
use attache_types::rng::PickRng;
use attache_types::{keywords, parameters};
use serde_json::Value;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "prefix-cache-affinity-filter",
    aliases: &[],
    kind: "filter",
    summary: "Keeps endpoints that hold most of the prompt, unless the wait for them is too long.",
    source: "llm-d and GIE `prefix-cache-affinity-filter`",
    parameters: section::<PrefixCacheAffinity>,
    build: |value| params::<PrefixCacheAffinity>(value).map(|p| Plugin::Filter(Arc::new(p))),
};

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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TtftSource {
    PrefillThroughput,
    LatencyPredictor,
}

keywords! {
    TtftSource: "prefillThroughput" => PrefillThroughput, "latencyPredictor" => LatencyPredictor;
}

parameters! {
    // The defaults are llm-d's.
    struct PrefixCacheAffinity {
        /// Cached share of the prompt from which an endpoint is kept.
        "affinityThreshold" => threshold: f64 { default: 0.8; range: 0.0..=1.0; unit: "share"; },
        /// Probability that all endpoints stay. GIE's default is 0.01.
        "explorationProbability" => exploration: f64 { default: 0.0; range: 0.0..=1.0; unit: "probability"; },
        /// Additional time to first token of the endpoints with the prefix, above which all endpoints stay. 0: no
        /// limit. GIE's default is 5000.
        "maxTTFTPenaltyMs" => penalty_ms: f64 { default: 18_000.0; range: 0.0..; unit: "milliseconds"; },
        /// Additional prompt tokens in flight of the endpoints with the prefix, above which all endpoints stay. 0: no
        /// limit.
        "maxTokensInFlightPenalty" => penalty_tokens: f64 { default: 0.0; range: 0.0..; unit: "tokens"; },
        /// How time to first token is estimated: from prompt tokens in flight and `peakPrefillThroughput`, or by
        /// learned predictions.
        "ttftSource" => source: TtftSource { default: TtftSource::PrefillThroughput; },
        /// With `prefillThroughput`: prefill speed of an endpoint. The default is llm-d's measurement of a 32B model on
        /// two H100.
        "peakPrefillThroughput" => throughput: f64 { default: 15_928.0; range: above(0.0); unit: "tokens per second"; },
        ignored {
            /// Without effect: there is one index, one ledger and one predictor.
            "prefixMatchInfoProducerName": Value, "inFlightLoadProducerName": Value,
            "latencyPredictionInfoProducerName": Value,
        }
    }
}

impl PrefixCacheAffinity {
    fn is_sticky(&self, cx: &PickContext<'_>, candidate: &Candidate<'_>) -> bool {
        let total = f64::from(cx.request.prompt_tokens.max(1));
        f64::from(candidate.cached.any) / total >= self.threshold
    }

    fn ttft_ms(&self, cx: &PickContext<'_>, candidate: &Candidate<'_>) -> Option<f64> {
        match self.source {
            TtftSource::PrefillThroughput => Some(in_flight_tokens(candidate) / (self.throughput / 1_000.0)),
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
