//! The recording format `attache.record.v1`: one JSON object per line, in the order in which the
//! inputs of decisions have changed.
//!
//! The first line is a [`Header`]. Every other one is a [`Line`]: an object with one member, whose name is the event.
//! Requests are numbered (`r`) in the order of their decisions, pools in the order of their creation, configurations in
//! the order in which they took effect; times are nanoseconds since an origin of the process.
//!
//! It contains no text of a prompt or response: prompts are recorded as block keys (seeded hashes) and lengths, tenants,
//! agents and credentials as hashes. Model names, endpoints, settings, request ids and the values of other headers that
//! the routing algorithm has read are recorded unchanged.

use super::kv::KvChange;
use attache_pool::health::{ClientSlot, HealthOutcome};
use attache_pool::writer::SourceId;
use attache_pool::{EndpointMetrics, EndpointSpec};
use attache_prefix::cache::CacheConfig;
use attache_prefix::key::BlockKey;
use attache_protocol::{Api, Usage};
use attache_scheduling::ModelPolicy;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Value of `format` in the first line.
pub const FORMAT: &str = "attache.record.v1";

/// The first line of a recording.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Header {
    /// Always [`FORMAT`].
    pub format: String,
    /// Version of the recording Attaché.
    pub version: String,
    /// Seed of all random numbers and hashes.
    pub seed: u64,
    /// The settings at the start, configuration number 0, as `/config_dump` shows them.
    pub settings: Value,
}

/// One event of a recording.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Line {
    /// A pool was created without endpoints.
    Pool { pool: u32, name: Arc<str>, cache: CacheConfig },
    /// The prefix cache was replaced by an empty one; keys from before do not match new ones. The first has number 0.
    Cache {
        pool: u32,
        cache: CacheConfig,
        #[serde(skip_serializing_if = "is_default", default)]
        number: u32,
    },
    /// A source of discovery reported its endpoints.
    Endpoints { pool: u32, source: SourceId, endpoints: Vec<EndpointSpec> },
    /// A source was removed.
    Gone { pool: u32, source: SourceId },
    /// The set of sources has changed.
    Expect { pool: u32, sources: Vec<SourceId> },
    /// An endpoint was scraped.
    Page { pool: u32, id: EndpointId, metrics: Arc<EndpointMetrics> },
    /// A server's process was restarted.
    Restart { pool: u32, id: EndpointId },
    /// A server has cleared its cache.
    Cleared { pool: u32, id: EndpointId },
    /// KV events of a model server changed the prefix cache with this number.
    Kv {
        pool: u32,
        #[serde(skip_serializing_if = "is_default", default)]
        number: u32,
        change: KvChange,
    },
    /// Decisions see all earlier events of the pool from now on.
    Publish { pool: u32 },
    /// A configuration took effect for streams that open from now on.
    Live { live: u32, settings: Value },
    /// A decision with its booking.
    Decide(Box<Decided>),
    /// A leg of the request moved to another endpoint: Envoy served the response from it, or the planned one has gone.
    Moved {
        r: u64,
        at: Timestamp,
        to: EndpointId,
        #[serde(skip_serializing_if = "is_default", default)]
        leg: RequestLeg,
    },
    /// The request was sent, whose prompt was to be computed on another server: `from`, which needed this many more
    /// seconds. Without `from`, its own server computes the prompt.
    Dispatch {
        r: u64,
        at: Timestamp,
        #[serde(skip_serializing_if = "Option::is_none")]
        from: Option<EndpointId>,
        #[serde(skip_serializing_if = "is_default", default)]
        seconds: f64,
    },
    /// The outcome of a request for an endpoint's health. Older recordings lack API and client, because error responses
    /// were not counted by them; a 5xx is a `failure` there.
    Health {
        r: u64,
        at: Timestamp,
        id: EndpointId,
        outcome: HealthOutcome,
        #[serde(skip_serializing_if = "is_default", default)]
        api: Api,
        #[serde(skip_serializing_if = "is_default", default)]
        client: ClientSlot,
    },
    /// A probe of this endpoint ended without a result.
    ProbeLost { r: u64, id: EndpointId },
    /// The first byte of the response; `good` and `tells` as in [`attache_scheduling::Booking::first_byte`].
    First {
        r: u64,
        at: Timestamp,
        good: bool,
        tells: bool,
        #[serde(skip_serializing_if = "is_default", default)]
        leg: RequestLeg,
    },
    /// A session ended: strategies drop what they recorded of it.
    SessionEnd {
        session: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        tenant: Option<String>,
    },
    /// The end of the response.
    End(Ended),
    /// A leg of the request was dropped without an end.
    Drop {
        r: u64,
        #[serde(skip_serializing_if = "is_default", default)]
        leg: RequestLeg,
    },
}

