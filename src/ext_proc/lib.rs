//! The request path: from Envoy's messages to the picker and back.
//!
//! [`service`] receives messages and owns the deadline. [`exchange`] is the state machine of one request, without I/O:
//! it asks the [`picker`](attache_picker) for the decision, and [`reply`] writes everything in the body mode that Envoy
//! speaks.
//!
//! **Owns** streams and their states, what all streams share ([`processor`]), and the work that the picker returns:
//! tokens ([`warmer`]), requests to prefill servers ([`prefiller`]), questions to Redis (`redis_quotas`), the timer of a
//! queue ([`queue_timer`]).
//! **Called by** the gRPC listener and by `app`, which composes the [`Processor`].
//! **Must not** decide where a request goes, hold a lock across an await, or serialize a body that did not change.
//!
//! Read first: `service.rs`, `exchange.rs`, `processor.rs`.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

pub mod exchange;
pub mod metadata;
pub mod mode;
pub mod prefiller;
pub mod processor;
pub mod queue_timer;
#[cfg(feature = "redis")]
pub mod redis_quotas;
pub mod reply;
pub mod service;
pub mod uploads;
pub mod warmer;
pub mod wire;

pub use exchange::{Event, Exchange};
pub use processor::Processor;
