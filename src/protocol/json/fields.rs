//! The members of each API's body, and the meaning of absent ones.

use super::embeddings::{EmbeddedTokens, MediaList, PromptEmbeddings};
use super::messages::{Content, Conversation, Conversations, Items};
use super::prompts::{Prompts, Texts, TokenList, invalid_prompt};
use super::scalars::{CacheSalt, Flag, Given, LimitCount, ModelName, Name, Set, Typed, invalid_model, invalid_type};
use super::walk::{Elements, Opaque, Skim, ValueShape, ValueType, Walk, Walked};
use crate::prompt::{Builder, DEFAULT_OPAQUE_TOKENS, MediaKind, TemplateSettings};
use crate::text::Text;
use crate::{Api, Model, Request};
use attache_types::error::{Reason, RequestError};
use attache_types::limits::Limits;
use std::borrow::Cow;

const COMPLETIONS: &[&str] = &[
    "model",
    "stream",
    "max_tokens",
    "n",
    "best_of",
    "cache_salt",
    "prompt",
    "prompt_embeds",
    "prompt_cache_key",
    "truncate_prompt_tokens",
    "prompt_logprobs",
    "echo",
    "logprobs",
    "vllm_xargs",
    "session_id",
];
const CHAT: &[&str] = &[
    "model",
    "stream",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "cache_salt",
    "messages",
    "tools",
    "documents",
    "prompt_cache_key",
    "truncate_prompt_tokens",
    "prompt_logprobs",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "mm_processor_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
    "vllm_xargs",
    "session_id",
];
const RESPONSES: &[&str] = &[
    "model",
    "stream",
    "max_output_tokens",
    "cache_salt",
    "input",
    "instructions",
    "tools",
    "previous_response_id",
    "conversation",
    "prompt_cache_key",
    "vllm_xargs",
    "chat_template_kwargs",
    "reasoning",
    "prompt",
    "session_id",
];
const CONVERSATIONS: &[&str] = &["model", "items"];
const MESSAGES: &[&str] = &[
    "model",
    "stream",
    "max_tokens",
    "cache_salt",
    "system",
    "messages",
    "tools",
    "vllm_xargs",
    "chat_template_kwargs",
    "output_config",
    "metadata",
    "session_id",
];
/// Members of an object about reasoning.
const REASONING: &[&str] = &["effort"];
const GENERATE: &[&str] = &["model", "stream", "cache_salt", "token_ids", "sampling_params", "vllm_xargs"];
/// Members of `sampling_params` that affect the amount of work, or have the engine's own arguments.
const SAMPLING: &[&str] = &["max_tokens", "n", "prompt_logprobs", "extra_args", "vllm_xargs"];
const SGLANG: &[&str] = &[
    "model",
    "stream",
    "text",
    "input_ids",
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "sampling_params",
    "cache_salt",
    "extra_key",
];
/// Members of SGLang's `sampling_params` that affect the amount of work.
const SGLANG_SAMPLING: &[&str] = &["max_new_tokens", "n"];
const EMBEDDINGS: &[&str] =
    &["model", "cache_salt", "input", "inputs", "texts", "images", "messages", "text", "input_ids", "data"];
/// Members of a request that counts the tokens of another one.
const INPUT_TOKENS: &[&str] =
    &["model", "input", "instructions", "messages", "tools", "previous_response_id", "conversation", "prompt"];
const RERANK: &[&str] = &["model", "cache_salt", "query", "documents"];
const SCORE: &[&str] =
    &["model", "cache_salt", "text_1", "text_2", "query", "queries", "documents", "items", "data_1", "data_2"];
const TOKENIZE: &[&str] = &["model", "prompt", "messages", "tools"];
const DETOKENIZE: &[&str] = &["model", "tokens"];
const OTHER: &[&str] = &["model", "stream", "vllm_xargs"];

fn table(api: Api) -> &'static [&'static str] {
    match api {
        Api::Completions => COMPLETIONS,
        Api::ChatCompletions | Api::ChatBatch => CHAT,
        Api::Responses => RESPONSES,
        Api::InputTokens => INPUT_TOKENS,
        Api::Conversations => CONVERSATIONS,
        Api::Messages | Api::CountTokens => MESSAGES,
        Api::Generate => GENERATE,
        Api::SglangGenerate => SGLANG,
        Api::Embeddings | Api::Pooling | Api::Classify => EMBEDDINGS,
        Api::Rerank => RERANK,
        Api::Score => SCORE,
        Api::Tokenize => TOKENIZE,
        Api::Detokenize => DETOKENIZE,
        _ => OTHER,
    }
}

