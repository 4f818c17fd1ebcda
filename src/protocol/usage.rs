//! Token counts, errors inside a stream, and the id of a response, read while the response passes and only at the
//! positions that its API defines:
//!
//! * Messages: `usage` of a document; in events `message.usage` of `message_start` and `usage` of `message_delta`.
//! * Responses: `usage` and `id` of a document; in events `response.id`, and `response.usage` of `response.completed`,
//!   `.incomplete` and `.failed`.
//! * SGLang's `/generate`: `meta_info` of the object or of each object of the array; in events, the last of each
//!   `index`.
//! * All others: `usage`, of a document or an event. For AstrAI also an event that begins with a count and is nothing
//!   but the usage.
//!
//! In all event streams, an error is `error` of an event without a type or of type `error`, and `response.error` of
//! `response.failed`. Content written by a client (tools, tool input, prompts) is at deeper positions and is never
//! read.
//!
//! Called by `ext_proc::exchange` with each chunk. Imports nothing but [`Api`] and [`AnswerFormat`].

mod count;
mod counts;
mod errors;
mod generated;

use super::answer::AnswerFormat;
use super::api::Api;
use super::documents::{Documents, EventVisitor};
use super::members::{DEFAULT_MAX_VALUE_BYTES, DocumentState, MemberReader, Visitor, Wanted, unquoted};
use count::Count;
pub use count::UnreadCount;
use counts::{CountMember, Counts};
pub use errors::StreamError;
use errors::{Code, UNKNOWN_ERROR};
use generated::{AnswerCounts, Generated};
use memchr::memmem::Finder;
use smallvec::SmallVec;
use std::sync::LazyLock;

static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"usage\""));
static ERROR: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"error\""));
static RESPONSE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"response\""));
static META_INFO: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"meta_info\""));

/// The counts of which one is the first member of an event that is nothing but the usage.
const BARE: [&[u8]; 3] = [b"prompt_tokens", b"completion_tokens", b"total_tokens"];
/// Longest id of a response that is stored, in bytes of JSON.
const MAX_RESPONSE_ID: usize = 256;
/// Longest name of an event that is stored, in bytes. The longest that matters, `response.in_progress`, has 20.
const MAX_EVENT_NAME: usize = 32;

/// Token counts of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Number of tokens of the prompt, including cached ones.
    pub prompt_tokens: Option<u64>,
    /// Number of tokens of the response.
    pub completion_tokens: Option<u64>,
    /// Number of tokens of the prompt that the server had in its cache.
    pub cached_tokens: Option<u64>,
}

impl Usage {
    /// Parses the value of a `usage` member of any API. `None` when it has no counts.
    #[must_use]
    pub fn read(value: &[u8]) -> Option<Self> {
        Counts::read(value)?.total()
    }
}

/// Parses one token count, in the spellings that are accepted in a `usage`. `None` when it is not a whole number.
#[must_use]
pub fn count(value: &[u8]) -> Option<u64> {
    Count::read(value).get()
}

/// What to look for besides token counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watch {
    /// Look for errors: in event streams, where the status was sent before the error.
    pub errors: bool,
    /// Look for the id of a response: in the Responses API.
    pub response_id: bool,
}

/// Scans one response while it passes.
#[derive(Debug)]
pub struct UsageScanner {
    documents: Documents<UsageMember>,
    found: ScannedValues,
}

/// Positions that an API defines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UsageLayout {
    Root,
    MessageEvents,
    ResponseEvents,
    Generated,
}

/// A member that is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum UsageMember {
    /// The object below the root that has the counts.
    #[default]
    Inner,
    Usage,
    Error,
    Id,
    Type,
    Code,
    /// SGLang: the number of the response that an event belongs to.
    Index,
    PromptTokens,
    CompletionTokens,
    CachedTokens,
}

/// The type of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EventType {
    Error,
    MessageStart,
    MessageDelta,
    /// `response.created` and other events with a response that continues.
    ResponseBegun,
    ResponseEnded,
    Other,
}

