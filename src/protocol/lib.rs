//! Bodies of requests and responses: the API of a path, the request data that routing needs, and the response data
//! that accounting needs.
//!
//! Everything is borrowed from the body and read in one pass, without a document tree.
//!
//! **Owns** parsing of every API, byte-exact edits ([`edit`], `splice`), usage and transfer scanners of responses
//! ([`usage`], [`transfer`]), and the error bodies of each API ([`dialect`]).
//! **Called by** `picker` and `ext_proc` for each request and response, by `disagg` and `tokenize` for bodies that
//! Attaché sends, and by the load generator. `prompt` and `scheduling` read the parsed [`Request`].
//! **Must not** do I/O, keep a body, or know of pools and endpoints.
//!
//! Read first: `lib.rs`, `json/mod.rs`, `usage.rs`.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

pub mod answer;
pub mod api;
pub mod dialect;
mod documents;
pub mod edit;
pub mod events;
pub mod grpc;
mod json;
mod members;
mod multipart;
pub mod prompt;
mod splice;
pub mod text;
pub mod transfer;
pub mod usage;

pub use answer::{AnswerFormat, AnswerText};
pub use api::{Api, BodyFormat, Dialect};
pub use multipart::{CUT_FORM, FormModel, FormScanner, insert_form_model, is_form};
pub use prompt::{MediaKind, Piece, Prompt};
pub use splice::{ModelRenamer, insert_model, replace_form_model, replace_model};
pub use text::Text;
pub use transfer::TransferScanner;
pub use usage::{Usage, UsageScanner};

use attache_types::error::RequestError;
use attache_types::limits::Limits;
use std::borrow::Cow;
use std::ops::Range;

/// The data of a request that routing needs, borrowed from the body.
#[derive(Clone, Debug, PartialEq)]
pub struct Request<'a> {
    /// The requested model; `None` if the API makes it optional and it is absent, or if the body cannot be read.
    pub model: Option<Model<'a>>,
    /// Whether `model` is the pool's default, because the body names none. It then has no position in the body.
    pub model_is_default: bool,
    /// Why the model can't be read, though a server may find one in the body: a form that is cut or ambiguous.
    pub unread_model: Option<&'static str>,
    /// Whether the body is a `multipart/form-data` form.
    pub is_form: bool,
    /// What the server will have to read.
    pub prompt: Prompt<'a>,
    /// Whether the response is a stream of server-sent events.
    pub stream: bool,
    /// Limit of the response in tokens; `None` when absent or not a whole number of 32 bits.
    pub max_tokens: Option<u32>,
    /// Number of requested responses (`n`), 1 by default.
    pub choices: u32,
    /// Salt that separates the prefix caches of tenants.
    pub cache_salt: Option<Cow<'a, str>>,
    /// Responses API: id of the response that this request continues. Its state is on the server that created it.
    pub previous_response_id: Option<Cow<'a, str>>,
    /// Responses API: id of the conversation that this request continues.
    pub conversation: Option<Cow<'a, str>>,
    /// The client's own key for requests that share a prefix.
    pub prompt_cache_key: Option<Cow<'a, str>>,
    /// The client's own id of a session (`session_id`), as vLLM and OpenRouter have it.
    pub session_id: Option<Cow<'a, str>>,
    /// Messages API: `metadata.user_id`, in which coding agents have the id of their session.
    pub metadata_user_id: Option<Cow<'a, str>>,
    /// Whether the server cuts the start of the prompt (`truncate_prompt_tokens`), so that its
    /// first computed token is unknown.
    pub truncated: bool,
    /// Whether a part of the prompt cannot be read: `prompt_embeds`, or Cohere's `inputs` of mixed content.
    pub opaque_prompt: bool,
    /// Whether the server computes the whole prompt despite its cache, because the client requested the probabilities
    /// of the prompt's tokens (vLLM's `prompt_logprobs`, and `echo` with `logprobs`).
    pub skips_cache: bool,
    /// Whether the client chooses which KV events vLLM publishes for the request (`kv_cache_report_mode`).
    pub sets_report_mode: bool,
}

impl Default for Request<'_> {
    fn default() -> Self {
        Self {
            model: None,
            model_is_default: false,
            unread_model: None,
            is_form: false,
            prompt: Prompt::default(),
            stream: false,
            max_tokens: None,
            choices: 1,
            cache_salt: None,
            previous_response_id: None,
            conversation: None,
            prompt_cache_key: None,
            session_id: None,
            metadata_user_id: None,
            truncated: false,
            opaque_prompt: false,
            skips_cache: false,
            sets_report_mode: false,
        }
    }
}

impl Request<'_> {
    /// Returns the number of responses that the server generates: those requested for each prompt.
    #[must_use]
    pub fn answers(&self) -> u32 {
        self.choices.saturating_mul(self.prompt.count.max(1))
    }
}

/// The name of the model and its position in the body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model<'a> {
    /// The name, unescaped.
    pub name: Cow<'a, str>,
    /// The bytes in the body that a rewrite replaces: the JSON string including quotes, or the value of a form's part.
    /// Empty for gRPC bodies, which cannot be rewritten.
    pub span: Range<usize>,
}

/// Parses a complete request body. `content_type` is the value of the header, if present.
///
/// # Errors
/// [`RequestError`] when the body violates a rule of its API or a limit: its reason names the rule, its message the
/// field, what was received and what is allowed. The message never quotes the prompt. Bodies of [`Api::Other`] and
/// forms are never rejected.
pub fn parse<'a>(
    api: Api,
    content_type: Option<&str>,
    body: &'a [u8],
    limits: &Limits,
) -> Result<Request<'a>, RequestError> {
    read(api, content_type, body, limits, true)
}

/// As [`parse`], for a body that need not name a model. A body with `null` is rejected all the same, since a
/// default model cannot be inserted.
///
/// # Errors
/// As [`parse`].
pub fn parse_unnamed<'a>(
    api: Api,
    content_type: Option<&str>,
    body: &'a [u8],
    limits: &Limits,
) -> Result<Request<'a>, RequestError> {
    read(api, content_type, body, limits, false)
}

/// Returns the error for a body without the required model.
#[must_use]
pub fn missing_model(limits: &Limits) -> RequestError {
    json::missing_model(limits)
}

/// Returns a JSON body without a byte order mark.
#[must_use]
pub fn without_mark(body: &[u8]) -> &[u8] {
    json::without_mark(body)
}

fn read<'a>(
    api: Api,
    content_type: Option<&str>,
    body: &'a [u8],
    limits: &Limits,
    named: bool,
) -> Result<Request<'a>, RequestError> {
    match api.body_format() {
        BodyFormat::Json => json::read(api, content_type, body, limits, named),
        BodyFormat::Multipart | BodyFormat::Unknown if is_form(content_type) => {
            Ok(multipart::read(content_type, body, limits))
        }
        BodyFormat::Grpc => grpc::read(api, body),
        BodyFormat::Multipart | BodyFormat::Unknown => Ok(json::glance(body, limits)),
    }
}

#[cfg(test)]
mod tests;
