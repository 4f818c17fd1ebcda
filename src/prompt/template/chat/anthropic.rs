//! `/v1/messages`: Anthropic's conversations, converted to OpenAI's as vLLM does.
//!
//! The blocks of `system` become one system message without separators, except those that begin with Claude
//! Code's billing header. `tool_use` becomes a tool call, `tool_result` of the user a tool message before the
//! rest of its message, `thinking` the message's reasoning. System messages among the messages are not supported,
//! since vLLM's versions place them differently.

use super::{
    Chat, ChatMessage, ITEM_BYTES, RenderError, Texts, body_error, dict, dump_tool, each, get, items, read_json, with,
};
use crate::template::node::{self, KnownFields};
use crate::work::WorkLimit;
use attache_jinja::Value;
use attache_protocol::MediaKind;
use serde::Deserialize;
use serde_json::value::RawValue;
use smallvec::smallvec;
use std::borrow::Cow;

const WHAT: &str = "an Anthropic request";
/// Start of the block that Claude Code puts before its system prompt. It differs in every request,
/// and vLLM leaves it out.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

#[derive(Deserialize)]
struct MessagesBody<'a> {
    #[serde(borrow)]
    system: Option<&'a RawValue>,
    #[serde(borrow)]
    messages: &'a RawValue,
    #[serde(borrow)]
    tools: Option<&'a RawValue>,
    #[serde(borrow)]
    chat_template_kwargs: Option<&'a RawValue>,
    #[serde(borrow)]
    output_config: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct MessagesTurn<'a> {
    #[serde(borrow)]
    role: Cow<'a, str>,
    #[serde(borrow)]
    content: &'a RawValue,
}

/// Reads a request of the Messages API.
pub(super) fn messages(body: &[u8], work: &WorkLimit) -> Result<Chat, RenderError> {
    let body: MessagesBody<'_> = read_json(WHAT, body)?;
    let value = |json: Option<&RawValue>| json.map(|json| node::value(json, work)).transpose();
    let mut chat = Chat::new(work);
    let system = value(body.system)?.as_ref().map_or_else(|| Ok(String::new()), system_text)?;
    if !system.is_empty() {
        work.charge(system.len() + ITEM_BYTES)?;
        chat.messages.push(ChatMessage::new("system").saying(Some(Value::from(system))));
    }
    each(WHAT, body.messages, |turn: &RawValue| {
        work.charge(turn.get().len() + ITEM_BYTES)?;
        let turn: MessagesTurn<'_> = read_json(WHAT, turn.get().as_bytes())?;
        if turn.role == "system" {
            return Err(RenderError::Unsupported("a system message among Anthropic messages"));
        }
        push_turn(&turn.role, &node::value(turn.content, work)?, &mut chat.messages, work)
    })?;
    chat.tools = body.tools.map(|tools| read_tools(tools, work)).transpose()?;
    chat.set_variables(value(body.chat_template_kwargs)?, [("add_generation_prompt", Some(Value::from(true)))]);
    chat.set_effort(value(body.output_config)?.and_then(|c| get(&c, "effort")));
    Ok(chat)
}

/// The text of a value that should be one.
fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn system_text(system: &Value) -> Result<String, RenderError> {
    match system {
        system if system.is_text() => Ok(text(system)),
        Value::None => Ok(String::new()),
        system if system.is_list() => Ok(items(system)
            .filter(|block| is_type(block, "text"))
            .filter_map(|block| get(&block, "text"))
            .filter(|text| !text.as_str().is_some_and(|t| t.starts_with(BILLING_HEADER)))
            .map(|value| text(&value))
            .collect()),
        _ => Err(body_error(WHAT, "system must be a string or an array of blocks")),
    }
}

fn is_type(block: &Value, kind: &str) -> bool {
    get(block, "type").is_some_and(|t| t.as_str() == Some(kind))
}

