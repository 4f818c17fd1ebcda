//! Our own format: everything that a workload knows of a request, one JSON object a row, no text of any prompt.
//!
//! The first row is `{"format":"attache.trace.v1"}`; every other one is a request:
//!
//! ```json
//! {"at":0.25,"parts":[["system","tools",6000],["user",17,1200]],"answer":["a-17",800],"adapter":"sql","session":4,"tenant":"shop","priority":10}
//! ```
//!
//! | field | holds |
//! |---|---|
//! | `at` | seconds from the start, to the nanosecond; never less than in the row before |
//! | `parts` | the prompt: at least one `[role, name, tokens]` or `[role, name, tokens, from]`, `role` being `system`, `user` or `assistant`, or `["image", name, tokens]` for an image in a user message |
//! | `answer` | `[name, tokens]` or `[name, tokens, from]` |
//! | `adapter`, `tenant` | text; may be missing |
//! | `session` | a whole number or text; may be missing |
//! | `priority` | a whole number, 0 when it is missing |
//! | `headers` | further headers of the request, such as `{"x-slo-ttft-ms":"500"}`; names in lower case; may be missing |
//!
//! If the first row is `{"format":"attache.trace.v1","sessions":true}`, the rows are turns of sessions. They are sent when
//! the responses have ended that they wait for, as in [`crate::sessions`]; `at` counts in an open loop only. Each row has
//! a `session`, and these fields:
//!
//! | field | holds |
//! |---|---|
//! | `pause` | seconds from the end of the response before to this request; may be missing in the first row of a session |
//! | `agent` | the sub-agent that sends the request, a whole number or text; missing for the main agent |
//! | `parent` | the agent that started this sub-agent, in its first row; missing for the main agent |
//! | `cause` | `"tool"` or `"person"`: what the agent waited for; a person if it is missing |
//!
//! A request waits for the response before of the same agent, and for the sub-agents that the agent has started since
//! and whose rows stand before it. The first request of a sub-agent waits for the last one of its parent.
//!
//! A name is a whole number below 2^64 or a text, which is turned into one by XXH3. Equal names are equal texts: a part
//! is the tokens `from..from + tokens` of it, and `from` is 0 when it is missing. A later prompt that quotes an answer
//! names it as the answer did. An image takes `tokens` in the prompt, and equal names are equal images. Fields that are
//! not listed here are refused.

use super::fields::{shown, time, tokens, whole, wrong};
use super::rows::Rows;
use super::{MAX_TOKENS, RowParser};
use crate::sessions::{Entry, OpenSession, SessionTrace};
use crate::{Headers, PromptPart, Request, Speaker, TraceError};
use attache_sim::content::Piece;
use attache_types::clock::Timestamp;
use attache_types::program::TurnCause;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64;

/// What the first row holds in `format`.
pub const FORMAT: &str = "attache.trace.v1";

/// The rule of the format.
pub(super) struct Native;

/// The fields of a row, unread, so that an error can name the one that is wrong.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NativeRow<'a> {
    #[serde(borrow)]
    at: Option<&'a RawValue>,
    #[serde(borrow)]
    parts: Option<&'a RawValue>,
    #[serde(borrow)]
    answer: Option<&'a RawValue>,
    #[serde(borrow)]
    adapter: Option<&'a RawValue>,
    #[serde(borrow)]
    session: Option<&'a RawValue>,
    #[serde(borrow)]
    tenant: Option<&'a RawValue>,
    #[serde(borrow)]
    priority: Option<&'a RawValue>,
    #[serde(borrow)]
    headers: Option<&'a RawValue>,
    #[serde(borrow)]
    pause: Option<&'a RawValue>,
    #[serde(borrow)]
    agent: Option<&'a RawValue>,
    #[serde(borrow)]
    parent: Option<&'a RawValue>,
    #[serde(borrow)]
    cause: Option<&'a RawValue>,
}

