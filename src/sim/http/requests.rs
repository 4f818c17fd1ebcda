//! What clients send, as far as a simulated server reads it. Unknown fields are ignored, as by the real servers.

use super::error::ApiError;
use crate::answer::AnswerLimits;
use crate::tokenizer::{self, ChatTurn, Content};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

/// 16 answers to one prompt.
const MAX_CHOICES: u32 = 16;

/// A value or a list of them.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

impl<T> OneOrMany<T> {
    pub(super) fn into_vec(self) -> Vec<T> {
        match self {
            OneOrMany::One(one) => vec![one],
            OneOrMany::Many(many) => many,
        }
    }
}

/// Text or token ids, one or several.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Prompts {
    Text(String),
    Texts(Vec<String>),
    Ids(Vec<u32>),
    ManyIds(Vec<Vec<u32>>),
}

impl Prompts {
    pub(super) fn into_tokens(self) -> Vec<Vec<u32>> {
        match self {
            Prompts::Text(text) => vec![encode(&text)],
            Prompts::Texts(texts) => texts.iter().map(|text| encode(text)).collect(),
            Prompts::Ids(ids) => vec![ids],
            Prompts::ManyIds(lists) => lists,
        }
    }
}

pub(super) fn encode(text: &str) -> Vec<u32> {
    let mut tokens = Vec::with_capacity(text.len() / tokenizer::BYTES_PER_TOKEN + 1);
    tokenizer::encode(text, &mut tokens);
    tokens
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum MessageContent {
    Text(String),
    Parts(Vec<ContentPart>),
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct ContentPart {
    #[serde(rename = "type", default)]
    kind: String,
    text: Option<String>,
    #[serde(flatten)]
    rest: serde_json::Map<String, Value>,
}

impl ContentPart {
    fn into_content(self) -> Content {
        const MEDIA: [&str; 9] = [
            "image_url",
            "image",
            "input_image",
            "input_audio",
            "audio_url",
            "video_url",
            "document",
            "file",
            "input_file",
        ];
        match self.text {
            Some(text) => Content::Text(text),
            None if MEDIA.contains(&self.kind.as_str()) => Content::Media(Value::Object(self.rest).to_string()),
            None => Content::Text(Value::Object(self.rest).to_string()),
        }
    }
}

impl MessageContent {
    pub(super) fn into_content(self) -> Vec<Content> {
        match self {
            MessageContent::Text(text) => vec![Content::Text(text)],
            MessageContent::Parts(parts) => parts.into_iter().map(ContentPart::into_content).collect(),
        }
    }
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct Message {
    role: String,
    content: Option<MessageContent>,
    tool_calls: Option<Value>,
}

impl Message {
    fn into_turn(self) -> ChatTurn {
        let mut content = self.content.map(MessageContent::into_content).unwrap_or_default();
        content.extend(self.tool_calls.map(|calls| Content::Text(calls.to_string())));
        ChatTurn { role: self.role, content }
    }
}

/// Tools stand before everything else, as in most templates.
fn turns(tools: Option<&RawValue>, system: Option<MessageContent>, messages: Vec<Message>) -> Vec<ChatTurn> {
    let tools = tools.map(|tools| ChatTurn::text("tools", tools.get()));
    let system = system.map(|system| ChatTurn { role: "system".to_owned(), content: system.into_content() });
    tools.into_iter().chain(system).chain(messages.into_iter().map(Message::into_turn)).collect()
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub(super) struct StreamOptions {
    pub(super) include_usage: Option<bool>,
}

/// `/v1/chat/completions`, `/v1/completions` and `/tokenize`.
#[derive(Debug, Deserialize)]
pub(super) struct OpenAiRequest {
    pub(super) model: Option<String>,
    messages: Option<Vec<Message>>,
    prompt: Option<Prompts>,
    max_tokens: Option<i64>,
    max_completion_tokens: Option<i64>,
    #[serde(default)]
    min_tokens: Option<u32>,
    n: Option<u32>,
    pub(super) stream: Option<bool>,
    pub(super) stream_options: Option<StreamOptions>,
    stop: Option<OneOrMany<String>>,
    ignore_eos: Option<bool>,
    temperature: Option<f64>,
    pub(super) cache_salt: Option<String>,
    tools: Option<Box<RawValue>>,
    tool_choice: Option<Value>,
    add_generation_prompt: Option<bool>,
    pub(super) return_token_strs: Option<bool>,
    pub(super) return_token_ids: Option<bool>,
}

impl OpenAiRequest {
    /// The tokens of the conversation.
    pub(super) fn take_chat(&mut self) -> Result<Vec<u32>, ApiError> {
        let messages = self
            .messages
            .take()
            .ok_or_else(|| ApiError::bad_request("Invalid request: messages is required").param("messages"))?;
        if messages.is_empty() {
            return Err(ApiError::bad_request(
                "Cannot apply chat template to an empty conversation. Provide at least one message.",
            )
            .param("messages"));
        }
        Ok(tokenizer::render_chat(
            &turns(self.tools.as_deref(), None, messages),
            self.add_generation_prompt.unwrap_or(true),
        ))
    }

    /// The tokens of every prompt.
    pub(super) fn take_prompts(&mut self) -> Result<Vec<Vec<u32>>, ApiError> {
        let prompts = self.prompt.take().map(Prompts::into_tokens).unwrap_or_default();
        if prompts.is_empty() {
            return Err(ApiError::bad_request("Invalid request: prompt is required").param("prompt"));
        }
        Ok(prompts)
    }

    /// The tool that the answer must call.
    pub(super) fn called_tool(&self) -> Result<Option<String>, ApiError> {
        let names = || names_of(self.tools.as_deref(), |tool| &tool["function"]["name"]);
        match &self.tool_choice {
            Some(Value::String(choice)) if choice == "required" => wanted_tool(None, names()),
            Some(choice @ Value::Object(_)) => wanted_tool(choice["function"]["name"].as_str(), names()),
            _ => Ok(None),
        }
    }

    pub(super) fn is_chat(&self) -> bool {
        self.messages.is_some()
    }

    /// Number of choices for each prompt (`n`).
    pub(super) fn choices(&self) -> Result<u32, ApiError> {
        match self.n.unwrap_or(1) {
            n @ 1..=MAX_CHOICES => Ok(n),
            n => Err(ApiError::bad_request(format!("n is {n}, allowed are 1 to {MAX_CHOICES}")).param("n")),
        }
    }

    pub(super) fn limits(&mut self) -> Result<AnswerLimits, ApiError> {
        check_temperature(self.temperature)?;
        Ok(AnswerLimits {
            max_tokens: max_tokens(self.max_completion_tokens.or(self.max_tokens))?,
            min_tokens: self.min_tokens.unwrap_or(0),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            stop: self.stop.take().map(OneOrMany::into_vec).unwrap_or_default(),
            keeps_stop: false,
        })
    }
}

/// `/v1/messages` and `/v1/messages/count_tokens`.
#[derive(Debug, Deserialize)]
pub(super) struct AnthropicRequest {
    pub(super) model: Option<String>,
    messages: Option<Vec<Message>>,
    system: Option<MessageContent>,
    tools: Option<Box<RawValue>>,
    tool_choice: Option<Value>,
    max_tokens: Option<i64>,
    pub(super) stream: Option<bool>,
    stop_sequences: Option<Vec<String>>,
    temperature: Option<f64>,
    pub(super) cache_salt: Option<String>,
}

impl AnthropicRequest {
    /// The tool that the answer must call.
    pub(super) fn called_tool(&self) -> Result<Option<String>, ApiError> {
        let names = || names_of(self.tools.as_deref(), |tool| &tool["name"]);
        let choice = self.tool_choice.as_ref().unwrap_or(&Value::Null);
        match choice["type"].as_str() {
            Some("any") => wanted_tool(None, names()),
            Some("tool") => wanted_tool(choice["name"].as_str(), names()),
            _ => Ok(None),
        }
    }

    pub(super) fn take_chat(&mut self) -> Result<Vec<u32>, ApiError> {
        let messages = self.messages.take().filter(|messages| !messages.is_empty()).ok_or_else(|| {
            ApiError::bad_request("Invalid request: messages must hold at least one message").param("messages")
        })?;
        Ok(tokenizer::render_chat(&turns(self.tools.as_deref(), self.system.take(), messages), true))
    }

    pub(super) fn limits(&mut self) -> Result<AnswerLimits, ApiError> {
        check_temperature(self.temperature)?;
        Ok(AnswerLimits {
            max_tokens: max_tokens(self.max_tokens)?,
            stop: self.stop_sequences.take().unwrap_or_default(),
            ..AnswerLimits::default()
        })
    }
}

/// `/v1/responses`.
#[derive(Debug, Deserialize)]
pub(super) struct ResponsesRequest {
    pub(super) model: Option<String>,
    input: Option<ResponsesInput>,
    pub(super) instructions: Option<String>,
    max_output_tokens: Option<i64>,
    pub(super) previous_response_id: Option<String>,
    pub(super) stream: Option<bool>,
    pub(super) store: Option<bool>,
    temperature: Option<f64>,
    pub(super) cache_salt: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum ResponsesInput {
    Text(String),
    Items(Vec<ResponsesItem>),
}

#[derive(Clone, Debug, Deserialize)]
struct ResponsesItem {
    role: Option<String>,
    content: Option<MessageContent>,
    #[serde(flatten)]
    rest: serde_json::Map<String, Value>,
}

impl ResponsesRequest {
    pub(super) fn take_turns(&mut self) -> Result<Vec<ChatTurn>, ApiError> {
        match self.input.take() {
            Some(ResponsesInput::Text(text)) => Ok(vec![ChatTurn::text("user", text)]),
            Some(ResponsesInput::Items(items)) if !items.is_empty() => Ok(items
                .into_iter()
                .map(|item| match (item.role, item.content) {
                    (Some(role), Some(content)) => ChatTurn { role, content: content.into_content() },
                    // Function calls and their results.
                    (role, _) => {
                        ChatTurn::text(role.as_deref().unwrap_or("tool"), Value::Object(item.rest).to_string())
                    }
                })
                .collect()),
            _ => Err(ApiError::bad_request("Invalid request: input is required").param("input")),
        }
    }

    pub(super) fn limits(&self) -> Result<AnswerLimits, ApiError> {
        check_temperature(self.temperature)?;
        Ok(AnswerLimits { max_tokens: max_tokens(self.max_output_tokens)?, ..AnswerLimits::default() })
    }
}

/// The names of the tools of a request, where `name` finds them.
fn names_of(tools: Option<&RawValue>, name: impl Fn(&Value) -> &Value) -> Vec<String> {
    let tools: Vec<Value> = tools.and_then(|tools| serde_json::from_str(tools.get()).ok()).unwrap_or_default();
    tools.iter().filter_map(|tool| name(tool).as_str().map(str::to_owned)).collect()
}

/// The tool of this name, or the first.
fn wanted_tool(wanted: Option<&str>, names: Vec<String>) -> Result<Option<String>, ApiError> {
    let found = names.into_iter().find(|name| wanted.is_none_or(|wanted| wanted == name));
    let missing = || {
        let wanted = wanted.map_or_else(String::new, |wanted| format!(" `{wanted}`"));
        ApiError::bad_request(format!("tool_choice asks for a tool{wanted} that is not in tools")).param("tool_choice")
    };
    found.map(Some).ok_or_else(missing)
}

fn max_tokens(given: Option<i64>) -> Result<Option<u32>, ApiError> {
    match given {
        None => Ok(None),
        Some(tokens @ ..1) => Err(ApiError::bad_request(format!(
            "max_tokens must be at least 1, got {tokens}. (parameter=max_tokens, value={tokens})"
        ))
        .param("max_tokens")),
        Some(tokens) => Ok(Some(u32::try_from(tokens).unwrap_or(u32::MAX))),
    }
}

fn check_temperature(given: Option<f64>) -> Result<(), ApiError> {
    match given {
        Some(value) if value < 0.0 => Err(ApiError::bad_request(format!(
            "temperature must be non-negative, got {value:?}. (parameter=temperature, value={value:?})"
        ))
        .param("temperature")),
        _ => Ok(()),
    }
}

/// `/v1/embeddings`.
#[derive(Debug, Deserialize)]
pub(super) struct EmbeddingsRequest {
    pub(super) model: Option<String>,
    pub(super) input: Option<Prompts>,
}

/// `/rerank`.
#[derive(Debug, Deserialize)]
pub(super) struct RerankRequest {
    pub(super) model: Option<String>,
    pub(super) query: Option<String>,
    pub(super) documents: Option<Vec<String>>,
    pub(super) top_n: Option<usize>,
}

/// `/score`, in its three spellings.
#[derive(Debug, Deserialize)]
pub(super) struct ScoreRequest {
    pub(super) model: Option<String>,
    #[serde(alias = "queries", alias = "data_1")]
    pub(super) text_1: Option<OneOrMany<String>>,
    #[serde(alias = "documents", alias = "items", alias = "data_2")]
    pub(super) text_2: Option<OneOrMany<String>>,
}

/// `/detokenize`.
#[derive(Debug, Deserialize)]
pub(super) struct DetokenizeRequest {
    pub(super) tokens: Vec<u32>,
}

/// `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`.
#[derive(Debug, Deserialize)]
pub(super) struct LoraRequest {
    pub(super) lora_name: Option<String>,
    pub(super) lora_path: Option<String>,
    #[serde(default)]
    pub(super) load_inplace: bool,
}