/// The body of one request.
#[derive(Debug)]
pub(super) struct RequestBody<'l, 'de> {
    api: Api,
    limits: &'l Limits,
    /// Whether the body must name a model.
    names_model: bool,
    request: Request<'de>,
    prompt: Builder<'de>,
    /// Whether the response repeats the prompt; with `logprobs`, it also has the probabilities of the prompt's tokens.
    echo: bool,
    logprobs: bool,
    /// Whether `input` is given, though it may be an empty list.
    has_input: bool,
    left: Side,
    right: Side,
}

/// One side of a rerank or score request.
#[derive(Clone, Copy, Debug, Default)]
struct Side {
    texts: u32,
    text_bytes: u64,
    token_ids: u64,
    media_tokens: u64,
}

impl<'l, 'de> RequestBody<'l, 'de> {
    /// Creates the parser of a body of this many bytes.
    pub(super) fn new(api: Api, limits: &'l Limits, body_bytes: usize, names_model: bool) -> Self {
        Self {
            api,
            limits,
            names_model,
            request: Request::default(),
            prompt: Builder::new(body_bytes),
            echo: false,
            logprobs: false,
            has_input: false,
            left: Side::default(),
            right: Side::default(),
        }
    }

    fn field(&mut self, walk: &mut Walk<'_, 'de>, name: &'static str) -> Walked<()> {
        match name {
            "model" => self.model(walk)?,
            "stream" => self.request.stream = walk.value(Flag { field: name })?,
            // Servers disagree on which of two limits counts; the larger one bounds all of them.
            "max_completion_tokens" | "max_output_tokens" | "max_tokens" | "max_new_tokens" => {
                let limit = walk.value(LimitCount { field: name })?;
                self.request.max_tokens = self.request.max_tokens.max(limit);
            }
            // A server generates `best_of` responses and returns `n` of them.
            "n" | "best_of" => {
                let answers = walk.value(LimitCount { field: name })?.unwrap_or(1);
                self.request.choices = self.request.choices.max(answers);
            }
            // SGLang's name for a salt; a list of them separates the prompts of one request.
            "extra_key" => {
                let salt = walk.value(CacheSalt { limits: self.limits, field: name })?;
                self.request.cache_salt = self.request.cache_salt.take().or(salt);
            }
            "sampling_params" if self.api == Api::SglangGenerate => walk.value(SglangSampling { body: self })?,
            "cache_salt" => self.request.cache_salt = walk.value(CacheSalt { limits: self.limits, field: name })?,
            "previous_response_id" => self.request.previous_response_id = walk.value(Name)?,
            "conversation" => self.request.conversation = walk.value(ConversationId)?,
            "truncate_prompt_tokens" => self.request.truncated = walk.value(Given)?,
            "prompt_logprobs" => self.request.skips_cache |= walk.value(Given)?,
            "echo" => self.echo = walk.value(Set)?,
            "logprobs" => self.logprobs = walk.value(Given)?,
            "sampling_params" => walk.value(Sampling { body: self, members: SAMPLING })?,
            "vllm_xargs" | "extra_args" => self.request.sets_report_mode |= walk.value(EngineArguments)?,
            "prompt_cache_key" => self.request.prompt_cache_key = walk.value(Name)?,
            "session_id" => self.request.session_id = walk.value(Name)?,
            "metadata" => self.request.metadata_user_id = walk.value(Metadata)?,
            "chat_template" => {
                let raw = walk.raw_of(Typed { field: name, expected: ValueType::String, allowed: "a string" })?;
                TemplateSettings::set(&mut self.prompt.prompt.settings.template, raw);
            }
            "chat_template_kwargs" => {
                let raw = walk.raw_of(Typed { field: name, expected: ValueType::Object, allowed: "an object" })?;
                TemplateSettings::set(&mut self.prompt.prompt.settings.variables, raw);
            }
            "reasoning_effort" | "effort" => {
                TemplateSettings::set(&mut self.prompt.prompt.settings.effort, walk.raw(name)?);
            }
            "mm_processor_kwargs" => TemplateSettings::set(&mut self.prompt.prompt.settings.media, walk.raw(name)?),
            "reasoning" | "output_config" => walk.value(Reasoning { body: self })?,
            "add_generation_prompt" | "continue_final_message" | "return_assistant_tokens_mask" => {
                walk.value(Flag { field: name })?;
            }
            _ => self.prompt_field(walk, name)?,
        }
        Ok(())
    }

