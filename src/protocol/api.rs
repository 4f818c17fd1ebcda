//! The APIs of model servers, recognised by the request path.
//!
//! Gateways may put prefixes before the path, so an API is recognised by the last path segments. Any other path is
//! [`Api::Other`], which is routed and never rejected.

use super::edit::Members;
use std::borrow::Cow;

/// One API of a model server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Api {
    /// `/v1/completions`
    Completions,
    /// `/v1/chat/completions`
    ChatCompletions,
    /// `/v1/chat/completions/batch`: a list of conversations (vLLM).
    ChatBatch,
    /// `/v1/responses`, and `/v1/responses/compact`, which summarises a conversation.
    Responses,
    /// `/v1/responses/{id}` and paths below it: a response that is stored on the server that created it.
    ResponseById,
    /// `/v1/conversations` and paths below it.
    Conversations,
    /// `/v1/messages` (Anthropic)
    Messages,
    /// `/inference/v1/generate`: token ids in, token ids out (vLLM).
    Generate,
    /// `/generate`: SGLang's own API.
    SglangGenerate,
    /// `/v1/messages/count_tokens` (Anthropic)
    CountTokens,
    /// `/v1/responses/input_tokens` and `/v1/chat/completions/input_tokens`: counts the tokens of such a request.
    InputTokens,
    /// `/v1/embeddings` and Cohere's `/v2/embed`
    Embeddings,
    /// `/rerank`, `/v1/rerank`, `/v2/rerank`
    Rerank,
    /// `/score`, `/v1/score`
    Score,
    /// `/tokenize`
    Tokenize,
    /// `/detokenize`
    Detokenize,
    /// `/v1/audio/transcriptions`
    Transcription,
    /// `/v1/audio/translations`
    Translation,
    /// `/pooling`
    Pooling,
    /// `/classify`
    Classify,
    /// `/v1/models` and `/v1/models/{id}`
    Models,
    /// gRPC `vllm.grpc.engine.VllmEngine/Generate`
    GrpcGenerate,
    /// gRPC `vllm.grpc.engine.VllmEngine/Embed`
    GrpcEmbed,
    /// Any other method of `vllm.grpc.engine.VllmEngine`: rejected, because it concerns one particular server.
    GrpcUnsupported,
    /// An unknown path: routed, never rejected.
    #[default]
    Other,
}

/// The error format of an API.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// OpenAI's format, which most other APIs share.
    #[default]
    OpenAi,
    /// Anthropic's format.
    Anthropic,
}

/// Format of a request's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BodyFormat {
    /// The body is one JSON object.
    Json,
    /// The body is `multipart/form-data`, usually with a file.
    Multipart,
    /// The body is one gRPC frame.
    Grpc,
    /// Unknown: the body is inspected, and never rejected.
    Unknown,
}

/// Members of an item that are searched for its role or type: no item has more.
const MAX_ITEM_MEMBERS: usize = 32;

/// Members of the root object that [`Api::from_body`] looks for.
const TELLING_FIELDS: &[&str] = &[
    "messages",
    "prompt",
    "input",
    "documents",
    "query",
    "items",
    "text_1",
    "token_ids",
    "system",
    "stop_sequences",
    "thinking",
    "encoding_format",
    "dimensions",
    "input_type",
    "text",
    "input_ids",
    "input_embeds",
    "sampling_params",
];
/// Members that have the prompt of SGLang's `/generate`, besides `sampling_params`.
const SGLANG_FIELDS: &[&str] = &["text", "input_ids", "input_embeds"];
/// Members besides `messages` that Anthropic's API has and OpenAI's does not.
const ANTHROPIC_FIELDS: &[&str] = &["system", "stop_sequences", "thinking"];
/// Members besides `input` that embeddings have and the Responses API does not.
const EMBEDDING_FIELDS: &[&str] = &["encoding_format", "dimensions", "input_type"];

/// The gRPC service of vLLM's engine, the first segment of its paths.
const VLLM_SERVICE: &str = "vllm.grpc.engine.VllmEngine";

