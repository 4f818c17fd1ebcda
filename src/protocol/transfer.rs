//! Reads what a decode worker reports at the end of its response for the next turn's prefill: vLLM's
//! `kv_transfer_params`, the reason for which the response ended, and its tokens if the client requested them
//! (`return_token_ids`).
//!
//! ```text
//! chat completions, completions   kv_transfer_params   choices[].finish_reason   choices[].token_ids
//! messages                        kv_transfer_params   stop_reason               -
//!   in events                                          delta.stop_reason
//! responses                       kv_transfer_params   status                    -
//!   in events, under response     kv_transfer_params   status                    -
//! ```
//!
//! Whole responses of vLLM 0.32 were recorded (`tests/data/pd/14` and `15`; they have no tokens). In a stream of
//! messages, vLLM reports nothing, since its converter from chat drops it (`vllm/entrypoints/anthropic/serving.py`). In
//! a stream of responses, the last event repeats the whole object.
//!
//! It follows the structure: only members at the server's own positions count, not text of a client or a model. Called
//! by `picker`; imports only APIs, the format of responses, and the parser of event streams.

use super::answer::AnswerFormat;
use super::api::Api;
use super::events::{EventLines, EventPart};
use memchr::memchr2;
use smallvec::SmallVec;

/// Longest value that is stored, 1 MiB of JSON: the ids of 100,000 tokens, or the blocks of a million.
const MAX_VALUE: usize = 1 << 20;
/// Deepest nesting that is followed: serde_json's default.
const MAX_DEPTH: usize = 128;
/// Longest key or word that matters, in bytes.
const MAX_WORD: usize = 20;

/// Reads one response.
#[derive(Debug)]
pub struct TransferScanner {
    /// Splits an event stream into events; `None` for a single document.
    events: Option<EventLines>,
    walk: Walk,
    reported: ReportedTransfer,
}

/// What a response has reported.
#[derive(Debug, Default)]
struct ReportedTransfer {
    params: Vec<u8>,
    ids: Vec<u32>,
    finish: Option<Finish>,
    /// Whether a value was too long to store.
    cut: bool,
}

/// The reason for which a response ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The token limit was reached: the last token is part of the text.
    Length,
    /// Any other reason: the last token is an end token, or is unknown.
    Stop,
}

/// A key that matters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Key {
    #[default]
    Other,
    Params,
    Choices,
    TokenIds,
    /// The reason for which the response ended.
    Finish,
    /// An object of an event that has the members of a whole response's root.
    Root,
}

/// Structure of an API's responses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum TransferLayout {
    #[default]
    Choices,
    Message,
    Response,
}

impl TransferLayout {
    /// Returns the meaning of a key; `word` ends with the quote.
    fn key(self, word: &[u8]) -> Key {
        match (self, word) {
            (_, b"kv_transfer_params\"") => Key::Params,
            (Self::Choices, b"choices\"") => Key::Choices,
            (Self::Choices, b"token_ids\"") => Key::TokenIds,
            (Self::Choices, b"finish_reason\"") | (Self::Message, b"stop_reason\"") | (Self::Response, b"status\"") => {
                Key::Finish
            }
            (Self::Message, b"delta\"") | (Self::Response, b"response\"") => Key::Root,
            _ => Key::Other,
        }
    }

    /// Returns the meaning of the word under [`Key::Finish`]; `None` if the response continues or has failed.
    fn finish(self, word: &[u8]) -> Option<Finish> {
        match (self, word) {
            (Self::Choices, b"length\"") | (Self::Message, b"max_tokens\"") | (Self::Response, b"incomplete\"") => {
                Some(Finish::Length)
            }
            (Self::Response, b"completed\"") | (Self::Choices | Self::Message, _) => Some(Finish::Stop),
            (Self::Response, _) => None,
        }
    }
}

/// The use of a stored value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StoredUse {
    Params,
    Ids,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Text {
    Key,
    Finish,
    Skip,
}

/// State of one JSON document.
#[derive(Debug, Default)]
struct Walk {
    shape: TransferLayout,
    /// Whether each open bracket is an object's, the innermost lowest.
    objects: u128,
    depth: usize,
    /// The keys of the outer brackets.
    under: [Key; 4],
    key: Key,
    key_next: bool,
    text: Option<Text>,
    escaped: bool,
    word: SmallVec<[u8; 24]>,
    /// The value that is being stored, and the depth at which it ends.
    kept: Option<(StoredUse, usize)>,
    raw: Vec<u8>,
    broken: bool,
}

impl TransferScanner {
    /// Creates a scanner for a response of `api` in this format; `None` for APIs that report nothing.
    #[must_use]
    pub fn new(api: Api, format: AnswerFormat) -> Option<Self> {
        let shape = match api {
            Api::ChatCompletions | Api::Completions => TransferLayout::Choices,
            Api::Messages => TransferLayout::Message,
            Api::Responses => TransferLayout::Response,
            _ => return None,
        };
        let events = (format == AnswerFormat::Events).then(EventLines::default);
        Some(Self { events, walk: Walk::of(shape), reported: ReportedTransfer::default() })
    }

    /// Processes the next bytes of the response, split anywhere.
    pub fn push(&mut self, chunk: &[u8]) {
        let Self { events, walk, reported } = self;
        let Some(events) = events else {
            walk.push(chunk, reported);
            return;
        };
        events.push(chunk, |part| match part {
            EventPart::Event(data) => {
                *walk = Walk::of(walk.shape);
                walk.push(data, reported);
            }
            // The lines of one event are joined by line feeds.
            EventPart::Line if walk.depth > 0 => walk.push(b"\n", reported),
            EventPart::Line | EventPart::End => *walk = Walk::of(walk.shape),
            EventPart::Data(data) => walk.push(data, reported),
            EventPart::Name(_) => {}
        });
    }