    fn prompt_field(&mut self, walk: &mut Walk<'_, 'de>, name: &'static str) -> Walked<()> {
        let out = &mut self.prompt;
        match name {
            "messages" if self.api == Api::ChatBatch => walk.value(Conversations { out, field: name }),
            "messages" => walk.value(Conversation { out, field: name }),
            "input" | "items" if matches!(self.api, Api::Responses | Api::Conversations | Api::InputTokens) => {
                self.has_input |= walk.value(Items { out, field: name })?;
                Ok(())
            }
            // A stored prompt on the server.
            "prompt" if matches!(self.api, Api::Responses | Api::InputTokens) => self.opaque(walk, name),
            "prompt" | "input" | "texts" | "text" | "input_ids" => {
                // Without decoding there are no prefixes to look up, so any shape that a server knows is counted.
                let takes_objects = matches!(self.api, Api::Embeddings | Api::Pooling | Api::Classify);
                walk.value(Prompts { out, field: name, takes_objects })
            }
            "tokens" | "token_ids" => {
                let takes_lists = self.api == Api::Detokenize;
                walk.value(TokenList { out, field: name, takes_lists })
            }
            "instructions" | "system" => out.system(|out| walk.value(Content { out, field: name })),
            "tools" | "documents" if self.api != Api::Rerank && self.api != Api::Score => self.list(walk, name),
            "query" | "queries" | "text_1" | "data_1" => {
                let side = self.side(walk, name)?;
                self.left.add(side);
                Ok(())
            }
            "documents" | "items" | "text_2" | "data_2" => {
                let side = self.side(walk, name)?;
                self.right.add(side);
                Ok(())
            }
            _ => self.opaque(walk, name),
        }
    }

    /// Reads a part of the prompt that is only counted: embeddings, SGLang's media, and Cohere's `inputs` of mixed
    /// content.
    fn opaque(&mut self, walk: &mut Walk<'_, 'de>, field: &'static str) -> Walked<()> {
        if walk.is_null() {
            return walk.raw(field).map(drop);
        }
        self.request.opaque_prompt = true;
        let out = &mut self.prompt;
        match field {
            "prompt_embeds" => walk.value(PromptEmbeddings { out, field }),
            "input_embeds" => walk.value(EmbeddedTokens { out, field }).map(drop),
            "image_data" | "images" => walk.value(MediaList { out, kind: MediaKind::Image }),
            "video_data" => walk.value(MediaList { out, kind: MediaKind::Video }),
            "audio_data" => walk.value(MediaList { out, kind: MediaKind::Audio }),
            _ => {
                out.opaque(DEFAULT_OPAQUE_TOKENS);
                walk.value(Opaque)
            }
        }
    }

    fn model(&mut self, walk: &mut Walk<'_, 'de>) -> Walked<()> {
        let name = ModelName { limits: self.limits, required: self.api.requires_model() };
        let (name, span) = walk.placed(name)?;
        self.request.model = name.map(|name| Model { name, span });
        Ok(())
    }

    /// Reads `tools` or the `documents` of a chat: an array that the template inserts into the prompt as JSON.
    fn list(&mut self, walk: &mut Walk<'_, 'de>, name: &'static str) -> Walked<()> {
        let raw = walk.raw(name)?;
        let got = match raw.as_bytes().first() {
            Some(b'[') => {
                self.prompt.add_text_bytes(raw.len());
                let prompt = &mut self.prompt.prompt;
                *(if name == "tools" { &mut prompt.tools } else { &mut prompt.documents }) = Some(raw);
                return Ok(());
            }
            Some(b'n') => return Ok(()),
            Some(b'{') => ValueType::Object,
            Some(b'"') => ValueType::String,
            Some(b't') => ValueType::Bool(true),
            Some(b'f') => ValueType::Bool(false),
            _ => ValueType::Unsigned(0),
        };
        Err(invalid_type(name, "an array", got).into())
    }

