//! `precise-prefix-cache-scorer`: llm-d's older name of `prefix-cache-scorer` over an index fed by KV events.
//!
//! The pool's `kvEvents` decide whether events feed the index, so the parameters for the index are accepted and have
//! no effect. When not: in new configurations. Source: llm-d `precise-prefix-cache-scorer`.

use super::prefix_cache::PrefixCacheScorer;
use attache_scheduling::plugin::{Inert, Plugin, params};
use attache_scheduling::registry::PluginDescriptor;
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "precise-prefix-cache-scorer",
    aliases: &[],
    kind: "scorer",
    summary: "The older name of `prefix-cache-scorer` where KV events are read.",
    source: "llm-d `precise-prefix-cache-scorer`",
    build: |value| params::<Params>(value).map(|_| Plugin::Scorer(Arc::new(PrefixCacheScorer::default()))),
};

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Params {
    #[serde(rename = "tokenProcessorConfig")]
    _blocks: Option<IgnoredAny>,
    #[serde(rename = "indexerConfig")]
    _index: Option<IgnoredAny>,
    #[serde(rename = "kvEventsConfig")]
    _events: Option<IgnoredAny>,
    #[serde(rename = "speculativeIndexing")]
    _speculative: Option<IgnoredAny>,
    #[serde(rename = "speculativeTTL")]
    _speculative_ttl: Option<IgnoredAny>,
}

/// Parameters that change nothing.
pub(crate) const INERT: &[Inert] = &[Inert {
    plugins: &[PLUGIN.name],
    keys: &["tokenProcessorConfig", "indexerConfig", "kvEventsConfig", "speculativeIndexing", "speculativeTTL"],
    when: |_| true,
    why: "the index is the pool's, with the settings of its `prefixCache`",
}];