/// The part of a request that a line is about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestLeg {
    /// The server of the response.
    #[default]
    Response,
    /// The server that computes the prompt of a split request.
    Prefill,
}

/// All inputs of a decision, and its result.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Decided {
    /// Number of the request, in the order of decisions.
    pub r: u64,
    /// The request's `x-request-id`; empty if it has none.
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub id: String,
    /// Time of the decision in nanoseconds.
    pub at: Timestamp,
    /// Number of the configuration that the stream began with.
    pub live: u32,
    /// Name of the pool in that configuration.
    pub pool: Arc<str>,
    /// Seed of the random numbers for this decision.
    pub rng: u64,
    /// The server's name for the model; empty if unknown.
    pub model: Arc<str>,
    /// The agent that sent the request, if the request names it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<RecordedAgent>,
    /// Whether the body could be read.
    pub readable: bool,
    /// First estimate of the prompt's length in tokens, by which a strategy is selected.
    pub estimated: u32,
    /// Limit of the response in tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u32>,
    /// As in [`attache_scheduling::RequestFacts`].
    #[serde(skip_serializing_if = "is_default", default)]
    pub priority: i32,
    /// How long the request waited in the queue.
    #[serde(skip_serializing_if = "is_default", default)]
    pub waited: Duration,
    /// The headers that were read, `null` for absent ones.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub headers: BTreeMap<String, Option<String>>,
    /// The gateway's subset hint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subset: Option<Vec<String>>,
    /// The operator's policy for the model.
    #[serde(skip_serializing_if = "is_default", default)]
    pub policy: ModelPolicy,
    /// The prompt as it was looked up; missing without a lookup.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt: Option<Looked>,
    /// A prefill and a decode server could share the request.
    #[serde(skip_serializing_if = "is_default", default)]
    pub splittable: bool,
    /// The request generates tokens. Missing in old recordings of pools that do not split requests, where it has no
    /// effect.
    #[serde(skip_serializing_if = "is_default", default)]
    pub generates: bool,
    /// Encode servers could get its images and audio.
    #[serde(skip_serializing_if = "is_default", default)]
    pub encodable: bool,
    /// Whether the first token of the response will be observed.
    pub streams: bool,
    /// Name of the strategy that decided, for people.
    pub strategy: Arc<str>,
    /// What algorithms computed from the prompt's text, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub digests: BTreeMap<String, Vec<u64>>,
    /// Whether the endpoint was fixed without an algorithm: by a previous response, a reservation or a test header.
    #[serde(skip_serializing_if = "is_default", default)]
    pub preset: bool,
    /// The endpoints, best first; empty when the request was rejected.
    pub picks: Vec<EndpointId>,
    /// The prefill servers of a split request, best first.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub prefill: Vec<EndpointId>,
    /// The encode servers of its images and audio.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub encode: Vec<EndpointId>,
    /// The reason for which the first endpoint was chosen, or the reason of the rejection.
    pub reason: String,
    /// Tokens of the prompt that the first endpoint was expected to have cached.
    pub matched: u32,
    /// Whether the request is a probe.
    #[serde(skip_serializing_if = "is_default", default)]
    pub probe: bool,
}

/// The agent that sent a request. All ids are hashes, which differ between tenants.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RecordedAgent {
    /// The task: a main agent with its sub-agents.
    pub program: Arc<str>,
    /// The sub-agent; missing for the main agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chain: Option<Arc<str>>,
    /// The sub-agent that started this one; missing if it was the main agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent: Option<Arc<str>>,
}

/// A prompt as it was looked up.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Looked {
    /// The available keys: base64 of 64 bits each, little-endian.
    #[serde(with = "keys")]
    pub keys: Vec<BlockKey>,
    /// Whether there are further keys that were not available.
    #[serde(skip_serializing_if = "is_default", default)]
    pub cold: bool,
    /// Whether Attaché made the keys from its own tokens or text.
    #[serde(skip_serializing_if = "is_default", default)]
    pub own_keys: bool,
    /// Whether the request asks not to use the cache.
    #[serde(skip_serializing_if = "is_default", default)]
    pub skips_cache: bool,
    /// Bytes of text, as in [`attache_protocol::Prompt`].
    pub text_bytes: u64,
    /// Number of token ids in all prompts.
    #[serde(skip_serializing_if = "is_default", default)]
    pub token_ids: u64,
    /// Estimated tokens of images, audio and other media.
    #[serde(skip_serializing_if = "is_default", default)]
    pub media_tokens: u64,
    /// Number of prompts in the request.
    pub count: u32,
    /// Length of the prompt, if the engine's tokenizer has counted its tokens.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub tokens: Option<u32>,
    /// The tenant as a hash.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// The text of the prompt was too long to be encoded completely.
    #[serde(skip_serializing_if = "is_default", default)]
    pub cut: bool,
    /// What a decode server keeps of the conversation's previous turn.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub carried: Option<Kept>,
}

