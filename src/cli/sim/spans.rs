//! Exports the spans of simulated servers, with vLLM's names. Below the span of the caller, and sampled if that is.

use anyhow::Context as _;
use attache_sim::config::SimConfig;
use attache_sim::spans::{ServedRequest, SpanSink};
use attache_telemetry::otlp::Otlp;
use attache_telemetry::trace::parent_context;
use clap::Args;
use opentelemetry::KeyValue;
use opentelemetry::trace::{Span, SpanKind, Tracer, TracerProvider};
use std::sync::Arc;
use std::time::SystemTime;

/// The name that vLLM gives its spans.
const NAME: &str = "llm_request";

/// Where the spans go.
#[derive(Args, Clone, Debug)]
pub(super) struct TraceArgs {
    /// Send a span of each finished request to this collector, as vLLM does; OTLP over HTTP.
    #[arg(long, value_name = "URL")]
    otlp_traces_endpoint: Option<String>,
}

impl TraceArgs {
    /// Serves with `config`, exports the spans of finished requests, and sends the last ones at the end.
    ///
    /// # Errors
    /// If the client can't be created, and those of `serving`.
    pub(super) async fn exporting(
        self,
        mut config: SimConfig,
        serving: impl AsyncFnOnce(SimConfig) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let Some(endpoint) = &self.otlp_traces_endpoint else { return serving(config).await };
        let handle = tokio::runtime::Handle::current();
        let otlp = Otlp::start_as("attache-sim", endpoint, handle).context("--otlp-traces-endpoint")?;
        config.server.spans = Some(Arc::new(Sink(otlp.clone())));
        serving(config).await?;
        otlp.shutdown().await;
        Ok(())
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
