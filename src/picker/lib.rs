//! The picker: one decision and one request in flight, without I/O.
//!
//! ```text
//! RequestView ─▶ decide ─▶ Step: Allow, Warm, Queue ─▶ the caller runs the work, and decides again
//!                    └▶ Plan ─▶ InFlight: headers, chunks, end of the response
//! ```
//!
//! [`decide`] makes the decision, [`InFlight`] observes the response, and [`split`] runs the prefill on another worker.
//! Work that takes time is returned to the caller: background work on the prompt ([`warming`]), a queued request
//! ([`queues`]), calls to prefill workers ([`split::LegCall`]).
//!
//! **Owns** the active configuration ([`active`]), the queues of pools, the quotas of tenants and models ([`quotas`]),
//! and the lookup of prompts ([`prefix`]). It reports events ([`event`]) and counts nothing.
//! **Called by** `ext_proc` for each live request, by `replay` for each simulated and recorded one ([`known`]), by
//! `app`, which composes the [`Picker`] and makes reservations ([`reserving`]), and by `app` and `cli` for explanations
//! ([`explain`]). `ext_proc` does the work that takes time.
//! **Must not** do I/O, wait, read a clock, name a runtime, Envoy's messages or a metric, or serialize a body that did
//! not change.
//!
//! Read first: `decide.rs`, `active.rs`, `in_flight.rs`.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

pub mod active;
pub mod affinity;
pub mod body;
mod ceiling;
pub mod conversation;
pub mod deadline;
pub mod decide;
mod ending;
pub mod explain;
pub mod explained;
pub mod head;
mod health;
pub mod hints;
pub mod identity;
pub mod in_flight;
pub mod known;
mod lookup;
pub mod picker;
mod placement;
pub mod prefilling;
pub mod prefix;
mod preset;
mod priority;
pub mod queues;
pub mod quotas;
mod reading;
mod recording;
pub mod reservations;
pub mod reserving;
mod sharing;
pub mod split;
pub mod tenant;
pub mod warming;

pub use active::{ActiveConfig, PoolRuntime};
pub use attache_request::{event, settings};
pub use ending::EndedSession;
pub use in_flight::InFlight;
pub use picker::Picker;
pub use reading::UNREAD_PROMPT_TOKENS;
pub use recording::RequestReads;
