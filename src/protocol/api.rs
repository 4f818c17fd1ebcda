//! The APIs that model servers speak, told from the path.
//!
//! Servers sit behind gateways that put prefixes before the path, so an API is told from the last segments of the path. What no
//! rule names is [`Api::Other`]: routed, never rejected.

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
    /// `/v1/responses`
    Responses,
    /// `/v1/responses/{id}` and what lies below: a response that lives on the server that gave it.
    ResponseById,
    /// `/v1/conversations` and what lies below.
    Conversations,
    /// `/v1/messages` (Anthropic)
    Messages,
    /// `/inference/v1/generate`: token ids in, token ids out (vLLM).
    Generate,
    /// `/generate`: SGLang's own API.
    SglangGenerate,
    /// `/v1/messages/count_tokens` (Anthropic)
    CountTokens,
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
    /// Any other method of `vllm.grpc.engine.VllmEngine`: refused, because it speaks about one server, not about any.
    GrpcUnsupported,
    /// A path that we don't know: routed, never rejected.
    #[default]
    Other,
}

/// In whose words an API speaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// OpenAI's, and everyone's who copied it.
    #[default]
    OpenAi,
    /// Anthropic's.
    Anthropic,
}

/// What the body of a request is written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BodyFormat {
    /// Requests of this API have no body that says anything.
    Nothing,
    /// One JSON object.
    Json,
    /// `multipart/form-data`, mostly a file.
    Multipart,
    /// One gRPC frame.
    Grpc,
    /// Not known; looked at, never refused.
    Unknown,
}

