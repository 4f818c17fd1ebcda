//! The server of a session: from a token that the client returns, or recorded by the session's id.
//!
//! ```text
//! encoded_endpoint_header   response: `x-session-token: base64(name of the server)`; the client sends it with the next
//!                           request
//! session_id                request: `x-session-id: anything`; the server of the id's last request is recorded
//! ```
//!
//! Clients choose the ids, so they are stored as keyed hashes, apart by tenant and at most [`MAX_SESSIONS`], least
//! recently used evicted first. Each expires `evictionTtlSeconds` after its last request, or when its client ends it.
//! The parameters are those of llm-d's session-affinity filter and scorer, old and new.

use crate::plugin::{Inert, ParamError, ResponseHeaders};
use crate::{Candidate, PickContext};
use attache_pool::Endpoint;
use attache_types::clock::Timestamp;
use attache_types::declare::above;
use attache_types::ids::EndpointId;
use attache_types::{keywords, parameters};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use quick_cache::sync::Cache;
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SessionStrategy {
    EncodedEndpointHeader,
    SessionId,
}

keywords! {
    SessionStrategy: "encoded_endpoint_header" => EncodedEndpointHeader,
        "session_id" | "session_id_header" => SessionId;
}

parameters! {
    /// Parameters of session affinity, as configured.
    pub struct SessionParams {
        /// How sessions are identified: by a token with the server's name, or by an id for which Attaché records the
        /// server.
        "strategy" | "algorithm" => strategy: SessionStrategy { default: SessionStrategy::EncodedEndpointHeader; },
        /// With `encoded_endpoint_header`: where the token is.
        "encodedEndpointHeaderConfig" => token: TokenParams,
        /// With `session_id`: where the id is, and how long it is kept.
        "sessionIdConfig" => id: IdParams,
        /// The older scorer's name for the header of either strategy.
        "headerName" => header_name: Option<String> { absent: "`x-session-token` or `x-session-id`"; },
        /// The older scorer's name for `sessionIdConfig.evictionTtlSeconds`.
        "evictionTtlSeconds" => eviction_ttl_seconds: Option<f64> {
            absent: "`300`"; range: above(0.0); unit: "seconds";
        },
        ignored {
            /// Without effect: profiles list their plugins, sessions expire without a sweep, and unavailable servers
            /// are replaced at once.
            "profileName": String, "evictionSweepSeconds": f64, "missThreshold": u32,
        }
    }
    /// Where the token of a session is.
    struct TokenParams {
        /// Header of requests and responses that carries the token.
        "header" => header: Option<String> { absent: "`x-session-token`"; },
    }
    /// Where the id of a session is.
    struct IdParams {
        /// Places of the id. The first one that a request has counts.
        "sources" => sources: Vec<SessionSource> { absent: "the header `x-session-id`"; },
        /// Time after its last request at which a session expires.
        "evictionTtlSeconds" => eviction_ttl_seconds: Option<f64> {
            absent: "`300`"; range: above(0.0); unit: "seconds";
        },
        ignored {
            /// Without effect: expired sessions are dropped without a sweep.
            "evictionSweepSeconds": f64,
        }
    }
    /// A header with the id of a session.
    struct SessionSource {
        /// Request header with the id.
        "header" => header: Option<String> { absent: "required without `attribute`"; },
        /// `agent-identity`: the session headers of Claude Code, OpenCode and Codex.
        "attribute" => attribute: Option<String> { absent: "required without `header`"; },
    }
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

impl SessionParams {
    /// Checks the parameters and builds the session lookup.
    ///
    /// # Errors
    /// A header name is invalid, a lifetime is not positive, or a source is not a header.
    pub fn build(self) -> Result<Session, ParamError> {
        match self.strategy {
            SessionStrategy::EncodedEndpointHeader => {
                let given = self.token.header.or(self.header_name);
                Ok(Session::Token { header: header("header", given.as_deref().unwrap_or(DEFAULT_TOKEN_HEADER))? })
            }
            SessionStrategy::SessionId => {
                let mut headers = Vec::new();
                for (index, source) in self.id.sources.into_iter().enumerate() {
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
                let seconds = self.id.eviction_ttl_seconds.or(self.eviction_ttl_seconds);
                let lifetime = |seconds| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
                let ttl = seconds.map_or(DEFAULT_SESSION_TTL, lifetime);
                let bindings = Box::new(Cache::new(MAX_SESSIONS));
                Ok(Session::Id { headers, ttl, bindings, hasher: ahash::RandomState::new() })
            }
        }
    }
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
        /// Recorded servers, by the hash of tenant and id.
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

    /// Forgets the server of the session `id` of `tenant`.
    pub fn end(&self, tenant: Option<&str>, id: &str) {
        if let Session::Id { bindings, hasher, .. } = self {
            bindings.remove(&hasher.hash_one((tenant, id)));
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
        ids.find(|id| !id.is_empty()).map(|id| hasher.hash_one((cx.request.headers.tenant(), id)))
    }
}
