//! `prefix-cache-scorer`: the cached share of the prompt: `w · min(1, cached / scale)² + (1 − w) · cached / prompt`.
//!
//! `cached` is the number of tokens of the prompt's longest prefix in any tier of the endpoint's cache, including
//! speculative entries. With `matchLengthWeight` w above 0, a long match scores higher than a short one of the same
//! share, up to `matchLengthScaleTokens`.
//! When not: prompts share no prefixes. Then all score 0 and the hashing costs time. Source: llm-d
//! `prefix-cache-scorer`; GIE's is the case w = 0.

use attache_scheduling::plugin::{Inert, Plugin, Scorer, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext, Reads, Signal};
use attache_types::parameters;
use serde_json::Value;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "prefix-cache-scorer",
    aliases: &[],
    kind: "scorer",
    summary: "Prefers endpoints that hold more of the prompt in their KV cache.",
    source: "llm-d and GIE `prefix-cache-scorer`",
    parameters: section::<PrefixCacheScorer>,
    build: |value| params::<PrefixCacheScorer>(value).map(|p| Plugin::Scorer(Arc::new(p))),
};

/// 8,192 tokens, llm-d's default.
const DEFAULT_SCALE_TOKENS: u32 = 8_192;

/// Parameters that change nothing.
pub(crate) const INERT: &[Inert] = &[Inert {
    plugins: &[PLUGIN.name],
    keys: &["matchLengthScaleTokens"],
    when: |all| all.get("matchLengthWeight").and_then(Value::as_f64).unwrap_or(0.0) == 0.0,
    why: "it needs a `matchLengthWeight` above 0",
}];

parameters! {
    /// The scorer of `prefix-cache-scorer` and of `precise-prefix-cache-scorer`.
    pub(super) struct PrefixCacheScorer {
        /// Weight of a match's length. The weight of its share of the prompt is 1 minus that.
        "matchLengthWeight" => weight: f32 { default: 0.0; range: 0.0..=1.0; unit: "share"; },
        /// Length of a match from which longer ones score no higher. 8,192 is llm-d's default.
        "matchLengthScaleTokens" => scale: u32 { default: DEFAULT_SCALE_TOKENS; range: 1..; unit: "tokens"; },
        ignored {
            /// Without effect: there is one index.
            "prefixMatchInfoProducerName": Value,
        }
    }
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
