//! The ext-proc road: from Envoy's messages to a destination and back.
//!
//! [`service`] pumps messages and owns the deadline; [`exchange`] is the sans-IO state machine of one request; [`decide`] is the decision
//! in the middle of it, and `reading` what it understands of the body; [`response`] watches the answer go by; [`reply`] puts everything into
//! the words of the body mode that Envoy speaks. May import L1, `telemetry`, `envoy_types`, `tonic`.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

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

pub use exchange::{Event, Exchange};
pub use picker::{Live, Picker};
