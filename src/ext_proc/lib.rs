//! The request path: from Envoy's messages to the picker and back.
//!
//! [`service`] receives messages. [`driver`] owns what a request waits for. [`exchange`] is the state machine of one
//! request, without I/O. It calls the [`picker`](attache_picker) for the decision. [`reply`] builds the replies that
//! Envoy's body mode needs.
//!
//! **Owns** the gRPC listener ([`server`]), streams and their states, the state that all streams share ([`processor`]),
//! and the work that the picker returns: tokenizing ([`warmer`]), calls to prefill workers ([`prefiller`]), calls to
//! Redis (`redis_quotas`), and the timer of a queue ([`queue_timer`]).
//! **Called by** `app`, which composes the [`Processor`] and starts the listener, and by the filter inside Envoy
//! (`envoy_module`), which drives exchanges without gRPC.
//! **Must not** decide where a request goes, hold a lock across an await, or serialize a body that did not change.
//!
//! Read first: `service.rs`, `driver.rs`, `exchange.rs`, `processor.rs`.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

pub mod driver;
pub mod exchange;
pub mod metadata;
pub mod mode;
mod opening;
pub mod prefiller;
pub mod processor;
pub mod queue_timer;
#[cfg(feature = "full")]
pub mod redis_quotas;
pub mod reply;
pub mod server;
pub mod service;
pub mod uploads;
pub mod warmer;
pub mod wire;

pub use exchange::{Event, Exchange};
pub use processor::Processor;