/// Adds a turn: first the results of tools, a message each, then the rest of the turn.
fn push_turn(role: &str, content: &Value, out: &mut Vec<ChatMessage>, work: &WorkLimit) -> Result<(), RenderError> {
    let mut message = ChatMessage::new(role);
    if content.is_text() {
        out.push(message.saying(Some(content.clone())));
        return Ok(());
    }
    if !content.is_list() {
        return Err(body_error(WHAT, "content must be a string or an array of blocks"));
    }
    let (mut parts, mut calls, mut thoughts): (Texts, _, _) = (smallvec![], Vec::new(), None::<String>);
    for block in items(content) {
        work.charge(ITEM_BYTES)?;
        let kind = get(&block, "type");
        match kind.as_ref().and_then(Value::as_str).unwrap_or_default() {
            "text" => parts.extend(get(&block, "text").filter(|t| t.as_str() != Some(""))),
            "thinking" => {
                let thought = get(&block, "thinking").map(|t| text(&t)).unwrap_or_default();
                thoughts.get_or_insert_default().push_str(&thought);
            }
            // Opaque to every server but Anthropic's.
            "redacted_thinking" | "tool_reference" => {}
            "tool_use" => calls.push(call(&block)),
            "tool_result" if role == "user" => out.push(tool_result(&block)?),
            "image" => return Err(RenderError::NotText(MediaKind::Image)),
            "document" => return Err(RenderError::NotText(MediaKind::Document)),
            _ => return Err(RenderError::Unsupported("this type of Anthropic block")),
        }
    }
    if thoughts.is_some() || !calls.is_empty() {
        let more = message.more();
        more.reasoning = thoughts.map(Value::from);
        more.calls = calls;
    }
    message.content = (!parts.is_empty()).then_some(parts);
    if role != "user" || message.content.is_some() {
        out.push(message);
    }
    Ok(())
}

fn call(block: &Value) -> Value {
    let or_empty = |key| get(block, key).unwrap_or(Value::from(""));
    let arguments = get(block, "input").unwrap_or_default();
    dict([
        ("id", or_empty("id")),
        ("type", Value::from("function")),
        ("function", dict([("name", or_empty("name")), ("arguments", arguments)])),
    ])
}

fn tool_result(block: &Value) -> Result<ChatMessage, RenderError> {
    let content = get(block, "content").unwrap_or(Value::from(""));
    let text = if content.is_list() {
        let mut texts = Vec::new();
        for part in items(&content) {
            match get(&part, "type").as_ref().and_then(Value::as_str) {
                Some("text") => texts.push(get(&part, "text").map(|t| text(&t)).unwrap_or_default()),
                Some("image") => return Err(RenderError::NotText(MediaKind::Image)),
                _ => return Err(RenderError::Unsupported("this type of part in a tool's result")),
            }
        }
        Value::from(texts.join("\n"))
    } else {
        content
    };
    let mut message = ChatMessage::new("tool").saying(Some(text));
    message.more().tool_call_id = Some(get(block, "tool_use_id").unwrap_or(Value::from("")));
    Ok(message)
}

fn read_tools(tools: &RawValue, work: &WorkLimit) -> Result<Vec<Value>, RenderError> {
    if !tools.get().starts_with('[') {
        return Err(body_error(WHAT, "tools must be an array"));
    }
    let mut out = Vec::new();
    each(WHAT, tools, |tool: &RawValue| {
        work.charge(tool.get().len() + ITEM_BYTES)?;
        let tool = node::value(tool, work)?;
        let Some(mut schema) = get(&tool, "input_schema").filter(|s| s.is_dict()) else {
            return Err(RenderError::Unsupported("a tool of Anthropic's servers"));
        };
        if get(&schema, "type").is_none() {
            schema = with(&schema, "type", Value::from("object"));
        }
        let mut function = vec![
            ("name", get(&tool, "name").unwrap_or_default()),
            ("description", get(&tool, "description").unwrap_or(Value::None)),
            ("parameters", schema),
        ];
        function.extend(["strict", "defer_loading"].into_iter().filter_map(|key| Some((key, get(&tool, key)?))));
        out.push(dump_tool(None, &KnownFields::value(function, work)?, None, work)?);
        Ok(())
    })?;
    Ok(out)
}
