//! Traces over OTLP in a build without the feature `full`: no exporter can be started.

use crate::trace::Tracing;
use attache_types::clock::Clock;
use std::sync::Arc;
use tokio::runtime::Handle;

/// No exporter can be started.
#[derive(Debug, thiserror::Error)]
#[error("this build has no OTLP exporter (feature `full`)")]
pub struct OtlpError;

/// Counters that can't exist.
#[derive(Debug)]
pub enum OtlpStats {}

impl OtlpStats {
    /// As in a build with traces.
    #[must_use]
    pub fn exported(&self) -> u64 {
        match *self {}
    }

    /// As in a build with traces.
    #[must_use]
    pub fn failed(&self) -> u64 {
        match *self {}
    }

    /// As in a build with traces.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        match *self {}
    }
}

/// An exporter that can't exist.
#[derive(Clone, Debug)]
pub enum Otlp {}

impl Otlp {
    /// Starts nothing.
    ///
    /// # Errors
    /// Always.
    pub fn start(_: &str, _: Handle) -> Result<Self, OtlpError> {
        Err(OtlpError)
    }

    /// As in a build with traces.
    #[must_use]
    pub fn tracing(&self, _: f64, _: Clock) -> Tracing {
        match *self {}
    }

    /// As in a build with traces.
    #[must_use]
    pub fn stats(&self) -> &Arc<OtlpStats> {
        match *self {}
    }

    /// As in a build with traces.
    #[expect(clippy::unused_async, reason = "its twin with traces waits")]
    pub async fn shutdown(&self) {
        match *self {}
    }
}