    fn side(&mut self, walk: &mut Walk<'_, 'de>, field: &'static str) -> Walked<Side> {
        let before = &self.prompt.prompt;
        let (bytes, ids, media) = (before.text_bytes, before.token_ids, before.media_tokens);
        let texts = walk.value(Texts { out: &mut self.prompt, field })?;
        let totals = &self.prompt.prompt;
        Ok(Side {
            texts,
            text_bytes: totals.text_bytes - bytes,
            token_ids: totals.token_ids - ids,
            media_tokens: totals.media_tokens - media,
        })
    }

    /// Checks the members and returns the request, once all have been read.
    fn finish(mut self) -> Result<Request<'de>, RequestError> {
        if self.request.model.is_none() && self.names_model {
            return Err(invalid_model(self.limits, "nothing"));
        }
        self.request.opaque_prompt |= self.prompt.is_opaque;
        let read = self.prompt.prompt.count > 0 || self.request.opaque_prompt;
        // What these name is part of the prompt, and only the server knows it.
        let continues = self.request.previous_response_id.is_some() || self.request.conversation.is_some();
        match self.api {
            Api::Completions if !read => return Err(absent("prompt")),
            Api::Generate if !read => return Err(absent("token_ids")),
            Api::ChatCompletions | Api::ChatBatch | Api::Messages | Api::CountTokens if !read => {
                let message = "`messages` must be an array of at least one message, got nothing";
                return Err(RequestError::new(Reason::InvalidMessages, message).param("messages"));
            }
            Api::Responses if !read && !self.has_input && !continues => return Err(absent("input")),
            Api::Embeddings if !read => return Err(absent("input")),
            Api::Tokenize if !read => return Err(absent("prompt")),
            Api::Rerank | Api::Score => self.pair()?,
            _ => {}
        }
        self.request.skips_cache |= self.echo && self.logprobs;
        self.request.prompt = self.prompt.prompt;
        Ok(self.request)
    }

    /// A model reads each pair of texts together, so a single text on one side is read again for each on the other.
    fn pair(&mut self) -> Result<(), RequestError> {
        let (left, right) = (self.left, self.right);
        if left.texts == 0 {
            return Err(absent(if self.api == Api::Rerank { "query" } else { "text_1" }));
        }
        if right.texts == 0 {
            return Err(absent(if self.api == Api::Rerank { "documents" } else { "text_2" }));
        }
        let (times_left, times_right) = match (left.texts, right.texts) {
            (1, n) => (n, 1),
            (n, 1) => (1, n),
            _ => (1, 1),
        };
        let prompt = &mut self.prompt.prompt;
        let sum = |left: u64, right: u64| {
            left.saturating_mul(u64::from(times_left)).saturating_add(right.saturating_mul(u64::from(times_right)))
        };
        prompt.text_bytes = sum(left.text_bytes, right.text_bytes);
        prompt.token_ids = sum(left.token_ids, right.token_ids);
        prompt.media_tokens = sum(left.media_tokens, right.media_tokens);
        prompt.count = left.texts.max(right.texts);
        Ok(())
    }
}

impl Side {
    fn add(&mut self, other: Side) {
        self.texts = self.texts.saturating_add(other.texts);
        self.text_bytes = self.text_bytes.saturating_add(other.text_bytes);
        self.token_ids = self.token_ids.saturating_add(other.token_ids);
        self.media_tokens = self.media_tokens.saturating_add(other.media_tokens);
    }
}

impl<'de> ValueShape<'de> for RequestBody<'_, 'de> {
    type Out = Request<'de>;

    fn other(self, got: ValueType) -> Result<Self::Out, RequestError> {
        let message = format!("the body must be a JSON object, got {}", got.describe());
        Err(RequestError::new(Reason::InvalidJson, message))
    }

    fn object(mut self, walk: &mut Walk<'_, 'de>) -> Walked<Self::Out> {
        walk.fields(table(self.api), |walk, name| self.field(walk, name))?;
        Ok(self.finish()?)
    }
}

/// One set of sampling parameters: an object whose members have the meaning of those in other APIs' bodies.
#[derive(Debug)]
struct Sampling<'b, 'l, 'de> {
    body: &'b mut RequestBody<'l, 'de>,
    members: &'static [&'static str],
}

impl<'de> ValueShape<'de> for Sampling<'_, '_, 'de> {
    type Out = ();

    fn other(self, got: ValueType) -> Result<(), RequestError> {
        match got {
            ValueType::Null => Ok(()),
            got => Err(invalid_type("sampling_params", "an object", got)),
        }
    }

    fn object(self, walk: &mut Walk<'_, 'de>) -> Walked<()> {
        walk.fields(self.members, |walk, name| self.body.field(walk, name))
    }
}

