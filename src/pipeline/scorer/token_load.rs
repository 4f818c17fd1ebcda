//! `token-load-scorer`: fewer prompt tokens to compute score higher, `1 − min(1, tokens / queueThresholdTokens)`.
//!
//! `tokens` is the sum of the uncached prompt tokens in flight on the endpoint and of this request's. A request's
//! tokens count until the first byte of its response.
//! When not: responses are long and prompts short; then use requests. Source: llm-d `token-load-scorer`; GIE's omits
//! this request.

use attache_scheduling::plugin::{ParamError, Plugin, Scorer, params};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext, Reads};
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "token-load-scorer",
    aliases: &[],
    kind: "scorer",
    summary: "Prefers endpoints with fewer prompt tokens to compute, this request's included.",
    source: "llm-d and GIE `token-load-scorer`",
    build: |value| params::<Params>(value)?.build().map(|p| Plugin::Scorer(Arc::new(p))),
};

/// 4 Mi tokens, the default of both.
pub const DEFAULT_QUEUE_THRESHOLD_TOKENS: u64 = 4_194_304;

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Params {
    queue_threshold_tokens: u64,
    // Accepted without effect: there is one ledger and one index.
    #[serde(rename = "inFlightLoadProducerName")]
    _load: Option<IgnoredAny>,
    #[serde(rename = "prefixMatchInfoProducerName")]
    _prefix: Option<IgnoredAny>,
}

impl Default for Params {
    fn default() -> Self {
        Self { queue_threshold_tokens: DEFAULT_QUEUE_THRESHOLD_TOKENS, _load: None, _prefix: None }
    }
}

impl Params {
    fn build(self) -> Result<TokenLoad, ParamError> {
        if self.queue_threshold_tokens == 0 {
            return Err(ParamError::value("queueThresholdTokens", 0, "at least 1 is needed"));
        }
        Ok(TokenLoad { threshold: self.queue_threshold_tokens as f64 })
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