impl<'a> NativeRow<'a> {
    fn read(row: &'a str) -> Result<Self, String> {
        serde_json::from_str(row).map_err(|e| format!("it is {}: {e}", shown(row)))
    }

    /// The request of the row.
    fn request(&self, number: u64) -> Result<Request, String> {
        let at = time("at", self.at.map(RawValue::get), "seconds", 0)?;
        let prompt = prompt(self.parts.map(RawValue::get))?;
        let answer = self.answer.map(RawValue::get);
        let fields = answer.and_then(list);
        let answer = match fields.as_deref() {
            Some([name, tokens]) => piece("answer", name, tokens, None)?,
            Some([name, tokens, from]) => piece("answer", name, tokens, Some(from))?,
            _ => return Err(wrong("answer", answer, "[name, tokens] or [name, tokens, from]")),
        };
        Ok(Request {
            number,
            at,
            prompt,
            answer,
            adapter: text("adapter", self.adapter)?,
            session: self.session.map(|got| id("session", got)).transpose()?,
            tenant: text("tenant", self.tenant)?,
            priority: priority(self.priority)?,
            headers: headers(self.headers)?,
            turn: None,
        })
    }
}

/// Whether this is the value of `format` in a first row.
pub(super) fn is_header(value: &str) -> bool {
    serde_json::from_str::<String>(value).is_ok_and(|format| format == FORMAT)
}

impl RowParser for Native {
    const FROM_FIRST: bool = false;

    fn request(&mut self, row: &str, number: u64) -> Result<Request, String> {
        let row = NativeRow::read(row)?;
        let of_sessions = [("pause", row.pause), ("agent", row.agent), ("parent", row.parent), ("cause", row.cause)];
        if let Some((field, got)) = of_sessions.into_iter().find_map(|(field, got)| Some((field, got?))) {
            let allowed = "it is allowed if the first row has \"sessions\":true";
            return Err(format!("`{field}` is {}; {allowed}", shown(got.get())));
        }
        row.request(number)
    }
}

/// Adds a row to its session.
fn add(session: &mut OpenSession, row: &NativeRow<'_>, request: Request) -> Result<(), String> {
    let agent = row.agent.map(|got| id("agent", got)).transpose()?;
    let parent = row.parent.map(|got| id("parent", got)).transpose()?;
    let parent = match parent {
        None => 0,
        Some(parent) => session.known(parent).ok_or_else(|| {
            wrong("parent", row.parent.map(RawValue::get), "an agent of an earlier row of the session")
        })?,
    };
    let agent = session.number(agent);
    let pause = match row.pause {
        None if session.is_empty() => Duration::ZERO,
        got => time("pause", got.map(RawValue::get), "seconds", 0)?.since(Timestamp(0)),
    };
    let cause = match row.cause.map(RawValue::get) {
        Some("\"tool\"") => TurnCause::Tool,
        Some("\"person\"") | None => TurnCause::Person,
        got => return Err(wrong("cause", got, "\"tool\" or \"person\"")),
    };
    session.push(Entry { request, agent, parent, cause, took: Duration::ZERO, pause: Some(pause) });
    Ok(())
}

/// Reads a trace of sessions, behind its first row.
///
/// # Errors
/// When a row can't be used, or there are none.
pub(super) fn sessions(mut rows: Rows) -> Result<SessionTrace, TraceError> {
    let mut sessions: Vec<OpenSession> = Vec::new();
    let mut places: HashMap<u64, usize> = HashMap::new();
    let mut last = Timestamp(0);
    while let Some((number, text)) = rows.next()? {
        let wrong = |message| TraceError::Row { row: number, message };
        let row = NativeRow::read(text).map_err(wrong)?;
        let request = row.request(0).map_err(wrong)?;
        if request.at < last {
            return Err(wrong(super::out_of_order(last.since(request.at))));
        }
        last = request.at;
        let session =
            request.session.ok_or_else(|| wrong(super::fields::wrong("session", None, "a whole number or text")))?;
        let place = *places.entry(session).or_insert(sessions.len());
        if place == sessions.len() {
            sessions.push(OpenSession::default());
        }
        if let Some(session) = sessions.get_mut(place) {
            add(session, &row, request).map_err(wrong)?;
        }
    }
    if sessions.is_empty() {
        return Err(TraceError::Format("the trace has no requests".to_owned()));
    }
    Ok(SessionTrace { sessions: sessions.into_iter().map(OpenSession::close).collect(), id_header: None })
}