impl EventType {
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

/// The values of one object.
#[derive(Clone, Debug, Default)]
struct ObjectValues {
    usage: Option<Counts>,
    error: Option<StreamError>,
    id: Option<String>,
}

impl ObjectValues {
    /// The counts of an object that is nothing but the usage.
    fn bare(&mut self) -> &mut Counts {
        self.usage.get_or_insert_default()
    }
}

/// The values found in a response.
#[derive(Debug)]
struct ScannedValues {
    shape: UsageLayout,
    watch: Watch,
    /// Number of events so far.
    events: u32,
    /// Whether the response is a stream in which an object may be nothing but the usage.
    may_be_bare: bool,
    /// Whether the object is nothing but the usage, according to its first member; `None` before that.
    is_bare: Option<bool>,
    /// The name of the event, and the `type` of its data.
    name: SmallVec<[u8; MAX_EVENT_NAME]>,
    kind: Option<EventType>,
    /// The status that the `code` of the event stands for.
    code: Option<u16>,
    root: ObjectValues,
    inner: ObjectValues,
    generated: Generated,
    counts: Counts,
    /// Why a count was not read, of the first such count.
    unread: Option<UnreadCount>,
    error: Option<StreamError>,
    response_id: Option<String>,
}

impl UsageScanner {
    /// Creates a scanner for one response to a request of `api`.
    #[must_use]
    pub fn new(api: Api, format: AnswerFormat, watch: Watch) -> Self {
        Self::of_answers(api, format, watch, 1)
    }

    /// As [`UsageScanner::new`], for a request with `answers` responses (`n`) to each of its prompts.
    #[must_use]
    pub fn of_answers(api: Api, format: AnswerFormat, watch: Watch, answers: u32) -> Self {
        let shape = match (api, format) {
            (Api::SglangGenerate, _) => UsageLayout::Generated,
            (Api::Messages, AnswerFormat::Events) => UsageLayout::MessageEvents,
            (Api::Responses | Api::ResponseById, AnswerFormat::Events) => UsageLayout::ResponseEvents,
            _ => UsageLayout::Root,
        };
        // Only the Responses API has ids of this type; elsewhere `id` is any text.
        let response_id = watch.response_id && matches!(api, Api::Responses | Api::ResponseById);
        let watch = Watch { response_id, ..watch };
        let found = ScannedValues {
            shape,
            watch,
            events: 0,
            may_be_bare: shape == UsageLayout::Root && format == AnswerFormat::Events,
            is_bare: None,
            name: SmallVec::new(),
            kind: None,
            code: None,
            root: ObjectValues::default(),
            inner: ObjectValues::default(),
            generated: Generated::new(answers),
            counts: Counts::default(),
            unread: None,
            error: None,
            response_id: None,
        };
        let document = MemberReader::new(shape == UsageLayout::Generated, DEFAULT_MAX_VALUE_BYTES);
        Self { documents: Documents::new(format, document), found }
    }

    /// Processes the next bytes of the response.
    pub fn push(&mut self, chunk: &[u8]) {
        self.documents.push(chunk, &mut self.found);
    }

    /// Returns the token counts found so far; `None` when the response has not reported any.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        if self.found.shape == UsageLayout::Generated {
            self.found.generated.total()
        } else {
            self.found.counts.total()
        }
    }

    /// Returns why a token count was not read; `None` if all were.
    #[must_use]
    pub fn unread_count(&self) -> Option<UnreadCount> {
        self.found.unread
    }

    /// Returns the number of events so far; 0 for a single document.
    #[must_use]
    pub fn events(&self) -> u32 {
        self.found.events
    }

    /// Returns the first error found in the stream.
    #[must_use]
    pub fn error(&self) -> Option<&StreamError> {
        self.found.error.as_ref()
    }

    /// Returns the id of the response.
    #[must_use]
    pub fn response_id(&self) -> Option<&str> {
        self.found.response_id.as_deref()
    }
}

impl ScannedValues {
    /// The event type of the name; `None` for an event without a name.
    fn named(&self) -> Option<EventType> {
        Some(self.name.trim_ascii()).filter(|name| !name.is_empty()).map(EventType::of)
    }

