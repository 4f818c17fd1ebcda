//! `/v1/responses`: instructions and input items, turned into messages as vLLM turns them.
//!
//! Known from its source: `instructions` become the first system message; consecutive items of the assistant (reasoning, text, calls)
//! become one message; the output of a call becomes a tool message. A request that continues an earlier one is not rendered: its history
//! lies on the server.

use super::{Chat, Message, RenderError, body_error, dump_tool, get, items, list, read_json};
use minijinja::Value;
use minijinja::value::ValueKind;
use serde::Deserialize;
use serde::de::IgnoredAny;

const WHAT: &str = "a Responses request";

#[derive(Deserialize)]
struct Body {
    instructions: Option<String>,
    input: Value,
    tools: Option<Value>,
    reasoning: Option<Value>,
    chat_template_kwargs: Option<Value>,
    previous_response_id: Option<IgnoredAny>,
    conversation: Option<IgnoredAny>,
    prompt: Option<IgnoredAny>,
}

/// A request of the Responses API.
pub(super) fn responses(body: &[u8]) -> Result<Chat, RenderError> {
    let body: Body = read_json(WHAT, body)?;
    if body.previous_response_id.is_some() || body.conversation.is_some() || body.prompt.is_some() {
        return Err(RenderError::Unsupported("a conversation that lies on the server"));
    }
    let mut chat = Chat::default();
    if let Some(text) = body.instructions.filter(|t| !t.is_empty()) {
        chat.messages.push(Message {
            role: "system".to_owned(),
            content: Some(Value::from(text)),
            ..Message::default()
        });
    }
    if body.input.kind() == ValueKind::String {
        chat.messages.push(Message { role: "user".to_owned(), content: Some(body.input), ..Message::default() });
    } else if body.input.kind() == ValueKind::Seq {
        chat.continue_final_message = items(&body.input).last().is_some_and(|item| is_unfinished(&item));
        let mut messages = Vec::new();
        for item in items(&body.input) {
            push_item(&item, &mut messages)?;
        }
        chat.messages.append(&mut messages);
    } else {
        return Err(body_error(WHAT, "input must be a string or an array of items"));
    }
    chat.tools = body.tools.as_ref().map(tools).transpose()?.flatten();
    let generate = Value::from(!chat.continue_final_message);
    chat.set_variables(body.chat_template_kwargs, [("add_generation_prompt", Some(generate))]);
    chat.set_effort(body.reasoning.and_then(|r| get(&r, "effort")));
    Ok(chat)
}

/// Whether the item is an answer that the model is to go on with.
fn is_unfinished(item: &Value) -> bool {
    let kind = get(item, "type");
    let status = get(item, "status");
    matches!(kind.as_ref().and_then(Value::as_str), None | Some("message" | "reasoning"))
        && matches!(status.as_ref().and_then(Value::as_str), Some("in_progress" | "incomplete"))
}

fn push_item(item: &Value, out: &mut Vec<Message>) -> Result<(), RenderError> {
    let kind = get(item, "type");
    let role = get(item, "role");
    match (kind.as_ref().and_then(Value::as_str), role.as_ref().and_then(Value::as_str)) {
        (Some("function_call"), _) => {
            if get(item, "namespace").is_some() {
                return Err(RenderError::Unsupported("a tool with a namespace"));
            }
            push_call(item, out);
        }
        (Some("function_call_output"), _) => out.push(Message {
            role: "tool".to_owned(),
            content: get(item, "output"),
            tool_call_id: get(item, "call_id"),
            ..Message::default()
        }),
        (Some("reasoning"), _) => {
            if get(item, "encrypted_content").is_some() {
                return Err(RenderError::Unsupported("encrypted reasoning"));
            }
            let text = first_text(item, "content").or_else(|| first_text(item, "summary")).unwrap_or(Value::from(""));
            assistant(out, |m| m.reasoning.is_none(), |m| m.reasoning = Some(text));
        }
        (None | Some("message"), Some("assistant")) => {
            let text = match get(item, "content") {
                Some(text) if text.kind() == ValueKind::String => text,
                _ => first_text(item, "content").unwrap_or(Value::from("")),
            };
            assistant(out, |m| m.content.is_none(), |m| m.content = Some(text));
        }
        (None | Some("message"), Some(role)) => {
            out.push(Message { role: role.to_owned(), content: get(item, "content"), ..Message::default() });
        }
        _ => return Err(RenderError::Unsupported("this type of input item")),
    }
    Ok(())
}

/// Changes the last message if it is the assistant's and has room for what comes, else a new one.
fn assistant(out: &mut Vec<Message>, has_room: impl Fn(&Message) -> bool, change: impl FnOnce(&mut Message)) {
    let last = out.pop_if(|m| m.role == "assistant" && has_room(m));
    let mut message = last.unwrap_or_else(|| Message { role: "assistant".to_owned(), ..Message::default() });
    change(&mut message);
    out.push(message);
}

fn push_call(item: &Value, out: &mut Vec<Message>) {
    let field = |key| get(item, key).unwrap_or(Value::from(""));
    let call = Value::from_pairs([
        ("id", field("call_id")),
        ("function", Value::from_pairs([("name", field("name")), ("arguments", field("arguments"))])),
        ("type", Value::from("function")),
    ]);
    let append = |message: &mut Message| {
        let calls = message.tool_calls.iter().flat_map(items).chain([call]);
        message.tool_calls = Some(list(calls.collect::<Vec<_>>()));
    };
    assistant(out, |_| true, append);
}

/// The text of the first part of a list.
fn first_text(item: &Value, key: &str) -> Option<Value> {
    let first = items(&get(item, key)?).next()?;
    if first.kind() == ValueKind::String { Some(first) } else { get(&first, "text") }
}

fn tools(tools: &Value) -> Result<Option<Vec<Value>>, RenderError> {
    let mut out = Vec::new();
    for tool in items(tools) {
        match get(&tool, "type").as_ref().and_then(Value::as_str) {
            // The fields of the function stand in the tool itself.
            Some("function") => out.push(dump_tool(None, &tool, None)?),
            Some("namespace") => return Err(RenderError::Unsupported("a tool with a namespace")),
            // The server's own tools are not part of the prompt.
            _ => {}
        }
    }
    Ok((!out.is_empty()).then_some(out))
}
