//! The export of traces, if a collector is configured.

use attache_config::settings::TelemetrySettings;
use attache_telemetry::otlp::Otlp;
use attache_telemetry::trace::Tracing;
use attache_types::clock::Clock;

/// The trace pipeline, if a collector is configured.
pub(super) struct Traces {
    pub(super) otlp: Option<Otlp>,
    ratio: f64,
}

impl Traces {
    pub(super) fn start(settings: &TelemetrySettings) -> anyhow::Result<Self> {
        let start = |endpoint: &String| Otlp::start(endpoint, tokio::runtime::Handle::current());
        Ok(Self { otlp: settings.otlp_endpoint.as_ref().map(start).transpose()?, ratio: settings.trace_ratio })
    }

    pub(super) fn tracing(&self, clock: Clock) -> Tracing {
        self.otlp.as_ref().map_or_else(Tracing::default, |otlp| otlp.tracing(self.ratio, clock))
    }

    pub(super) async fn shutdown(&self) {
        if let Some(otlp) = &self.otlp {
            otlp.shutdown().await;
        }
    }
}
