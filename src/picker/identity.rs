//! Which agent sent a request: the program, the chain, its parent, and what the request is for.
//!
//! ```text
//! headers ─▶ body ─▶ the response that it continues ─▶ prompt_cache_key ─▶ its first tool call
//! ```
//!
//! The first that names a session counts. Clients choose all these ids. So they may change the cost and the order of
//! requests, but never what a request may do, and what is remembered of them is bounded and kept apart by tenant. A
//! request without any of them costs one look at each header name ([`may_name_session`]).

use super::Picker;
use super::head::Head;
use super::tenant::Tenant;
use attache_protocol::Request;
use attache_request::agent::{AgentIdentity, AgentKind, IdentitySource};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use std::borrow::Cow;
use std::net::SocketAddr;
use std::sync::Arc;

mod programs;

pub use programs::KnownSession;
pub(super) use programs::{Programs, Turn};

/// Longest id, bytes. A longer one is no id.
pub const MAX_ID_BYTES: usize = 256;
/// Longest JSON text in a header or in `metadata.user_id` that is parsed, bytes.
const MAX_JSON_BYTES: usize = 16 << 10;

/// Headers of one client that name a session.
struct SessionHeaders {
    /// Has the id of the program, or that of the chain if `names_chain` is set.
    session: &'static str,
    /// Has the id of the chain.
    chain: Option<&'static str>,
    /// Has the id of the parent's chain.
    parent: Option<&'static str>,
    /// `session` is the id of a chain. Its program is that of its parent.
    names_chain: bool,
}

/// A client whose only header names a session without sub-agents.
const fn alone(session: &'static str) -> SessionHeaders {
    SessionHeaders { session, chain: None, parent: None, names_chain: false }
}

/// A client whose header names a chain, and another one its parent.
const fn chain(session: &'static str, parent: &'static str) -> SessionHeaders {
    SessionHeaders { session, chain: None, parent: Some(parent), names_chain: true }
}

/// The first one of which the request has the session counts, so names of single clients precede those that many use.
const SESSION_HEADERS: &[SessionHeaders] = &[
    // Claude Code.
    SessionHeaders {
        session: "x-claude-code-session-id",
        chain: Some("x-claude-code-agent-id"),
        parent: Some("x-claude-code-parent-agent-id"),
        names_chain: false,
    },
    // Codex.
    SessionHeaders {
        session: "session-id",
        chain: Some("thread-id"),
        parent: Some("x-codex-parent-thread-id"),
        names_chain: false,
    },
    chain("x-dynamo-session-id", "x-dynamo-parent-session-id"),
    // OpenCode.
    chain("x-session-affinity", "x-parent-session-id"),
    // Goose.
    alone("agent-session-id"),
    // Copilot in VS Code, Copilot CLI.
    alone("x-interaction-id"),
    alone("x-client-session-id"),
    alone("x-kilocode-taskid"),
    alone("x-amp-thread-id"),
    // Codex before 0.131, pi.
    SessionHeaders { session: "session_id", chain: None, parent: Some("x-codex-parent-thread-id"), names_chain: false },
    alone("x-litellm-session-id"),
    // xAI.
    alone("x-grok-conv-id"),
    // SGLang's gateway, AIBrix.
    alone("x-sgl-routing-key"),
    alone("x-aibrix-session-key"),
    // llm-d, vLLM, OpenRouter.
    chain(SHARED_HEADER, "x-parent-session-id"),
];

/// In AIBrix, its value is the address of a server instead of a session.
const SHARED_HEADER: &str = "x-session-id";

/// Whether a header of this lower-case name names a session. Most headers fail a cheap check of length and letters.
pub(super) fn may_name_session(name: &str) -> bool {
    #[expect(clippy::indexing_slicing, reason = "an index out of range fails the build")]
    const LENGTHS: [u32; 26] = {
        let (mut lengths, mut left) = ([0; 26], SESSION_HEADERS);
        while let [SessionHeaders { session, .. }, rest @ ..] = left {
            if let [b'x', b'-', letter, ..] = session.as_bytes() {
                lengths[(*letter - b'a') as usize] |= 1 << session.len();
            }
            left = rest;
        }
        lengths
    };
    let may = match name.as_bytes() {
        [b'x', b'-', letter @ b'a'..=b'z', ..] if name.len() < 32 => {
            LENGTHS.get(usize::from(*letter - b'a')).is_some_and(|lengths| lengths >> name.len() & 1 == 1)
        }
        [b's' | b'a', ..] => matches!(name, "session-id" | "session_id" | "agent-session-id"),
        _ => false,
    };
    may && SESSION_HEADERS.iter().any(|headers| headers.session == name)
}

