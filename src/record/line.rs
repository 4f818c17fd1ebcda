//! The recording format `attache.record.v1`: one JSON object a line, in exactly the order in which what decisions see has changed.
//!
//! The first line is a [`Header`]. Every other one is a [`Line`]: an object with one field, whose name says what happened. Requests have
//! numbers (`r`) in the order of their decisions, pools in the order in which they were made, configurations in the order in which they
//! came into force; times are nanoseconds since an origin of the process. No text of a prompt or of an answer is in it: prompts are
//! the keys of their blocks (seeded hashes) and lengths, tenants and credentials are hashes. Model names, endpoints, the settings and
//! the values of those other headers that the routing algorithm has read are in it as they are.

use attache_pool::health::{ClientSlot, Outcome};
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

/// What the first line holds in `format`.
pub const FORMAT: &str = "attache.record.v1";

/// The first line.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Header {
    /// [`FORMAT`].
    pub format: String,
    /// Of the picker that recorded.
    pub version: String,
    /// Of all that it drew and hashed.
    pub seed: u64,
    /// The settings of the start, configuration number 0, as `/config_dump` shows them.
    pub settings: Value,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Line {
    /// A pool begins, without endpoints.
    Pool { pool: u32, name: Arc<str>, cache: CacheConfig },
    /// What is known of its caches begins anew, and says nothing of the old keys.
    Cache { pool: u32, cache: CacheConfig },
    /// A source of discovery said which endpoints there are.
    Endpoints { pool: u32, source: SourceId, endpoints: Vec<EndpointSpec> },
    /// A source is no more.
    Gone { pool: u32, source: SourceId },
    /// These are the sources from now on.
    Expect { pool: u32, sources: Vec<SourceId> },
    /// A page was read.
    Page { pool: u32, id: EndpointId, metrics: Arc<EndpointMetrics> },
    /// A server's process is a new one.
    Restart { pool: u32, id: EndpointId },
    /// A server has cleared its cache.
    Cleared { pool: u32, id: EndpointId },
    /// What was said of the pool so far is what decisions see from now on.
    Publish { pool: u32 },
    /// A configuration came into force for streams that open from now on.
    Live { live: u32, settings: Value },
    /// A decision, and its booking.
    Decide(Box<Decided>),
    /// Envoy served the request elsewhere.
    Moved { r: u64, at: Timestamp, to: EndpointId },
    /// The outcome of a request for an endpoint's health. Recordings from before error responses were counted by API and client have
    /// neither; a 5xx is a `failure` there.
    Health {
        r: u64,
        at: Timestamp,
        id: EndpointId,
        outcome: Outcome,
        #[serde(skip_serializing_if = "is_default", default)]
        api: Api,
        #[serde(skip_serializing_if = "is_default", default)]
        client: ClientSlot,
    },
    /// A probe ended without telling anything of this endpoint.
    ProbeLost { r: u64, id: EndpointId },
    /// The first byte of the answer; `good` and `tells` as in [`attache_scheduling::Booking::first_byte`].
    First { r: u64, at: Timestamp, good: bool, tells: bool },
    /// The end of the answer.
    End(Ended),
    /// The request is gone without an end.
    Drop { r: u64 },
}

/// All that a decision was made from, and what it came to.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Decided {
    /// The request's number.
    pub r: u64,
    /// The moment.
    pub at: Timestamp,
    /// The configuration that the stream began with.
    pub live: u32,
    /// The pool's name in it.
    pub pool: Arc<str>,
    /// What the generator of this decision was seeded with.
    pub rng: u64,
    /// The server's name for the model; empty when unknown.
    pub model: Arc<str>,
    /// The body was read.
    pub readable: bool,
    /// The first estimate of the prompt's length, tokens, by which a strategy is chosen.
    pub estimated: u32,
    /// Longest answer asked for, tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u32>,
    /// As in [`attache_scheduling::RequestFacts`].
    #[serde(skip_serializing_if = "is_default", default)]
    pub priority: i32,
    /// How long it had waited for its turn.
    #[serde(skip_serializing_if = "is_default", default)]
    pub waited: Duration,
    /// The headers that were asked for, `null` for those that the request does not have.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub headers: BTreeMap<String, Option<String>>,
    /// The gateway's subset hint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subset: Option<Vec<String>>,
    /// What operators had said about the model.
    #[serde(skip_serializing_if = "is_default", default)]
    pub policy: ModelPolicy,
    /// What was looked up; missing when nothing was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt: Option<Looked>,
    /// The first token of the answer will be seen as it comes.
    pub streams: bool,
    /// The strategy that decided, for people.
    pub strategy: Arc<str>,
    /// What algorithms made of the prompt's text, by what it is.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub digests: BTreeMap<String, Vec<u64>>,
    /// No algorithm decided: an earlier answer lives there, or a test named it.
    #[serde(skip_serializing_if = "is_default", default)]
    pub preset: bool,
    /// The endpoints, best first; empty when the request was refused.
    pub picks: Vec<EndpointId>,
    /// Why the first won, or the reason of the refusal.
    pub reason: String,
    /// Tokens of the prompt that the first was thought to hold.
    pub matched: u32,
    /// The request is a probe.
    #[serde(skip_serializing_if = "is_default", default)]
    pub probe: bool,
}

