//! `disagg-profile-handler` and the older `pd-profile-handler`: prefill, decode and media encoding on different
//! servers.
//!
//! ```text
//! decode-first    decode profile; the encode profile if its decider agrees; the prefill profile if its decider agrees
//! prefill-first   prefill profile, always; encode as above; decode profile, near the prefill server if it has a
//!                 topology plugin
//! ```
//!
//! A stage runs only if it has a decider; prefill that comes first needs none. It does not run either if its profile
//! is missing or picks no server, or if prefill and decode pick one server. The server that the decode profile alone
//! picks then serves the whole request.
//!
//! The encode stage runs with and without prefill, for requests with media; a sidecar runs it. Its profile picks as
//! many servers as its picker allows, at most one per different media item, and none if the decode server is its
//! first pick.
//! Topology plugins see the server of the previous stage. All of this needs `disaggregation` in the pool; an
//! EndpointPickerConfig with a profile for prefill or encode that can run implies llm-d's sidecars.
//!
//! `pd-profile-handler` uses `prefix-based-pd-decider` by default. In configurations older than deciders, `threshold`
//! is the number of uncached prompt characters, four per token, from which a request is split.
//!
//! When not: the choice should weigh queues and the transfer; `predicted-latency` chooses both servers at once.
//! Source: llm-d.

use super::{decider, position};
use attache_scheduling::division::{DeciderName, Division, StageProfile, Stages};
use attache_scheduling::plugin::{Inert, ParamError, Plugin, ProfileHandler, StageDecider, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext, Reads};
use attache_types::{keywords, parameters};
use serde_json::Value;
use std::sync::Arc;

/// Registry entry.
pub const DISAGG: PluginDescriptor = PluginDescriptor {
    name: "disagg-profile-handler",
    aliases: &[],
    kind: "handler",
    summary: "The decode profile decides; other profiles choose the servers of prefill and encode if their deciders \
              agree.",
    source: "llm-d `disagg-profile-handler`",
    parameters: section::<Params>,
    build: |value| params::<Params>(value)?.build().map(|h| Plugin::Handler(Arc::new(h))),
};

/// Registry entry.
pub const PD: PluginDescriptor = PluginDescriptor {
    name: "pd-profile-handler",
    summary: "The older name of `disagg-profile-handler`, for prefill and decode.",
    source: "llm-d `pd-profile-handler`",
    parameters: section::<PdParams>,
    build: |value| params::<PdParams>(value).map(|p| Plugin::Handler(Arc::new(p.build()))),
    ..DISAGG
};

/// llm-d's name of the profile that picks the decode server.
pub const DEFAULT_DECODE_PROFILE: &str = "decode";
/// llm-d's name of the profile that picks the prefill server.
pub const DEFAULT_PREFILL_PROFILE: &str = "prefill";
/// llm-d's name of the profile that picks the encode servers.
pub const DEFAULT_ENCODE_PROFILE: &str = "encode";
/// llm-d's number of characters per token.
const CHARACTERS_PER_TOKEN: f64 = 4.0;

