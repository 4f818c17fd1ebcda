//! The picker: one decision and one request in flight, without I/O.
//!
//! **Owns** the events by which requests are counted ([`event`]), and the log line of an explained decision ([`explained`]).
//! **Called by** `ext_proc` for each request; `telemetry` implements the observers.
//! **Must not** do I/O, name a runtime, Envoy's messages or a metric.
//!
//! Read first: `event.rs`.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

pub mod event;
pub mod explained;
pub mod settings;
