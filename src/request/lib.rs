//! Settings of the request path, and the events that it reports.
//!
//! The picker makes decisions by the settings and reports the events. This crate is apart from the picker so that a
//! change of the picker compiles neither the configuration nor the metrics again.
//!
//! **Owns** the settings of requests and of their labels ([`settings`]), the events and observers by which requests are
//! counted ([`event`]), and the identity of a request's agent ([`agent`]).
//! **Called by** `config`, which makes the settings, by `picker` and `ext_proc`, and by `telemetry`, which implements
//! the observers.
//! **Must not** decide or count anything.
//!
//! Read first: `event.rs`, `settings.rs`.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

pub mod agent;
pub mod event;
pub mod settings;