fn prompt(parts: Option<&str>) -> Result<Vec<PromptPart>, String> {
    let list_of_parts = parts.and_then(list).filter(|list| !list.is_empty());
    let Some(list_of_parts) = list_of_parts else {
        return Err(wrong("parts", parts, "a list of [role, name, tokens] with at least one"));
    };
    let mut sum = 0;
    let mut prompt = Vec::with_capacity(list_of_parts.len());
    for part in list_of_parts {
        let part = prompt_part(part.get())?;
        sum += u64::from(part.piece.tokens);
        prompt.push(part);
    }
    if sum > MAX_TOKENS {
        return Err(format!("`parts` has {sum} tokens; at most {MAX_TOKENS} are allowed"));
    }
    Ok(prompt)
}

fn prompt_part(json: &str) -> Result<PromptPart, String> {
    let fields = list(json);
    let (role, from, piece) = match fields.as_deref() {
        Some([role, name, tokens]) => (role, None, piece("parts", name, tokens, None)?),
        Some([role, name, tokens, from]) => (role, Some(from), piece("parts", name, tokens, Some(from))?),
        _ => return Err(wrong("parts", Some(json), "[role, name, tokens] or [role, name, tokens, from]")),
    };
    let role = match role.get() {
        "\"system\"" => Speaker::System,
        "\"user\"" => Speaker::User,
        "\"assistant\"" => Speaker::Assistant,
        "\"image\"" if from.is_some() => return Err(wrong("parts", Some(json), "[\"image\", name, tokens]")),
        "\"image\"" => return Ok(PromptPart::image(piece.name, piece.tokens)),
        other => return Err(wrong("role", Some(other), "\"system\", \"user\", \"assistant\" or \"image\"")),
    };
    Ok(PromptPart::text(role, piece))
}

fn piece(field: &str, name: &RawValue, length: &RawValue, from: Option<&RawValue>) -> Result<Piece, String> {
    let name = name_of(name.get())
        .ok_or_else(|| wrong(&format!("name` in `{field}"), Some(name.get()), "a whole number or text"))?;
    let tokens = tokens(&format!("tokens` in `{field}"), Some(length.get()), 1)?;
    let most = u64::from(u32::MAX - tokens);
    let from = match from {
        Some(from) => whole(&format!("from` in `{field}"), Some(from.get()), 0..=most)?,
        None => 0,
    };
    Ok(Piece { name, from: u32::try_from(from).unwrap_or(u32::MAX), tokens })
}

fn list(json: &str) -> Option<Vec<Box<RawValue>>> {
    serde_json::from_str(json).ok()
}

/// The number that an id stands for.
fn id(field: &str, got: &RawValue) -> Result<u64, String> {
    name_of(got.get()).ok_or_else(|| wrong(field, Some(got.get()), "a whole number or text"))
}

/// The number that a name stands for.
fn name_of(json: &str) -> Option<u64> {
    match serde_json::from_str::<String>(json) {
        Ok(text) => Some(xxh3_64(text.as_bytes())),
        Err(_) => serde_json::from_str(json).ok(),
    }
}

fn priority(got: Option<&RawValue>) -> Result<i32, String> {
    let Some(got) = got else { return Ok(0) };
    serde_json::from_str(got.get()).map_err(|_| wrong("priority", Some(got.get()), "a whole number of 32 bits"))
}

