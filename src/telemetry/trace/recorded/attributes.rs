//! Names and attributes of spans, made once at the end of a request.
//!
//! The conventions are those for GenAI of August 2026 (in development) and those for HTTP of version 1.41.

use super::Received;
use attache_pool::{Endpoint, Engine};
use attache_request::event::{DecisionRecord, End, REJECTED};
use opentelemetry::{KeyValue, Value};
use std::borrow::Cow;
use std::sync::Arc;

/// Why an operation failed.
pub(super) const ERROR_TYPE: &str = "error.type";
/// 1,024 characters of a path, and 256 of a model name: clients choose both.
const MAX_PATH: usize = 1_024;
const MAX_MODEL: usize = 256;

/// What is known of a request before it is routed.
#[derive(Debug, Default)]
pub(super) struct Reach {
    /// HTTP method.
    pub(super) method: String,
    /// Name of the pool; empty before it is known.
    pub(super) pool: Arc<str>,
    /// The model name for the model server; empty if unknown.
    pub(super) model: Arc<str>,
}

/// Attributes of a request that are known by its headers.
pub(super) fn received(request: Received<'_>) -> impl IntoIterator<Item = KeyValue> {
    let path = request.path.split(['?', '#']).next().unwrap_or_default();
    [
        KeyValue::new("http.request.method", request.method.to_owned()),
        KeyValue::new("url.path", path.chars().take(MAX_PATH).collect::<String>()),
    ]
}

/// The model server, as the conventions name it.
pub(super) fn server(endpoint: &Endpoint) -> [KeyValue; 3] {
    let address = endpoint.spec.address;
    [
        KeyValue::new("server.address", address.ip().to_string()),
        KeyValue::new("server.port", i64::from(address.port())),
        KeyValue::new("gen_ai.provider.name", provider(endpoint.spec.engine)),
    ]
}

fn provider(engine: Engine) -> &'static str {
    match engine {
        Engine::Vllm => "vllm",
        Engine::Sglang => "sglang",
        Engine::TrtllmServe | Engine::Triton => "tensorrt_llm",
        Engine::Xllm => "xllm",
        Engine::Astrai => "astrai",
        Engine::None => "_OTHER",
    }
}

/// The GenAI operation of an API, by the API's name in metric labels. `None`: it runs no model.
fn operation(api: &'static str) -> Option<&'static str> {
    Some(match api {
        "chat_completions" | "chat_batch" | "responses" | "messages" => "chat",
        "completions" | "generate" | "sglang_generate" | "grpc_generate" => "text_completion",
        "embeddings" | "grpc_embed" => "embeddings",
        // The conventions have no name for these.
        "rerank" | "score" | "classify" | "pooling" | "transcription" | "translation" => api,
        _ => return None,
    })
}

/// Whether the request failed. As for HTTP servers, an error of the client is none, and neither is a disconnect.
pub(super) fn is_error(record: &DecisionRecord) -> bool {
    record.status >= 500 || end_error(record).is_some()
}

/// The description of an error: the reason of a rejection, or how the request ended.
pub(super) fn description(record: &DecisionRecord) -> &'static str {
    if record.end == REJECTED { record.reason } else { end_error(record).unwrap_or_default() }
}

/// The end of a routed request that is an error whatever its status says.
fn end_error(record: &DecisionRecord) -> Option<&'static str> {
    [End::Aborted, End::Evicted, End::Contradicted, End::ConnectFailure, End::Gateway]
        .map(End::label)
        .into_iter()
        .find(|label| *label == record.end)
}

/// The class of the error; `None` for a request without one.
fn error_type(record: &DecisionRecord) -> Option<Value> {
    if record.end == REJECTED {
        return Some(record.reason.into());
    }
    let by_status = || (record.status >= 400).then(|| record.status.to_string().into());
    end_error(record).map(Value::from).or_else(by_status)
}

impl Reach {
    /// `{operation} {model}` for a routed request. A rejected one has no model in its name, since its client chose it.
    pub(super) fn name(&self, record: &DecisionRecord) -> Cow<'static, str> {
        match operation(record.api) {
            Some(operation) if record.model.is_empty() => operation.into(),
            Some(operation) => format!("{operation} {}", short(&record.model)).into(),
            None if self.method.is_empty() => "HTTP".into(),
            None => self.method.clone().into(),
        }
    }

    /// Attributes that are known at the end.
    pub(super) fn ended(&self, record: &DecisionRecord, served: Option<&Endpoint>) -> Vec<KeyValue> {
        let mut all: Vec<KeyValue> = served.into_iter().flat_map(server).collect();
        let mut add =
            |key: &'static str, value: Option<Value>| all.extend(value.map(|value| KeyValue::new(key, value)));
        let named = |first: &Arc<str>, second: &Arc<str>| if first.is_empty() { second.clone() } else { first.clone() };
        let text = |name: &Arc<str>| (!name.is_empty()).then(|| name.clone().into());
        let count = |tokens: Option<u64>| tokens.and_then(|tokens| i64::try_from(tokens).ok()).map(Value::from);
        let seconds = |ms: Option<f64>| ms.map(|ms| Value::from(ms / 1e3));
        let rejected = record.end == REJECTED;

        add("gen_ai.operation.name", operation(record.api).map(Value::from));
        let model = named(&record.model, &self.model);
        add("gen_ai.request.model", (!model.is_empty()).then(|| short(&model).into()));
        add("gen_ai.request.stream", record.ttft_ms.is_some().then_some(Value::from(true)));
        add("gen_ai.response.time_to_first_chunk", seconds(record.ttft_ms));
        add("gen_ai.usage.input_tokens", count(record.prompt_tokens));
        add("gen_ai.usage.cache_read.input_tokens", count(record.cached_tokens));
        add("gen_ai.usage.output_tokens", count(record.completion_tokens));
        add("http.response.status_code", (record.status > 0).then(|| i64::from(record.status).into()));
        add(ERROR_TYPE, error_type(record));

        add("attache.request_id", (!record.request_id.is_empty()).then(|| record.request_id.clone().into()));
        add("attache.pool", text(&named(&record.pool, &self.pool)));
        add("attache.endpoint", text(&record.endpoint));
        add("attache.strategy", text(&record.strategy));
        add("attache.reason", (!rejected && !record.reason.is_empty()).then(|| record.reason.into()));
        add("attache.rejection.reason", rejected.then(|| record.reason.into()));
        let routed = !record.endpoint.is_empty();
        add("attache.prompt_tokens", routed.then(|| i64::from(record.estimated_prompt_tokens).into()));
        add("attache.cached_tokens", routed.then(|| i64::from(record.estimated_cached_tokens).into()));
        add("attache.predicted_ttft", seconds(record.predicted_ttft_ms));
        add("attache.queue_time", seconds(record.queued_ms));
        add("attache.prefill.endpoint", record.prefill.as_ref().and_then(text));
        add("attache.prefill.failure", record.prefill_failure.map(Value::from));
        add("attache.end", Some(record.end.into()));
        all
    }
}

/// The beginning of a model name.
fn short(model: &str) -> String {
    model.chars().take(MAX_MODEL).collect()
}
