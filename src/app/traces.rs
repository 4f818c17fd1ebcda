//! The export of traces, if a collector is configured.

use attache_config::settings::TelemetrySettings;
#[cfg(feature = "otlp")]
use attache_telemetry::otlp::Otlp;
use attache_telemetry::trace::Tracing;
use attache_types::clock::Clock;
#[cfg(feature = "otlp")]
use opentelemetry::trace::TracerProvider;

/// The trace pipeline, if a collector is configured.
pub(super) struct Traces {
    #[cfg(feature = "otlp")]
    pub(super) otlp: Option<Otlp>,
}

#[cfg(feature = "otlp")]
impl Traces {
    pub(super) fn start(settings: &TelemetrySettings) -> anyhow::Result<Self> {
        let start = |endpoint: &String| Otlp::start(endpoint, settings.trace_ratio, tokio::runtime::Handle::current());
        Ok(Self { otlp: settings.otlp_endpoint.as_ref().map(start).transpose()? })
    }

    pub(super) fn tracing(&self, clock: Clock) -> Tracing {
        self.otlp.as_ref().map_or_else(Tracing::default, |o| Tracing::new(o.provider().tracer("attache"), clock))
    }

    pub(super) async fn shutdown(&self) {
        if let Some(otlp) = &self.otlp {
            otlp.shutdown().await;
        }
    }
}

#[cfg(not(feature = "otlp"))]
impl Traces {
    pub(super) fn start(settings: &TelemetrySettings) -> anyhow::Result<Self> {
        anyhow::ensure!(settings.otlp_endpoint.is_none(), "this build has no OTLP exporter (feature `otlp`)");
        Ok(Self {})
    }

    pub(super) fn tracing(&self, _: Clock) -> Tracing {
        Tracing::default()
    }

    pub(super) async fn shutdown(&self) {}
}
