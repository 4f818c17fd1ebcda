//! The fields of each API's body, and what an absent one means.

use super::messages::{Content, Conversation, Conversations, Items};
use super::prompts::{Prompts, Texts, TokenList, invalid_prompt};
use super::scalars::{CacheSalt, Count, Flag, ModelName, Name, Typed, invalid_model, invalid_type};
use super::walk::{Kind, Shape, Str, Walk};
use crate::error::{Reason, RequestError};
use crate::limits::Limits;
use crate::protocol::prompt::Builder;
use crate::protocol::{Api, Model, Request};
use serde::de::MapAccess;
use serde_json::value::RawValue;
use std::borrow::Cow;

const COMPLETIONS: &[&str] =
    &["model", "stream", "max_tokens", "n", "cache_salt", "prompt", "prompt_embeds", "prompt_cache_key"];
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
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
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
];
const CONVERSATIONS: &[&str] = &["model", "items"];
const MESSAGES: &[&str] = &["model", "stream", "max_tokens", "cache_salt", "system", "messages", "tools"];
const EMBEDDINGS: &[&str] = &["model", "cache_salt", "input", "inputs", "texts", "messages"];
const RERANK: &[&str] = &["model", "cache_salt", "query", "documents"];
const SCORE: &[&str] =
    &["model", "cache_salt", "text_1", "text_2", "queries", "documents", "items", "data_1", "data_2"];
const TOKENIZE: &[&str] = &["model", "prompt", "messages", "tools"];
const DETOKENIZE: &[&str] = &["model", "tokens"];
const OTHER: &[&str] = &["model", "stream"];

fn table(api: Api) -> &'static [&'static str] {
    match api {
        Api::Completions => COMPLETIONS,
        Api::ChatCompletions | Api::ChatBatch => CHAT,
        Api::Responses => RESPONSES,
        Api::Conversations => CONVERSATIONS,
        Api::Messages | Api::CountTokens => MESSAGES,
        Api::Embeddings | Api::Pooling | Api::Classify => EMBEDDINGS,
        Api::Rerank => RERANK,
        Api::Score => SCORE,
        Api::Tokenize => TOKENIZE,
        Api::Detokenize => DETOKENIZE,
        _ => OTHER,
    }
}

/// The whole body of one request.
#[derive(Debug)]
pub(super) struct Body<'l, 'de> {
    api: Api,
    /// The body, to tell where the model's name stands in it.
    text: &'de str,
    limits: &'l Limits,
    request: Request<'de>,
    prompt: Builder<'de>,
    /// A newer field has said how long the answer may be: the older one no longer counts.
    max_tokens_settled: bool,
    /// Something that stands for a prompt and can't be counted was there.
    opaque_prompt: bool,
    left: Side,
    right: Side,
}

/// One side of a rerank or score request.
#[derive(Clone, Copy, Debug, Default)]
struct Side {
    texts: u32,
    text_bytes: u64,
    media_tokens: u64,
}

impl<'l, 'de> Body<'l, 'de> {
    pub(super) fn new(api: Api, text: &'de str, limits: &'l Limits) -> Self {
        Self {
            api,
            text,
            limits,
            request: Request::default(),
            prompt: Builder::new(),
            max_tokens_settled: false,
            opaque_prompt: false,
            left: Side::default(),
            right: Side::default(),
        }
    }