impl Api {
    /// All APIs, for tests, fuzzing and metric labels.
    pub const ALL: &'static [Api] = &[
        Api::Completions,
        Api::ChatCompletions,
        Api::ChatBatch,
        Api::Responses,
        Api::ResponseById,
        Api::Conversations,
        Api::Messages,
        Api::Generate,
        Api::SglangGenerate,
        Api::CountTokens,
        Api::InputTokens,
        Api::Embeddings,
        Api::Rerank,
        Api::Score,
        Api::Tokenize,
        Api::Detokenize,
        Api::Transcription,
        Api::Translation,
        Api::Pooling,
        Api::Classify,
        Api::Models,
        Api::GrpcGenerate,
        Api::GrpcEmbed,
        Api::GrpcUnsupported,
        Api::Other,
    ];

    /// Returns the API of `path`, and the id of the response or conversation if the path has one. The query, trailing
    /// slashes and prefixes before the known segments are ignored. Percent-encoded bytes are decoded once, as model
    /// servers decode a path before routing it: `/v1/%63hat%2Fcompletions` is `/v1/chat/completions`.
    #[must_use]
    pub fn from_path(path: &str) -> (Api, Option<Cow<'_, str>>) {
        match decoded_path(path) {
            Cow::Borrowed(path) => {
                let (api, id) = Self::from_decoded(path);
                (api, id.map(Cow::Borrowed))
            }
            Cow::Owned(path) => {
                let (api, id) = Self::from_decoded(&path);
                (api, id.map(|id| Cow::Owned(id.to_owned())))
            }
        }
    }

    fn from_decoded(path: &str) -> (Api, Option<&str>) {
        // The last four segments, the last one first: no known suffix is longer.
        let mut segments = path.rsplit('/').skip_while(|s| s.is_empty());
        let tail = [segments.next(), segments.next(), segments.next(), segments.next()].map(Option::unwrap_or_default);
        let api = match tail {
            ["batch", "completions", "chat", _] => Api::ChatBatch,
            ["completions", "chat", ..] => Api::ChatCompletions,
            ["completions", ..] => Api::Completions,
            ["responses", ..] | ["compact", "responses", ..] => Api::Responses,
            ["input_tokens", "responses", ..] | ["input_tokens", "completions", "chat", _] => Api::InputTokens,
            ["count_tokens", "messages", ..] => Api::CountTokens,
            // `/v1/threads/{id}/messages` is another API: only a version or nothing may precede.
            ["messages", before, ..] if before.is_empty() || is_version(before) => Api::Messages,
            ["generate", "v1", "inference", ..] => Api::Generate,
            // Triton's `/v2/models/{model}/generate` is another API.
            ["generate", _, models, _] if models != "models" => Api::SglangGenerate,
            ["embeddings", ..] | ["embed", "v2", ..] => Api::Embeddings,
            ["rerank", ..] => Api::Rerank,
            ["score", ..] => Api::Score,
            ["tokenize", ..] => Api::Tokenize,
            ["detokenize", ..] => Api::Detokenize,
            ["transcriptions", "audio", ..] => Api::Transcription,
            ["translations", "audio", ..] => Api::Translation,
            ["pooling", ..] => Api::Pooling,
            ["classify", ..] => Api::Classify,
            ["conversations", ..] => Api::Conversations,
            ["Generate", VLLM_SERVICE, ..] => Api::GrpcGenerate,
            ["Embed", VLLM_SERVICE, ..] => Api::GrpcEmbed,
            [_, VLLM_SERVICE, ..] => Api::GrpcUnsupported,
            ["cancel" | "input_items", id, "responses", _] | [id, "responses", ..] => {
                return (Api::ResponseById, Some(id));
            }
            [_, "items", id, "conversations"] | ["items", id, "conversations", _] | [id, "conversations", ..] => {
                return (Api::Conversations, Some(id));
            }
            // Model ids may contain slashes.
            _ if path.contains("/v1/models/") || path.trim_end_matches('/').ends_with("/models") => Api::Models,
            _ => Api::Other,
        };
        (api, None)
    }

    /// Returns the API of a JSON body by its members, for gateways that do not send the path;
    /// [`Api::Other`] if they match none.
    ///
    /// `input` may belong to the Responses API or to embeddings. A list that begins with text or numbers, or a member
    /// that only embeddings have, means embeddings.
    #[must_use]
    pub fn from_body(body: &[u8]) -> Api {
        let Ok(members) = Members::new(body) else { return Api::Other };
        let mut seen = Vec::new();
        let mut lists_text = false;
        for member in members.map_while(Result::ok).filter(|member| member.given().is_some()) {
            let Some(field) = TELLING_FIELDS.iter().find(|field| member.is(field)) else { continue };
            if *field == "input" {
                let first = member.value.strip_prefix(b"[").unwrap_or_default().trim_ascii_start();
                lists_text = match first.first() {
                    Some(b'{') => !is_item(first),
                    Some(byte) => *byte != b']',
                    None => false,
                };
            }
            if !seen.contains(field) {
                seen.push(*field);
            }
        }
        let has = |fields: &[&str]| fields.iter().any(|field| seen.contains(field));
        match () {
            () if has(&["messages"]) && has(ANTHROPIC_FIELDS) => Api::Messages,
            () if has(&["messages"]) => Api::ChatCompletions,
            () if has(&["prompt"]) => Api::Completions,
            () if has(&["input"]) && (lists_text || has(EMBEDDING_FIELDS)) => Api::Embeddings,
            () if has(&["input"]) => Api::Responses,
            () if has(&["documents"]) && has(&["query"]) => Api::Rerank,
            () if has(&["text_1"]) || has(&["items"]) && has(&["query"]) => Api::Score,
            () if has(&["token_ids"]) => Api::Generate,
            () if has(&["sampling_params"]) && has(SGLANG_FIELDS) => Api::SglangGenerate,
            () => Api::Other,
        }
    }

    /// Returns the usual path of an API that [`Api::from_body`] recognises; empty for other APIs.
    #[must_use]
    pub fn usual_path(self) -> &'static str {
        match self {
            Api::Messages => "/v1/messages",
            Api::ChatCompletions => "/v1/chat/completions",
            Api::Completions => "/v1/completions",
            Api::Embeddings => "/v1/embeddings",
            Api::Responses => "/v1/responses",
            Api::Rerank => "/v1/rerank",
            Api::Score => "/v1/score",
            Api::Generate => "/inference/v1/generate",
            Api::SglangGenerate => "/generate",
            _ => "",
        }
    }

    /// Returns the format of this API's errors.
    #[must_use]
    pub fn dialect(self) -> Dialect {
        match self {
            Api::Messages | Api::CountTokens => Dialect::Anthropic,
            _ => Dialect::OpenAi,
        }
    }

    /// Returns the format of this API's request bodies.
    #[must_use]
    pub fn body_format(self) -> BodyFormat {
        match self {
            Api::Transcription | Api::Translation => BodyFormat::Multipart,
            Api::GrpcGenerate | Api::GrpcEmbed | Api::GrpcUnsupported => BodyFormat::Grpc,
            // No known method of these has a body. One with a body is a word that Attaché takes for an id.
            Api::ResponseById | Api::Models | Api::Other => BodyFormat::Unknown,
            _ => BodyFormat::Json,
        }
    }

    /// Whether responses report token counts.
    #[must_use]
    pub fn reports_usage(self) -> bool {
        self.generates()
            || matches!(
                self,
                Api::ResponseById
                    | Api::Embeddings
                    | Api::Rerank
                    | Api::Score
                    | Api::Pooling
                    | Api::Classify
                    | Api::GrpcEmbed
            )
    }

    /// Whether the server generates tokens (decode), instead of only reading a prompt.
    #[must_use]
    pub fn generates(self) -> bool {
        matches!(
            self,
            Api::Completions
                | Api::ChatCompletions
                | Api::ChatBatch
                | Api::Responses
                | Api::Messages
                | Api::Generate
                | Api::SglangGenerate
                | Api::Transcription
                | Api::Translation
                | Api::GrpcGenerate
        )
    }

    /// Whether the first byte of a streamed response comes with the first token. The Responses
    /// API announces a response earlier.
    #[must_use]
    pub fn first_byte_is_first_token(self) -> bool {
        matches!(
            self,
            Api::Completions
                | Api::ChatCompletions
                | Api::Messages
                | Api::Generate
                | Api::SglangGenerate
                | Api::GrpcGenerate
        )
    }

    /// Whether the prompt uses a KV cache that may hold prefixes of other prompts.
    #[must_use]
    pub fn prefills(self) -> bool {
        self.generates() && self.body_format() != BodyFormat::Multipart
    }

    /// Whether a request without a model is rejected. vLLM accepts it, but with several pools or adapters
    /// the model would be ambiguous.
    #[must_use]
    pub fn requires_model(self) -> bool {
        let optional =
            matches!(self, Api::Tokenize | Api::Detokenize | Api::Conversations | Api::Generate | Api::SglangGenerate);
        self.body_format() == BodyFormat::Json && !optional
    }

    /// Returns the stable name for metric labels and logs, in snake_case.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Api::Completions => "completions",
            Api::ChatCompletions => "chat_completions",
            Api::ChatBatch => "chat_batch",
            Api::Responses => "responses",
            Api::ResponseById => "response_by_id",
            Api::Conversations => "conversations",
            Api::Messages => "messages",
            Api::Generate => "generate",
            Api::SglangGenerate => "sglang_generate",
            Api::CountTokens => "count_tokens",
            Api::InputTokens => "input_tokens",
            Api::Embeddings => "embeddings",
            Api::Rerank => "rerank",
            Api::Score => "score",
            Api::Tokenize => "tokenize",
            Api::Detokenize => "detokenize",
            Api::Transcription => "transcription",
            Api::Translation => "translation",
            Api::Pooling => "pooling",
            Api::Classify => "classify",
            Api::Models => "models",
            Api::GrpcGenerate => "grpc_generate",
            Api::GrpcEmbed => "grpc_embed",
            Api::GrpcUnsupported => "grpc_unsupported",
            Api::Other => "other",
        }
    }
}

