//! `prefix-based-pd-decider`, `always-disagg-pd-decider`, `always-disagg-multimodal-decider`: whether a stage of a
//! request runs on a server of its own. A profile handler refers to them by name.
//!
//! ```text
//! prefix-based        tokens >= promptTokens  and  tokens - cached on the decode server >= nonCachedTokens;  0: never
//! always              every request
//! always-multimodal   requests with images, sounds or videos
//! ```
//!
//! Tokens cached on the decode server are read from the pool's prefix index, whatever its source. llm-d reads one
//! producer's value and never splits if another one is configured.
//! When not: queue lengths matter, since these deciders consider the request alone. Source: llm-d.

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

/// 0 never splits, llm-d's default: a useful value depends on the network.
const DEFAULT_NON_CACHED_TOKENS: i64 = 0;
/// Prompts of any length, llm-d's default.
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
