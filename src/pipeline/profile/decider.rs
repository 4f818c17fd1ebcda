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
use attache_scheduling::plugin::{NoParams, Plugin, StageDecider, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::split::lacks_enough;
use attache_scheduling::{Candidate, PickContext, Reads};
use attache_types::parameters;
use std::sync::Arc;

/// Registry entry.
pub const PREFIX_BASED: PluginDescriptor = PluginDescriptor {
    name: "prefix-based-pd-decider",
    aliases: &[],
    kind: "decider",
    summary: "Splits a request when the decode server lacks enough tokens of its prompt.",
    source: "llm-d `prefix-based-pd-decider`",
    parameters: section::<PrefixBased>,
    build: |value| params::<PrefixBased>(value).map(|p| Plugin::Decider(Arc::new(p))),
};

/// Registry entry.
pub const ALWAYS: PluginDescriptor = PluginDescriptor {
    name: "always-disagg-pd-decider",
    summary: "Splits every request.",
    source: "llm-d `always-disagg-pd-decider`",
    parameters: section::<NoParams>,
    build: |value| params::<NoParams>(value).map(|NoParams {}| Plugin::Decider(Arc::new(Always))),
    ..PREFIX_BASED
};

/// Registry entry.
pub const ALWAYS_MULTIMODAL: PluginDescriptor = PluginDescriptor {
    name: "always-disagg-multimodal-decider",
    summary: "Has images, sounds and videos encoded on a server of their own.",
    source: "llm-d `always-disagg-multimodal-decider`",
    parameters: section::<NoParams>,
    build: |value| params::<NoParams>(value).map(|NoParams {}| Plugin::Decider(Arc::new(AlwaysMultimodal))),
    ..PREFIX_BASED
};

parameters! {
    // The defaults are llm-d's.
    struct PrefixBased {
        /// Prompt tokens not cached on the decode server from which a request is split. 0: no request is split.
        "nonCachedTokens" => non_cached_tokens: u32 { default: 0; unit: "tokens"; },
        /// Prompt length from which a request is split, if `nonCachedTokens` holds too.
        "promptTokens" => prompt_tokens: u32 { default: 0; unit: "tokens"; },
    }
}

impl StageDecider for PrefixBased {
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
