//! `/v1/chat/completions` and `/v1/completions`.

use super::{
    Chat, ChatMessage, ITEM_BYTES, RenderError, Texts, body_error, calls, dump_tool, each, get, part_text, read_json,
    texts,
};
use crate::template::node;
use crate::work::WorkLimit;
use attache_jinja::Value;
use serde::Deserialize;
use serde::de::{IgnoredAny, SeqAccess, Visitor};
use serde_json::value::RawValue;
use smallvec::smallvec;
use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

const CHAT: &str = "a chat request";
const COMPLETION: &str = "a completion request";

#[derive(Deserialize)]
struct ChatBody<'a> {
    #[serde(borrow)]
    messages: &'a RawValue,
    #[serde(borrow)]
    tools: Option<&'a RawValue>,
    #[serde(borrow)]
    documents: Option<&'a RawValue>,
    #[serde(borrow)]
    reasoning_effort: Option<&'a RawValue>,
    #[serde(borrow)]
    chat_template_kwargs: Option<&'a RawValue>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    add_special_tokens: Option<bool>,
    truncate_prompt_tokens: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct MessageBody<'a> {
    #[serde(borrow)]
    role: Cow<'a, str>,
    #[serde(borrow)]
    content: Option<&'a RawValue>,
    #[serde(borrow)]
    tool_calls: Option<&'a RawValue>,
    #[serde(borrow)]
    tool_call_id: Option<&'a RawValue>,
    #[serde(borrow)]
    reasoning: Option<&'a RawValue>,
    /// The older name of `reasoning`.
    #[serde(borrow)]
    reasoning_content: Option<&'a RawValue>,
    #[serde(borrow)]
    name: Option<&'a RawValue>,
    #[serde(borrow)]
    task: Option<&'a RawValue>,
    #[serde(borrow)]
    tools: Option<&'a RawValue>,
}

/// Reads a chat request.
pub(super) fn chat(body: &[u8], work: &WorkLimit) -> Result<Chat, RenderError> {
    let body: ChatBody<'_> = read_json(CHAT, body)?;
    if body.truncate_prompt_tokens.is_some() {
        return Err(RenderError::Unsupported("truncate_prompt_tokens"));
    }
    let add_generation_prompt = body.add_generation_prompt.unwrap_or(true);
    let continue_final_message = body.continue_final_message.unwrap_or(false);
    if add_generation_prompt && continue_final_message {
        return Err(body_error(CHAT, "add_generation_prompt and continue_final_message exclude each other"));
    }
    let mut chat = Chat::new(work);
    chat.continue_final_message = continue_final_message;
    chat.add_special_tokens = body.add_special_tokens.unwrap_or(false);
    each(CHAT, body.messages, |message: &RawValue| {
        work.charge(message.get().len() + ITEM_BYTES)?;
        chat.messages.push(read_message(read_json(CHAT, message.get().as_bytes())?, work)?);
        Ok(())
    })?;
    chat.tools = body.tools.map(|tools| read_tools(tools, work)).transpose()?.flatten();
    let value = |json: Option<&RawValue>| json.map(|json| node::value(json, work)).transpose();
    let given =
        [("documents", value(body.documents)?), ("add_generation_prompt", Some(Value::from(add_generation_prompt)))];
    chat.set_variables(value(body.chat_template_kwargs)?, given);
    chat.set_effort(value(body.reasoning_effort)?);
    Ok(chat)
}

fn read_message(body: MessageBody<'_>, work: &WorkLimit) -> Result<ChatMessage, RenderError> {
    let value = |json: Option<&RawValue>| json.map(|json| node::value(json, work)).transpose();
    let mut message = ChatMessage::new(&body.role);
    message.content = body.content.map(|content| read_content(content, work)).transpose()?;
    if let Some(given) = value(body.tool_calls)? {
        message.more().calls = calls(&given)?;
    }
    if let Some(text) = value(body.reasoning.or(body.reasoning_content))? {
        message.more().reasoning = Some(text);
    }
    if [body.tool_call_id, body.name, body.task, body.tools].iter().any(Option::is_some) {
        let more = message.more();
        more.tool_call_id = value(body.tool_call_id)?;
        more.name = value(body.name)?;
        more.task = value(body.task)?;
        more.tools = value(body.tools)?;
    }
    Ok(message)
}

/// Returns the texts of a content, reading its parts one by one.
fn read_content(content: &RawValue, work: &WorkLimit) -> Result<Texts, RenderError> {
    if !content.get().starts_with('[') {
        return texts(&node::value(content, work)?);
    }
    let mut texts: Texts = smallvec![];
    each(CHAT, content, |part: &RawValue| {
        work.charge(size_of::<Value>())?;
        texts.extend(part_text(&node::value(part, work)?)?);
        Ok(())
    })?;
    Ok(texts)
}

fn read_tools(tools: &RawValue, work: &WorkLimit) -> Result<Option<Vec<Value>>, RenderError> {
    if !tools.get().starts_with('[') {
        return Err(body_error(CHAT, "tools must be an array"));
    }
    let mut out = Vec::new();
    each(CHAT, tools, |tool: &RawValue| {
        work.charge(tool.get().len() + ITEM_BYTES)?;
        let tool = node::value(tool, work)?;
        let function = get(&tool, "function").unwrap_or_default();
        out.push(dump_tool(get(&tool, "type").as_ref(), &function, get(&tool, "defer_loading"), work)?);
        Ok(())
    })?;
    Ok((!out.is_empty()).then_some(out))
}

/// The first prompt of a completion request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Completion {
    /// Text, with a flag for special tokens (BOS), which are added by default.
    Text {
        /// The text of the prompt.
        text: String,
        /// Whether special tokens are added.
        add_special_tokens: bool,
    },
    /// Token ids, which are used unchanged.
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

/// The first element of an array; the others are skipped.
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