fn text(field: &str, got: Option<&RawValue>) -> Result<Option<Arc<str>>, String> {
    let Some(got) = got else { return Ok(None) };
    match serde_json::from_str::<String>(got.get()) {
        Ok(text) => Ok(Some(text.into())),
        Err(_) => Err(wrong(field, Some(got.get()), "text")),
    }
}

fn headers(got: Option<&RawValue>) -> Result<Headers, String> {
    let Some(got) = got else { return Ok(Vec::new()) };
    let allowed = "an object with header names in lower case and values of printable ASCII";
    let headers: BTreeMap<String, String> =
        serde_json::from_str(got.get()).map_err(|_| wrong("headers", Some(got.get()), allowed))?;
    let is_name = |name: &str| {
        let of_names =
            |byte: u8| byte.is_ascii_graphic() && !byte.is_ascii_uppercase() && !b"()<>@,;:\\\"/[]?={}".contains(&byte);
        !name.is_empty() && name.bytes().all(of_names)
    };
    let is_value = |value: &str| value.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic());
    if headers.iter().all(|(name, value)| is_name(name) && is_value(value)) {
        return Ok(headers.into_iter().map(|(name, value)| (name.into(), value.into())).collect());
    }
    Err(wrong("headers", Some(got.get()), allowed))
}

/// Writes requests in this format. They must come in the order of time; their numbers are not written,
/// for a reader counts again.
#[derive(Debug)]
pub struct TraceWriter<W> {
    out: W,
}

impl<W: Write> TraceWriter<W> {
    /// Writes the first row, which names the format.
    ///
    /// # Errors
    /// When `out` can't be written to.
    pub fn new(mut out: W) -> io::Result<Self> {
        writeln!(out, "{{\"format\":\"{FORMAT}\"}}")?;
        Ok(Self { out })
    }

    /// Writes one request as one row.
    ///
    /// # Errors
    /// When `out` can't be written to.
    pub fn write(&mut self, request: &Request) -> io::Result<()> {
        let out = &mut self.out;
        let (seconds, nanoseconds) = (request.at.0 / 1_000_000_000, request.at.0 % 1_000_000_000);
        write!(out, "{{\"at\":{seconds}.{nanoseconds:09},\"parts\":[")?;
        for (i, PromptPart { role, piece: Piece { name, from, tokens }, is_image }) in request.prompt.iter().enumerate()
        {
            let comma = if i > 0 { "," } else { "" };
            let role = match role {
                _ if *is_image => "image",
                Speaker::System => "system",
                Speaker::User => "user",
                Speaker::Assistant => "assistant",
            };
            write!(out, "{comma}[\"{role}\",{name},{tokens}")?;
            write_from(out, *from)?;
        }
        let Piece { name, from, tokens } = request.answer;
        write!(out, "],\"answer\":[{name},{tokens}")?;
        write_from(out, from)?;
        if let Some(adapter) = &request.adapter {
            write!(out, ",\"adapter\":{}", serde_json::to_string(adapter)?)?;
        }
        if let Some(session) = request.session {
            write!(out, ",\"session\":{session}")?;
        }
        if let Some(tenant) = &request.tenant {
            write!(out, ",\"tenant\":{}", serde_json::to_string(tenant)?)?;
        }
        if request.priority != 0 {
            write!(out, ",\"priority\":{}", request.priority)?;
        }
        if !request.headers.is_empty() {
            let headers: BTreeMap<&str, &str> =
                request.headers.iter().map(|(name, value)| (&**name, &**value)).collect();
            write!(out, ",\"headers\":{}", serde_json::to_string(&headers)?)?;
        }
        writeln!(out, "}}")
    }

    /// Returns the inner writer without flushing it.
    pub fn into_inner(self) -> W {
        self.out
    }
}

fn write_from(out: &mut impl Write, from: u32) -> io::Result<()> {
    if from > 0 { write!(out, ",{from}]") } else { write!(out, "]") }
}