/// Returns a path without its query, with percent-encoded bytes decoded once. Invalid encodings stay unchanged, and
/// invalid UTF-8 becomes U+FFFD, as in Python's `unquote`, which uvicorn uses. Nothing else is normalised.
#[must_use]
pub fn decoded_path(path: &str) -> Cow<'_, str> {
    let end = memchr::memchr2(b'?', b'#', path.as_bytes()).unwrap_or(path.len());
    let path = path.get(..end).unwrap_or_default();
    if memchr::memchr(b'%', path.as_bytes()).is_none() {
        return Cow::Borrowed(path);
    }
    let mut bytes = Vec::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let [first, after @ ..] = rest {
        let digit = |at: usize| after.get(at).and_then(|digit| char::from(*digit).to_digit(16));
        let encoded = (*first == b'%').then(|| digit(0).zip(digit(1))).flatten();
        let byte = encoded.and_then(|(high, low)| u8::try_from(high << 4 | low).ok());
        bytes.push(byte.unwrap_or(*first));
        rest = byte.and_then(|_| after.get(2..)).unwrap_or(after);
    }
    Cow::Owned(String::from_utf8_lossy(&bytes).into_owned())
}

/// Whether a list of the Responses API may begin with this object, whose end may be followed by anything.
fn is_item(object: &[u8]) -> bool {
    let members = Members::new(object).into_iter().flatten().map_while(Result::ok);
    members.take(MAX_ITEM_MEMBERS).any(|member| member.is("role") || member.is("type"))
}

fn is_version(segment: &str) -> bool {
    segment.strip_prefix('v').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

#[cfg(test)]
mod tests;