/// The first tokens of a prompt, which a decode server keeps of the conversation's previous turn.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Kept {
    /// Number of tokens.
    pub tokens: u32,
    /// The decode server.
    pub keeper: EndpointId,
    /// The prefill servers that can fetch them.
    pub by: Vec<EndpointId>,
}

/// The end of a response.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Ended {
    /// Number of the request, as in its decision.
    pub r: u64,
    /// Time of the end in nanoseconds.
    pub at: Timestamp,
    /// Whether the response was received to its last byte.
    pub complete: bool,
    /// Tokens of the prompt, as the server reported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_tokens: Option<u64>,
    /// Tokens of the response, as the server reported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens: Option<u64>,
    /// Cached tokens of the prompt, as the server reported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cached_tokens: Option<u64>,
    /// The keys that the response added to the prompt's; missing if unknown.
    #[serde(with = "maybe_keys", skip_serializing_if = "Option::is_none", default)]
    pub keys: Option<Vec<BlockKey>>,
    /// The leg that has ended.
    #[serde(skip_serializing_if = "is_default", default)]
    pub leg: RequestLeg,
}

impl Ended {
    /// Returns the usage that the response reported.
    #[must_use]
    pub fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.completion_tokens,
            cached_tokens: self.cached_tokens,
        }
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Base64 of numbers of 64 bits, little-endian.
pub(super) fn encode(numbers: impl Iterator<Item = u64>) -> String {
    let bytes: Vec<u8> = numbers.flat_map(u64::to_le_bytes).collect();
    STANDARD_NO_PAD.encode(bytes)
}

pub(super) fn decode(text: &str) -> Result<Vec<u64>, String> {
    let bytes = STANDARD_NO_PAD.decode(text).map_err(|e| format!("it is not base64: {e}"))?;
    let (numbers, rest) = bytes.as_chunks::<8>();
    if !rest.is_empty() {
        return Err(format!("it has {} bytes; a multiple of 8 is allowed", bytes.len()));
    }
    Ok(numbers.iter().map(|number| u64::from_le_bytes(*number)).collect())
}

fn keys_of(text: &str) -> Result<Vec<BlockKey>, String> {
    let numbers = decode(text).map_err(|error| format!("`keys`: {error}"))?;
    Ok(numbers.into_iter().map(BlockKey).collect())
}

mod keys {
    use super::{BlockKey, Deserialize, Deserializer, Error, Serializer, encode, keys_of};
    use std::borrow::Cow;

    pub(super) fn serialize<S: Serializer>(keys: &[BlockKey], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&encode(keys.iter().map(|key| key.0)))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<BlockKey>, D::Error> {
        keys_of(&Cow::<'_, str>::deserialize(from)?).map_err(D::Error::custom)
    }
}

mod maybe_keys {
    use super::{BlockKey, Deserialize, Deserializer, Error, Serializer, encode, keys_of};
    use std::borrow::Cow;

    pub(super) fn serialize<S: Serializer>(keys: &Option<Vec<BlockKey>>, to: S) -> Result<S::Ok, S::Error> {
        match keys {
            Some(keys) => to.serialize_str(&encode(keys.iter().map(|key| key.0))),
            None => to.serialize_none(),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Vec<BlockKey>>, D::Error> {
        let text = Option::<Cow<'_, str>>::deserialize(from)?;
        text.map(|text| keys_of(&text)).transpose().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_lines_of_old_recordings_lack_api_and_client() {
        let old = r#"{"health":{"r":7,"at":3,"id":1,"outcome":"failure"}}"#;
        let (api, client) = (Api::default(), ClientSlot::default());
        let line =
            Line::Health { r: 7, at: Timestamp(3), id: EndpointId(1), outcome: HealthOutcome::Failure, api, client };
        assert_eq!(serde_json::from_str::<Line>(old).unwrap(), line);
        assert_eq!(serde_json::to_string(&line).unwrap(), old);
        let (api, client) = (Api::ChatCompletions, ClientSlot::of(b"tenant"));
        let line = Line::Health {
            r: 7,
            at: Timestamp(3),
            id: EndpointId(1),
            outcome: HealthOutcome::ErrorResponse,
            api,
            client,
        };
        let text = serde_json::to_string(&line).unwrap();
        assert!(text.contains(r#""outcome":"error_response","api":"chat_completions","client":"#), "{text}");
        assert_eq!(serde_json::from_str::<Line>(&text).unwrap(), line);
    }
}