/// A prompt as it was looked up.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Looked {
    /// The keys that were at hand: base64 of 64 bits each, little-endian.
    #[serde(with = "keys")]
    pub keys: Vec<BlockKey>,
    /// There are more that were not at hand.
    #[serde(skip_serializing_if = "is_default", default)]
    pub cold: bool,
    /// The keys are of the picker's own making.
    #[serde(skip_serializing_if = "is_default", default)]
    pub own_keys: bool,
    /// The request asks not to use the cache.
    #[serde(skip_serializing_if = "is_default", default)]
    pub skips_cache: bool,
    /// Bytes of text, as in [`attache_protocol::Prompt`].
    pub text_bytes: u64,
    /// Token ids.
    #[serde(skip_serializing_if = "is_default", default)]
    pub token_ids: u64,
    /// A guess at the tokens of media.
    #[serde(skip_serializing_if = "is_default", default)]
    pub media_tokens: u64,
    /// How many prompts.
    pub count: u32,
    /// Who asks, as a hash.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
}

/// The end of an answer.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Ended {
    /// The request's number.
    pub r: u64,
    /// The moment.
    pub at: Timestamp,
    /// It was seen to its last byte.
    pub complete: bool,
    /// As the server told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_tokens: Option<u64>,
    /// As the server told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens: Option<u64>,
    /// As the server told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cached_tokens: Option<u64>,
    /// The keys that the answer added to the prompt's; missing when that could not be told.
    #[serde(with = "maybe_keys", skip_serializing_if = "Option::is_none", default)]
    pub keys: Option<Vec<BlockKey>>,
}

impl Ended {
    /// What the answer told.
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

fn encode(keys: &[BlockKey]) -> String {
    let bytes: Vec<u8> = keys.iter().flat_map(|key| key.0.to_le_bytes()).collect();
    STANDARD_NO_PAD.encode(bytes)
}

fn decode(text: &str) -> Result<Vec<BlockKey>, String> {
    let bytes = STANDARD_NO_PAD.decode(text).map_err(|e| format!("`keys` is no base64: {e}"))?;
    let (keys, rest) = bytes.as_chunks::<8>();
    if !rest.is_empty() {
        return Err(format!("`keys` has {} bytes; a multiple of 8 is allowed", bytes.len()));
    }
    Ok(keys.iter().map(|key| BlockKey(u64::from_le_bytes(*key))).collect())
}

mod keys {
    use super::{BlockKey, Deserialize, Deserializer, Error, Serializer, decode, encode};
    use std::borrow::Cow;

    pub(super) fn serialize<S: Serializer>(keys: &[BlockKey], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&encode(keys))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<BlockKey>, D::Error> {
        decode(&Cow::<'_, str>::deserialize(from)?).map_err(D::Error::custom)
    }
}

mod maybe_keys {
    use super::{BlockKey, Deserialize, Deserializer, Error, Serializer, decode, encode};
    use std::borrow::Cow;

    pub(super) fn serialize<S: Serializer>(keys: &Option<Vec<BlockKey>>, to: S) -> Result<S::Ok, S::Error> {
        match keys {
            Some(keys) => to.serialize_str(&encode(keys)),
            None => to.serialize_none(),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Vec<BlockKey>>, D::Error> {
        let text = Option::<Cow<'_, str>>::deserialize(from)?;
        text.map(|text| decode(&text)).transpose().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_lines_of_old_recordings_have_neither_api_nor_client() {
        let old = r#"{"health":{"r":7,"at":3,"id":1,"outcome":"failure"}}"#;
        let (api, client) = (Api::default(), ClientSlot::default());
        let line = Line::Health { r: 7, at: Timestamp(3), id: EndpointId(1), outcome: Outcome::Failure, api, client };
        assert_eq!(serde_json::from_str::<Line>(old).unwrap(), line);
        assert_eq!(serde_json::to_string(&line).unwrap(), old);
        let (api, client) = (Api::ChatCompletions, ClientSlot::of(b"tenant"));
        let line =
            Line::Health { r: 7, at: Timestamp(3), id: EndpointId(1), outcome: Outcome::ErrorResponse, api, client };
        let text = serde_json::to_string(&line).unwrap();
        assert!(text.contains(r#""outcome":"error_response","api":"chat_completions","client":"#), "{text}");
        assert_eq!(serde_json::from_str::<Line>(&text).unwrap(), line);
    }
}