/// An object that has the reasoning effort; the server decides about any other value.
#[derive(Debug)]
struct Reasoning<'b, 'l, 'de> {
    body: &'b mut RequestBody<'l, 'de>,
}

impl<'de> ValueShape<'de> for Reasoning<'_, '_, 'de> {
    type Out = ();

    fn other(self, _got: ValueType) -> Result<(), RequestError> {
        Ok(())
    }

    fn object(self, walk: &mut Walk<'_, 'de>) -> Walked<()> {
        walk.fields(REASONING, |walk, name| self.body.field(walk, name))
    }
}

/// SGLang's `sampling_params`: one object, or an array with one for each prompt. The largest
/// limit counts for all prompts.
#[derive(Debug)]
struct SglangSampling<'b, 'l, 'de> {
    body: &'b mut RequestBody<'l, 'de>,
}

impl<'de> ValueShape<'de> for SglangSampling<'_, '_, 'de> {
    type Out = ();

    fn other(self, got: ValueType) -> Result<(), RequestError> {
        match got {
            ValueType::Null => Ok(()),
            got => Err(invalid_type("sampling_params", "an object or an array of objects", got)),
        }
    }

    fn object(self, walk: &mut Walk<'_, 'de>) -> Walked<()> {
        Sampling { body: self.body, members: SGLANG_SAMPLING }.object(walk)
    }

    fn array(self, walk: &mut Walk<'_, 'de>, mut rest: Elements) -> Walked<()> {
        let Self { body } = self;
        // One entry per prompt: if one of them has no limit, the request has none.
        let mut largest: Option<Option<u32>> = None;
        loop {
            body.request.max_tokens = None;
            if walk.element(&mut rest, Sampling { body: &mut *body, members: SGLANG_SAMPLING })?.is_none() {
                break;
            }
            let limit = body.request.max_tokens;
            largest = Some(largest.map_or(limit, |largest| largest.zip(limit).map(|(a, b)| a.max(b))));
        }
        body.request.max_tokens = largest.flatten();
        Ok(())
    }
}

/// The conversation of a Responses request: its id, or an object with its id.
#[derive(Clone, Copy, Debug)]
struct ConversationId;

impl<'de> ValueShape<'de> for ConversationId {
    type Out = Option<Cow<'de, str>>;

    fn other(self, got: ValueType) -> Result<Self::Out, RequestError> {
        Name.other(got)
    }

    fn string(self, text: Text<'de>) -> Result<Self::Out, RequestError> {
        Name.string(text)
    }

    fn object(self, walk: &mut Walk<'_, 'de>) -> Walked<Self::Out> {
        let mut id = None;
        walk.fields(&["id"], |walk, _| {
            id = walk.value(Name)?;
            Ok(())
        })?;
        Ok(id)
    }
}

/// The `metadata` of a Messages request: its `user_id`.
#[derive(Clone, Copy, Debug)]
struct Metadata;

impl<'de> ValueShape<'de> for Metadata {
    type Out = Option<Cow<'de, str>>;

    fn other(self, _: ValueType) -> Result<Self::Out, RequestError> {
        Ok(None)
    }

    fn object(self, walk: &mut Walk<'_, 'de>) -> Walked<Self::Out> {
        let mut user_id = None;
        walk.fields(&["user_id"], |walk, _| {
            user_id = walk.value(Name)?;
            Ok(())
        })?;
        Ok(user_id)
    }
}

/// Arguments that vLLM passes to its engine. Returns whether one of them is `kv_cache_report_mode`.
#[derive(Clone, Copy, Debug)]
struct EngineArguments;

impl<'de> ValueShape<'de> for EngineArguments {
    type Out = bool;

    fn other(self, _: ValueType) -> Result<bool, RequestError> {
        Ok(false)
    }

    fn object(self, walk: &mut Walk<'_, 'de>) -> Walked<bool> {
        let mut is_set = false;
        walk.fields(&["kv_cache_report_mode"], |walk, _| {
            is_set = true;
            walk.value(Skim)
        })?;
        Ok(is_set)
    }
}

fn absent(field: &'static str) -> RequestError {
    invalid_prompt(field, "present", "nothing")
}
