//! What the process says about itself: logs, metrics, traces, recent decisions.

pub mod by_name;
pub mod deadlines;
pub mod decisions;
pub mod explained;
pub mod listeners;
pub mod logs;
pub mod metrics;
pub mod names;
#[cfg(feature = "otlp")]
pub mod otlp;
pub mod outcomes;
pub mod pools;
pub mod pressure;
pub mod process;
pub mod queues;
pub mod redis;
pub mod trace;
