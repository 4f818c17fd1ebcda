//! `/v1/chat/completions` and `/v1/completions`.

use super::body::{SimBody, json_response, late_response};
use super::error::ApiError;
use super::legs::{Legs, Totals};
use super::requests::OpenAiRequest;
use super::stream::{EventSink, EventStream, EventWriter, StreamUsage};
use super::{Call, Generation, Server, Whole, quoted};
use crate::answer::{AnswerLimits, GeneratedText};
use crate::config::Quirks;
use crate::engine::{FinishReason, JobReport};
use crate::tokenizer::answer_token;
use http::{Response, StatusCode};
use serde_json::{Value, json};
use std::sync::Arc;

/// In place of vLLM's build fingerprint.
const FINGERPRINT: &str = concat!("attache-sim-", env!("CARGO_PKG_VERSION"));

pub(super) async fn generate(server: &Arc<Server>, chat: bool, call: &Call) -> Result<Response<SimBody>, ApiError> {
    let mut request: OpenAiRequest = call.json()?;
    let model = server.model(request.model.as_deref())?;
    let choices = request.choices()?;
    let limits = request.limits()?;
    let is_astrai = server.config.quirks == Quirks::Astrai;
    let limits = AnswerLimits { keeps_stop: is_astrai && chat && !request.stream.unwrap_or(false), ..limits };
    let tool = request.called_tool()?.filter(|_| chat);
    let prompts = if chat { vec![request.take_chat()?] } else { request.take_prompts()? };
    let shape = ChunkShape {
        chat,
        id: server.id(if chat { "chatcmpl" } else { "cmpl" }, call),
        created: server.unix_seconds(),
        model: model.name.clone(),
        token_ids: request.return_token_ids.unwrap_or(false),
        tool: tool.map(|name| Tool { id: format!("call_{:016x}", server.unique()), name }),
        only_stops: is_astrai,
    };
    let generation = Generation {
        prompts,
        choices,
        model,
        limits,
        cache_salt: request.cache_salt.take(),
        legs: Legs::of(&call.body)?,
        request_id: format!("{}{}", shape.id, if chat { "" } else { "-0" }),
        traceparent: call.traceparent(),
        host: call.host.clone(),
    };
    if !request.stream.unwrap_or(false) {
        return Ok(json_response(StatusCode::OK, &shape.whole(&server.start(generation).await?.finish().await?)));
    }
    let include_usage = request.stream_options.and_then(|options| options.include_usage);
    let writer = Box::new(Chunks::new(shape, include_usage, server.config.quirks));
    if !server.answers_early() {
        return server.stream(server.start(generation).await, writer, false);
    }
    let server = server.clone();
    Ok(late_response(async move {
        let streamed = server.stream(server.start(generation).await, writer, false);
        streamed.map_or_else(
            |error| SimBody::Full(Some(EventStream::error(&error, false, server.config.quirks).into())),
            Response::into_body,
        )
    }))
}

/// What all parts of one answer carry.
#[derive(Debug)]
struct ChunkShape {
    chat: bool,
    id: String,
    created: u64,
    model: String,
    /// The response also contains token ids (`return_token_ids`).
    token_ids: bool,
    /// The answer calls this tool.
    tool: Option<Tool>,
    /// Every answer ends with the reason `stop`.
    only_stops: bool,
}

/// A call of a tool. Its only argument is `text`, which the answer's tokens make.
#[derive(Clone, Debug)]
struct Tool {
    id: String,
    name: String,
}