    fn wants_errors(&self) -> bool {
        self.watch.errors && self.error.is_none()
    }

    fn wants_id(&self) -> bool {
        self.watch.response_id && self.response_id.is_none()
    }

    /// An object below the root begins, which counts instead of an earlier one of the same name.
    fn forget_inner(&mut self) {
        self.inner = ObjectValues::default();
        self.generated.current = AnswerCounts::default();
    }

    /// Applies the values of the document, depending on the type of the event.
    fn take(&mut self) {
        let kind = self.kind.or_else(|| self.named());
        let (root, inner) = (std::mem::take(&mut self.root), std::mem::take(&mut self.inner));
        let (usage, id) = match (self.shape, kind) {
            (UsageLayout::Root, _) => (root.usage, root.id),
            (UsageLayout::MessageEvents, Some(EventType::MessageStart)) => (inner.usage, None),
            (UsageLayout::MessageEvents, Some(EventType::MessageDelta)) => (root.usage, None),
            (UsageLayout::ResponseEvents, Some(EventType::ResponseEnded)) => (inner.usage, inner.id),
            (UsageLayout::ResponseEvents, Some(EventType::ResponseBegun)) => (None, inner.id),
            _ => (None, None),
        };
        if let Some(usage) = usage {
            self.unread = self.unread.or(usage.unread());
            self.counts.merge(&usage);
        }
        if self.wants_id() {
            self.response_id = id;
        }
        if self.wants_errors() {
            self.error = match kind {
                None => root.error,
                Some(EventType::Error) => {
                    root.error.or(Some(StreamError { status: self.code.unwrap_or(UNKNOWN_ERROR), kind: None }))
                }
                Some(EventType::ResponseEnded) => inner.error,
                Some(_) => None,
            };
        }
    }
}

impl Visitor for ScannedValues {
    type Member = UsageMember;

    fn wants(&mut self, path: &[UsageMember], name: &[u8]) -> Wanted<UsageMember> {
        let inner = !path.is_empty();
        if self.may_be_bare && !inner && *self.is_bare.get_or_insert_with(|| BARE.contains(&name)) {
            match name {
                b"prompt_tokens" => return Wanted::Value(UsageMember::PromptTokens),
                b"completion_tokens" => return Wanted::Value(UsageMember::CompletionTokens),
                _ => {}
            }
        }
        let value = |wanted: bool, member| if wanted { Wanted::Value(member) } else { Wanted::No };
        match (self.shape, inner, name) {
            (UsageLayout::Root | UsageLayout::MessageEvents, false, b"usage")
            | (UsageLayout::MessageEvents | UsageLayout::ResponseEvents, true, b"usage") => {
                Wanted::Value(UsageMember::Usage)
            }
            (UsageLayout::MessageEvents, false, b"message")
            | (UsageLayout::ResponseEvents, false, b"response")
            | (UsageLayout::Generated, false, b"meta_info") => Wanted::Members(UsageMember::Inner),
            (UsageLayout::Root, false, b"id") | (UsageLayout::ResponseEvents, true, b"id") => {
                value(self.wants_id(), UsageMember::Id)
            }
            (_, false, b"error") | (UsageLayout::ResponseEvents, true, b"error") => {
                value(self.wants_errors(), UsageMember::Error)
            }
            (UsageLayout::Root | UsageLayout::Generated, false, b"type" | b"code") if !self.watch.errors => Wanted::No,
            (_, false, b"type") => Wanted::Value(UsageMember::Type),
            (_, false, b"code") => value(self.wants_errors(), UsageMember::Code),
            (UsageLayout::Generated, false, b"index") => Wanted::Value(UsageMember::Index),
            (UsageLayout::Generated, true, b"prompt_tokens") => Wanted::Value(UsageMember::PromptTokens),
            (UsageLayout::Generated, true, b"completion_tokens") => Wanted::Value(UsageMember::CompletionTokens),
            (UsageLayout::Generated, true, b"cached_tokens") => Wanted::Value(UsageMember::CachedTokens),
            _ => Wanted::No,
        }
    }

