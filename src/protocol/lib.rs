//! Bodies of requests and responses: which API a path names, what in a request matters to routing, what in a response
//! matters to accounting.
//!
//! Everything is borrowed from the body and read in one pass; no document tree is built.
//!
//! **Owns** parsing of every API, byte-exact edits ([`edit`], [`splice`]), usage and transfer scanners of responses
//! ([`usage`], [`transfer`]), and the error bodies of each API ([`dialect`]).
//! **Called by** `ext_proc`, `disagg`, `prompt`, `scheduling` and the load generator.
//! **Must not** do I/O, keep a body, or know of pools and endpoints.
//!
//! Read first: `lib.rs`, `json/mod.rs`, `usage.rs`.

pub mod answer;
pub mod api;
pub mod dialect;
pub mod edit;
mod events;
pub mod grpc;
mod json;
mod members;
pub mod multipart;
pub mod prompt;
pub mod splice;
pub mod text;
pub mod transfer;
pub mod usage;

pub use answer::{AnswerFormat, AnswerText};
pub use api::{Api, BodyFormat, Dialect};
pub use prompt::{MediaKind, Piece, Prompt};
pub use splice::{ModelRenamer, insert_model, replace_model};
pub use text::Text;
pub use transfer::TransferScanner;
pub use usage::{Usage, UsageScanner};

use attache_types::error::RequestError;
use attache_types::limits::Limits;
use std::borrow::Cow;
use std::ops::Range;

/// What a request says that matters to routing. Borrows from the body.
#[derive(Clone, Debug, PartialEq)]
pub struct Request<'a> {
    /// The model the client asked for; `None` where the API makes it optional and it is absent, or the body can't be read.
    pub model: Option<Model<'a>>,
    /// The body names no model: `model` is the default of the pool, and has no place in the body.
    pub model_is_default: bool,
    /// What the server will have to read.
    pub prompt: Prompt<'a>,
    /// The answer comes as server-sent events.
    pub stream: bool,
    /// Longest answer asked for, tokens; `None` when absent or not a whole number of 32 bits.
    pub max_tokens: Option<u32>,
    /// Answers asked for (`n`); 1 unless said.
    pub choices: u32,
    /// Separates the prefix caches of tenants.
    pub cache_salt: Option<Cow<'a, str>>,
    /// Responses API: the answer that this request continues; its state lives on the server that gave it.
    pub previous_response_id: Option<Cow<'a, str>>,
    /// Responses API: the conversation that this request continues.
    pub conversation: Option<Cow<'a, str>>,
    /// The client's own name for requests that share a beginning.
    pub prompt_cache_key: Option<Cow<'a, str>>,
    /// The server cuts the prompt at its front (`truncate_prompt_tokens`): where what it computes begins is not known.
    pub truncated: bool,
    /// Something is there that stands for a prompt, or for several, and can't be read: `prompt_embeds`, Cohere's `inputs` of mixed content.
    pub opaque_prompt: bool,
    /// The server computes all of the prompt, whatever it has cached: it is asked for the probabilities of the prompt's tokens
    /// (vLLM's `prompt_logprobs`, and `echo` with `logprobs`).
    pub skips_cache: bool,
}

impl Default for Request<'_> {
    fn default() -> Self {
        Self {
            model: None,
            model_is_default: false,
            prompt: Prompt::default(),
            stream: false,
            max_tokens: None,
            choices: 1,
            cache_salt: None,
            previous_response_id: None,
            conversation: None,
            prompt_cache_key: None,
            truncated: false,
            opaque_prompt: false,
            skips_cache: false,
        }
    }
}

impl Request<'_> {
    /// Answers that the server makes: as many as are asked for, to each of its prompts.
    #[must_use]
    pub fn answers(&self) -> u32 {
        self.choices.saturating_mul(self.prompt.count.max(1))
    }
}

/// The model's name and where it stands in the body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model<'a> {
    /// The name, unescaped.
    pub name: Cow<'a, str>,
    /// The bytes of the JSON string in the body, quotes included: what a rewrite replaces. Empty for multipart and gRPC bodies, in
    /// which nothing can be spliced.
    pub span: Range<usize>,
}

/// Reads a whole request body. `content_type` is the header's value, if there was one.
///
/// # Errors
/// The body breaks a rule of its API or a limit: the reason names the rule, the message the field, what was got and what is allowed. The
/// message never holds text of the prompt. Bodies of [`Api::Other`] and multipart bodies are never refused.
pub fn parse<'a>(
    api: Api,
    content_type: Option<&str>,
    body: &'a [u8],
    limits: &Limits,
) -> Result<Request<'a>, RequestError> {
    read(api, content_type, body, limits, true)
}

/// The same, where a body need not name a model. One that names `null` is refused all the same: a default has no place in it.
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

/// The refusal of a body that must name a model and does not.
#[must_use]
pub fn missing_model(limits: &Limits) -> RequestError {
    json::missing_model(limits)
}

fn read<'a>(
    api: Api,
    content_type: Option<&str>,
    body: &'a [u8],
    limits: &Limits,
    named: bool,
) -> Result<Request<'a>, RequestError> {
    match api.body_format() {
        BodyFormat::Nothing => Ok(Request::default()),
        BodyFormat::Json => json::read(api, content_type, body, limits, named),
        BodyFormat::Multipart => Ok(multipart::sniff(content_type, body, limits)),
        BodyFormat::Grpc => grpc::read(api, body),
        BodyFormat::Unknown => Ok(json::glance(body, limits)),
    }
}
