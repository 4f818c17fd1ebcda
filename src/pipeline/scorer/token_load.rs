//! `token-load-scorer`: fewer prompt tokens to compute score higher, `1 − min(1, tokens / queueThresholdTokens)`.
//!
//! `tokens` is the sum of the uncached prompt tokens in flight on the endpoint and of this request's. A request's
//! tokens count until the first byte of its response.
//! When not: responses are long and prompts short; then use requests. Source: llm-d `token-load-scorer`; GIE's omits
//! this request.

use attache_scheduling::plugin::{Plugin, Scorer, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext, Reads};
use attache_types::parameters;
use serde_json::Value;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "token-load-scorer",
    aliases: &[],
    kind: "scorer",
    summary: "Prefers endpoints with fewer prompt tokens to compute, this request's included.",
    source: "llm-d and GIE `token-load-scorer`",
    parameters: section::<Params>,
    build: |value| {
        let Params { threshold } = params(value)?;
        Ok(Plugin::Scorer(Arc::new(TokenLoad { threshold: threshold as f64 })))
    },
};

parameters! {
    struct Params {
        /// Uncached prompt tokens in flight, this request's included, from which an endpoint scores 0. 4,194,304 is the
        /// default of GIE and llm-d.
        "queueThresholdTokens" => threshold: u64 { default: 4_194_304; range: 1..; unit: "tokens"; },
        ignored {
            /// Without effect: there is one ledger and one index.
            "inFlightLoadProducerName": Value, "prefixMatchInfoProducerName": Value,
        }
    }
}

#[derive(Debug)]
struct TokenLoad {
    threshold: f64,
}

impl Scorer for TokenLoad {
    fn score(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f32]) {
        for (score, candidate) in out.iter_mut().zip(candidates) {
            let uncached = cx.request.prompt_tokens.saturating_sub(candidate.cached.any);
            let tokens = candidate.state.live().ledger.prefill_tokens() as f64 + f64::from(uncached);
            *score = (1.0 - (tokens / self.threshold).min(1.0)) as f32;
        }
    }

    fn reads(&self) -> Reads {
        Reads::PREFIX
    }
}
