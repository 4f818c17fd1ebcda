//! Recorded sessions of coding agents: one JSON object a row, prompts as the ids of their blocks.
//!
//! ```json
//! {"id": "trace_0002", "block_size": 64, "hash_id_scope": "local", "tool_tokens": 12448, "system_tokens": 2882,
//!  "requests": [{"t": 0.0, "type": "n", "model": "claude-opus-4-5", "in": 15818, "out": 154, "hash_ids": [1, 2, …],
//!                "input_types": ["text"], "stop": "tool_use", "api_time": 5.23},
//!               {"t": 100.65, "type": "subagent", "agent_id": "agent_001", "duration_ms": 91243, "tool_tokens": 7771,
//!                "system_tokens": 2227, "requests": […]}]}
//! ```
//!
//! | field | meaning |
//! |---|---|
//! | `t` | seconds since the start of the session or sub-agent. That of a `subagent` is its end: it began `duration_ms` earlier |
//! | `api_time` | seconds from the request to the end of its response. Where it is missing, the next pause includes it |
//! | `hash_ids` | one id for each whole block of the prompt, or for each started one. Equal ids are equal prefixes |
//! | `hash_id_scope` | `local`: ids count in one session only; `global`: in all sessions of the trace |
//! | `input_types` | with `tool_result`, the agent waited for a tool, otherwise for a person. Where it is missing, `stop` of the request before decides |
//!
//! **Pauses.** A pause is `t` less the end of the response before, or of the last sub-agent. So `think_time` is not
//! read: it is the same in whole seconds.
//!
//! **Shared prefixes.** A prompt begins with tools and system prompt. Sessions with the same model and `tool_tokens` share
//! the tools. They share the system prompt too if they have the same `system_tokens`. A request has this prefix as far as
//! its ids agree with those of the first request of its agent. Tokens behind the last whole block are shared with nothing,
//! and prompts do not quote responses: the trace does not say where.
//!
//! Clients send `x-claude-code-session-id`, and those of sub-agents `x-claude-code-agent-id`, as Claude Code does. A row in
//! which agents without an id of their own are mixed is one agent. Source: `callanjfox/kv-cache-tester`, folder
//! `traces` ("Weka" traces).

use super::blocks::pieces;
use super::fields::{shown, time, tokens, whole, wrong};
use super::mooncake::MAX_BLOCK_TOKENS;
use super::rows::Rows;
use crate::names::{NUMBERS, TextKind, name};
use crate::sessions::{Entry, Session, SessionTrace, link};
use crate::{Headers, PromptPart, Request, Speaker, TraceError};
use attache_sim::content::Piece;
use attache_types::clock::Timestamp;
use attache_types::program::TurnCause;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Fields of a session that are read.
pub(super) const FIELDS: [&str; 5] = ["block_size", "hash_id_scope", "tool_tokens", "system_tokens", "requests"];
/// Request header with the id of the session.
pub(super) const SESSION_HEADER: &str = "x-claude-code-session-id";
/// Request header with the id of a sub-agent.
pub(super) const AGENT_HEADER: &str = "x-claude-code-agent-id";
/// Request header with the id of the sub-agent that started this one.
pub(super) const PARENT_HEADER: &str = "x-claude-code-parent-agent-id";

/// The fields of a row, unread, so that an error can name the one that is wrong.
#[derive(Deserialize)]
struct SessionRow<'a> {
    #[serde(borrow)]
    block_size: Option<&'a RawValue>,
    #[serde(borrow)]
    hash_id_scope: Option<&'a RawValue>,
    #[serde(borrow)]
    tool_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    system_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    requests: Option<&'a RawValue>,
}