parameters! {
    // Empty names are as absent ones, as in llm-d.
    struct Params {
        /// Names of the profiles.
        "profiles" => profiles: ProfileNames,
        /// Stage whose server is picked first. With `prefill-first`, every request has the prefill stage.
        "stageOrder" => stage_order: StageOrder { default: StageOrder::DecodeFirst; },
        /// Names of the deciders.
        "deciders" => deciders: DeciderNames,
        /// The older name of `profiles.decode`.
        "decodeProfile" => decode_profile: String { default: String::new(); absent: "`decode`"; },
        /// The older name of `profiles.prefill`.
        "prefillProfile" => prefill_profile: String { default: String::new(); absent: "`prefill`"; },
        /// The older name of `profiles.encode`.
        "encodeProfile" => encode_profile: String { default: String::new(); absent: "`encode`"; },
        /// The oldest name of `deciders.prefill`.
        "deciderPluginName" => decider_plugin_name: String { default: String::new(); absent: "none"; },
        /// The older name of `deciders.prefill`.
        "prefillDeciderPluginName" => prefill_decider_plugin_name: String { default: String::new(); absent: "none"; },
        /// The older name of `deciders.encode`.
        "encodeDeciderPluginName" => encode_decider_plugin_name: String { default: String::new(); absent: "none"; },
    }
    /// Names of the profiles.
    #[derive(Default, PartialEq, Eq)]
    struct ProfileNames {
        /// Profile that picks the decode server.
        "decode" => decode: String { default: String::new(); absent: "`decode`"; },
        /// Profile that picks the prefill server.
        "prefill" => prefill: String { default: String::new(); absent: "`prefill`"; },
        /// Profile that picks the encode servers.
        "encode" => encode: String { default: String::new(); absent: "`encode`"; },
    }
    /// Names of the deciders.
    #[derive(Default, PartialEq, Eq)]
    struct DeciderNames {
        /// Decider plugin that says whether a request has the prefill stage. `stageOrder: prefill-first` needs none.
        "prefill" => prefill: String { default: String::new(); absent: "none: no request has the stage"; },
        /// Decider plugin that says whether a request has the encode stage.
        "encode" => encode: String { default: String::new(); absent: "none: no request has the stage"; },
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StageOrder {
    /// llm-d's default: the tokens cached on the decode server are known when the decider runs.
    DecodeFirst,
    PrefillFirst,
}

keywords! {
    StageOrder: "decode-first" => DecodeFirst, "prefill-first" => PrefillFirst;
}

/// `name`, or `default` if it is empty; empty means not set, as in llm-d.
fn named(name: String, default: &str) -> String {
    if name.is_empty() { default.to_owned() } else { name }
}

impl Params {
    /// The profiles and deciders, from either spelling.
    ///
    /// # Errors
    /// Both spellings are used; llm-d rejects that too.
    fn named(self) -> Result<(ProfileNames, DeciderNames), ParamError> {
        let prefill = named(self.prefill_decider_plugin_name, &self.decider_plugin_name);
        let flat = (
            ProfileNames { decode: self.decode_profile, prefill: self.prefill_profile, encode: self.encode_profile },
            DeciderNames { prefill, encode: self.encode_decider_plugin_name },
        );
        let nested = (self.profiles, self.deciders);
        let none = (ProfileNames::default(), DeciderNames::default());
        match (nested == none, flat == none) {
            (false, false) => Err(ParamError::new(
                "`profiles` and `deciders` stand beside their older names (`decodeProfile`, `deciderPluginName`, \
                 …); one spelling is allowed"
                    .to_owned(),
            )),
            (true, false) => Ok(flat),
            (_, true) => Ok(nested),
        }
    }

    fn build(self) -> Result<Disagg, ParamError> {
        let stage_order = self.stage_order;
        let (profiles, deciders) = self.named()?;
        let decider = |name: String| (!name.is_empty()).then_some(DeciderName { name, otherwise: None });
        let prefill_first = stage_order == StageOrder::PrefillFirst;
        let (to_prefill, to_encode) = (decider(deciders.prefill), decider(deciders.encode));
        let prefill = (prefill_first || to_prefill.is_some()).then(|| StageProfile {
            profile: named(profiles.prefill, DEFAULT_PREFILL_PROFILE),
            decider: to_prefill.filter(|_| !prefill_first),
        });
        let encode = to_encode.map(|decider| StageProfile {
            profile: named(profiles.encode, DEFAULT_ENCODE_PROFILE),
            decider: Some(decider),
        });
        let decode = named(profiles.decode, DEFAULT_DECODE_PROFILE);
        Ok(Disagg { decode, stages: Stages { prefill, encode, prefill_first } })
    }
}

fn has(parameters: &Value, keys: &[&str]) -> bool {
    let named = |key: &&str| parameters.pointer(key).and_then(Value::as_str).is_some_and(|name| !name.is_empty());
    keys.iter().any(named)
}

fn prefills_first(parameters: &Value) -> bool {
    parameters.get("stageOrder").is_some_and(|order| order == "prefill-first")
}

/// Parameters that change nothing.
pub(crate) const INERT: &[Inert] = &[
    Inert {
        plugins: &[DISAGG.name],
        keys: &["deciders.prefill", "deciderPluginName", "prefillDeciderPluginName"],
        when: prefills_first,
        why: "with `stageOrder: prefill-first` every request has the prefill stage",
    },
    Inert {
        plugins: &[DISAGG.name],
        keys: &["profiles.prefill", "prefillProfile"],
        when: |all| {
            !prefills_first(all) && !has(all, &["/deciders/prefill", "/deciderPluginName", "/prefillDeciderPluginName"])
        },
        why: "without a decider for prefill no request has that stage",
    },
    Inert {
        plugins: &[DISAGG.name],
        keys: &["profiles.encode", "encodeProfile"],
        when: |all| !has(all, &["/deciders/encode", "/encodeDeciderPluginName"]),
        why: "without a decider for encode no request has that stage",
    },
    Inert {
        plugins: &[PD.name],
        keys: &["threshold"],
        when: |all| has(all, &["/deciderPluginName"]),
        why: "`deciderPluginName` says which requests are split",
    },
    Inert {
        plugins: &[PD.name],
        keys: &["prefixPluginType", "prefixPluginName"],
        when: |_| true,
        why: "a pool has one index of prefixes",
    },
    Inert { plugins: &[PD.name], keys: &["hashBlockSize"], when: |_| true, why: "the pool's blocks are counted" },
    Inert {
        plugins: &[PD.name],
        keys: &["primaryPort"],
        when: |_| true,
        why: "each rank of a server is an endpoint of its own",
    },
];

parameters! {
    struct PdParams {
        /// Profile that picks the decode server.
        "decodeProfile" => decode_profile: String { default: DEFAULT_DECODE_PROFILE.to_owned(); },
        /// Profile that picks the prefill server.
        "prefillProfile" => prefill_profile: String { default: DEFAULT_PREFILL_PROFILE.to_owned(); },
        /// Decider plugin that says whether a request is split.
        "deciderPluginName" => decider_plugin_name: String {
            default: String::new(); absent: "`prefix-based-pd-decider`";
        },
        /// Without a decider among the plugins: uncached characters of the prompt from which a request is split. 0:
        /// every request is.
        "threshold" => threshold: f64 { default: 0.0; range: 0.0..; unit: "characters"; },
        ignored {
            /// Without effect: a pool has one prefix index with its own block size, and each rank of a server is an
            /// endpoint.
            "prefixPluginType": Value, "prefixPluginName": Value, "primaryPort": u16, "hashBlockSize": Value,
        }
    }
}

impl PdParams {
    fn build(self) -> Disagg {
        let decider = if self.decider_plugin_name.is_empty() {
            let otherwise: Arc<dyn StageDecider> = Arc::new(CharacterThreshold { threshold: self.threshold });
            DeciderName { name: decider::PREFIX_BASED.name.to_owned(), otherwise: Some(otherwise) }
        } else {
            DeciderName { name: self.decider_plugin_name, otherwise: None }
        };
        let prefill = StageProfile { profile: self.prefill_profile, decider: Some(decider) };
        let stages = Stages { prefill: Some(prefill), encode: None, prefill_first: false };
        Disagg { decode: self.decode_profile, stages }
    }
}

/// The rule of versions without deciders.
#[derive(Debug)]
struct CharacterThreshold {
    threshold: f64,
}

impl StageDecider for CharacterThreshold {
    fn runs(&self, cx: &PickContext<'_>, decoder: Option<&Candidate<'_>>) -> bool {
        let lacking = cx.request.prompt_tokens.saturating_sub(decoder.map_or(0, |d| d.cached.any));
        f64::from(lacking) * CHARACTERS_PER_TOKEN >= self.threshold
    }

    fn reads(&self) -> Reads {
        Reads::PREFIX
    }
}

#[derive(Debug)]
struct Disagg {
    decode: String,
    stages: Stages,
}

impl ProfileHandler for Disagg {
    fn eligible(&self, profiles: &[&str]) -> Result<Vec<usize>, ParamError> {
        Ok(vec![position(profiles, &self.decode)?])
    }

    fn choose(&self, _: &PickContext<'_>, _: &[&str]) -> Option<usize> {
        Some(0)
    }

    fn division(&self) -> Division {
        Division::Stages(self.stages.clone())
    }
}