/// An id that may be used: not blank, at most [`MAX_ID_BYTES`] long, without control characters.
pub(super) fn valid(id: &str) -> Option<&str> {
    let id = id.trim();
    ((1..=MAX_ID_BYTES).contains(&id.len()) && !id.chars().any(char::is_control)).then_some(id)
}

/// The program's id of a request, and where it is from.
struct Named<'a> {
    program: Cow<'a, str>,
    chain: Option<&'a str>,
    parent: Option<&'a str>,
    source: IdentitySource,
    field: &'static str,
}

impl<'a> Named<'a> {
    /// A program without sub-agents.
    fn alone(program: impl Into<Cow<'a, str>>, source: IdentitySource, field: &'static str) -> Self {
        Self { program: program.into(), chain: None, parent: None, source, field }
    }
}

impl Picker {
    /// The agent that these headers name, for a request that is rejected before its body is read.
    #[must_use]
    pub fn agent_of_headers(&self, head: &Head) -> Option<Box<AgentIdentity>> {
        self.programs.identify(head, None)
    }
}

impl Programs {
    /// The agent of the request with these headers and this parsed body; `None` if nothing names it.
    pub(super) fn identify(&self, head: &Head, request: Option<&Request<'_>>) -> Option<Box<AgentIdentity>> {
        let names_session = |r: &&Request<'_>| {
            let conversation = r.conversation.is_some() || r.previous_response_id.is_some();
            let session = conversation || r.session_id.is_some() || r.metadata_user_id.is_some();
            session || r.prompt_cache_key.is_some() || r.prompt.first_tool_call.is_some()
        };
        let request = request.filter(names_session);
        if request.is_none() && !head.names_session() {
            return None;
        }
        let named = self.by_headers(head).or_else(|| self.by_body(head, request?))?;
        Some(Box::new(named.identity(head)))
    }

    fn by_headers<'a>(&self, head: &'a Head) -> Option<Named<'a>> {
        if !head.names_session() {
            return None;
        }
        let of = |names: &'static SessionHeaders| {
            let id = head.get(names.session).and_then(valid);
            Some((names, id.filter(|id| names.session != SHARED_HEADER || !is_address(id))?))
        };
        let (names, session) = SESSION_HEADERS.iter().find_map(of)?;
        let value = |name: Option<&'static str>| head.get(name?).and_then(valid);
        let (chain, parent) = (value(names.chain), value(names.parent));
        let (source, field) = (IdentitySource::Header, names.session);
        let Some(parent) = parent.filter(|_| names.names_chain) else {
            return Some(Named { program: session.into(), chain, parent, source, field });
        };
        Some(Named { program: self.root(head, parent), chain: Some(session), parent: Some(parent), source, field })
    }

    /// The program of a chain or of a stored response. An unknown one starts a program of its own.
    fn root<'a>(&self, head: &Head, id: &'a str) -> Cow<'a, str> {
        self.of(head.tenant().name(), id).map_or(Cow::Borrowed(id), |program| program.id.to_string().into())
    }

    fn by_body<'a>(&self, head: &Head, request: &'a Request<'_>) -> Option<Named<'a>> {
        let session = request.metadata_user_id.as_deref().and_then(session_of_user);
        let given = |id: &'a Option<Cow<'_, str>>| id.as_deref().and_then(valid);
        let in_body = |id: &'a Option<Cow<'_, str>>, field| Some(Named::alone(given(id)?, IdentitySource::Body, field));
        let user = session.map(|program| Named::alone(program, IdentitySource::Body, "metadata.user_id"));
        user.or_else(|| in_body(&request.session_id, "session_id"))
            .or_else(|| in_body(&request.conversation, "conversation"))
            .or_else(|| {
                let previous = given(&request.previous_response_id)?;
                let program = self.root(head, previous);
                Some(Named::alone(program, IdentitySource::Inferred, "previous_response_id"))
            })
            .or_else(|| in_body(&request.prompt_cache_key, "prompt_cache_key"))
            .or_else(|| {
                let call = given(&request.prompt.first_tool_call).filter(|id| is_unique(id))?;
                Some(Named::alone(call, IdentitySource::Inferred, "tool_call_id"))
            })
    }

    /// Remembers the program of the request's chain. A sub-agent of the chain may name only its parent, and the end of a
    /// session only the chain.
    pub(super) fn booked(&self, agent: &AgentIdentity) {
        if agent.chain != agent.program {
            self.learn_chain(agent);
        }
    }

    /// Remembers the program of a stored response. The next request may name only this response.
    pub(super) fn stored(&self, agent: &AgentIdentity, response: &str) {
        if agent.source != IdentitySource::Header {
            self.learn_response(agent, response);
        }
    }
}

