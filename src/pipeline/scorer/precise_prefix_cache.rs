//! `precise-prefix-cache-scorer`: llm-d's older name for `prefix-cache-scorer` over an index that engines' KV events feed.
//!
//! Whether events feed the index is the pool's `kvEvents` and not the scorer's business, so the parameters that configured the index there
//! are taken and have no effect here. When not: in new configurations. Source: llm-d `precise-prefix-cache-scorer`.

use super::prefix_cache::PrefixCache;
use attache_scheduling::plugin::{Plugin, params};
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
    build: |value| params::<Params>(value).map(|_| Plugin::Scorer(Arc::new(PrefixCache::default()))),
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
