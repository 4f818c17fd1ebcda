//! What a response says about itself: token counts, errors inside a stream, the id of a response. Read while the
//! response passes, only where its API defines them:
//!
//! | API | one JSON document | server-sent events |
//! |---|---|---|
//! | Messages | `usage` | `message.usage` of `message_start`, `usage` of `message_delta` |
//! | Responses | `usage`, `id` | `response.usage` of `response.completed`, `.incomplete`, `.failed`; `response.id` |
//! | SGLang's `/generate` | `meta_info` of the object, or of each object of the array | `meta_info`, the last of each `index` |
//! | all others | `usage` | `usage`; of AstrAI, an event that begins with a count and is nothing but the usage |
//!
//! In all event streams, an error is `error` of an event without a type or of type `error`, and `response.error` of
//! `response.failed`. What a client wrote (tools, tool input, prompts) lies deeper, and is never read.
//!
//! Called by `ext_proc::exchange` with each chunk. Imports nothing but [`Api`] and [`AnswerFormat`].

mod generated;

use super::answer::AnswerFormat;
use super::api::Api;
use super::events::{EventLines, Part};
use super::members::{MemberReader, Visitor, Wanted};
use generated::{AnswerCounts, Generated};
use memchr::memmem::Finder;
use serde::Deserialize;
use smallvec::SmallVec;
use std::sync::LazyLock;

pub use super::members::DEFAULT_MAX_VALUE_BYTES;

static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"usage\""));
static ERROR: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"error\""));
static RESPONSE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"response\""));
static META_INFO: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"meta_info\""));

/// The counts of which one is the first member of an event that is nothing but the usage.
const BARE: [&[u8]; 3] = [b"prompt_tokens", b"completion_tokens", b"total_tokens"];
/// Longest id of a response that is kept, bytes of JSON.
const MAX_RESPONSE_ID: usize = 256;
/// Longest name of an event that is kept, bytes. `response.in_progress`, the longest that matters, has 20.
const MAX_EVENT_NAME: usize = 32;

/// Token counts of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt, cached ones included.
    pub prompt_tokens: Option<u64>,
    /// Tokens of the answer.
    pub completion_tokens: Option<u64>,
    /// Tokens of the prompt that the server had in its cache.
    pub cached_tokens: Option<u64>,
}

impl Usage {
    /// Reads the value of a `usage` member, in the words of any API. `None` when it holds no counts.
    #[must_use]
    pub fn read(value: &[u8]) -> Option<Self> {
        Counts::read(value)?.total()
    }
}

/// An error that came inside a stream whose status was 200.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamError {
    /// The HTTP status that it stands for; 500 when it doesn't say.
    pub status: u16,
    /// Its `type`, when it has one.
    pub kind: Option<String>,
}

/// What to look for besides token counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watch {
    /// Errors: for server-sent events, in which the status was sent before the error.
    pub errors: bool,
    /// The id of a response: for the Responses API.
    pub response_id: bool,
}

/// Watches an answer go by.
#[derive(Debug)]
pub struct UsageScanner {
    events: Option<EventLines>,
    document: MemberReader<Member>,
    found: Found,
}

/// Where an API defines what is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    Root,
    MessageEvents,
    ResponseEvents,
    Generated,
}

/// A member that is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Member {
    Usage,
    Error,
    Id,
    Type,
    Code,
    /// Of SGLang: which of several answers an event is about.
    Index,
    PromptTokens,
    CompletionTokens,
    CachedTokens,
}

/// What kind of event it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Error,
    MessageStart,
    MessageDelta,
    /// `response.created` and others that hold a response which goes on.
    ResponseBegun,
    ResponseEnded,
    Other,
}

impl Kind {
    fn of(name: &[u8]) -> Self {
        match name {
            b"error" => Self::Error,
            b"message_start" => Self::MessageStart,
            b"message_delta" => Self::MessageDelta,
            b"response.created" | b"response.queued" | b"response.in_progress" => Self::ResponseBegun,
            b"response.completed" | b"response.incomplete" | b"response.failed" => Self::ResponseEnded,
            _ => Self::Other,
        }
    }
}

