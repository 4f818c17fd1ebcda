//! `/v1/chat/completions` and `/v1/completions`.

use super::body::{SimBody, json_response, late_response};
use super::error::ApiError;
use super::legs::{Legs, Totals};
use super::requests::OpenAiRequest;
use super::stream::{EventSink, EventStream, EventWriter, Usage};
use super::{Call, Generation, Server, Whole, quoted};
use crate::sim::answer::Answer;
use crate::sim::config::Quirks;
use crate::sim::engine::{FinishReason, JobReport};
use crate::sim::tokenizer::answer_token;
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
    let prompts = if chat { vec![request.take_chat()?] } else { request.take_prompts()? };
    let shape = Shape {
        chat,
        id: server.id(if chat { "chatcmpl" } else { "cmpl" }, call),
        created: server.unix_seconds(),
        model: model.name.clone(),
        token_ids: request.return_token_ids.unwrap_or(false),
    };
    let generation = Generation {
        prompts,
        choices,
        model,
        limits,
        cache_salt: request.cache_salt.take(),
        legs: Legs::of(&call.body)?,
        request_id: format!("{}{}", shape.id, if chat { "" } else { "-0" }),
        host: call.host.clone(),
    };
    if !request.stream.unwrap_or(false) {
        return Ok(json_response(StatusCode::OK, &shape.whole(&server.start(generation).await?.finish().await?)));
    }
    let include_usage = request.stream_options.and_then(|options| options.include_usage);
    let writer = Box::new(Chunks::new(&shape, include_usage, server.config.quirks));
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
struct Shape {
    chat: bool,
    id: String,
    created: u64,
    model: String,
    /// The answer is told in tokens as well (`return_token_ids`).
    token_ids: bool,
}

/// The tokens of an answer, when they are asked for.
fn token_ids(asked: bool, answer: &Answer, report: &JobReport) -> Value {
    match asked {
        true => (0..report.generated_tokens).map(|token| answer_token(answer.seed, token)).collect(),
        false => Value::Null,
    }
}

impl Shape {
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

    fn choice(&self, index: usize, answer: &Answer, report: &JobReport) -> Value {
        let text = answer.whole(report.generated_tokens);
        let finish = finish_reason(report.reason);
        let (stop, token_ids) = (answer.stop_text(report), token_ids(self.token_ids, answer, report));
        if self.chat {
            json!({
                "index": index,
                "message": {
                    "role": "assistant", "content": text, "refusal": null, "annotations": null, "audio": null,
                    "function_call": null, "reasoning": null,
                },
                "logprobs": null, "finish_reason": finish, "stop_reason": stop, "token_ids": token_ids, "routed_experts": null,
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

pub(super) fn usage_json(usage: &Usage, chat: bool) -> Value {
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

/// When a stream tells its usage.
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

/// A stream of chunks.
#[derive(Debug)]
struct Chunks {
    chat: bool,
    /// Everything before the choices of a chunk.
    head: String,
    /// The same for the chunks with tokens.
    token_head: String,
    usage_in: UsageIn,
    token_ids: bool,
}

impl Chunks {
    fn new(shape: &Shape, include_usage: Option<bool>, quirks: Quirks) -> Self {
        let object = if shape.chat { "chat.completion.chunk" } else { "text_completion" };
        let head = |created: u64| {
            let (id, model) = (quoted(&shape.id), quoted(&shape.model));
            format!(r#"{{"id":{id},"object":"{object}","created":{created},"model":{model},"choices":["#)
        };
        let usage_in = match (quirks, include_usage) {
            (Quirks::Astrai, _) => UsageIn::BareEvent,
            (Quirks::None, None) => UsageIn::FinishChunk,
            (Quirks::None, Some(true)) => UsageIn::OwnChunk,
            (Quirks::None, Some(false)) => UsageIn::Nowhere,
        };
        let token_head = head(if quirks == Quirks::Astrai { 0 } else { shape.created });
        Self { chat: shape.chat, head: head(shape.created), token_head, usage_in, token_ids: shape.token_ids }
    }
}

impl EventWriter for Chunks {
    fn start(&mut self, out: &mut EventSink) {
        if self.chat {
            out.event(None, |out| {
                out.push_str(&self.head);
                out.push_str(
                    r#"{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}"#,
                );
            });
        }
    }

    fn token(&mut self, choice: usize, text: &str, out: &mut EventSink) {
        out.event(None, |out| {
            out.push_str(&self.token_head);
            out.push_str(r#"{"index":"#);
            out.push_str(&choice.to_string());
            // The vocabulary needs no escaping; see the tokenizer.
            out.push_str(if self.chat { r#","delta":{"content":""# } else { r#","text":""# });
            out.push_str(text);
            out.push_str(if self.chat {
                r#""},"logprobs":null,"finish_reason":null,"token_ids":null}]}"#
            } else {
                r#"","logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":null}]}"#
            });
        });
    }

    fn finish(
        &mut self,
        choice: usize,
        answer: &Answer,
        report: &JobReport,
        totals: Option<&Totals>,
        out: &mut EventSink,
    ) {
        let params = totals.map_or(&Value::Null, |totals| &totals.kv_transfer_params);
        let params = if params.is_null() { String::new() } else { format!(r#","kv_transfer_params":{params}"#) };
        let usage = totals.map(|totals| &totals.usage);
        out.event(None, |out| {
            out.push_str(&self.head);
            let finish = finish_reason(report.reason);
            let stop = answer.stop_text(report).map_or_else(|| "null".to_owned(), quoted);
            let content = if self.chat { r#""delta":{}"# } else { r#""text":"""# };
            // All at once; vLLM tells them with the text that they make.
            let ids = match self.token_ids {
                true => format!(r#","token_ids":{}"#, token_ids(true, answer, report)),
                false => String::new(),
            };
            out.push_str(&format!(
                r#"{{"index":{choice},{content},"logprobs":null,"finish_reason":"{finish}","stop_reason":{stop}{ids}}}]"#
            ));
            if let Some(usage) = usage.filter(|_| self.usage_in == UsageIn::FinishChunk) {
                out.push_str(&format!(r#","usage":{}"#, usage_json(usage, self.chat)));
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
                let usage = usage_json(usage, self.chat);
                out.push_str(&self.head);
                out.push_str(&format!(r#"],"usage":{usage},"system_fingerprint":"{FINGERPRINT}"{params}}}"#));
            }),
            UsageIn::BareEvent => out.event(None, |out| out.push_str(&usage_json(usage, self.chat).to_string())),
            UsageIn::FinishChunk | UsageIn::Nowhere => {}
        }
        out.done();
    }
}
