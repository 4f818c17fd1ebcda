//! The request path: from Envoy's messages to a destination and back.
//!
//! [`service`] receives messages and owns the deadline. [`exchange`] is the state machine of one request, without I/O.
//! [`decide`] is the decision in the middle of it. [`response`] watches the response, and [`reply`] writes everything in the body
//! mode that Envoy speaks.
//!
//! **Owns** streams and their states, the [`picker`] that all streams share, calls of prefill servers ([`prefiller`]), and what
//! tenants hold ([`quotas`]).
//! **Called by** the gRPC listener and by `app`, which composes the [`Picker`].
//! **Must not** hold a lock across an await, serialize a body that did not change, or name a strategy.
//!
//! Read first: `exchange.rs`, `decide.rs`, `response.rs`.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

pub mod active;
pub mod affinity;
pub mod body;
mod ceiling;
pub mod conversation;
pub mod deadline;
pub mod decide;
pub mod exchange;
pub mod explain;
pub mod head;
pub mod hints;
pub mod lookup;
pub mod metadata;
pub mod mode;
pub mod picker;
pub mod prefiller;
pub mod prefix;
mod preset;
mod priority;
pub mod queues;
pub mod quotas;
mod reading;
mod recording;
pub mod reply;
pub mod response;
pub mod service;
pub mod split;
pub mod tenant;
pub mod uploads;
pub mod warmer;
pub mod wire;

pub use active::{ActiveConfig, PoolRuntime};
pub use exchange::{Event, Exchange};
pub use picker::Picker;