/// What one object says.
#[derive(Clone, Debug, Default)]
struct Said {
    usage: Option<Counts>,
    error: Option<StreamError>,
    id: Option<String>,
}

impl Said {
    /// The counts of an object that is nothing but the usage.
    fn bare(&mut self) -> &mut Counts {
        self.usage.get_or_insert_default()
    }
}

/// What has been found in a response.
#[derive(Debug)]
struct Found {
    shape: Shape,
    watch: Watch,
    /// The response is a stream in which an object may be nothing but the usage.
    may_be_bare: bool,
    /// The object is nothing but the usage, as its first member tells; `None` before that.
    is_bare: Option<bool>,
    /// The name of the event, and the `type` of its data.
    name: SmallVec<[u8; MAX_EVENT_NAME]>,
    kind: Option<Kind>,
    /// The status that the `code` of the event stands for.
    code: Option<u16>,
    root: Said,
    inner: Said,
    generated: Generated,
    counts: Counts,
    error: Option<StreamError>,
    response_id: Option<String>,
}

impl UsageScanner {
    /// A scanner for one response to a request of `api`.
    #[must_use]
    pub fn new(api: Api, format: AnswerFormat, watch: Watch) -> Self {
        Self::of_answers(api, format, watch, 1)
    }

    /// The same for a request that asks for so many answers (`n`) to each of its prompts.
    #[must_use]
    pub fn of_answers(api: Api, format: AnswerFormat, watch: Watch, answers: u32) -> Self {
        let shape = match (api, format) {
            (Api::SglangGenerate, _) => Shape::Generated,
            (Api::Messages, AnswerFormat::Events) => Shape::MessageEvents,
            (Api::Responses | Api::ResponseById, AnswerFormat::Events) => Shape::ResponseEvents,
            _ => Shape::Root,
        };
        // Only responses of this API have an id of this kind; elsewhere `id` is any text.
        let response_id = watch.response_id && matches!(api, Api::Responses | Api::ResponseById);
        let watch = Watch { response_id, ..watch };
        let found = Found {
            shape,
            watch,
            may_be_bare: shape == Shape::Root && format == AnswerFormat::Events,
            is_bare: None,
            name: SmallVec::new(),
            kind: None,
            code: None,
            root: Said::default(),
            inner: Said::default(),
            generated: Generated::new(answers),
            counts: Counts::default(),
            error: None,
            response_id: None,
        };
        let events = (format == AnswerFormat::Events).then(EventLines::default);
        Self { events, document: MemberReader::new(shape == Shape::Generated), found }
    }

    /// Takes the next bytes of the answer.
    pub fn push(&mut self, chunk: &[u8]) {
        let Self { events, document, found } = self;
        let Some(events) = events else {
            document.push(chunk, found);
            return;
        };
        events.push(chunk, |part| match part {
            Part::Event(data) => {
                if found.may_be_in(data) {
                    document.restart();
                    document.push(data, found);
                    document.restart();
                }
                found.name.clear();
            }
            Part::Line if document.is_open() => {}
            Part::Line => document.restart(),
            Part::Data(data) => document.push(data, found),
            Part::Name(name) => {
                let space = MAX_EVENT_NAME.saturating_sub(found.name.len());
                found.name.extend_from_slice(name.get(..space).unwrap_or(name));
            }
            Part::End => {
                document.restart();
                found.name.clear();
            }
        });
    }

    /// The token counts found so far; `None` when the answer has not reported any.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        if self.found.shape == Shape::Generated { self.found.generated.total() } else { self.found.counts.total() }
    }

    /// Events so far; 0 where the answer is one document.
    #[must_use]
    pub fn events(&self) -> u32 {
        self.events.map_or(0, |events| events.count())
    }

    /// The first error found in the stream.
    #[must_use]
    pub fn error(&self) -> Option<&StreamError> {
        self.found.error.as_ref()
    }

    /// The id of the response.
    #[must_use]
    pub fn response_id(&self) -> Option<&str> {
        self.found.response_id.as_deref()
    }
}