/// Fields of the root that [`Api::from_body`] looks for.
const TELLING_FIELDS: &[&str] = &[
    "messages",
    "prompt",
    "input",
    "documents",
    "query",
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
/// Fields that hold the prompt of SGLang's `/generate`, beside `sampling_params`.
const SGLANG_FIELDS: &[&str] = &["text", "input_ids", "input_embeds"];
/// Fields beside `messages` that Anthropic's API has and OpenAI's has not.
const ANTHROPIC_FIELDS: &[&str] = &["system", "stop_sequences", "thinking"];
/// Fields beside `input` that embeddings have and the Responses API has not.
const EMBEDDING_FIELDS: &[&str] = &["encoding_format", "dimensions", "input_type"];

/// The gRPC service of vLLM's engine, the first segment of its paths.
const VLLM_SERVICE: &str = "vllm.grpc.engine.VllmEngine";

impl Api {
    /// All of them, for tests, fuzzing and metric labels.
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

    /// The API that `path` names, and the id of the response or conversation when the path holds one. The query, trailing slashes
    /// and any prefix before the known segments don't matter. Percent-encoded bytes count as what they stand for, once, as model servers
    /// decode a path before they look for its handler: `/v1/%63hat%2Fcompletions` is `/v1/chat/completions`.
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
            ["responses", ..] => Api::Responses,
            ["count_tokens", "messages", ..] => Api::CountTokens,
            // `/v1/threads/{id}/messages` is another API: only a version or nothing may stand before.
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
            // Ids of models hold slashes.
            _ if path.contains("/v1/models/") || path.trim_end_matches('/').ends_with("/models") => Api::Models,
            _ => Api::Other,
        };
        (api, None)
    }

    /// The API that a JSON body is of, by its fields, for gateways that do not send the path; [`Api::Other`] when they fit none.
    ///
    /// `input` alone may be of the Responses API or of embeddings: a list that begins with text or numbers, or a field that only embeddings have,
    /// is embeddings'.
    #[must_use]
    pub fn from_body(body: &[u8]) -> Api {
        let Ok(members) = Members::new(body) else { return Api::Other };
        let mut seen = Vec::new();
        let mut lists_text = false;
        for member in members.map_while(Result::ok).filter(|member| member.given().is_some()) {
            let Some(field) = TELLING_FIELDS.iter().find(|field| member.is(field)) else { continue };
            if *field == "input" {
                let first = member.value.strip_prefix(b"[").unwrap_or_default().trim_ascii_start();
                lists_text = first.first().is_some_and(|byte| !matches!(byte, b'{' | b']'));
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
            () if has(&["text_1"]) => Api::Score,
            () if has(&["token_ids"]) => Api::Generate,
            () if has(&["sampling_params"]) && has(SGLANG_FIELDS) => Api::SglangGenerate,
            () => Api::Other,
        }
    }

    /// The path at which model servers have an API that [`Api::from_body`] recognizes; empty for other APIs.
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

    /// In whose words this API speaks, errors included.
    #[must_use]
    pub fn dialect(self) -> Dialect {
        match self {
            Api::Messages | Api::CountTokens => Dialect::Anthropic,
            _ => Dialect::OpenAi,
        }
    }

    /// What its request bodies are written in.
    #[must_use]
    pub fn body_format(self) -> BodyFormat {
        match self {
            Api::ResponseById | Api::Models => BodyFormat::Nothing,
            Api::Transcription | Api::Translation => BodyFormat::Multipart,
            Api::GrpcGenerate | Api::GrpcEmbed | Api::GrpcUnsupported => BodyFormat::Grpc,
            Api::Other => BodyFormat::Unknown,
            _ => BodyFormat::Json,
        }
    }

    /// Whether the server generates tokens for it one by one (decode), in place of reading a prompt only.
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

    /// Whether the first byte of a streamed answer comes with the first token: the Responses API says before it that the answer has
    /// been created.
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

    /// Whether its prompt goes through a KV cache that the beginnings of other prompts may be found in.
    #[must_use]
    pub fn prefills(self) -> bool {
        self.generates() && self.body_format() != BodyFormat::Multipart
    }

    /// Whether a request without a model is refused. vLLM takes one without; with several pools or adapters it would be a guess.
    #[must_use]
    pub fn requires_model(self) -> bool {
        let optional =
            matches!(self, Api::Tokenize | Api::Detokenize | Api::Conversations | Api::Generate | Api::SglangGenerate);
        self.body_format() == BodyFormat::Json && !optional
    }

    /// The name in metric labels and logs: snake_case, stable.
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

/// A path without its query, percent-encoded bytes decoded once. What is no encoded byte stays as it is, and bytes that are no UTF-8 become U+FFFD: so
/// does Python's `unquote`, which uvicorn decodes paths with. Nothing else of it is normalized.
#[must_use]
pub fn decoded_path(path: &str) -> Cow<'_, str> {
    let path = path.split(['?', '#']).next().unwrap_or_default();
    if !path.contains('%') {
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

fn is_version(segment: &str) -> bool {
    segment.strip_prefix('v').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_name_apis() {
        let cases: &[(&str, Api, Option<&str>)] = &[
            ("/v1/completions", Api::Completions, None),
            ("/v1/completions/", Api::Completions, None),
            ("/v1/completions?timeout=3&x=/v1/chat/completions", Api::Completions, None),
            ("completions", Api::Completions, None),
            ("/v1/chat/completions", Api::ChatCompletions, None),
            ("/openai/v1/chat/completions//", Api::ChatCompletions, None),
            ("/models/tiny/v1/chat/completions", Api::ChatCompletions, None),
            ("/v1/chat/completions/batch", Api::ChatBatch, None),
            ("/v1/responses", Api::Responses, None),
            ("/v1/responses/resp_1", Api::ResponseById, Some("resp_1")),
            ("/v1/responses/resp_1/cancel?x", Api::ResponseById, Some("resp_1")),
            ("/responses/resp_1/input_items/", Api::ResponseById, Some("resp_1")),
            ("/v1/conversations", Api::Conversations, None),
            ("/v1/conversations/conv_1", Api::Conversations, Some("conv_1")),
            ("/v1/conversations/conv_1/items", Api::Conversations, Some("conv_1")),
            ("/v1/conversations/conv_1/items/msg_1", Api::Conversations, Some("conv_1")),
            ("/v1/messages", Api::Messages, None),
            ("/messages", Api::Messages, None),
            ("/anthropic/v1/messages?beta=true", Api::Messages, None),
            ("/v1/threads/t_1/messages", Api::Other, None),
            ("/inference/v1/generate", Api::Generate, None),
            ("/p/inference/v1/generate/?x", Api::Generate, None),
            ("/generate", Api::SglangGenerate, None),
            ("/p/generate/?x", Api::SglangGenerate, None),
            ("/v2/models/tiny/generate", Api::Other, None),
            ("/models/tiny/generate", Api::Other, None),
            ("/v2/models/tiny/versions/1/generate", Api::SglangGenerate, None),
            ("/v1/messages/count_tokens", Api::CountTokens, None),
            ("/v1/embeddings", Api::Embeddings, None),
            ("/v2/embed", Api::Embeddings, None),
            ("/rerank", Api::Rerank, None),
            ("/v2/rerank", Api::Rerank, None),
            ("/score", Api::Score, None),
            ("/tokenize", Api::Tokenize, None),
            ("/detokenize", Api::Detokenize, None),
            ("/v1/audio/transcriptions", Api::Transcription, None),
            ("/v1/audio/translations", Api::Translation, None),
            ("/pooling", Api::Pooling, None),
            ("/classify", Api::Classify, None),
            ("/v1/models", Api::Models, None),
            ("/v1/models/org/tiny", Api::Models, None),
            ("/vllm.grpc.engine.VllmEngine/Generate", Api::GrpcGenerate, None),
            ("/vllm.grpc.engine.VllmEngine/Embed", Api::GrpcEmbed, None),
            ("/vllm.grpc.engine.VllmEngine/Abort", Api::GrpcUnsupported, None),
            ("unsupportedMethod", Api::Other, None),
            ("/v1/chat/completions/render", Api::Other, None),
            ("/v1/images/generations", Api::Other, None),
            ("/v1/chatcompletions", Api::Other, None),
            ("/", Api::Other, None),
            ("", Api::Other, None),
            ("//?", Api::Other, None),
        ];
        for (path, api, id) in cases {
            assert_eq!(Api::from_path(path), (*api, id.map(Cow::Borrowed)), "{path}");
        }
    }

    #[test]
    fn encoded_paths_name_the_api_that_servers_decode() {
        let cases: &[(&str, Api, Option<&str>)] = &[
            ("/v1/%63hat/completions", Api::ChatCompletions, None),
            ("/v1/chat%2Fcompletions", Api::ChatCompletions, None),
            ("/v1%2fchat%2fcompletion%73?x=%2F", Api::ChatCompletions, None),
            ("/%76%31/%6d%65%73%73%61%67%65%73", Api::Messages, None),
            ("/v1/responses/resp%5F1", Api::ResponseById, Some("resp_1")),
            ("/gener%61te", Api::SglangGenerate, None),
            ("/v1/%6dodels/org%2Ftiny", Api::Models, None),
            // Decoded once only, and no more than that.
            ("/v1/%2563hat/completion%2573", Api::Other, None),
            ("/v1/chat/completions%", Api::Other, None),
            ("/v1/chat/completion%7", Api::Other, None),
            ("/v1/chat/completion%zz", Api::Other, None),
            ("/v1/chat/completions%3Fx", Api::Other, None),
            ("/v1/chat/completions%00", Api::Other, None),
            ("/v1/chat/completions%ff", Api::Other, None),
        ];
        for (path, api, id) in cases {
            assert_eq!(Api::from_path(path), (*api, id.map(Cow::Borrowed)), "{path}");
        }
        assert_eq!(decoded_path("/a%20%c3%a9%fe%4?b%20"), "/a é\u{fffd}%4");
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = Api::ALL.iter().map(|a| a.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Api::ALL.len());
    }

    #[test]
    fn the_fields_of_a_body_tell_its_api() {
        for (body, api) in [
            (r#"{"model": "m", "messages": []}"#, Api::ChatCompletions),
            (r#"{"system": "s", "messages": [], "max_tokens": 5}"#, Api::Messages),
            (r#"{"messages": [], "system": null}"#, Api::ChatCompletions),
            (r#"{"prompt": "messages"}"#, Api::Completions),
            (r#"{"text": "a", "sampling_params": {}}"#, Api::SglangGenerate),
            (r#"{"text": "a"}"#, Api::Other),
            (r#"{"prompt": [1, 2]}"#, Api::Completions),
            (r#"{"input": "text", "model": "m"}"#, Api::Responses),
            (r#"{"input": [{"role": "user", "content": "a"}]}"#, Api::Responses),
            (r#"{"input": [ "a", "b"]}"#, Api::Embeddings),
            (r#"{"input": [[1, 2], [3]]}"#, Api::Embeddings),
            (r#"{"input": "text", "encoding_format": "base64"}"#, Api::Embeddings),
            (r#"{"query": "q", "documents": ["a"]}"#, Api::Rerank),
            (r#"{"text_1": "a", "text_2": "b"}"#, Api::Score),
            (r#"{"token_ids": [1], "sampling_params": {}}"#, Api::Generate),
            (r#"{"nested": {"messages": []}}"#, Api::Other),
            (r#"{"m\u0065ssages": []}"#, Api::ChatCompletions),
            (r#"{"messages": null}"#, Api::Other),
            ("[1]", Api::Other),
            ("", Api::Other),
            ("\u{1f}\u{8b}", Api::Other),
        ] {
            assert_eq!(Api::from_body(body.as_bytes()), api, "{body}");
            if api != Api::Other {
                assert_eq!(Api::from_path(api.usual_path()).0, api);
            }
        }
    }
}