    /// Returns the last `kv_transfer_params`: one JSON object, as it was written.
    #[must_use]
    pub fn params(&self) -> Option<&[u8]> {
        Some(&*self.reported.params).filter(|params| !params.is_empty() && !self.reported.cut)
    }

    /// Returns the tokens of the response; empty if they were not reported.
    #[must_use]
    pub fn token_ids(&self) -> &[u32] {
        &self.reported.ids
    }

    /// Returns the reason for which the response ended; `None` if it has not.
    #[must_use]
    pub fn finish(&self) -> Option<Finish> {
        self.reported.finish
    }
}

impl Walk {
    fn of(shape: TransferLayout) -> Self {
        Self { shape, ..Self::default() }
    }

    fn push(&mut self, chunk: &[u8], reported: &mut ReportedTransfer) {
        let mut rest = chunk;
        while !rest.is_empty() && !self.broken {
            let length = match self.text {
                Some(text) => self.text(text, rest, reported),
                None => self.between(rest, reported),
            };
            rest = rest.get(length..).unwrap_or_default();
        }
    }

    /// Consumes bytes of a string. Returns how many.
    fn text(&mut self, text: Text, rest: &[u8], reported: &mut ReportedTransfer) -> usize {
        let end = if self.escaped { Some(0) } else { memchr2(b'"', b'\\', rest) };
        let length = end.map_or(rest.len(), |at| at + 1);
        let part = rest.get(..length).unwrap_or_default();
        self.keep(part);
        if text != Text::Skip {
            let room = MAX_WORD.saturating_sub(self.word.len());
            self.word.extend_from_slice(part.get(..room).unwrap_or(part));
        }
        match end.and_then(|at| rest.get(at)) {
            Some(b'"') if !self.escaped => self.end_text(text, reported),
            Some(b'\\') if !self.escaped => self.escaped = true,
            _ => self.escaped = false,
        }
        length
    }

    fn end_text(&mut self, text: Text, reported: &mut ReportedTransfer) {
        self.text = None;
        match (text, &*self.word) {
            (Text::Key, word) => self.key = self.shape.key(word),
            (Text::Finish, word) => reported.finish = self.shape.finish(word).or(reported.finish),
            (Text::Skip, _) => {}
        }
        self.word.clear();
    }

    /// Consumes bytes between strings. Returns how many.
    fn between(&mut self, rest: &[u8], reported: &mut ReportedTransfer) -> usize {
        let Some(byte) = rest.first() else { return 0 };
        match byte {
            b'"' => {
                let is_finish = self.key == Key::Finish && self.may_finish();
                self.text = Some(match (self.key_next, is_finish) {
                    (true, _) => Text::Key,
                    (false, true) => Text::Finish,
                    (false, false) => Text::Skip,
                });
                self.key_next = false;
            }
            b'{' | b'[' => self.open(*byte),
            b'}' | b']' => {
                self.keep(&[*byte]);
                return self.close(reported);
            }
            b',' => {
                self.key_next = self.objects & 1 == 1;
                self.key = Key::Other;
            }
            _ => {}
        }
        self.keep(&[*byte]);
        1
    }

    /// Whether the position is directly in an element of `choices`.
    fn is_in_choice(&self) -> bool {
        self.depth == 3 && self.objects & 0b111 == 0b101 && self.under.get(1) == Some(&Key::Choices)
    }

    /// Whether the position is directly in the root of a response: the document, or the object that has
    /// its place in an event.
    fn is_in_root(&self) -> bool {
        self.depth == 1 || (self.depth == 2 && self.objects & 0b11 == 0b11 && self.under.get(1) == Some(&Key::Root))
    }

    /// Whether the end of the response is reported at this position.
    fn may_finish(&self) -> bool {
        if self.shape == TransferLayout::Choices { self.is_in_choice() } else { self.is_in_root() }
    }

    fn open(&mut self, bracket: u8) {
        let wanted = match (self.key, bracket) {
            (Key::Params, b'{') if self.is_in_root() => Some(StoredUse::Params),
            (Key::TokenIds, b'[') if self.is_in_choice() => Some(StoredUse::Ids),
            _ => None,
        };
        if let Some(wanted) = wanted {
            self.raw.clear();
            self.kept = Some((wanted, self.depth));
        }
        if let Some(slot) = self.under.get_mut(self.depth) {
            *slot = self.key;
        }
        self.objects = self.objects << 1 | u128::from(bracket == b'{');
        self.depth += 1;
        self.key = Key::Other;
        self.key_next = bracket == b'{';
        self.broken |= self.depth > MAX_DEPTH;
    }

    fn close(&mut self, reported: &mut ReportedTransfer) -> usize {
        match self.depth.checked_sub(1) {
            Some(depth) => self.depth = depth,
            None => self.broken = true,
        }
        self.objects >>= 1;
        (self.key_next, self.key) = (false, Key::Other);
        if let Some((wanted, _)) = self.kept.filter(|(_, depth)| *depth == self.depth) {
            self.kept = None;
            if self.raw.len() > MAX_VALUE {
                reported.cut = true;
            }
            match wanted {
                StoredUse::Params => reported.params = std::mem::take(&mut self.raw),
                StoredUse::Ids => match serde_json::from_slice::<Vec<u32>>(&self.raw) {
                    Ok(ids) => reported.ids.extend_from_slice(&ids),
                    Err(_) => reported.cut = true,
                },
            }
        }
        1
    }

    fn keep(&mut self, bytes: &[u8]) {
        if self.kept.is_some() && self.raw.len() <= MAX_VALUE {
            self.raw.extend_from_slice(bytes);
        }
    }
}

#[cfg(test)]
mod tests;
