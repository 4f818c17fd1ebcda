//! `encode-filter`, `prefill-filter`, `decode-filter`: endpoints that serve one stage of an answer, by the label `llm-d.ai/role`.
//!
//! ```text
//! encode    encode, encode-prefill, encode-decode, encode-prefill-decode
//! prefill   prefill, encode-prefill, prefill-decode, encode-prefill-decode, both
//! decode    decode, encode-decode, prefill-decode, encode-prefill-decode, both, and endpoints without the label
//! ```
//!
//! When not: every endpoint does everything; then nothing is labelled, and `encode` and `prefill` leave nobody. Source: llm-d.

use crate::rng::PickRng;
use crate::scheduling::plugin::{Filter, NoParams, ParamError, Plugin, PluginDescriptor, params};
use crate::scheduling::{Candidate, PickContext};
use serde_json::Value;
use std::sync::Arc;

/// The label that tells an endpoint's role.
pub const ROLE_LABEL: &str = "llm-d.ai/role";

/// Registry entry.
pub const ENCODE: PluginDescriptor = PluginDescriptor {
    name: "encode-filter",
    aliases: &[],
    kind: "filter",
    summary: "Keeps endpoints whose role takes in the encoding of media.",
    source: "llm-d `encode-filter`",
    build: |value| build(value, Stage::Encode),
};

/// Registry entry.
pub const PREFILL: PluginDescriptor = PluginDescriptor {
    name: "prefill-filter",
    summary: "Keeps endpoints whose role takes in prefill.",
    source: "llm-d `prefill-filter`",
    build: |value| build(value, Stage::Prefill),
    ..ENCODE
};

/// Registry entry.
pub const DECODE: PluginDescriptor = PluginDescriptor {
    name: "decode-filter",
    summary: "Keeps endpoints whose role takes in decoding, and those without a role.",
    source: "llm-d `decode-filter`",
    build: |value| build(value, Stage::Decode),
    ..ENCODE
};

fn build(value: &Value, stage: Stage) -> Result<Plugin, ParamError> {
    params::<NoParams>(value).map(|NoParams {}| Plugin::Filter(Arc::new(Role { stage })))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Encode,
    Prefill,
    Decode,
}

impl Stage {
    fn is_served_by(self, role: Option<&str>) -> bool {
        use Stage::{Decode, Encode, Prefill};
        let stages: &[Stage] = match role {
            None | Some("decode") => &[Decode],
            Some("encode") => &[Encode],
            Some("prefill") => &[Prefill],
            Some("encode-prefill") => &[Encode, Prefill],
            Some("encode-decode") => &[Encode, Decode],
            Some("prefill-decode" | "both") => &[Prefill, Decode],
            Some("encode-prefill-decode") => &[Encode, Prefill, Decode],
            Some(_) => &[],
        };
        stages.contains(&self)
    }
}

#[derive(Debug)]
struct Role {
    stage: Stage,
}

impl Filter for Role {
    fn keep(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], _: &mut PickRng, keep: &mut [bool]) {
        for (keep, candidate) in keep.iter_mut().zip(candidates) {
            let role = candidate.state.endpoint.spec.labels.get(ROLE_LABEL);
            *keep = self.stage.is_served_by(role.map(|role| &**role));
        }
    }
}
