//! `/v1/responses`: instructions and input items, converted to messages as vLLM does.
//!
//! According to its source: `instructions` become the first system message; consecutive items of the assistant
//! (reasoning, text, calls) become one message; the output of a call becomes a tool message. A request that continues
//! an earlier one is not rendered, because its history is on the server.

use super::{
    Chat, ChatMessage, ITEM_BYTES, RenderError, body_error, dict, dump_tool, each, get, items, read_json, texts,
};
use crate::template::node;
use crate::work::WorkLimit;
use attache_jinja::Value;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

const WHAT: &str = "a Responses request";

#[derive(Deserialize)]
struct ResponsesBody<'a> {
    instructions: Option<String>,
    #[serde(borrow)]
    input: &'a RawValue,
    #[serde(borrow)]
    tools: Option<&'a RawValue>,
    #[serde(borrow)]
    reasoning: Option<&'a RawValue>,
    #[serde(borrow)]
    chat_template_kwargs: Option<&'a RawValue>,
    previous_response_id: Option<IgnoredAny>,
    conversation: Option<IgnoredAny>,
    prompt: Option<IgnoredAny>,
}

/// Reads a request of the Responses API.
pub(super) fn responses(body: &[u8], work: &WorkLimit) -> Result<Chat, RenderError> {
    let body: ResponsesBody<'_> = read_json(WHAT, body)?;
    if body.previous_response_id.is_some() || body.conversation.is_some() || body.prompt.is_some() {
        return Err(RenderError::Unsupported("a conversation that lies on the server"));
    }
    let value = |json: Option<&RawValue>| json.map(|json| node::value(json, work)).transpose();
    let mut chat = Chat::new(work);
    if let Some(text) = body.instructions.filter(|t| !t.is_empty()) {
        work.charge(text.len() + ITEM_BYTES)?;
        chat.messages.push(ChatMessage::new("system").saying(Some(Value::from(text))));
    }
    if body.input.get().starts_with('"') {
        work.charge(body.input.get().len() + ITEM_BYTES)?;
        chat.messages.push(ChatMessage::new("user").saying(Some(node::value(body.input, work)?)));
    } else if body.input.get().starts_with('[') {
        let mut messages = Vec::new();
        each(WHAT, body.input, |item: &RawValue| {
            work.charge(item.get().len() + ITEM_BYTES)?;
            let item = node::value(item, work)?;
            chat.continue_final_message = is_unfinished(&item);
            push_item(&item, &mut messages)
        })?;
        chat.messages.append(&mut messages);
    } else {
        return Err(body_error(WHAT, "input must be a string or an array of items"));
    }
    chat.tools = body.tools.map(|tools| read_tools(tools, work)).transpose()?.flatten();
    let generate = Value::from(!chat.continue_final_message);
    chat.set_variables(value(body.chat_template_kwargs)?, [("add_generation_prompt", Some(generate))]);
    chat.set_effort(value(body.reasoning)?.and_then(|r| get(&r, "effort")));
    Ok(chat)
}

/// Whether the item is a response that the model should continue.
fn is_unfinished(item: &Value) -> bool {
    let kind = get(item, "type");
    let status = get(item, "status");
    matches!(kind.as_ref().and_then(Value::as_str), None | Some("message" | "reasoning"))
        && matches!(status.as_ref().and_then(Value::as_str), Some("in_progress" | "incomplete"))
}

fn push_item(item: &Value, out: &mut Vec<ChatMessage>) -> Result<(), RenderError> {
    let kind = get(item, "type");
    let role = get(item, "role");
    match (kind.as_ref().and_then(Value::as_str), role.as_ref().and_then(Value::as_str)) {
        (Some("function_call"), _) => {
            if get(item, "namespace").is_some() {
                return Err(RenderError::Unsupported("a tool with a namespace"));
            }
            push_call(item, out);
        }
        (Some("function_call_output"), _) => {
            let mut message = ChatMessage::new("tool");
            message.content = get(item, "output").as_ref().map(texts).transpose()?;
            message.more().tool_call_id = get(item, "call_id");
            out.push(message);
        }
        (Some("reasoning"), _) => {
            if get(item, "encrypted_content").is_some() {
                return Err(RenderError::Unsupported("encrypted reasoning"));
            }
            let text = first_text(item, "content").or_else(|| first_text(item, "summary")).unwrap_or(Value::from(""));
            let is_free = |m: &ChatMessage| m.more.as_ref().is_none_or(|more| more.reasoning.is_none());
            assistant(out, is_free, |m| m.more().reasoning = Some(text));
        }
        (None | Some("message"), Some("assistant")) => {
            let text = match get(item, "content") {
                Some(text) if text.is_text() => text,
                _ => first_text(item, "content").unwrap_or(Value::from("")),
            };
            let content = texts(&text)?;
            assistant(out, |m| m.content.is_none(), |m| m.content = Some(content));
        }
        (None | Some("message"), Some(role)) => {
            let mut message = ChatMessage::new(role);
            message.content = get(item, "content").as_ref().map(texts).transpose()?;
            out.push(message);
        }
        _ => return Err(RenderError::Unsupported("this type of input item")),
    }
    Ok(())
}

/// Changes the last message if it is the assistant's and satisfies `has_room`, otherwise adds a new one.
fn assistant(
    out: &mut Vec<ChatMessage>,
    has_room: impl Fn(&ChatMessage) -> bool,
    change: impl FnOnce(&mut ChatMessage),
) {
    let last = out.pop_if(|m| m.is_assistant() && has_room(m));
    let mut message = last.unwrap_or_else(|| ChatMessage::new("assistant"));
    change(&mut message);
    out.push(message);
}

fn push_call(item: &Value, out: &mut Vec<ChatMessage>) {
    let field = |key| get(item, key).unwrap_or(Value::from(""));
    let call = dict([
        ("id", field("call_id")),
        ("function", dict([("name", field("name")), ("arguments", field("arguments"))])),
        ("type", Value::from("function")),
    ]);
    assistant(out, |_| true, |message| message.more().calls.push(call));
}

/// Returns the text of the first part of a list.
fn first_text(item: &Value, key: &str) -> Option<Value> {
    let first = items(&get(item, key)?).next()?;
    if first.is_text() { Some(first) } else { get(&first, "text") }
}

fn read_tools(tools: &RawValue, work: &WorkLimit) -> Result<Option<Vec<Value>>, RenderError> {
    let mut out = Vec::new();
    if tools.get().starts_with('[') {
        each(WHAT, tools, |tool: &RawValue| {
            work.charge(tool.get().len() + ITEM_BYTES)?;
            let tool = node::value(tool, work)?;
            match get(&tool, "type").as_ref().and_then(Value::as_str) {
                // The function's members are in the tool itself.
                Some("function") => out.push(dump_tool(None, &tool, None, work)?),
                Some("namespace") => return Err(RenderError::Unsupported("a tool with a namespace")),
                // The server's own tools are not part of the prompt.
                _ => {}
            }
            Ok(())
        })?;
    }
    Ok((!out.is_empty()).then_some(out))
}
