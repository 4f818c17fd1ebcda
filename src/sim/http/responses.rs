//! `/v1/responses`: answers that are remembered by the server that gave them, and only there.

use super::body::{SimBody, json_response};
use super::error::ApiError;
use super::legs::{Legs, Totals};
use super::requests::ResponsesRequest;
use super::stream::{EventSink, EventWriter};
use super::{Call, Generation, Server, Started, Whole};
use crate::answer::GeneratedText;
use crate::engine::{FinishReason, JobReport};
use crate::tokenizer::{ChatTurn, render_chat};
use http::{Response, StatusCode};
use serde_json::{Value, json};
use std::collections::{HashMap, VecDeque};

/// 4,096 responses are remembered; the oldest is forgotten first.
const RESPONSES_KEPT: usize = 4_096;

/// The conversations that `previous_response_id` can name.
#[derive(Debug, Default)]
pub(super) struct ResponseStore {
    turns: HashMap<String, Vec<ChatTurn>>,
    order: VecDeque<String>,
}

impl ResponseStore {
    fn put(&mut self, id: String, turns: Vec<ChatTurn>) {
        if self.order.len() >= RESPONSES_KEPT
            && let Some(oldest) = self.order.pop_front()
        {
            self.turns.remove(&oldest);
        }
        self.order.push_back(id.clone());
        self.turns.insert(id, turns);
    }
}

pub(super) async fn create(server: &Server, call: &Call) -> Result<Response<SimBody>, ApiError> {
    let mut request: ResponsesRequest = call.json()?;
    let model = server.model(request.model.as_deref())?;
    let limits = request.limits()?;
    let history = match &request.previous_response_id {
        Some(id) => server.responses.lock().turns.get(id).cloned().ok_or_else(|| {
            ApiError::new(StatusCode::NOT_FOUND, format!("Response with id '{id}' not found."))
                .param("previous_response_id")
        })?,
        None => Vec::new(),
    };
    let mut conversation: Vec<ChatTurn> = history;
    conversation.extend(request.take_turns()?);
    let system = request.instructions.as_deref().map(|text| ChatTurn::text("system", text));
    let rendered: Vec<ChatTurn> = system.into_iter().chain(conversation.iter().cloned()).collect();
    let shape = ResponseShape {
        id: format!("resp_{:016x}", server.unique()),
        item: format!("msg_{:016x}", server.unique()),
        created: server.unix_seconds(),
        model: model.name.clone(),
        instructions: request.instructions.take(),
        previous: request.previous_response_id.take(),
        max_output_tokens: limits.max_tokens,
    };
    let generation = Generation {
        prompts: vec![render_chat(&rendered, true)],
        choices: 1,
        model,
        limits,
        cache_salt: request.cache_salt.take(),
        legs: Legs::of(&call.body)?,
        request_id: format!("{}_0", shape.id),
        traceparent: call.traceparent(),
        host: call.host.clone(),
    };
    let started = server.start(generation).await;
    let store = request.store.unwrap_or(true);
    // The answer is known before it is given, so a stream needs no way back here to be remembered. Its last token's
    // count is not known yet (the room may end it), but what follows a cut answer is the same conversation.
    if request.stream.unwrap_or(false) {
        if let (Ok(started), true) = (&started, store) {
            remember(server, &shape, conversation, started);
        }
        return server.stream(started, Box::new(ResponseEvents { shape, text: String::new(), sequence: 0 }), false);
    }
    let started = started?;
    if store {
        remember(server, &shape, conversation, &started);
    }
    let Whole { answers, reports, totals, .. } = started.finish().await?;
    let (Some(answer), Some(report)) = (answers.first(), reports.first()) else {
        return Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the engine stopped"));
    };
    let body = shape.response(Some((&answer.whole(report.generated_tokens), report.reason)), Some(&totals));
    Ok(json_response(StatusCode::OK, &body))
}

fn remember(server: &Server, shape: &ResponseShape, mut conversation: Vec<ChatTurn>, started: &Started) {
    let Some(answer) = started.answers.first() else { return };
    let longest = answer.stops_after.unwrap_or(u32::MAX).min(shape.max_output_tokens.unwrap_or(u32::MAX));
    conversation.push(ChatTurn::text("assistant", answer.whole(longest.min(server.engine.max_request_tokens()))));
    server.responses.lock().put(shape.id.clone(), conversation);
}

