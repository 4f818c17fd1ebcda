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
//! by `picker`; imports only APIs, the format of responses, and their documents.

use super::answer::AnswerFormat;
use super::api::Api;
use super::documents::{Documents, EventVisitor};
use super::members::{MemberReader, Visitor, Wanted, unquoted};

/// Longest value that is stored, 1 MiB of JSON: the ids of 100,000 tokens, or the blocks of a million.
const MAX_VALUE: usize = 1 << 20;

/// Reads one response.
#[derive(Debug)]
pub struct TransferScanner {
    documents: Documents<Key>,
    reported: ReportedTransfer,
}

/// What a response has reported.
#[derive(Debug)]
struct ReportedTransfer {
    shape: TransferLayout,
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
    // The default only fills the unused part of the reader's path.
    #[default]
    Params,
    Choices,
    TokenIds,
    /// The reason for which the response ended.
    Finish,
    /// An object of an event that has the members of a whole response's root.
    Root,
}

/// Structure of an API's responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TransferLayout {
    Choices,
    Message,
    Response,
}

impl TransferLayout {
    /// Returns the meaning of the word under [`Key::Finish`]; `None` if the response continues or has failed.
    fn finish(self, word: &[u8]) -> Option<Finish> {
        match (self, word) {
            (Self::Choices, b"length") | (Self::Message, b"max_tokens") | (Self::Response, b"incomplete") => {
                Some(Finish::Length)
            }
            (Self::Response, b"completed") | (Self::Choices | Self::Message, _) => Some(Finish::Stop),
            (Self::Response, _) => None,
        }
    }
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
        let reported = ReportedTransfer { shape, params: Vec::new(), ids: Vec::new(), finish: None, cut: false };
        Some(Self { documents: Documents::new(format, MemberReader::new(false, MAX_VALUE)), reported })
    }

    /// Processes the next bytes of the response, split anywhere.
    pub fn push(&mut self, chunk: &[u8]) {
        self.documents.push(chunk, &mut self.reported);
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

impl Visitor for ReportedTransfer {
    type Member = Key;

    fn wants(&mut self, path: &[Key], name: &[u8]) -> Wanted<Key> {
        use TransferLayout::{Choices, Message, Response};
        match (self.shape, path, name) {
            (_, [] | [Key::Root], b"kv_transfer_params") => Wanted::Value(Key::Params),
            (Choices, [], b"choices") => Wanted::Elements(Key::Choices),
            (Message, [], b"delta") | (Response, [], b"response") => Wanted::Members(Key::Root),
            (Choices, [Key::Choices], b"token_ids") => Wanted::Value(Key::TokenIds),
            (Choices, [Key::Choices], b"finish_reason")
            | (Message, [] | [Key::Root], b"stop_reason")
            | (Response, [] | [Key::Root], b"status") => Wanted::Value(Key::Finish),
            _ => Wanted::No,
        }
    }

    fn begin(&mut self, _path: &[Key]) {}

    fn end(&mut self, _path: &[Key], _number: usize) {}

    fn value(&mut self, _path: &[Key], member: Key, value: Option<&[u8]>) {
        let Some(value) = value else {
            self.cut |= member != Key::Finish;
            return;
        };
        match (member, value.first()) {
            (Key::Params, Some(b'{')) => self.params = value.to_vec(),
            (Key::TokenIds, Some(b'[')) => match serde_json::from_slice::<Vec<u32>>(value) {
                Ok(ids) => self.ids.extend_from_slice(&ids),
                Err(_) => self.cut = true,
            },
            (Key::Finish, Some(b'"')) => self.finish = self.shape.finish(unquoted(value)).or(self.finish),
            _ => {}
        }
    }
}

impl EventVisitor for ReportedTransfer {}

#[cfg(test)]
mod tests;