/// What stands before the answer's tokens in the arguments of a tool, and what behind them.
const ARGUMENTS: (&str, &str) = (r#"{"text":""#, r#""}"#);

/// The tokens of an answer, when they are asked for.
fn token_ids(asked: bool, answer: &GeneratedText, report: &JobReport) -> Value {
    match asked {
        true => (0..report.generated_tokens).map(|token| answer_token(answer.seed, token)).collect(),
        false => Value::Null,
    }
}

impl ChunkShape {
    fn whole(&self, whole: &Whole) -> Value {
        let Whole { answers, reports, totals, reply } = whole;
        let mut choices: Vec<Value> = answers
            .iter()
            .zip(reports)
            .enumerate()
            .map(|(index, (answer, report))| self.choice(index, answer, report))
            .collect();
        let context = totals.disaggregated_params.as_ref();
        if let (Some(params), Some(first)) = (context, choices.first_mut()) {
            first["disaggregated_params"] = params.clone();
        }
        let mut whole = json!({
            "id": self.id,
            "object": if self.chat { "chat.completion" } else { "text_completion" },
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "service_tier": null,
            "system_fingerprint": FINGERPRINT,
            "usage": usage_json(&totals.usage, self.chat),
            "kv_transfer_params": totals.kv_transfer_params,
            "ec_transfer_params": null,
            "metrics": null,
        });
        if self.chat {
            for field in ["prompt_logprobs", "prompt_token_ids", "prompt_text"] {
                whole[field] = Value::Null;
            }
        }
        if context.is_some() {
            whole["prompt_token_ids"] = Value::from(reply.prompt());
        }
        whole
    }

    fn finish(&self, report: &JobReport) -> &'static str {
        match finish_reason(report.reason) {
            "length" if self.only_stops => "stop",
            "stop" if self.tool.is_some() => "tool_calls",
            reason => reason,
        }
    }

    fn choice(&self, index: usize, answer: &GeneratedText, report: &JobReport) -> Value {
        let text = answer.whole(report.generated_tokens);
        let finish = self.finish(report);
        let (stop, token_ids) = (answer.stop_text(report), token_ids(self.token_ids, answer, report));
        if self.chat {
            let mut message = json!({
                "role": "assistant", "content": text, "refusal": null, "annotations": null, "audio": null,
                "function_call": null, "reasoning": null,
            });
            if let Some(Tool { id, name }) = &self.tool {
                let arguments = format!("{}{text}{}", ARGUMENTS.0, ARGUMENTS.1);
                let function = json!({"name": name, "arguments": arguments});
                message["content"] = Value::Null;
                message["tool_calls"] = json!([{"id": id, "type": "function", "function": function}]);
            }
            json!({
                "index": index,
                "message": message,
                "logprobs": null, "finish_reason": finish, "stop_reason": stop, "token_ids": token_ids,
                "routed_experts": null,
            })
        } else {
            json!({
                "index": index, "text": text, "logprobs": null, "finish_reason": finish, "stop_reason": stop,
                "token_ids": token_ids, "prompt_logprobs": null, "prompt_token_ids": null, "routed_experts": null,
            })
        }
    }
}

pub(super) fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Abort => "abort",
    }
}

pub(super) fn usage_json(usage: &StreamUsage, chat: bool) -> Value {
    json!({
        "prompt_tokens": usage.prompt,
        "total_tokens": usage.prompt + usage.completion,
        "completion_tokens": usage.completion,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached,
            // vLLM fills it for chat only.
            "created_cache_tokens": chat.then_some(usage.created),
            "multimodal_tokens": null,
        },
        "completion_tokens_details": null,
    })
}

/// When a stream reports its usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UsageIn {
    /// With the last finish reason: when the client says nothing about it.
    FinishChunk,
    /// In a chunk of its own without choices: `include_usage: true`.
    OwnChunk,
    /// An event that is nothing but the usage.
    BareEvent,
    /// Not at all: `include_usage: false`.
    Nowhere,
}

/// State of a stream of chunks.
#[derive(Debug)]
struct Chunks {
    shape: ChunkShape,
    /// Everything before the choices of a chunk.
    head: String,
    /// The same for the chunks with tokens.
    token_head: String,
    usage_in: UsageIn,
    /// The first chunk's delta says nothing but the role.
    role_only: bool,
    /// Choices whose call of a tool has begun.
    calling: Vec<usize>,
}

