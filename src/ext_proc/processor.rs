//! What all streams share: the picker, and what does the work that it returns.

use super::prefiller::Prefiller;
use super::uploads::Uploads;
use super::warmer::Warmer;
use attache_picker::Picker;
use attache_telemetry::Telemetry;
use attache_telemetry::decisions::Decisions;
use attache_telemetry::metrics::Metrics;
use attache_telemetry::trace::Tracing;
use std::sync::Arc;

/// The external processor.
#[derive(Debug)]
pub struct Processor {
    /// Decides.
    pub picker: Picker,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// The last decisions.
    pub decisions: Arc<Decisions>,
    /// Traces, when they are on.
    pub tracing: Tracing,
    /// The part of the memory for request bodies that waits for more bytes.
    pub uploads: Arc<Uploads>,
    /// Where long reading is done.
    pub warmer: Warmer,
    /// Asks prefill servers.
    pub prefiller: Prefiller,
}

impl Processor {
    /// A processor around `picker`, whose observer is `telemetry`.
    #[must_use]
    pub fn new(picker: Picker, telemetry: &Telemetry, tracing: Tracing) -> Self {
        let Telemetry { metrics, decisions } = telemetry.clone();
        Self {
            warmer: Warmer::new(picker.buffered.clone(), metrics.clone()),
            uploads: Arc::default(),
            prefiller: Prefiller::default(),
            picker,
            metrics,
            decisions,
            tracing,
        }
    }
}
