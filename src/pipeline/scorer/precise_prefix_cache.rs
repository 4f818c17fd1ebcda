//! `precise-prefix-cache-scorer`: llm-d's older name of `prefix-cache-scorer` over an index fed by KV events.
//!
//! The pool's `kvEvents` decide whether events feed the index, so the parameters for the index are accepted and have
//! no effect. When not: in new configurations. Source: llm-d `precise-prefix-cache-scorer`.

use super::prefix_cache::PrefixCacheScorer;
use attache_scheduling::plugin::{Inert, Plugin, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_types::parameters;
use serde_json::Value;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "precise-prefix-cache-scorer",
    aliases: &[],
    kind: "scorer",
    summary: "The older name of `prefix-cache-scorer` where KV events are read.",
    source: "llm-d `precise-prefix-cache-scorer`",
    parameters: section::<Params>,
    build: |value| params::<Params>(value).map(|_| Plugin::Scorer(Arc::new(PrefixCacheScorer::default()))),
};

parameters! {
    struct Params {
        ignored {
            /// Without effect: the index is the pool's, with the settings of its `prefixCache`.
            "tokenProcessorConfig": Value, "indexerConfig": Value, "kvEventsConfig": Value,
            "speculativeIndexing": Value, "speculativeTTL": Value,
        }
    }
}

/// Parameters that change nothing.
pub(crate) const INERT: &[Inert] = &[Inert {
    plugins: &[PLUGIN.name],
    keys: &["tokenProcessorConfig", "indexerConfig", "kvEventsConfig", "speculativeIndexing", "speculativeTTL"],
    when: |_| true,
    why: "the index is the pool's, with the settings of its `prefixCache`",
}];
