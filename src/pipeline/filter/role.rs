//! `encode-filter`, `prefill-filter`, `decode-filter`: endpoints that serve one stage of a request, by the label
//! `llm-d.ai/role` (or AIBrix's `role-name`, see [`attache_pool::role`]).
//!
//! ```text
//! encode    encode, encode-prefill, encode-decode, encode-prefill-decode
//! prefill   prefill, encode-prefill, prefill-decode, encode-prefill-decode, both
//! decode    decode, encode-decode, prefill-decode, encode-prefill-decode, both, and endpoints without the label
//! ```
//!
//! When not: every endpoint serves all stages. Then no endpoint has the label, and `encode` and `prefill` keep none.
//! Source: llm-d.

use attache_pool::Roles;
use attache_scheduling::plugin::{Filter, NoParams, ParamError, Plugin, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext};
use attache_types::rng::PickRng;
use serde_json::Value;
use std::sync::Arc;

/// Registry entry.
pub const ENCODE: PluginDescriptor = PluginDescriptor {
    name: "encode-filter",
    aliases: &[],
    kind: "filter",
    summary: "Keeps endpoints whose role includes the encoding of media.",
    source: "llm-d `encode-filter`",
    parameters: section::<NoParams>,
    build: |value| build(value, Roles::ENCODE),
};

/// Registry entry.
pub const PREFILL: PluginDescriptor = PluginDescriptor {
    name: "prefill-filter",
    summary: "Keeps endpoints whose role includes prefill.",
    source: "llm-d `prefill-filter`",
    build: |value| build(value, Roles::PREFILL),
    ..ENCODE
};

/// Registry entry.
pub const DECODE: PluginDescriptor = PluginDescriptor {
    name: "decode-filter",
    summary: "Keeps endpoints whose role includes decoding, and those without a role.",
    source: "llm-d `decode-filter`",
    build: |value| build(value, Roles::DECODE),
    ..ENCODE
};

fn build(value: &Value, stage: Roles) -> Result<Plugin, ParamError> {
    params::<NoParams>(value).map(|NoParams {}| Plugin::Filter(Arc::new(RoleFilter { stage })))
}

#[derive(Debug)]
struct RoleFilter {
    stage: Roles,
}

impl Filter for RoleFilter {
    fn keep(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], _: &mut PickRng, keep: &mut [bool]) {
        for (keep, candidate) in keep.iter_mut().zip(candidates) {
            *keep = candidate.state.endpoint.roles.has(self.stage);
        }
    }
}
