//! The state that all streams share: the picker, and the executors of the work that it returns.

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
    /// Makes the decisions.
    pub picker: Picker,
    /// Metrics of the process.
    pub metrics: Arc<Metrics>,
    /// The decision log.
    pub decisions: Arc<Decisions>,
    /// Creates the spans of requests; does nothing without a collector.
    pub tracing: Tracing,
    /// Memory of request bodies that are still being uploaded.
    pub uploads: Arc<Uploads>,
    /// Runs computations of prompts outside of the serving threads.
    pub warmer: Warmer,
    /// Calls prefill workers.
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
