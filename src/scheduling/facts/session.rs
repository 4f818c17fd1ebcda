//! The server of a session: from a token that the client returns, or recorded by the session's id.
//!
//! ```text
//! encoded_endpoint_header   response: `x-session-token: base64(name of the server)`; the client sends it with the next
//!                           request
//! session_id                request: `x-session-id: anything`; the server of the id's last request is recorded
//! ```
//!
//! Clients choose the ids, so they are stored as keyed hashes, at most [`MAX_SESSIONS`], least recently used evicted
//! first. Each expires `evictionTtlSeconds` after its last request. The parameters are those of llm-d's
//! session-affinity filter and scorer, old and new.

use crate::plugin::{Inert, ParamError, ResponseHeaders};
use crate::{Candidate, PickContext};
use attache_pool::Endpoint;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use quick_cache::sync::Cache;
use serde::Deserialize;
use serde_json::Value;
use std::time::Duration;

/// llm-d's header with the token of `encoded_endpoint_header`.
pub const DEFAULT_TOKEN_HEADER: &str = "x-session-token";
/// llm-d's header with the id of `session_id`.
pub const DEFAULT_ID_HEADER: &str = "x-session-id";
/// llm-d's name of a coding agent's session id, which its plugin of the same name reads from [`AGENT_HEADERS`].
pub const AGENT_ATTRIBUTE: &str = "agent-identity";
/// Headers with the session ids of coding agents, in llm-d's order: Claude Code, OpenCode, Codex, older Codex.
pub const AGENT_HEADERS: [&str; 4] = ["x-claude-code-session-id", "x-session-affinity", "session-id", "session_id"];
/// 5 min, llm-d's default: longer than a person thinks, about as long as a prefix stays cached.
pub const DEFAULT_SESSION_TTL: Duration = Duration::from_secs(300);
/// 100,000 sessions, about 6 MB. Clients choose ids, so their number must be bounded.
pub const MAX_SESSIONS: usize = 100_000;
/// Longest token that is decoded, in bytes: four times the longest name of a pod.
const MAX_TOKEN_BYTES: usize = 1_024;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum SessionStrategy {
    #[default]
    EncodedEndpointHeader,
    #[serde(alias = "session_id_header")]
    SessionId,
}

/// Parameters of session affinity, as configured.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct SessionParams {
    #[serde(alias = "algorithm")]
    strategy: SessionStrategy,
    encoded_endpoint_header_config: TokenParams,
    session_id_config: IdParams,
    /// The older scorer's parameter for the header of either strategy.
    header_name: Option<String>,
    /// The older scorer's parameter for the lifetime.
    eviction_ttl_seconds: Option<f64>,
    // Accepted without effect, see `INERT`.
    #[serde(rename = "profileName")]
    _profile: Option<String>,
    #[serde(rename = "evictionSweepSeconds")]
    _sweep: Option<f64>,
    #[serde(rename = "missThreshold")]
    _misses: Option<u32>,
}

const PLUGINS: &[&str] = &["session-affinity-filter", "session-affinity-scorer"];

fn is_by_id(parameters: &Value) -> bool {
    let strategy = parameters.get("strategy").or_else(|| parameters.get("algorithm"));
    matches!(strategy.and_then(Value::as_str), Some("session_id" | "session_id_header"))
}

/// Whether a newer parameter names the header, so that `headerName` is not read.
fn names_header(parameters: &Value) -> bool {
    if is_by_id(parameters) {
        parameters.pointer("/sessionIdConfig/sources").and_then(Value::as_array).is_some_and(|s| !s.is_empty())
    } else {
        parameters.pointer("/encodedEndpointHeaderConfig/header").is_some_and(|header| !header.is_null())
    }
}