impl Found {
    /// Whether the data of an event may hold anything that is still wanted: one or two substring searches, which all
    /// but a few events end with.
    fn may_be_in(&self, data: &[u8]) -> bool {
        let counts = match self.shape {
            Shape::Root | Shape::MessageEvents => &USAGE,
            Shape::ResponseEvents => &RESPONSE,
            Shape::Generated => &META_INFO,
        };
        has_member(data, counts)
            || self.may_be_bare && begins_with_count(data)
            || (self.wants_errors() && (has_member(data, &ERROR) || self.named() == Some(Kind::Error)))
    }

    /// The kind of event that the name stands for; `None` for an event without a name.
    fn named(&self) -> Option<Kind> {
        Some(self.name.trim_ascii()).filter(|name| !name.is_empty()).map(Kind::of)
    }

    fn wants_errors(&self) -> bool {
        self.watch.errors && self.error.is_none()
    }

    fn wants_id(&self) -> bool {
        self.watch.response_id && self.response_id.is_none()
    }

    /// Takes what the document has said, by what kind of event it is.
    fn take(&mut self) {
        let kind = self.kind.or_else(|| self.named());
        let (root, inner) = (std::mem::take(&mut self.root), std::mem::take(&mut self.inner));
        let (usage, id) = match (self.shape, kind) {
            (Shape::Root, _) => (root.usage, root.id),
            (Shape::MessageEvents, Some(Kind::MessageStart)) => (inner.usage, None),
            (Shape::MessageEvents, Some(Kind::MessageDelta)) => (root.usage, None),
            (Shape::ResponseEvents, Some(Kind::ResponseEnded)) => (inner.usage, inner.id),
            (Shape::ResponseEvents, Some(Kind::ResponseBegun)) => (None, inner.id),
            _ => (None, None),
        };
        if let Some(usage) = usage {
            self.counts.merge(usage);
        }
        if self.wants_id() {
            self.response_id = id;
        }
        if self.wants_errors() {
            self.error = match kind {
                None => root.error,
                Some(Kind::Error) => {
                    root.error.or(Some(StreamError { status: self.code.unwrap_or(UNKNOWN_ERROR), kind: None }))
                }
                Some(Kind::ResponseEnded) => inner.error,
                Some(_) => None,
            };
        }
    }
}

impl Visitor for Found {
    type Member = Member;

    fn wants(&mut self, inner: bool, name: &[u8]) -> Wanted<Member> {
        if self.may_be_bare && !inner && *self.is_bare.get_or_insert_with(|| BARE.contains(&name)) {
            match name {
                b"prompt_tokens" => return Wanted::Value(Member::PromptTokens),
                b"completion_tokens" => return Wanted::Value(Member::CompletionTokens),
                _ => {}
            }
        }
        let value = |wanted: bool, member| if wanted { Wanted::Value(member) } else { Wanted::No };
        match (self.shape, inner, name) {
            (Shape::Root | Shape::MessageEvents, false, b"usage")
            | (Shape::MessageEvents | Shape::ResponseEvents, true, b"usage") => Wanted::Value(Member::Usage),
            (Shape::MessageEvents, false, b"message")
            | (Shape::ResponseEvents, false, b"response")
            | (Shape::Generated, false, b"meta_info") => Wanted::Members,
            (Shape::Root, false, b"id") | (Shape::ResponseEvents, true, b"id") => value(self.wants_id(), Member::Id),
            (_, false, b"error") | (Shape::ResponseEvents, true, b"error") => value(self.wants_errors(), Member::Error),
            (Shape::Root | Shape::Generated, false, b"type" | b"code") if !self.watch.errors => Wanted::No,
            (_, false, b"type") => Wanted::Value(Member::Type),
            (_, false, b"code") => value(self.wants_errors(), Member::Code),
            (Shape::Generated, false, b"index") => Wanted::Value(Member::Index),
            (Shape::Generated, true, b"prompt_tokens") => Wanted::Value(Member::PromptTokens),
            (Shape::Generated, true, b"completion_tokens") => Wanted::Value(Member::CompletionTokens),
            (Shape::Generated, true, b"cached_tokens") => Wanted::Value(Member::CachedTokens),
            _ => Wanted::No,
        }
    }