    fn begin(&mut self, path: &[UsageMember]) {
        if path.is_empty() {
            (self.kind, self.code, self.is_bare) = (None, None, None);
            self.root = ObjectValues::default();
            self.generated.index = None;
        }
        self.forget_inner();
    }

    fn mistyped(&mut self, _path: &[UsageMember], _member: UsageMember, _first: u8) {
        self.forget_inner();
    }

    fn value(&mut self, path: &[UsageMember], member: UsageMember, value: Option<&[u8]>) {
        let value = value.unwrap_or_default();
        let said = if path.is_empty() { &mut self.root } else { &mut self.inner };
        match member {
            UsageMember::Inner => {}
            UsageMember::Usage => said.usage = Counts::read(value),
            UsageMember::Error => said.error = StreamError::read(value),
            UsageMember::Id => {
                let wanted = value.starts_with(b"\"resp_") && value.len() <= MAX_RESPONSE_ID;
                said.id = wanted.then(|| serde_json::from_slice(value).ok()).flatten();
            }
            // The names that matter have no escapes.
            UsageMember::Type => self.kind = Some(EventType::of(unquoted(value))),
            UsageMember::Code => self.code = serde_json::from_slice(value).ok().and_then(|code: Code| code.status()),
            UsageMember::Index => self.generated.index = count(value),
            UsageMember::PromptTokens if self.may_be_bare => {
                said.bare().set(CountMember::PromptTokens, Count::read(value))
            }
            UsageMember::CompletionTokens if self.may_be_bare => {
                said.bare().set(CountMember::CompletionTokens, Count::read(value))
            }
            UsageMember::PromptTokens => self.generated.current.prompt = Count::read(value),
            UsageMember::CompletionTokens => self.generated.current.completion = Count::read(value),
            UsageMember::CachedTokens => self.generated.current.cached = Count::read(value),
        }
    }

    fn end(&mut self, path: &[UsageMember], number: usize) {
        if !path.is_empty() {
            return;
        }
        if self.shape == UsageLayout::Generated {
            self.unread = self.unread.or(self.generated.current.unread());
            self.generated.end(number);
        }
        self.take();
    }
}

impl EventVisitor for ScannedValues {
    /// One or two substring searches, which exclude most events.
    fn may_be_in(&mut self, data: &[u8]) -> bool {
        let counts = match self.shape {
            UsageLayout::Root | UsageLayout::MessageEvents => &USAGE,
            UsageLayout::ResponseEvents => &RESPONSE,
            UsageLayout::Generated => &META_INFO,
        };
        has_member(data, counts)
            || self.may_be_bare && begins_with_count(data)
            || (self.wants_errors() && (has_member(data, &ERROR) || self.named() == Some(EventType::Error)))
    }

    fn event_begins(&mut self) {
        self.events = self.events.saturating_add(1);
    }

    fn event_name(&mut self, part: &[u8]) {
        let space = MAX_EVENT_NAME.saturating_sub(self.name.len());
        self.name.extend_from_slice(part.get(..space).unwrap_or(part));
    }

    fn event_ends(&mut self, _document: DocumentState) {
        self.name.clear();
    }
}

/// Whether `data` has the name that `finder` finds, with a value other than `null`.
fn has_member(data: &[u8], finder: &Finder<'_>) -> bool {
    finder.find_iter(data).any(|at| {
        let behind = data.get(at + finder.needle().len()..).unwrap_or_default().trim_ascii_start();
        !behind.strip_prefix(b":").is_some_and(|value| value.trim_ascii_start().starts_with(b"null"))
    })
}

/// Whether the first member of the object in `data` is a token count.
fn begins_with_count(data: &[u8]) -> bool {
    let members = data.trim_ascii_start().strip_prefix(b"{").map(<[u8]>::trim_ascii_start);
    let name = members.and_then(|members| members.strip_prefix(b"\""));
    name.is_some_and(|name| {
        BARE.iter().any(|count| name.strip_prefix(*count).is_some_and(|rest| rest.starts_with(b"\"")))
    })
}

#[cfg(test)]
mod tests;