/// The fields of a request or a sub-agent, unread.
#[derive(Deserialize)]
struct RequestRow<'a> {
    #[serde(borrow)]
    t: Option<&'a RawValue>,
    #[serde(borrow, rename = "type")]
    kind: Option<&'a RawValue>,
    #[serde(borrow)]
    model: Option<&'a RawValue>,
    #[serde(borrow, rename = "in")]
    input: Option<&'a RawValue>,
    #[serde(borrow, rename = "out")]
    output: Option<&'a RawValue>,
    #[serde(borrow)]
    hash_ids: Option<&'a RawValue>,
    #[serde(borrow)]
    input_types: Option<&'a RawValue>,
    #[serde(borrow)]
    stop: Option<&'a RawValue>,
    #[serde(borrow)]
    api_time: Option<&'a RawValue>,
    #[serde(borrow)]
    agent_id: Option<&'a RawValue>,
    #[serde(borrow)]
    duration_ms: Option<&'a RawValue>,
    #[serde(borrow)]
    tool_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    system_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    requests: Option<&'a RawValue>,
}

/// Reads all sessions.
///
/// # Errors
/// When a row can't be used, or none has a request.
pub(super) fn read(mut rows: Rows) -> Result<SessionTrace, TraceError> {
    let mut sessions = Vec::new();
    let mut requests = 0;
    while let Some((row, text)) = rows.next()? {
        let session = session(text, row, &mut requests).map_err(|message| TraceError::Row { row, message })?;
        sessions.extend(Some(session).filter(|session| !session.turns.is_empty()));
    }
    if sessions.is_empty() {
        return Err(TraceError::Format("the trace has no requests".to_owned()));
    }
    Ok(SessionTrace { sessions, id_header: Some(SESSION_HEADER) })
}

fn session(row: &str, number: u64, requests: &mut u64) -> Result<Session, String> {
    let row: SessionRow<'_> = serde_json::from_str(row).map_err(|e| format!("it is {}: {e}", shown(row)))?;
    let got = row.block_size.map(RawValue::get);
    let block = u32::try_from(whole("block_size", got, 1..=MAX_BLOCK_TOKENS.into())?).unwrap_or(1);
    let text = match row.hash_id_scope.map(RawValue::get) {
        Some("\"local\"") | None => number,
        Some("\"global\"") => 0,
        got => return Err(wrong("hash_id_scope", got, "\"local\" or \"global\"")),
    };
    let mut reader = SessionReader {
        session: number,
        block,
        text: name(0, TextKind::Session, text),
        requests,
        entries: Vec::new(),
        agents: 0,
    };
    let head = Head::read("", row.tool_tokens, row.system_tokens)?;
    let agent = Agent { number: 0, parent: 0, id: None, parent_id: None, began: Duration::ZERO, head };
    reader.agent(&agent, "requests", row.requests)?;
    Ok(Session::new(None, link(reader.entries)))
}

/// Lengths of what all prompts of an agent begin with.
#[derive(Clone, Copy)]
struct Head {
    tools: u32,
    system: u32,
}

impl Head {
    /// Fields `tool_tokens` and `system_tokens`; 0 if they are missing.
    fn read(at: &str, tools: Option<&RawValue>, system: Option<&RawValue>) -> Result<Self, String> {
        let read = |field: &str, got: Option<&RawValue>| match got {
            Some(got) => tokens(&format!("{at}{field}"), Some(got.get()), 0),
            None => Ok(0),
        };
        Ok(Self { tools: read("tool_tokens", tools)?, system: read("system_tokens", system)? })
    }

    /// Pieces of the first `length` tokens for `model`.
    fn pieces(self, model: &str, length: u32) -> impl Iterator<Item = Piece> {
        let Self { tools, system } = self;
        let named = |kind, seed: u64| name(0, kind, xxh3_64_with_seed(model.as_bytes(), seed) % NUMBERS);
        let first = Piece::new(named(TextKind::Tools, tools.into()), length.min(tools));
        let seed = u64::from(tools) << 32 | u64::from(system);
        let second = Piece::new(named(TextKind::System, seed), length.saturating_sub(tools).min(system));
        [first, second].into_iter().filter(|piece| piece.tokens > 0)
    }
}