impl Chunks {
    fn new(shape: ChunkShape, include_usage: Option<bool>, quirks: Quirks) -> Self {
        let object = if shape.chat { "chat.completion.chunk" } else { "text_completion" };
        let head = |created: u64| {
            let (id, model) = (quoted(&shape.id), quoted(&shape.model));
            format!(r#"{{"id":{id},"object":"{object}","created":{created},"model":{model},"choices":["#)
        };
        let usage_in = match (quirks, include_usage) {
            (Quirks::Astrai, _) => UsageIn::BareEvent,
            (Quirks::AstraiDocumented, _) | (Quirks::None, None) => UsageIn::FinishChunk,
            (Quirks::None, Some(true)) => UsageIn::OwnChunk,
            (Quirks::None, Some(false)) => UsageIn::Nowhere,
        };
        let token_head = head(if quirks == Quirks::Astrai { 0 } else { shape.created });
        let head = head(shape.created);
        Self { head, token_head, usage_in, role_only: quirks.is_astrai(), calling: Vec::new(), shape }
    }

    /// A piece of the arguments of a choice's call, which names the tool if it is the first.
    fn call(&mut self, choice: usize, arguments: &str) -> Option<Value> {
        let Tool { id, name } = self.shape.tool.as_ref()?;
        if self.calling.contains(&choice) {
            return Some(json!([{"index": 0, "function": {"arguments": arguments}}]));
        }
        self.calling.push(choice);
        let arguments = format!("{}{arguments}", ARGUMENTS.0);
        Some(json!([{"index": 0, "id": id, "type": "function", "function": {"name": name, "arguments": arguments}}]))
    }

    /// A chunk with a piece of a call.
    fn calls(&self, choice: usize, call: &Value, out: &mut EventSink) {
        out.event(None, |out| {
            let head = &self.token_head;
            out.push_str(&format!(
                r#"{head}{{"index":{choice},"delta":{{"tool_calls":{call}}},"logprobs":null,"finish_reason":null}}]}}"#
            ));
        });
    }
}

impl EventWriter for Chunks {
    fn start(&mut self, out: &mut EventSink) {
        if self.shape.chat {
            let content = if self.role_only { "" } else { r#","content":"""# };
            out.event(None, |out| {
                out.push_str(&format!(
                    r#"{}{{"index":0,"delta":{{"role":"assistant"{content}}},"logprobs":null,"finish_reason":null}}]}}"#,
                    self.head
                ));
            });
        }
    }

    fn token(&mut self, choice: usize, text: &str, out: &mut EventSink) {
        if let Some(call) = self.call(choice, text) {
            return self.calls(choice, &call, out);
        }
        out.event(None, |out| {
            out.push_str(&self.token_head);
            out.push_str(r#"{"index":"#);
            out.push_str(&choice.to_string());
            // The vocabulary needs no escaping; see the tokenizer.
            out.push_str(if self.shape.chat { r#","delta":{"content":""# } else { r#","text":""# });
            out.push_str(text);
            out.push_str(if self.shape.chat {
                r#""},"logprobs":null,"finish_reason":null,"token_ids":null}]}"#
            } else {
                r#"","logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":null}]}"#
            });
        });
    }

    fn finish(
        &mut self,
        choice: usize,
        answer: &GeneratedText,
        report: &JobReport,
        totals: Option<&Totals>,
        out: &mut EventSink,
    ) {
        let params = totals.map_or(&Value::Null, |totals| &totals.kv_transfer_params);
        let params = if params.is_null() { String::new() } else { format!(r#","kv_transfer_params":{params}"#) };
        let usage = totals.map(|totals| &totals.usage);
        if let Some(call) = self.call(choice, ARGUMENTS.1) {
            self.calls(choice, &call, out);
        }
        out.event(None, |out| {
            out.push_str(&self.head);
            let finish = self.shape.finish(report);
            let stop = answer.stop_text(report).map_or_else(|| "null".to_owned(), quoted);
            let content = if self.shape.chat { r#""delta":{}"# } else { r#""text":"""# };
            // All at once; vLLM sends them with their text.
            let ids = match self.shape.token_ids {
                true => format!(r#","token_ids":{}"#, token_ids(true, answer, report)),
                false => String::new(),
            };
            out.push_str(&format!(
                r#"{{"index":{choice},{content},"logprobs":null,"finish_reason":"{finish}","stop_reason":{stop}{ids}}}]"#
            ));
            if let Some(usage) = usage.filter(|_| self.usage_in == UsageIn::FinishChunk) {
                out.push_str(&format!(r#","usage":{}"#, usage_json(usage, self.shape.chat)));
            }
            // With what is the last event of the stream.
            if self.usage_in != UsageIn::OwnChunk {
                out.push_str(&params);
            }
            out.push('}');
        });
        let Some(usage) = usage else { return };
        match self.usage_in {
            UsageIn::OwnChunk => out.event(None, |out| {
                let usage = usage_json(usage, self.shape.chat);
                out.push_str(&self.head);
                out.push_str(&format!(r#"],"usage":{usage},"system_fingerprint":"{FINGERPRINT}"{params}}}"#));
            }),
            UsageIn::BareEvent => out.event(None, |out| out.push_str(&usage_json(usage, self.shape.chat).to_string())),
            UsageIn::FinishChunk | UsageIn::Nowhere => {}
        }
        out.done();
    }
}