impl Named<'_> {
    fn identity(&self, head: &Head) -> AgentIdentity {
        let program: Arc<str> = (&*self.program).into();
        let chain = self.chain.or_else(|| {
            let agent = || head.get("x-claude-code-agent-id").and_then(valid);
            (self.field == "metadata.user_id").then(agent).flatten()
        });
        let chain: Option<Arc<str>> = chain.filter(|chain| **chain != *program).map(Into::into);
        // The parent of a sub-agent without one is the main agent.
        let parent = self.parent.map(Into::into).or_else(|| chain.is_some().then(|| program.clone()));
        let started = parent.is_some();
        let tenant = match head.tenant() {
            Tenant::Named(tenant) => Some(tenant.clone()),
            Tenant::Unconfigured | Tenant::Missing => None,
        };
        AgentIdentity {
            tenant,
            kind: kind(head).unwrap_or(if started { AgentKind::SubAgent } else { AgentKind::Main }),
            chain: chain.unwrap_or_else(|| program.clone()),
            parent,
            source: self.source,
            field: self.field,
            program,
        }
    }
}

/// Dynamo's header: the request is the last one of its session.
const FINAL_HEADER: &str = "x-dynamo-session-final";

/// Whether the client marks the request as the last one of its session.
pub(super) fn is_final(head: &Head) -> bool {
    head.get(FINAL_HEADER).is_some_and(|value| value.trim().eq_ignore_ascii_case("true"))
}

/// What the headers of Claude Code and Codex say that the request is for.
fn kind(head: &Head) -> Option<AgentKind> {
    match head.get("x-claude-code-request-class").map(str::trim) {
        Some("main") => return Some(AgentKind::Main),
        Some("subagent" | "workflow") => return Some(AgentKind::SubAgent),
        Some("compaction") => return Some(AgentKind::Compaction),
        Some("auxiliary") => return Some(AgentKind::Auxiliary),
        _ => {}
    }
    #[derive(Deserialize)]
    struct TurnMetadata<'a> {
        #[serde(borrow, default)]
        request_kind: Option<Cow<'a, str>>,
    }
    let metadata = head.get("x-codex-turn-metadata").filter(|text| text.len() <= MAX_JSON_BYTES);
    let metadata = metadata.and_then(|text| serde_json::from_str::<TurnMetadata<'_>>(text).ok());
    match metadata.and_then(|metadata| metadata.request_kind).as_deref() {
        Some("compaction") => return Some(AgentKind::Compaction),
        Some("memory" | "prewarm") => return Some(AgentKind::Auxiliary),
        _ => {}
    }
    match head.get("x-openai-subagent").map(str::trim)? {
        "compact" => Some(AgentKind::Compaction),
        "memory_consolidation" => Some(AgentKind::Auxiliary),
        _ => Some(AgentKind::SubAgent),
    }
}

/// The session in Claude Code's `metadata.user_id`: JSON text with `session_id`, or before version 2.1.78
/// `user_HASH_account_UUID_session_UUID`. Any other value names a person.
fn session_of_user(user: &str) -> Option<Cow<'_, str>> {
    #[derive(Deserialize)]
    struct UserId<'a> {
        #[serde(borrow)]
        session_id: Cow<'a, str>,
    }
    if user.starts_with('{') {
        let user: UserId<'_> = serde_json::from_str(Some(user).filter(|user| user.len() <= MAX_JSON_BYTES)?).ok()?;
        return match user.session_id {
            Cow::Borrowed(id) => valid(id).map(Cow::Borrowed),
            Cow::Owned(id) => valid(&id).map(|id| id.to_owned().into()),
        };
    }
    let (_, session) = user.strip_prefix("user_").and_then(|user| user.split_once("_session_"))?;
    valid(session).map(Cow::Borrowed)
}

/// Shortest random part in the ids of tool calls, characters: Ollama's `call_` with eight letters and digits.
const RANDOM_CHARS: usize = 8;

/// Whether no other conversation has a tool call of this id. Some servers count the calls of a conversation, and some
/// gateways use the name of the tool: `functions.read_file:0`, `call_1`, `read_file`.
fn is_unique(call: &str) -> bool {
    let random = call.rsplit(|c: char| !c.is_ascii_alphanumeric()).next().unwrap_or_default();
    random.len() >= RANDOM_CHARS && random.bytes().any(|byte| byte.is_ascii_digit())
}

/// Whether this id is the address of a server, as AIBrix returns it to clients.
fn is_address(id: &str) -> bool {
    let mut decoded = [0; MAX_ID_BYTES];
    let address = BASE64_STANDARD.decode_slice(id, &mut decoded).ok().and_then(|length| decoded.get(..length));
    address.and_then(|bytes| std::str::from_utf8(bytes).ok()).is_some_and(|text| text.parse::<SocketAddr>().is_ok())
}

#[cfg(test)]
mod tests;
