//! `prefix-cache-scorer`: the cached share of the prompt: `w · min(1, cached / scale)² + (1 − w) · cached / prompt`.
//!
//! `cached` is the number of tokens of the prompt's longest prefix in any tier of the endpoint's cache, including
//! speculative entries. With `matchLengthWeight` w above 0, a long match scores higher than a short one of the same
//! share, up to `matchLengthScaleTokens`.
//! When not: prompts share no prefixes. Then all score 0 and the hashing costs time. Source: llm-d
//! `prefix-cache-scorer`; GIE's is the case w = 0.

use attache_scheduling::plugin::{Inert, ParamError, Plugin, Scorer, params};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext, Reads, Signal};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "prefix-cache-scorer",
    aliases: &[],
    kind: "scorer",
    summary: "Prefers endpoints that hold more of the prompt in their KV cache.",
    source: "llm-d and GIE `prefix-cache-scorer`",
    build: |value| params::<Params>(value)?.build().map(|p| Plugin::Scorer(Arc::new(p))),
};

/// 8,192 tokens, llm-d's default.
const DEFAULT_SCALE_TOKENS: u32 = 8_192;

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Params {
    match_length_weight: f32,
    match_length_scale_tokens: u32,
    // Accepted without effect: there is one index.
    #[serde(rename = "prefixMatchInfoProducerName")]
    _prefix: Option<IgnoredAny>,
}

/// Parameters that change nothing.
pub(crate) const INERT: &[Inert] = &[Inert {
    plugins: &[PLUGIN.name],
    keys: &["matchLengthScaleTokens"],
    when: |all| all.get("matchLengthWeight").and_then(Value::as_f64).unwrap_or(0.0) == 0.0,
    why: "it needs a `matchLengthWeight` above 0",
}];

impl Default for Params {
    fn default() -> Self {
        Self { match_length_weight: 0.0, match_length_scale_tokens: DEFAULT_SCALE_TOKENS, _prefix: None }
    }
}

impl Params {
    fn build(self) -> Result<PrefixCacheScorer, ParamError> {
        let weight = self.match_length_weight;
        if !(0.0..=1.0).contains(&weight) {
            return Err(ParamError::value("matchLengthWeight", weight, "0 to 1 is allowed"));
        }
        if self.match_length_scale_tokens == 0 {
            return Err(ParamError::value("matchLengthScaleTokens", 0, "at least 1 is needed"));
        }
        Ok(PrefixCacheScorer { weight, scale: self.match_length_scale_tokens })
    }
}

/// The scorer of `prefix-cache-scorer` and of `precise-prefix-cache-scorer`.
#[derive(Debug)]
pub(super) struct PrefixCacheScorer {
    weight: f32,
    scale: u32,
}

impl Default for PrefixCacheScorer {
    fn default() -> Self {
        Self { weight: 0.0, scale: DEFAULT_SCALE_TOKENS }
    }
}

impl Scorer for PrefixCacheScorer {
    fn score(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f32]) {
        let total = cx.request.prompt_tokens.max(1) as f32;
        for (score, candidate) in out.iter_mut().zip(candidates) {
            let held = candidate.cached.any as f32;
            let length = (held / self.scale as f32).min(1.0);
            *score = self.weight * length * length + (1.0 - self.weight) * (held / total).min(1.0);
        }
    }

    fn lacks(&self, cx: &PickContext<'_>, _: &[Candidate<'_>]) -> Option<Signal> {
        cx.prefix.is_none().then_some(Signal::Prefix)
    }

    fn reads(&self) -> Reads {
        Reads::PREFIX
    }
}