    fn begin(&mut self) {
        (self.kind, self.code, self.is_bare) = (None, None, None);
        (self.root, self.inner) = (Said::default(), Said::default());
        (self.generated.index, self.generated.current) = (None, AnswerCounts::default());
    }

    fn inner(&mut self) {
        self.inner = Said::default();
        self.generated.current = AnswerCounts::default();
    }

    fn value(&mut self, inner: bool, member: Member, value: Option<&[u8]>) {
        let value = value.unwrap_or_default();
        let said = if inner { &mut self.inner } else { &mut self.root };
        match member {
            Member::Usage => said.usage = Counts::read(value),
            Member::Error => said.error = StreamError::read(value),
            Member::Id => {
                let wanted = value.starts_with(b"\"resp_") && value.len() <= MAX_RESPONSE_ID;
                said.id = wanted.then(|| serde_json::from_slice(value).ok()).flatten();
            }
            // The names that matter hold no escapes.
            Member::Type => self.kind = Some(Kind::of(unquoted(value))),
            Member::Code => self.code = serde_json::from_slice(value).ok().and_then(|code: Code| code.status()),
            Member::Index => self.generated.index = number(value),
            Member::PromptTokens if self.may_be_bare => said.bare().prompt_tokens = number(value),
            Member::CompletionTokens if self.may_be_bare => said.bare().completion_tokens = number(value),
            Member::PromptTokens => self.generated.current.prompt = number(value),
            Member::CompletionTokens => self.generated.current.completion = number(value),
            Member::CachedTokens => self.generated.current.cached = number(value),
        }
    }

    fn end(&mut self, number: usize) {
        if self.shape == Shape::Generated {
            self.generated.end(number);
        }
        self.take();
    }
}

/// Whether the name that `finder` finds stands in `data`, and not only with `null` as its value.
fn has_member(data: &[u8], finder: &Finder<'_>) -> bool {
    finder.find_iter(data).any(|at| {
        let behind = data.get(at + finder.needle().len()..).unwrap_or_default().trim_ascii_start();
        !behind.strip_prefix(b":").is_some_and(|value| value.trim_ascii_start().starts_with(b"null"))
    })
}

/// Whether the first member of the object in `data` is a count of tokens.
fn begins_with_count(data: &[u8]) -> bool {
    let members = data.trim_ascii_start().strip_prefix(b"{").map(<[u8]>::trim_ascii_start);
    let name = members.and_then(|members| members.strip_prefix(b"\""));
    name.is_some_and(|name| {
        BARE.iter().any(|count| name.strip_prefix(*count).is_some_and(|rest| rest.starts_with(b"\"")))
    })
}

/// What stands between the quotes of a JSON string, as it is written; empty for any other value.
fn unquoted(value: &[u8]) -> &[u8] {
    value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\"")).unwrap_or_default()
}

fn number(value: &[u8]) -> Option<u64> {
    serde_json::from_slice(value).ok()
}

