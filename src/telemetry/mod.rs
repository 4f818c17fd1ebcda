//! What the process says about itself: logs, metrics, traces, recent decisions.

pub mod decisions;
pub mod explained;
pub mod logs;
pub mod metrics;
#[cfg(feature = "otlp")]
pub mod otlp;
pub mod pools;
pub mod process;
pub mod queues;
pub mod trace;
