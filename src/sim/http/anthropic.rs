//! `/v1/messages` and `/v1/messages/count_tokens`.

use super::body::{SimBody, json_response};
use super::error::ApiError;
use super::legs::{Legs, Totals};
use super::requests::AnthropicRequest;
use super::stream::{EventSink, EventWriter, StreamUsage};
use super::{Call, Generation, Server, Whole, quoted};
use crate::answer::GeneratedText;
use crate::config::Quirks;
use crate::engine::{FinishReason, JobReport};
use http::{Response, StatusCode};
use serde_json::{Value, json};

pub(super) async fn messages(server: &Server, call: &Call) -> Result<Response<SimBody>, ApiError> {
    let mut request: AnthropicRequest = call.json()?;
    let model = server.model(request.model.as_deref())?;
    let limits = request.limits()?;
    let tool = request.called_tool()?.map(|name| Tool { id: format!("toolu_{:016x}", server.unique()), name });
    let prompt = request.take_chat()?;
    let id = format!("msg_{:016x}", server.unique());
    let input_tokens = prompt.len();
    let generation = Generation {
        prompts: vec![prompt],
        choices: 1,
        model: model.clone(),
        limits,
        cache_salt: request.cache_salt.take(),
        legs: Legs::of(&call.body)?,
        request_id: id.clone(),
        traceparent: call.traceparent(),
        host: call.host.clone(),
    };
    let started = server.start(generation).await;
    if request.stream.unwrap_or(false) {
        return server.stream(started, Box::new(AnthropicEvents { id, model: model.name, input_tokens, tool }), true);
    }
    let Whole { answers, reports, totals, .. } = started?.finish().await?;
    let (Some(answer), Some(report)) = (answers.first(), reports.first()) else {
        return Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the engine stopped"));
    };
    let text = answer.whole(report.generated_tokens);
    let content = match &tool {
        Some(Tool { id, name }) => json!({"type": "tool_use", "id": id, "name": name, "input": {"text": text}}),
        None => json!({"type": "text", "text": text}),
    };
    let mut body = json!({
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model.name,
        "content": [content],
        "stop_reason": stop_reason(answer, report, tool.is_some()),
        "stop_sequence": answer.stop_text(report),
        "usage": usage_json(&totals.usage),
    });
    if !totals.kv_transfer_params.is_null() {
        body["kv_transfer_params"] = totals.kv_transfer_params;
    }
    Ok(json_response(StatusCode::OK, &body))
}

pub(super) fn count_tokens(call: &Call) -> Result<Response<SimBody>, ApiError> {
    let tokens = call.json::<AnthropicRequest>()?.take_chat()?.len();
    let body = json!({"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}});
    Ok(json_response(StatusCode::OK, &body))
}

/// A call of a tool. Its only input is `text`, which the answer's tokens make.
#[derive(Clone, Debug)]
struct Tool {
    id: String,
    name: String,
}

fn stop_reason(answer: &GeneratedText, report: &JobReport, calls: bool) -> &'static str {
    match report.reason {
        FinishReason::Length => "max_tokens",
        _ if calls => "tool_use",
        _ if answer.stop_text(report).is_some() => "stop_sequence",
        _ => "end_turn",
    }
}

/// Anthropic counts apart what was read from the cache, what was put into it, and the rest.
fn usage_json(usage: &StreamUsage) -> Value {
    json!({
        "input_tokens": usage.prompt.saturating_sub(usage.cached + usage.created),
        "output_tokens": usage.completion,
        "cache_creation_input_tokens": usage.created,
        "cache_read_input_tokens": usage.cached,
    })
}

#[derive(Debug)]
struct AnthropicEvents {
    id: String,
    model: String,
    input_tokens: usize,
    tool: Option<Tool>,
}

/// A piece of a tool's input.
fn input_delta(json: &str, out: &mut EventSink) {
    out.event(Some("content_block_delta"), |out| {
        let delta = json!({"type": "input_json_delta", "partial_json": json});
        out.push_str(&format!(r#"{{"type":"content_block_delta","index":0,"delta":{delta}}}"#));
    });
}

impl EventWriter for AnthropicEvents {
    fn start(&mut self, out: &mut EventSink) {
        let (id, model, input_tokens) = (quoted(&self.id), quoted(&self.model), self.input_tokens);
        let rest = match out.quirks() {
            Quirks::None | Quirks::AstraiDocumented => {
                format!(
                    r#""stop_reason":null,"stop_sequence":null,"usage":{{"input_tokens":{input_tokens},"output_tokens":0}}"#
                )
            }
            Quirks::Astrai => format!(r#""usage":{{"input_tokens":{input_tokens}}}"#),
        };
        out.event(Some("message_start"), |out| {
            out.push_str(&format!(
                r#"{{"type":"message_start","message":{{"id":{id},"type":"message","role":"assistant","model":{model},"content":[],{rest}}}}}"#
            ));
        });
        out.event(Some("content_block_start"), |out| {
            let block = match &self.tool {
                Some(Tool { id, name }) => json!({"type": "tool_use", "id": id, "name": name, "input": {}}),
                None => json!({"type": "text", "text": ""}),
            };
            out.push_str(&format!(r#"{{"type":"content_block_start","index":0,"content_block":{block}}}"#));
        });
        if self.tool.is_some() {
            input_delta(r#"{"text":""#, out);
        }
    }

    fn token(&mut self, _choice: usize, text: &str, out: &mut EventSink) {
        if self.tool.is_some() {
            return input_delta(text, out);
        }
        out.event(Some("content_block_delta"), |out| {
            out.push_str(r#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":""#);
            out.push_str(text);
            out.push_str(r#""}}"#);
        });
    }

    fn finish(
        &mut self,
        _choice: usize,
        answer: &GeneratedText,
        report: &JobReport,
        totals: Option<&Totals>,
        out: &mut EventSink,
    ) {
        if self.tool.is_some() {
            input_delta(r#""}"#, out);
        }
        out.event(Some("content_block_stop"), |out| out.push_str(r#"{"type":"content_block_stop","index":0}"#));
        out.event(Some("message_delta"), |out| {
            let delta = json!({"stop_reason": stop_reason(answer, report, self.tool.is_some()),
            "stop_sequence": answer.stop_text(report)});
            let usage = totals.map_or(Value::Null, |totals| usage_json(&totals.usage));
            out.push_str(&format!(r#"{{"type":"message_delta","delta":{delta},"usage":{usage}}}"#));
        });
        out.event(Some("message_stop"), |out| {
            let mut stop = json!({"type": "message_stop"});
            if let Some(totals) = totals.filter(|totals| !totals.kv_transfer_params.is_null()) {
                stop["kv_transfer_params"] = totals.kv_transfer_params.clone();
            }
            out.push_str(&stop.to_string());
        });
        if out.quirks() == Quirks::Astrai {
            out.done();
        }
    }
}
