//! What an answer says about itself: token counts, errors inside a stream, the id of a response. Seen in passing: the answer is
//! neither parsed nor kept.
//!
//! Called by `ext_proc::exchange` with each chunk. Imports nothing of the crate.

use super::events::EventCounter;
use super::scan::ValueScanner;
use memchr::memmem::Finder;
use serde::Deserialize;
use std::sync::LazyLock;

pub use super::scan::DEFAULT_MAX_VALUE_BYTES;

static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"usage\""));
static ERROR: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"error\""));
static ID: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"id\""));

/// Longest id of a response that is kept, bytes of JSON.
const MAX_RESPONSE_ID: usize = 256;

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
    /// How many events have come: for server-sent events.
    pub events: bool,
}

/// Watches an answer go by.
#[derive(Debug)]
pub struct UsageScanner {
    usages: ValueScanner,
    errors: Option<ValueScanner>,
    ids: Option<ValueScanner>,
    events: Option<EventCounter>,
    counts: Counts,
    error: Option<StreamError>,
    response_id: Option<String>,
}

impl UsageScanner {
    /// A scanner for one answer.
    #[must_use]
    pub fn new(watch: Watch) -> Self {
        Self {
            usages: ValueScanner::new(&USAGE, b'{'),
            errors: watch.errors.then(|| ValueScanner::new(&ERROR, b'{')),
            ids: watch.response_id.then(|| ValueScanner::new(&ID, b'"')),
            events: watch.events.then(EventCounter::default),
            counts: Counts::default(),
            error: None,
            response_id: None,
        }
    }

    /// Takes the next bytes of the answer.
    pub fn push(&mut self, chunk: &[u8]) {
        let counts = &mut self.counts;
        self.usages.push(chunk, |value| {
            // A `usage` that is something else says nothing.
            if let Ok(found) = serde_json::from_slice::<Counts>(value) {
                counts.merge(found);
            }
        });
        if let Some(errors) = &mut self.errors {
            errors.push(chunk, |value| {
                if self.error.is_none() {
                    self.error = StreamError::read(value);
                }
            });
        }
        if let Some(ids) = &mut self.ids {
            ids.push(chunk, |value| {
                let wanted = value.starts_with(b"\"resp_") && value.len() <= MAX_RESPONSE_ID;
                if wanted && self.response_id.is_none() {
                    self.response_id = serde_json::from_slice(value).ok();
                }
            });
        }
        if let Some(events) = &mut self.events {
            events.push(chunk);
        }
        // The first one is the one that counts.
        if self.error.is_some() {
            self.errors = None;
        }
        if self.response_id.is_some() {
            self.ids = None;
        }
    }

    /// The token counts found so far; `None` when the answer has not told any.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        self.counts.total()
    }

    /// Events so far; 0 where they are not watched for.
    #[must_use]
    pub fn events(&self) -> u32 {
        self.events.map_or(0, |events| events.count())
    }

    /// The first error found in the stream.
    #[must_use]
    pub fn error(&self) -> Option<&StreamError> {
        self.error.as_ref()
    }

    /// The id of the response.
    #[must_use]
    pub fn response_id(&self) -> Option<&str> {
        self.response_id.as_deref()
    }
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
    /// A stream may tell its counts piece by piece (Anthropic's `message_start`, then `message_delta`) or again and again: what is
    /// told last counts.
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

impl StreamError {
    fn read(value: &[u8]) -> Option<Self> {
        let ErrorObject { code, r#type, message } = serde_json::from_slice(value).ok()?;
        if code.is_none() && r#type.is_none() && message.is_none() {
            return None;
        }
        let told = match &code {
            Some(Code::Number(number)) => u16::try_from(*number).ok().filter(is_error),
            Some(Code::Text(text)) => status_of(text),
            None => None,
        };
        let status = told.or_else(|| r#type.as_deref().and_then(status_of)).unwrap_or(500);
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
