//! `/v1/chat/completions` and `/v1/completions`.

use super::{Chat, Message, RenderError, body_error, dump_tool, get, items, read_json};
use minijinja::Value;
use minijinja::value::ValueKind;
use serde::Deserialize;
use serde::de::{IgnoredAny, SeqAccess, Visitor};
use serde_json::value::RawValue;
use std::fmt;
use std::marker::PhantomData;

const CHAT: &str = "a chat request";
const COMPLETION: &str = "a completion request";

#[derive(Deserialize)]
struct ChatBody {
    messages: Vec<Message>,
    tools: Option<Value>,
    documents: Option<Value>,
    reasoning_effort: Option<Value>,
    chat_template_kwargs: Option<Value>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    add_special_tokens: Option<bool>,
    truncate_prompt_tokens: Option<IgnoredAny>,
}

/// A chat request.
pub(super) fn chat(body: &[u8]) -> Result<Chat, RenderError> {
    let body: ChatBody = read_json(CHAT, body)?;
    if body.truncate_prompt_tokens.is_some() {
        return Err(RenderError::Unsupported("truncate_prompt_tokens"));
    }
    let add_generation_prompt = body.add_generation_prompt.unwrap_or(true);
    let continue_final_message = body.continue_final_message.unwrap_or(false);
    if add_generation_prompt && continue_final_message {
        return Err(body_error(CHAT, "add_generation_prompt and continue_final_message exclude each other"));
    }
    let mut chat = Chat {
        messages: body.messages,
        tools: body.tools.as_ref().map(tools).transpose()?.flatten(),
        continue_final_message,
        add_special_tokens: body.add_special_tokens.unwrap_or(false),
        ..Chat::default()
    };
    let given = [("documents", body.documents), ("add_generation_prompt", Some(Value::from(add_generation_prompt)))];
    chat.set_variables(body.chat_template_kwargs, given);
    chat.set_effort(body.reasoning_effort);
    Ok(chat)
}

fn tools(tools: &Value) -> Result<Option<Vec<Value>>, RenderError> {
    if tools.kind() != ValueKind::Seq {
        return Err(body_error(CHAT, "tools must be an array"));
    }
    let mut out = Vec::new();
    for tool in items(tools) {
        let function = get(&tool, "function").unwrap_or_default();
        out.push(dump_tool(get(&tool, "type").as_ref(), &function, get(&tool, "defer_loading"))?);
    }
    Ok((!out.is_empty()).then_some(out))
}

/// The first prompt of a completion request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Completion {
    /// Text, and whether the tokenizer adds its special tokens (BOS) to it: true unless the request says otherwise.
    Text {
        /// The prompt.
        text: String,
        /// Whether special tokens are added.
        add_special_tokens: bool,
    },
    /// Token ids, which pass as they are.
    Tokens(Vec<u32>),
}

#[derive(Deserialize)]
struct CompletionBody<'a> {
    #[serde(borrow)]
    prompt: Option<&'a RawValue>,
    prompt_embeds: Option<IgnoredAny>,
    add_special_tokens: Option<bool>,
    truncate_prompt_tokens: Option<IgnoredAny>,
}

/// Reads a completion request; of a batch, the first prompt.
///
/// # Errors
/// See [`RenderError`].
pub fn completions(body: &[u8]) -> Result<Completion, RenderError> {
    let body: CompletionBody<'_> = read_json(COMPLETION, body)?;
    if body.prompt_embeds.is_some() {
        return Err(RenderError::Unsupported("prompt_embeds"));
    }
    if body.truncate_prompt_tokens.is_some() {
        return Err(RenderError::Unsupported("truncate_prompt_tokens"));
    }
    let prompt = body.prompt.map_or("null", RawValue::get);
    let text = |text| Completion::Text { text, add_special_tokens: body.add_special_tokens.unwrap_or(true) };
    let mut starts = prompt.chars().filter(|c| !c.is_ascii_whitespace());
    match (starts.next(), starts.next()) {
        (Some('"'), _) => Ok(text(parse(prompt)?)),
        (Some('['), Some('"')) => first(prompt).map(text),
        (Some('['), Some('[')) => first(prompt).map(Completion::Tokens),
        (Some('['), Some('0'..='9')) => Ok(Completion::Tokens(parse(prompt)?)),
        _ => Err(body_error(COMPLETION, "prompt must be a string, token ids, or an array of them")),
    }
}

fn parse<'a, T: Deserialize<'a>>(json: &'a str) -> Result<T, RenderError> {
    read_json(COMPLETION, json.as_bytes())
}

fn first<'a, T: Deserialize<'a>>(json: &'a str) -> Result<T, RenderError> {
    let First(first) = parse(json)?;
    first.ok_or_else(|| body_error(COMPLETION, "prompt is an empty array"))
}

/// The first element of an array; the others are passed over.
struct First<T>(Option<T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for First<T> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OfSeq<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for OfSeq<T> {
            type Value = First<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<First<T>, A::Error> {
                let first = seq.next_element()?;
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(First(first))
            }
        }

        deserializer.deserialize_seq(OfSeq(PhantomData))
    }
}