/// What all events of one response carry.
#[derive(Debug)]
struct ResponseShape {
    id: String,
    item: String,
    created: u64,
    model: String,
    instructions: Option<String>,
    previous: Option<String>,
    max_output_tokens: Option<u32>,
}

impl ResponseShape {
    /// The response object: in progress while there is no `end`.
    fn response(&self, end: Option<(&str, FinishReason)>, totals: Option<&Totals>) -> Value {
        let usage = totals.map(|totals| &totals.usage);
        let (status, incomplete) = match end {
            None => ("in_progress", Value::Null),
            Some((_, FinishReason::Length)) => ("incomplete", json!({"reason": "max_output_tokens"})),
            Some(_) => ("completed", Value::Null),
        };
        let output: Vec<Value> = end.iter().map(|(text, _)| self.item(Some(text))).collect();
        json!({
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "model": self.model,
            "incomplete_details": incomplete, "instructions": self.instructions, "metadata": null, "output": output,
            "parallel_tool_calls": true, "temperature": 1.0, "tool_choice": "auto", "tools": [], "top_p": 1.0,
            "background": false, "max_output_tokens": self.max_output_tokens, "previous_response_id": self.previous,
            "service_tier": "auto", "truncation": "disabled", "user": null, "kv_transfer_params": totals.map(|totals| &totals.kv_transfer_params), "ec_transfer_params": null,
            "prompt": null, "reasoning": null, "text": null, "top_logprobs": null, "max_tool_calls": null,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "input_messages": null, "output_messages": null,
            "usage": usage.map(|usage| json!({
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": usage.created,
                    "input_tokens_per_turn": [], "cached_tokens_per_turn": []},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0, "output_tokens_per_turn": [],
                    "tool_output_tokens_per_turn": []},
                "total_tokens": usage.prompt + usage.completion,
            })),
        })
    }

    fn item(&self, text: Option<&str>) -> Value {
        let content: Vec<Value> = text.map(part).into_iter().collect();
        let status = if text.is_some() { "completed" } else { "in_progress" };
        json!({"id": self.item, "type": "message", "role": "assistant", "status": status, "content": content,
        "phase": null})
    }
}

fn part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": null})
}

#[derive(Debug)]
struct ResponseEvents {
    shape: ResponseShape,
    text: String,
    sequence: u64,
}

impl ResponseEvents {
    /// Writes one event with its sequence number.
    fn emit(&mut self, kind: &str, mut data: Value, out: &mut EventSink) {
        data["type"] = Value::from(kind);
        data["sequence_number"] = Value::from(self.sequence);
        self.sequence += 1;
        out.event(Some(kind), |out| out.push_str(&data.to_string()));
    }

    /// Where a piece of text belongs.
    fn place(&self) -> Value {
        json!({"item_id": self.shape.item, "output_index": 0, "content_index": 0})
    }
}

impl EventWriter for ResponseEvents {
    fn start(&mut self, out: &mut EventSink) {
        let response = self.shape.response(None, None);
        self.emit("response.created", json!({"response": response}), out);
        self.emit("response.in_progress", json!({"response": response}), out);
        self.emit("response.output_item.added", json!({"output_index": 0, "item": self.shape.item(None)}), out);
        let mut added = self.place();
        added["part"] = part("");
        self.emit("response.content_part.added", added, out);
    }

    fn token(&mut self, _choice: usize, text: &str, out: &mut EventSink) {
        self.text.push_str(text);
        let mut delta = self.place();
        delta["delta"] = Value::from(text);
        delta["logprobs"] = json!([]);
        self.emit("response.output_text.delta", delta, out);
    }

    fn finish(
        &mut self,
        _choice: usize,
        _answer: &GeneratedText,
        report: &JobReport,
        totals: Option<&Totals>,
        out: &mut EventSink,
    ) {
        let text = std::mem::take(&mut self.text);
        let mut done = self.place();
        done["text"] = Value::from(text.as_str());
        done["logprobs"] = json!([]);
        self.emit("response.output_text.done", done, out);
        let mut done = self.place();
        done["part"] = part(&text);
        self.emit("response.content_part.done", done, out);
        self.emit("response.output_item.done", json!({"output_index": 0, "item": self.shape.item(Some(&text))}), out);
        let response = self.shape.response(Some((&text, report.reason)), totals);
        // vLLM says completed for an incomplete response too; the status is inside.
        self.emit("response.completed", json!({"response": response}), out);
    }
}