/// The counts as the APIs spell them.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
struct Counts {
    // OpenAI's completions and chat, and vLLM's.
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    prompt_tokens_details: Option<Details>,
    // The same, as some servers and pickers misspell it.
    prompt_token_details: Option<Details>,
    // OpenAI's Responses API, and Anthropic's.
    input_tokens: Option<u64>,
    output_tokens: Option<u64>,
    input_tokens_details: Option<Details>,
    // Anthropic's alone: there `input_tokens` counts neither.
    cache_read_input_tokens: Option<u64>,
    cache_creation_input_tokens: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
struct Details {
    cached_tokens: Option<u64>,
}

impl Counts {
    fn read(value: &[u8]) -> Option<Self> {
        // Serde would take an array for an object.
        value.starts_with(b"{").then(|| serde_json::from_slice(value).ok()).flatten()
    }

    /// A stream may tell its counts piece by piece (Anthropic's `message_start`, then `message_delta`) or again and
    /// again: what is told last counts.
    fn merge(&mut self, later: Counts) {
        fn take<T>(to: &mut Option<T>, from: Option<T>) {
            if from.is_some() {
                *to = from;
            }
        }
        take(&mut self.prompt_tokens, later.prompt_tokens);
        take(&mut self.completion_tokens, later.completion_tokens);
        take(&mut self.prompt_tokens_details, later.prompt_tokens_details);
        take(&mut self.prompt_token_details, later.prompt_token_details);
        take(&mut self.input_tokens, later.input_tokens);
        take(&mut self.output_tokens, later.output_tokens);
        take(&mut self.input_tokens_details, later.input_tokens_details);
        take(&mut self.cache_read_input_tokens, later.cache_read_input_tokens);
        take(&mut self.cache_creation_input_tokens, later.cache_creation_input_tokens);
    }

    fn total(&self) -> Option<Usage> {
        let uncounted = self
            .cache_read_input_tokens
            .unwrap_or_default()
            .saturating_add(self.cache_creation_input_tokens.unwrap_or_default());
        let details = self.prompt_tokens_details.or(self.prompt_token_details).or(self.input_tokens_details);
        let usage = Usage {
            prompt_tokens: self.prompt_tokens.or(self.input_tokens.map(|n| n.saturating_add(uncounted))),
            completion_tokens: self.completion_tokens.or(self.output_tokens),
            cached_tokens: details.and_then(|d| d.cached_tokens).or(self.cache_read_input_tokens),
        };
        (usage != Usage::default()).then_some(usage)
    }
}

#[derive(Deserialize)]
struct ErrorObject {
    code: Option<Code>,
    r#type: Option<String>,
    message: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Code {
    Number(i64),
    Text(String),
}

/// The status of an error that names none.
const UNKNOWN_ERROR: u16 = 500;

impl Code {
    fn status(&self) -> Option<u16> {
        match self {
            Code::Number(number) => u16::try_from(*number).ok().filter(is_error),
            Code::Text(text) => status_of(text),
        }
    }
}

impl StreamError {
    fn read(value: &[u8]) -> Option<Self> {
        if !value.starts_with(b"{") {
            return None;
        }
        let ErrorObject { code, r#type, message } = serde_json::from_slice(value).ok()?;
        if code.is_none() && r#type.is_none() && message.is_none() {
            return None;
        }
        let named = code.and_then(|code| code.status());
        let status = named.or_else(|| r#type.as_deref().and_then(status_of)).unwrap_or(UNKNOWN_ERROR);
        Some(Self { status, kind: r#type })
    }
}

fn is_error(status: &u16) -> bool {
    (400..=599).contains(status)
}

/// The status that the name of an error stands for, where the APIs document one.
fn status_of(name: &str) -> Option<u16> {
    match name {
        "invalid_request_error" | "BadRequestError" => Some(400),
        "authentication_error" => Some(401),
        "permission_error" => Some(403),
        "not_found_error" | "NotFoundError" => Some(404),
        "request_too_large" => Some(413),
        "rate_limit_error" | "rate_limit_exceeded" => Some(429),
        "overloaded_error" | "Service Unavailable" => Some(503),
        "timeout_error" => Some(504),
        number => number.parse().ok().filter(is_error),
    }
}

#[cfg(test)]
mod tests;
