//! `prefix-based-pd-decider`, `always-disagg-pd-decider`, `always-disagg-multimodal-decider`: whether a stage of a request runs on a server of its
//! own. A profile handler names them.
//!
//! ```text
//! prefix-based        tokens >= promptTokens  and  tokens - those that the decode server holds >= nonCachedTokens;  0: never
//! always              every request
//! always-multimodal   requests with images, sounds or videos
//! ```
//!
//! What the decode server holds is read from the pool's prefix index, whoever feeds it; the original reads one producer's figure and never splits
//! when another is configured. When not: queues matter; these look at the request alone. Source: llm-d.

use attache_scheduling::facts::media;
use attache_scheduling::plugin::{NoParams, ParamError, Plugin, StageDecider, params};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::split::lacks_enough;
use attache_scheduling::{Candidate, PickContext, Reads};
use serde::Deserialize;
use std::sync::Arc;

/// Registry entry.
pub const PREFIX_BASED: PluginDescriptor = PluginDescriptor {
    name: "prefix-based-pd-decider",
    aliases: &[],
    kind: "decider",
    summary: "Splits a request when the decode server lacks enough tokens of its prompt.",
    source: "llm-d `prefix-based-pd-decider`",
    build: |value| params::<PrefixBased>(value)?.checked().map(|p| Plugin::Decider(Arc::new(p))),
};

/// Registry entry.
pub const ALWAYS: PluginDescriptor = PluginDescriptor {
    name: "always-disagg-pd-decider",
    summary: "Splits every request.",
    source: "llm-d `always-disagg-pd-decider`",
    build: |value| params::<NoParams>(value).map(|NoParams {}| Plugin::Decider(Arc::new(Always))),
    ..PREFIX_BASED
};

/// Registry entry.
pub const ALWAYS_MULTIMODAL: PluginDescriptor = PluginDescriptor {
    name: "always-disagg-multimodal-decider",
    summary: "Has images, sounds and videos encoded on a server of their own.",
    source: "llm-d `always-disagg-multimodal-decider`",
    build: |value| params::<NoParams>(value).map(|NoParams {}| Plugin::Decider(Arc::new(AlwaysMultimodal))),
    ..PREFIX_BASED
};

/// No request is split for what its decode server lacks, as in llm-d: the figure depends on the network.
const DEFAULT_NON_CACHED_TOKENS: i64 = 0;
/// A prompt of any length, as in llm-d.
const DEFAULT_PROMPT_TOKENS: i64 = 0;

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct PrefixBased {
    non_cached_tokens: i64,
    prompt_tokens: i64,
}

impl Default for PrefixBased {
    fn default() -> Self {
        Self { non_cached_tokens: DEFAULT_NON_CACHED_TOKENS, prompt_tokens: DEFAULT_PROMPT_TOKENS }
    }
}

impl PrefixBased {
    fn checked(self) -> Result<Thresholds, ParamError> {
        let whole = |name: &str, value: i64| {
            u32::try_from(value).map_err(|_| ParamError::value(name, value, "0 to 4294967295 is allowed"))
        };
        Ok(Thresholds {
            non_cached_tokens: whole("nonCachedTokens", self.non_cached_tokens)?,
            prompt_tokens: whole("promptTokens", self.prompt_tokens)?,
        })
    }
}

#[derive(Debug)]
struct Thresholds {
    non_cached_tokens: u32,
    prompt_tokens: u32,
}

impl StageDecider for Thresholds {
    fn runs(&self, cx: &PickContext<'_>, decoder: Option<&Candidate<'_>>) -> bool {
        decoder.is_some_and(|d| lacks_enough(cx, d, self.non_cached_tokens, self.prompt_tokens))
    }

    fn reads(&self) -> Reads {
        Reads::PREFIX
    }
}

#[derive(Debug)]
struct Always;

impl StageDecider for Always {
    fn runs(&self, _: &PickContext<'_>, _: Option<&Candidate<'_>>) -> bool {
        true
    }
}

#[derive(Debug)]
struct AlwaysMultimodal;

impl StageDecider for AlwaysMultimodal {
    fn runs(&self, cx: &PickContext<'_>, _: Option<&Candidate<'_>>) -> bool {
        media::any(cx)
    }

    fn reads(&self) -> Reads {
        Reads::PROMPT
    }
}
