//! Tools and tool calls in the form in which vLLM passes them to templates.

use super::super::node::{self, KnownFields};
use super::{RenderError, body_error, dict, get, items, with};
use crate::work::WorkLimit;
use attache_jinja::Value;

/// Memory of a tool call with parsed arguments: two maps with a few entries.
const CALL_BYTES: usize = 768;

/// Returns the tool calls of a message as the client sent them.
pub(super) fn calls(calls: &Value) -> Result<Vec<Value>, RenderError> {
    match calls {
        Value::None => Ok(Vec::new()),
        calls if calls.is_list() => Ok(items(calls).collect()),
        _ => Err(wrong_calls()),
    }
}

pub(super) fn wrong_calls() -> RenderError {
    body_error("a chat request", "tool_calls must be an array of function calls")
}

/// Returns a tool call with parsed arguments; text that is not a JSON object counts as an empty one.
pub(super) fn parse_call(call: &Value, work: &WorkLimit) -> Result<Value, RenderError> {
    work.charge(CALL_BYTES)?;
    let function = get(call, "function").filter(|f| f.is_dict()).ok_or_else(wrong_calls)?;
    let arguments = match get(&function, "arguments") {
        Some(text) if text.is_text() => node::parse(text.as_str().unwrap_or_default(), work)?,
        other => other,
    };
    let arguments = arguments.filter(|v| v.is_dict());
    let arguments = arguments.unwrap_or_else(|| dict::<&str>([]));
    Ok(with(call, "function", with(&function, "arguments", arguments)))
}

/// Writes a tool in the form of vLLM's types (0.32): the type, then the function with name, description and parameters,
/// present or not, and with `strict` and `defer_loading` if set. Other members are dropped. `deferred` is the tool's
/// own `defer_loading`, which its function inherits.
pub(super) fn dump_tool(
    kind: Option<&Value>,
    function: &Value,
    deferred: Option<Value>,
    work: &WorkLimit,
) -> Result<Value, RenderError> {
    let wrong = || body_error("a request with tools", "a tool must be a function with a name");
    if !function.is_dict() || kind.is_some_and(|k| k.as_str() != Some("function")) {
        return Err(wrong());
    }
    let name = get(function, "name").filter(|n| n.is_text()).ok_or_else(wrong)?;
    let or_none = |key| get(function, key).unwrap_or(Value::None);
    let mut out = vec![("name", name), ("description", or_none("description")), ("parameters", or_none("parameters"))];
    out.extend(get(function, "strict").map(|v| ("strict", v)));
    let inherited = get(function, "defer_loading").or_else(|| deferred.clone());
    out.extend(inherited.map(|v| ("defer_loading", v)));
    let mut tool = vec![("type", Value::from("function")), ("function", KnownFields::value(out, work)?)];
    tool.extend(deferred.map(|v| ("defer_loading", v)));
    Ok(KnownFields::value(tool, work)?)
}
