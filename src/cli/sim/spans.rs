//! Exports the spans of simulated servers, with vLLM's names. Below the span of the caller, and sampled if that is.

use anyhow::Context as _;
use attache_sim::spans::{ServedRequest, SpanSink};
use attache_telemetry::otlp::Otlp;
use attache_telemetry::trace::parent_context;
use opentelemetry::KeyValue;
use opentelemetry::trace::{Span, SpanKind, Tracer, TracerProvider};
use std::sync::Arc;
use std::time::SystemTime;

/// The name that vLLM gives its spans.
const NAME: &str = "llm_request";

/// The running export.
#[derive(Debug)]
pub(super) struct Export(Otlp);

/// Starts to export to this collector.
///
/// # Errors
/// If the client can't be created.
pub(super) fn export(endpoint: &str) -> anyhow::Result<Export> {
    let handle = tokio::runtime::Handle::current();
    let otlp = Otlp::start_as("attache-sim", endpoint, 1.0, handle).context("--otlp-traces-endpoint")?;
    Ok(Export(otlp))
}

impl Export {
    pub(super) fn sink(&self) -> Arc<dyn SpanSink> {
        Arc::new(Sink(self.0.clone()))
    }

    /// Sends the last spans.
    pub(super) async fn shutdown(&self) {
        self.0.shutdown().await;
    }
}

#[derive(Debug)]
struct Sink(Otlp);

impl SpanSink for Sink {
    fn finished(&self, request: ServedRequest) {
        let tracer = self.0.provider().tracer("vllm.llm_engine");
        let parent = request.traceparent.as_deref().and_then(parent_context).unwrap_or_default();
        let builder = tracer.span_builder(NAME).with_kind(SpanKind::Server).with_start_time(request.arrived);
        let mut span = tracer.build_with_context(builder, &parent);
        let since = |at: SystemTime| at.duration_since(request.arrived).unwrap_or_default().as_secs_f64();
        span.set_attributes([
            KeyValue::new("gen_ai.response.model", request.model),
            KeyValue::new("gen_ai.request.id", request.request_id),
            KeyValue::new("gen_ai.usage.prompt_tokens", i64::from(request.prompt_tokens)),
            KeyValue::new("gen_ai.usage.completion_tokens", i64::from(request.generated_tokens)),
            KeyValue::new("gen_ai.latency.e2e", since(request.ended)),
        ]);
        if let Some(first) = request.first_token {
            span.set_attribute(KeyValue::new("gen_ai.latency.time_to_first_token", since(first)));
        }
        span.end_with_timestamp(request.ended);
    }
}
