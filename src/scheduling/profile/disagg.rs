//! `disagg-profile-handler` and the older `pd-profile-handler`: prefill and decode on different servers.
//!
//! What is in force of them is the decode profile: it decides about everything, and the server that it picks computes the whole answer,
//! which is what the originals do for a request that their deciders don't split. The other profiles, the order and the deciders are accepted
//! and not used. When not: prompts are long and must not slow the answers of others. Source: llm-d.

use super::position;
use crate::scheduling::PickContext;
use crate::scheduling::plugin::{ParamError, Plugin, PluginDescriptor, ProfileHandler, params};
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::sync::Arc;

/// Registry entry.
pub const DISAGG: PluginDescriptor = PluginDescriptor {
    name: "disagg-profile-handler",
    aliases: &[],
    kind: "handler",
    summary: "The decode profile decides; requests are not split between prefill and decode servers yet.",
    source: "llm-d `disagg-profile-handler`",
    build: |value| {
        let Params { profiles, .. } = params(value)?;
        Ok(Plugin::Handler(Arc::new(DecodeOnly { decode: profiles.decode })))
    },
};

/// Registry entry.
pub const PD: PluginDescriptor = PluginDescriptor {
    name: "pd-profile-handler",
    aliases: &[],
    kind: "handler",
    summary: "The older name of `disagg-profile-handler`; likewise, the decode profile decides.",
    source: "llm-d `pd-profile-handler`",
    build: |value| {
        let PdParams { decode_profile, .. } = params(value)?;
        Ok(Plugin::Handler(Arc::new(DecodeOnly { decode: decode_profile })))
    },
};

/// llm-d's name for the profile that picks the server of the answer.
pub const DEFAULT_DECODE_PROFILE: &str = "decode";

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Params {
    profiles: Profiles,
    #[serde(rename = "stageOrder")]
    _stage_order: Option<StageOrder>,
    #[serde(rename = "deciders")]
    _deciders: Deciders,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum StageOrder {
    DecodeFirst,
    PrefillFirst,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Profiles {
    decode: String,
    #[serde(rename = "prefill")]
    _prefill: Option<String>,
    #[serde(rename = "encode")]
    _encode: Option<String>,
}

impl Default for Profiles {
    fn default() -> Self {
        Self { decode: DEFAULT_DECODE_PROFILE.to_owned(), _prefill: None, _encode: None }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Deciders {
    #[serde(rename = "prefill")]
    _prefill: Option<String>,
    #[serde(rename = "encode")]
    _encode: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct PdParams {
    decode_profile: String,
    #[serde(rename = "prefillProfile")]
    _prefill_profile: Option<String>,
    #[serde(rename = "prefixPluginType")]
    _prefix_plugin_type: Option<String>,
    #[serde(rename = "prefixPluginName")]
    _prefix_plugin_name: Option<String>,
    #[serde(rename = "deciderPluginName")]
    _decider: Option<String>,
    #[serde(rename = "primaryPort")]
    _primary_port: Option<u16>,
    #[serde(rename = "threshold")]
    _threshold: Option<IgnoredAny>,
    #[serde(rename = "hashBlockSize")]
    _hash_block_size: Option<IgnoredAny>,
}

impl Default for PdParams {
    fn default() -> Self {
        Self {
            decode_profile: DEFAULT_DECODE_PROFILE.to_owned(),
            _prefill_profile: None,
            _prefix_plugin_type: None,
            _prefix_plugin_name: None,
            _decider: None,
            _primary_port: None,
            _threshold: None,
            _hash_block_size: None,
        }
    }
}

#[derive(Debug)]
struct DecodeOnly {
    decode: String,
}

impl ProfileHandler for DecodeOnly {
    fn eligible(&self, profiles: &[&str]) -> Result<Vec<usize>, ParamError> {
        Ok(vec![position(profiles, &self.decode)?])
    }

    fn choose(&self, _: &PickContext<'_>, _: &[&str]) -> Option<usize> {
        Some(0)
    }
}