/// Parameters that change nothing.
pub const INERT: &[Inert] = &[
    Inert {
        plugins: PLUGINS,
        keys: &["sessionIdConfig", "evictionTtlSeconds"],
        when: |all| !is_by_id(all),
        why: "it needs `strategy: session_id`; here sessions are found by the server's name in a header",
    },
    Inert {
        plugins: PLUGINS,
        keys: &["encodedEndpointHeaderConfig"],
        when: is_by_id,
        why: "it needs `strategy: encoded_endpoint_header`; here sessions are found by their ids",
    },
    Inert {
        plugins: PLUGINS,
        keys: &["headerName"],
        when: names_header,
        why: "`encodedEndpointHeaderConfig.header` or `sessionIdConfig.sources` names the header",
    },
    Inert {
        plugins: PLUGINS,
        keys: &["evictionTtlSeconds"],
        when: |all| is_by_id(all) && all.pointer("/sessionIdConfig/evictionTtlSeconds").is_some_and(|v| !v.is_null()),
        why: "`sessionIdConfig.evictionTtlSeconds` says it",
    },
    Inert {
        plugins: PLUGINS,
        keys: &["sessionIdConfig.evictionSweepSeconds"],
        when: is_by_id,
        why: "expired sessions are dropped without a sweep",
    },
    Inert {
        plugins: PLUGINS,
        keys: &["evictionSweepSeconds"],
        when: |_| true,
        why: "expired sessions are dropped without a sweep",
    },
    Inert {
        plugins: PLUGINS,
        keys: &["profileName"],
        when: |_| true,
        why: "a plugin belongs to the profiles that list it",
    },
    Inert {
        plugins: PLUGINS,
        keys: &["missThreshold"],
        when: |_| true,
        why: "a server that is not available is replaced at once",
    },
];

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct TokenParams {
    header: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct IdParams {
    sources: Vec<SessionSource>,
    eviction_ttl_seconds: Option<f64>,
    #[serde(rename = "evictionSweepSeconds")]
    _sweep: Option<f64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SessionSource {
    header: Option<String>,
    attribute: Option<String>,
}

impl SessionParams {
    /// Checks the parameters and builds the session lookup.
    ///
    /// # Errors
    /// A header name is invalid, a lifetime is not positive, or a source is not a header.
    pub fn build(self) -> Result<Session, ParamError> {
        match self.strategy {
            SessionStrategy::EncodedEndpointHeader => {
                let given = self.encoded_endpoint_header_config.header.or(self.header_name);
                Ok(Session::Token { header: header("header", given.as_deref().unwrap_or(DEFAULT_TOKEN_HEADER))? })
            }
            SessionStrategy::SessionId => {
                let mut headers = Vec::new();
                for (index, source) in self.session_id_config.sources.into_iter().enumerate() {
                    match (source.header, source.attribute.as_deref()) {
                        (Some(name), None) => headers.push(
                            header("header", &name)
                                .map_err(|e| e.in_item(index).under("sources").under("sessionIdConfig"))?,
                        ),
                        (None, Some(AGENT_ATTRIBUTE)) => headers.extend(AGENT_HEADERS.map(Box::from)),
                        _ => {
                            let message = format!(
                                "`sources` must each name a `header`, or the `attribute` `{AGENT_ATTRIBUTE}`; \
                                 attributes of other plugins are not held"
                            );
                            return Err(ParamError::new(message)
                                .in_item(index)
                                .under("sources")
                                .under("sessionIdConfig"));
                        }
                    }
                }
                if headers.is_empty() {
                    headers.push(header("headerName", self.header_name.as_deref().unwrap_or(DEFAULT_ID_HEADER))?);
                }
                let ttl = match (self.session_id_config.eviction_ttl_seconds, self.eviction_ttl_seconds) {
                    (Some(seconds), _) => lifetime(seconds).map_err(|e| e.under("sessionIdConfig"))?,
                    (None, Some(seconds)) => lifetime(seconds)?,
                    (None, None) => DEFAULT_SESSION_TTL,
                };
                let bindings = Box::new(Cache::new(MAX_SESSIONS));
                Ok(Session::Id { headers, ttl, bindings, hasher: ahash::RandomState::new() })
            }
        }
    }
}

fn lifetime(seconds: f64) -> Result<Duration, ParamError> {
    let ttl = Duration::try_from_secs_f64(seconds).ok().filter(|ttl| !ttl.is_zero());
    ttl.ok_or_else(|| ParamError::value("evictionTtlSeconds", seconds, "more than 0 is allowed"))
}

/// A header's name in lower case.
///
/// # Errors
/// The name has a character that is not allowed in header names.
pub fn header(parameter: &str, name: &str) -> Result<Box<str>, ParamError> {
    let token = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
    if name.is_empty() || !name.bytes().all(token) {
        return Err(ParamError::value(parameter, format!("`{name}`"), "the name of a header is needed"));
    }
    Ok(name.to_ascii_lowercase().into())
}

/// The server that served a session last, and when.
#[derive(Clone, Copy, Debug)]
pub struct Binding {
    endpoint: EndpointId,
    seen: Timestamp,
}

/// How sessions are identified.
#[derive(Debug)]
pub enum Session {
    /// By a token with the server's name, which the client keeps.
    Token {
        /// Name of the request and response header.
        header: Box<str>,
    },
    /// By an id that the client chooses; Attaché records the server.
    Id {
        /// Request headers with the id; the first one present counts.
        headers: Vec<Box<str>>,
        /// Time after its last request at which a session expires.
        ttl: Duration,
        /// Recorded servers, by the id's hash.
        bindings: Box<Cache<u64, Binding>>,
        /// Keyed, so that clients cannot make ids collide.
        hasher: ahash::RandomState,
    },
}

/// The server of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionServer {
    /// The server with this name.
    Name(String),
    /// The endpoint with this id.
    Id(EndpointId),
}

impl SessionServer {
    /// Whether `candidate` is that server.
    #[must_use]
    pub fn is(&self, candidate: &Candidate<'_>) -> bool {
        let endpoint = &candidate.state.endpoint;
        match self {
            SessionServer::Name(name) => *endpoint.spec.name == **name,
            SessionServer::Id(id) => endpoint.id == *id,
        }
    }
}

impl Session {
    /// The server of the request's session; `None` if it has none yet, or the request has no session.
    #[must_use]
    pub fn bound(&self, cx: &PickContext<'_>) -> Option<SessionServer> {
        match self {
            Session::Token { header } => {
                let token = cx.request.headers.get(header).map(str::trim).filter(|t| t.len() <= MAX_TOKEN_BYTES)?;
                let bytes = STANDARD.decode(token).ok()?;
                let name = String::from_utf8(bytes).ok()?;
                // llm-d writes `namespace/name`.
                Some(SessionServer::Name(name.rsplit_once('/').map_or(name.as_str(), |(_, name)| name).to_owned()))
            }
            Session::Id { ttl, bindings, .. } => {
                let binding = bindings.get(&self.key(cx)?)?;
                (cx.now.since(binding.seen) <= *ttl).then_some(SessionServer::Id(binding.endpoint))
            }
        }
    }

    /// Records that the request's session was sent to `endpoint`.
    pub fn picked(&self, cx: &PickContext<'_>, endpoint: &Endpoint) {
        if let Session::Id { bindings, .. } = self
            && let Some(key) = self.key(cx)
        {
            bindings.insert(key, Binding { endpoint: endpoint.id, seen: cx.now });
        }
    }

    /// Adds the session token with the server's name to the response.
    pub fn response_headers(&self, endpoint: &Endpoint, headers: &mut ResponseHeaders) {
        if let Session::Token { header } = self {
            headers.push((header.to_string().into(), STANDARD.encode(&*endpoint.spec.name)));
        }
    }

    fn key(&self, cx: &PickContext<'_>) -> Option<u64> {
        let Session::Id { headers, hasher, .. } = self else { return None };
        let mut ids = headers.iter().filter_map(|name| cx.request.headers.get(name).map(str::trim));
        ids.find(|id| !id.is_empty()).map(|id| hasher.hash_one(id))
    }
}
