//! Traces over OTLP (HTTP, protobuf). A slow or unreachable collector does not delay requests.
//!
//! Spans go into a bounded queue; when it is full they are dropped and counted. The SDK's batch processor runs
//! in its own thread without a tokio reactor, so `Exporter` passes each batch to the runtime and waits for it.
//! Used by `telemetry::trace` and `app`.

use crate::trace::Tracing;
use attache_types::clock::Clock;
use opentelemetry::trace::TracerProvider;
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::{Protocol, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracerProvider, Span, SpanData, SpanExporter, SpanProcessor,
};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::runtime::Handle;

/// Most finished spans that wait for the next batch, about 8 MB; further ones are dropped. A request has about eight.
pub const MAX_QUEUED_SPANS: u64 = 8_192;
/// Most spans in one request to the collector.
const BATCH_SPANS: usize = 512;
/// Time between two batches, full or not.
const BATCH_DELAY: Duration = Duration::from_secs(1);
/// A batch that takes the collector longer counts as failed.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the shutdown of the process waits for the last batch.
pub const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// Counters of exported and dropped spans.
#[derive(Debug, Default)]
pub struct OtlpStats {
    queued: AtomicU64,
    exported: AtomicU64,
    failed: AtomicU64,
    dropped: AtomicU64,
    failing: AtomicBool,
}

impl OtlpStats {
    /// Number of spans that the collector accepted.
    #[must_use]
    pub fn exported(&self) -> u64 {
        self.exported.load(Relaxed)
    }

    /// Number of spans in batches that the collector did not accept.
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.failed.load(Relaxed)
    }

    /// Number of spans dropped because the queue was full.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Relaxed)
    }
}