/// An agent of a session.
struct Agent<'a> {
    number: u32,
    parent: u32,
    /// Its id, and the id of the agent that started it; `None` for the main agent.
    id: Option<&'a str>,
    parent_id: Option<&'a str>,
    /// Since the start of the session.
    began: Duration,
    head: Head,
}

impl Agent<'_> {
    fn headers(&self) -> Headers {
        let ids = [(AGENT_HEADER, self.id), (PARENT_HEADER, self.parent_id)];
        ids.into_iter().filter_map(|(name, id)| Some((name.into(), id?.into()))).collect()
    }
}

/// Reads the requests of one session.
struct SessionReader<'r> {
    session: u64,
    block: u32,
    /// Name of the session's text.
    text: u64,
    /// Requests of the trace so far.
    requests: &'r mut u64,
    entries: Vec<Entry>,
    /// Sub-agents so far.
    agents: u32,
}

impl SessionReader<'_> {
    /// Reads the list `field` of an agent.
    fn agent(&mut self, agent: &Agent<'_>, field: &str, list: Option<&RawValue>) -> Result<(), String> {
        let got = list.map(RawValue::get);
        let rows: Option<Vec<RequestRow<'_>>> = got.and_then(|list| serde_json::from_str(list).ok());
        let rows = rows.ok_or_else(|| wrong(field, got, "a list of requests"))?;
        // Ids of the head: those of the first request of the agent.
        let mut first: Option<Vec<u64>> = None;
        let (mut before, mut stop) = (Timestamp(0), false);
        for (i, row) in rows.iter().enumerate() {
            let at = format!("{field}[{i}].");
            let t = time(&format!("{at}t"), row.t.map(RawValue::get), "seconds", 0)?;
            match row.kind.map(RawValue::get) {
                Some("\"n\"" | "\"s\"") if t < before => {
                    let got = row.t.map(RawValue::get);
                    return Err(wrong(&format!("{at}t"), got, "a time not before that of the request before"));
                }
                Some("\"n\"" | "\"s\"") => {
                    before = t;
                    let ids = self.request(agent, &at, row, t, first.as_deref(), stop)?;
                    stop = row.stop.is_some_and(|stop| stop.get() == "\"tool_use\"");
                    first.get_or_insert(ids);
                }
                Some("\"subagent\"") => self.sub_agent(agent, &at, row, (before, t))?,
                got => return Err(wrong(&format!("{at}type"), got, "\"n\", \"s\" or \"subagent\"")),
            }
        }
        Ok(())
    }

    /// Reads a sub-agent, which ended at `end` and did not begin before the last request of its parent at `least`.
    fn sub_agent(
        &mut self,
        parent: &Agent<'_>,
        at: &str,
        row: &RequestRow<'_>,
        (least, end): (Timestamp, Timestamp),
    ) -> Result<(), String> {
        let took = time(&format!("{at}duration_ms"), row.duration_ms.map(RawValue::get), "milliseconds", 3)?;
        let id = row.agent_id.map(|id| text(&format!("{at}agent_id"), id)).transpose()?;
        self.agents += 1;
        let id = id.unwrap_or_else(|| format!("agent_{:03}", self.agents));
        let agent = Agent {
            number: self.agents,
            parent: parent.number,
            id: Some(&id),
            parent_id: parent.id,
            began: parent.began + end.since(took).max(least.since(Timestamp(0))),
            head: Head::read(at, row.tool_tokens, row.system_tokens)?,
        };
        self.agent(&agent, &format!("{at}requests"), row.requests)
    }

    /// Reads one request, which waited for a tool if its `input_types` or `after_tool` say so. Returns its ids.
    fn request(
        &mut self,
        agent: &Agent<'_>,
        at: &str,
        row: &RequestRow<'_>,
        t: Timestamp,
        first: Option<&[u64]>,
        after_tool: bool,
    ) -> Result<Vec<u64>, String> {
        let field = |name: &str| format!("{at}{name}");
        let input = tokens(&field("in"), row.input.map(RawValue::get), 1)?;
        // A response that was cut off is still requested.
        let output = tokens(&field("out"), row.output.map(RawValue::get), 0)?.max(1);
        let ids = ids(&field("hash_ids"), row.hash_ids, input, self.block)?;
        let model = row.model.map(|model| text(&field("model"), model)).transpose()?.unwrap_or_default();
        let took = match row.api_time {
            Some(got) => time(&field("api_time"), Some(got.get()), "seconds", 0)?.since(Timestamp(0)),
            None => Duration::ZERO,
        };
        let is_tool = match row.input_types {
            Some(got) => serde_json::from_str::<Vec<String>>(got.get())
                .map_err(|_| wrong(&field("input_types"), Some(got.get()), "a list of texts"))?
                .iter()
                .any(|kind| kind == "tool_result"),
            None => after_tool,
        };
        let request = Request {
            number: 0,
            at: Timestamp(0).after(agent.began + t.since(Timestamp(0))),
            prompt: self.prompt(agent.head, &model, &ids, first.unwrap_or(&ids), input),
            answer: Piece::new(name(0, TextKind::Answer, *self.requests), output),
            adapter: None,
            session: Some(self.session),
            tenant: None,
            priority: 0,
            headers: agent.headers(),
            turn: None,
        };
        *self.requests += 1;
        let cause = if is_tool { TurnCause::Tool } else { TurnCause::Person };
        let (agent, parent) = (agent.number, agent.parent);
        self.entries.push(Entry { request, agent, parent, cause, took, pause: None });
        Ok(ids)
    }

    /// The prompt of `input` tokens; `first` are the ids with which the agent began.
    fn prompt(&self, head: Head, model: &str, ids: &[u64], first: &[u64], input: u32) -> Vec<PromptPart> {
        let most = (head.tools.saturating_add(head.system) / self.block) as usize;
        let shared = ids.iter().zip(first).take(most).take_while(|(id, first)| id == first).count();
        let length = self.block * u32::try_from(shared).unwrap_or(0);
        let system = head.pieces(model, length).map(|piece| PromptPart::text(Speaker::System, piece));
        let named = u32::try_from(ids.len()).unwrap_or(u32::MAX).saturating_mul(self.block).min(input);
        let own = pieces(self.text, ids.get(shared..).unwrap_or_default(), self.block, named - length);
        let rest = Piece::new(name(0, TextKind::Prompt, *self.requests), input - named);
        let user = own.into_iter().chain(Some(rest).filter(|rest| rest.tokens > 0));
        system.chain(user.map(|piece| PromptPart::text(Speaker::User, piece))).collect()
    }
}

/// The ids of the whole blocks of `input` tokens, or of the started ones too.
fn ids(field: &str, got: Option<&RawValue>, input: u32, block: u32) -> Result<Vec<u64>, String> {
    let got = got.map(RawValue::get);
    let ids: Option<Vec<u64>> = got.and_then(|ids| serde_json::from_str(ids).ok());
    let ids = ids.ok_or_else(|| wrong(field, got, "a list of whole numbers"))?;
    let (whole, started) = (input / block, input.div_ceil(block));
    if ids.len() as u64 != u64::from(whole) && ids.len() as u64 != u64::from(started) {
        return Err(format!(
            "`{field}` has {} ids; {input} tokens are {whole} whole blocks of {block}, {started} with the last one",
            ids.len()
        ));
    }
    Ok(ids)
}

fn text(field: &str, got: &RawValue) -> Result<String, String> {
    serde_json::from_str(got.get()).map_err(|_| wrong(field, Some(got.get()), "text"))
}

#[cfg(test)]
mod tests;