    fn field<A: MapAccess<'de>>(
        &mut self,
        walk: &mut Walk<'_>,
        map: &mut A,
        name: &'static str,
    ) -> Result<(), A::Error> {
        match name {
            "model" => self.model(walk, map)?,
            "stream" => self.request.stream = walk.value(map, Flag { field: name })?,
            "max_completion_tokens" | "max_output_tokens" => {
                let limit = walk.value(map, Count)?;
                if limit.is_some() {
                    self.request.max_tokens = limit;
                    self.max_tokens_settled = true;
                }
            }
            "max_tokens" => {
                let limit = walk.value(map, Count)?;
                if !self.max_tokens_settled {
                    self.request.max_tokens = limit;
                }
            }
            "n" => self.request.choices = walk.value(map, Count)?.unwrap_or(1).max(1),
            "cache_salt" => self.request.cache_salt = walk.value(map, CacheSalt { limits: self.limits })?,
            "previous_response_id" => self.request.previous_response_id = walk.value(map, Name)?,
            "conversation" => self.request.conversation = walk.value(map, ConversationId)?,
            "prompt_cache_key" => self.request.prompt_cache_key = walk.value(map, Name)?,
            "chat_template" => walk.value(map, Typed { field: name, expected: Kind::String, allowed: "a string" })?,
            "chat_template_kwargs" => {
                walk.value(map, Typed { field: name, expected: Kind::Object, allowed: "an object" })?;
            }
            "add_generation_prompt" | "continue_final_message" | "return_assistant_tokens_mask" => {
                walk.value(map, Flag { field: name })?;
            }
            _ => self.prompt_field(walk, map, name)?,
        }
        Ok(())
    }

    fn prompt_field<A: MapAccess<'de>>(
        &mut self,
        walk: &mut Walk<'_>,
        map: &mut A,
        name: &'static str,
    ) -> Result<(), A::Error> {
        let out = &mut self.prompt;
        match name {
            "messages" if self.api == Api::ChatBatch => walk.value(map, Conversations { out, field: name }),
            "messages" | "items" if self.api != Api::Score => walk.value(map, Conversation { out, field: name }),
            "input" if self.api == Api::Responses => walk.value(map, Items { out, field: name }),
            "prompt" | "input" | "texts" => walk.value(map, Prompts { out, field: name }),
            "tokens" => walk.value(map, TokenList { out, field: name }),
            "instructions" | "system" => out.system(|out| walk.value(map, Content { out, field: name })),
            "tools" | "documents" if self.api != Api::Rerank && self.api != Api::Score => self.list(walk, map, name),
            "query" | "queries" | "text_1" | "data_1" => {
                let side = self.side(walk, map, name)?;
                self.left.add(side);
                Ok(())
            }
            "documents" | "items" | "text_2" | "data_2" => {
                let side = self.side(walk, map, name)?;
                self.right.add(side);
                Ok(())
            }
            // `prompt_embeds`, and Cohere's `inputs` of mixed content.
            _ => {
                self.opaque_prompt |= walk.raw(map, name)? != "null";
                Ok(())
            }
        }
    }

    fn model<A: MapAccess<'de>>(&mut self, walk: &mut Walk<'_>, map: &mut A) -> Result<(), A::Error> {
        // Taken raw, for the bytes that a rewrite replaces.
        let raw = map.next_value::<&'de RawValue>()?.get();
        if raw == "null" && !self.api.requires_model() {
            return Ok(());
        }
        let name = walk.nested(raw, "model", ModelName { limits: self.limits })?;
        let start = (raw.as_ptr() as usize).saturating_sub(self.text.as_ptr() as usize);
        self.request.model = Some(Model { name, span: start..start + raw.len() });
        Ok(())
    }

    /// `tools` and the `documents` of a chat: an array that the template puts into the prompt as JSON.
    fn list<A: MapAccess<'de>>(
        &mut self,
        walk: &mut Walk<'_>,
        map: &mut A,
        name: &'static str,
    ) -> Result<(), A::Error> {
        let raw = walk.raw(map, name)?;
        let got = match raw.as_bytes().first() {
            Some(b'[') => {
                self.prompt.add_text_bytes(raw.len());
                let prompt = &mut self.prompt.prompt;
                *(if name == "tools" { &mut prompt.tools } else { &mut prompt.documents }) = Some(raw);
                return Ok(());
            }
            Some(b'n') => return Ok(()),
            Some(b'{') => Kind::Object,
            Some(b'"') => Kind::String,
            Some(b't') => Kind::Bool(true),
            Some(b'f') => Kind::Bool(false),
            _ => Kind::Unsigned(0),
        };
        Err(walk.fail(invalid_type(name, "an array", got)))
    }

    fn side<A: MapAccess<'de>>(
        &mut self,
        walk: &mut Walk<'_>,
        map: &mut A,
        field: &'static str,
    ) -> Result<Side, A::Error> {
        let (bytes, media) = (self.prompt.prompt.text_bytes, self.prompt.prompt.media_tokens);
        let texts = walk.value(map, Texts { out: &mut self.prompt, field })?;
        let totals = &self.prompt.prompt;
        Ok(Side { texts, text_bytes: totals.text_bytes - bytes, media_tokens: totals.media_tokens - media })
    }

    /// What the fields come to, once all have been seen.
    fn finish(mut self) -> Result<Request<'de>, RequestError> {
        if self.request.model.is_none() && self.api.requires_model() {
            return Err(invalid_model(self.limits, "nothing"));
        }
        let read = self.prompt.prompt.count > 0 || self.opaque_prompt;
        match self.api {
            Api::Completions if !read => return Err(absent("prompt")),
            Api::ChatCompletions | Api::ChatBatch | Api::Messages | Api::CountTokens if !read => {
                let message = "`messages` must be an array of at least one message, got nothing";
                return Err(RequestError::new(Reason::InvalidMessages, message).param("messages"));
            }
            Api::Responses | Api::Embeddings if !read => return Err(absent("input")),
            Api::Tokenize if !read => return Err(absent("prompt")),
            Api::Rerank | Api::Score => self.pair()?,
            _ => {}
        }
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
        prompt.media_tokens = sum(left.media_tokens, right.media_tokens);
        prompt.count = left.texts.max(right.texts);
        Ok(())
    }
}

impl Side {
    fn add(&mut self, other: Side) {
        self.texts = self.texts.saturating_add(other.texts);
        self.text_bytes = self.text_bytes.saturating_add(other.text_bytes);
        self.media_tokens = self.media_tokens.saturating_add(other.media_tokens);
    }
}

impl<'de> Shape<'de> for Body<'_, 'de> {
    type Out = Request<'de>;

    fn other(self, got: Kind) -> Result<Self::Out, RequestError> {
        let message = format!("the body must be a JSON object, got {}", got.describe());
        Err(RequestError::new(Reason::InvalidJson, message))
    }

    fn object<A: MapAccess<'de>>(mut self, walk: &mut Walk<'_>, map: &mut A) -> Result<Self::Out, A::Error> {
        walk.fields(map, table(self.api), |walk, map, name| self.field(walk, map, name))?;
        self.finish().map_err(|e| walk.fail(e))
    }
}

/// The conversation of a Responses request: its id, or an object that holds it.
#[derive(Clone, Copy, Debug)]
struct ConversationId;

impl<'de> Shape<'de> for ConversationId {
    type Out = Option<Cow<'de, str>>;

    fn other(self, got: Kind) -> Result<Self::Out, RequestError> {
        Name.other(got)
    }

    fn string(self, text: Str<'de, '_>) -> Result<Self::Out, RequestError> {
        Name.string(text)
    }

    fn object<A: MapAccess<'de>>(self, walk: &mut Walk<'_>, map: &mut A) -> Result<Self::Out, A::Error> {
        let mut id = None;
        walk.fields(map, &["id"], |walk, map, _| {
            id = walk.value(map, Name)?;
            Ok(())
        })?;
        Ok(id)
    }
}

fn absent(field: &'static str) -> RequestError {
    invalid_prompt(field, "present", "nothing")
}