/// Why traces can't be exported.
#[derive(Debug, thiserror::Error)]
pub enum OtlpError {
    /// The HTTP client could not be created.
    #[error("can't make the client for the trace collector: {0}")]
    Client(#[from] reqwest::Error),
    /// The exporter could not be created.
    #[error("can't make the trace exporter: {0}")]
    Exporter(#[from] opentelemetry_otlp::ExporterBuildError),
}

/// The running trace pipeline.
#[derive(Clone, Debug)]
pub struct Otlp {
    provider: SdkTracerProvider,
    stats: Arc<OtlpStats>,
}

impl Otlp {
    /// Starts to export to `endpoint` (`http://collector:4318`; a path other than `/` is used as it is,
    /// else `/v1/traces`). `runtime` sends the batches.
    ///
    /// # Errors
    /// If the client can't be created. An unreachable collector is not an error.
    pub fn start(endpoint: &str, runtime: Handle) -> Result<Self, OtlpError> {
        Self::start_as("attache", endpoint, runtime)
    }

    /// As [`Otlp::start`], under another service name. `OTEL_SERVICE_NAME` outranks it.
    ///
    /// # Errors
    /// As [`Otlp::start`].
    pub fn start_as(service: &'static str, endpoint: &str, runtime: Handle) -> Result<Self, OtlpError> {
        let client = client(endpoint)?;
        let inner = opentelemetry_otlp::SpanExporter::builder()
            .with_http()
            .with_http_client(client)
            .with_protocol(Protocol::HttpBinary)
            .with_timeout(EXPORT_TIMEOUT)
            .with_endpoint(traces_url(endpoint))
            .build()?;
        let stats = Arc::new(OtlpStats::default());
        let exporter = Exporter { inner: Arc::new(inner), runtime, stats: stats.clone() };
        // The limit is enforced here, so that drops are counted; the SDK's own is larger and never reached.
        let batch = BatchConfigBuilder::default()
            .with_max_queue_size(MAX_QUEUED_SPANS as usize + 2 * BATCH_SPANS)
            .with_max_export_batch_size(BATCH_SPANS)
            .with_scheduled_delay(BATCH_DELAY)
            .build();
        let processor = BatchSpanProcessor::builder(exporter).with_batch_config(batch).build();
        let resource = Resource::builder()
            .with_service_name(std::env::var("OTEL_SERVICE_NAME").unwrap_or_else(|_| service.into()))
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
            .build();
        let provider = SdkTracerProvider::builder()
            // Without it, the SDK reads a sampler from the environment.
            .with_sampler(Sampler::ParentBased(Box::new(Sampler::AlwaysOn)))
            .with_resource(resource)
            .with_span_processor(Bounded { inner: processor, stats: stats.clone() })
            .build();
        Ok(Self { provider, stats })
    }

    /// Creates the spans of requests, as [`Tracing::new`].
    #[must_use]
    pub fn tracing(&self, ratio: f64, clock: Clock) -> Tracing {
        Tracing::new(self.provider.tracer("attache"), ratio, clock)
    }

    /// The source of tracers.
    #[must_use]
    pub fn provider(&self) -> &SdkTracerProvider {
        &self.provider
    }

    /// Counters of exported and dropped spans.
    #[must_use]
    pub fn stats(&self) -> &Arc<OtlpStats> {
        &self.stats
    }

    /// Sends the queued spans and ends, within [`FLUSH_TIMEOUT`] whatever the collector does. Spans
    /// that end later are dropped.
    pub async fn shutdown(&self) {
        let provider = self.provider.clone();
        let flush = tokio::task::spawn_blocking(move || provider.shutdown_with_timeout(FLUSH_TIMEOUT));
        let flushed = tokio::time::timeout(FLUSH_TIMEOUT, flush).await;
        if !matches!(flushed, Ok(Ok(Ok(())))) {
            tracing::warn!("last spans not sent before shutdown");
        }
    }
}

/// The client uses no proxy and follows no redirects: only the operator decides where traces go.
fn client(endpoint: &str) -> Result<reqwest::Client, reqwest::Error> {
    // reqwest uses the process-wide provider. The first caller installs it, and all choose ring.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let builder = reqwest::Client::builder()
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(EXPORT_TIMEOUT)
        .timeout(EXPORT_TIMEOUT);
    // A collector without TLS must not depend on root certificates, which small images lack.
    if endpoint.starts_with("https") { builder.build() } else { builder.tls_certs_only([]).build() }
}

fn traces_url(endpoint: &str) -> String {
    let trimmed = endpoint.trim_end_matches('/');
    let has_path = trimmed.split_once("://").is_some_and(|(_, rest)| rest.contains('/'));
    if has_path { trimmed.to_owned() } else { format!("{trimmed}/v1/traces") }
}

/// Counts and limits spans before the queue.
#[derive(Debug)]
struct Bounded {
    inner: BatchSpanProcessor,
    stats: Arc<OtlpStats>,
}

impl SpanProcessor for Bounded {
    fn on_start(&self, span: &mut Span, cx: &Context) {
        self.inner.on_start(span, cx);
    }

    fn on_end(&self, span: SpanData) {
        if !span.span_context.is_sampled() {
            return;
        }
        if self.stats.queued.fetch_add(1, Relaxed) >= MAX_QUEUED_SPANS {
            self.stats.queued.fetch_sub(1, Relaxed);
            self.stats.dropped.fetch_add(1, Relaxed);
            return;
        }
        self.inner.on_end(span);
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.inner.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.inner.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}

/// Sends batches on the runtime, and counts them.
#[derive(Debug)]
struct Exporter {
    inner: Arc<opentelemetry_otlp::SpanExporter>,
    runtime: Handle,
    stats: Arc<OtlpStats>,
}

impl SpanExporter for Exporter {
    fn export(&self, batch: Vec<SpanData>) -> impl Future<Output = OTelSdkResult> + Send {
        let spans = batch.len() as u64;
        let (inner, stats) = (self.inner.clone(), self.stats.clone());
        stats.queued.fetch_sub(spans, Relaxed);
        // Polled by the processor's thread; the work runs where the reactor is.
        let sent = self.runtime.spawn(async move {
            tokio::time::timeout(EXPORT_TIMEOUT, inner.export(batch))
                .await
                .unwrap_or(Err(OTelSdkError::Timeout(EXPORT_TIMEOUT)))
        });
        async move {
            let result = sent.await.unwrap_or_else(|e| Err(OTelSdkError::InternalFailure(e.to_string())));
            match &result {
                Ok(()) => {
                    stats.exported.fetch_add(spans, Relaxed);
                    if stats.failing.swap(false, Relaxed) {
                        tracing::info!("export of spans works again");
                    }
                }
                Err(error) => {
                    stats.failed.fetch_add(spans, Relaxed);
                    // One line when exports begin to fail, none while they keep failing.
                    if !stats.failing.swap(true, Relaxed) {
                        tracing::warn!(%error, "export of spans failed; spans are dropped until the collector \
                                                accepts them");
                    }
                }
            }
            result
        }
    }

    fn set_resource(&mut self, resource: &Resource) {
        if let Some(inner) = Arc::get_mut(&mut self.inner) {
            inner.set_resource(resource);
        }
    }
}

#[cfg(test)]
mod tests;
