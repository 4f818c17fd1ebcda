//! Telemetry of the process: logs, metrics, traces, recent decisions.
//!
//! **Owns** the metrics of requests and of the process ([`metrics`]), bounded label values ([`by_name`], [`names`]),
//! log output ([`logs`]), OpenTelemetry spans ([`trace`]) and the ring of recent decisions ([`decisions`]). The metrics
//! of endpoints and feeds are in `admin`, so that the request path needs none of the feeds.
//! **Called by** `picker` through its observers for each request ([`Telemetry`]), by `ext_proc`, by `admin` and by
//! `app`, which registers the collectors.
//! **Must not** change a decision, block a request, or create a series for each name that a client invents.
//!
//! Read first: `metrics.rs`, `decisions.rs`, `trace.rs`.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

pub mod by_name;
pub mod counts;
pub mod decisions;
mod explanations;
pub mod latency;
pub mod listeners;
pub mod logs;
pub mod metrics;
pub mod names;
mod observer;
pub mod operating_system;
#[cfg_attr(not(feature = "full"), path = "otlp/absent.rs")]
pub mod otlp;
pub mod pressure;
pub mod process;
pub mod queues;
pub mod redis;
pub mod rejections;
pub mod reloads;
pub mod sync;
pub mod trace;

pub use observer::Telemetry;
