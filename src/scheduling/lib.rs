//! Decides which endpoint serves a request.
//!
//! [`Scheduler::decide`] narrows the pool to the endpoints that may serve the request and lets one [`Strategy`] rank
//! them. The strategies and the parts of a pipeline are plugins in other crates; a [`Registry`] finds them by name.
//!
//! **Owns** the plugin traits ([`plugin`]), the [`registry`], the [`router`], the [`scheduler`], the [`booking`] of a
//! decision, splitting over prefill and decode ([`split`]), and the predictions that plugins share ([`facts`]).
//! **Called by** `picker` and `replay` for each request, by `flow` for predictions, by `config`, which builds a
//! scheduler for each pool, and by `pipeline` and `strategies`, which implement its traits.
//! **Must not** do I/O, name a plugin crate, or read the clock or draw random numbers on its own: both are arguments.
//!
//! Read first: `scheduler.rs`, `plugin.rs`, `registry.rs`.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

pub mod booking;
pub mod candidates;
pub mod choice;
pub mod decision;
pub mod digest;
pub mod division;
pub mod facts;
pub mod floors;
mod headers;
pub mod least_request;
pub mod losses;
pub mod objective;
pub mod plugin;
pub mod policy;
pub mod registry;
pub mod router;
pub mod scheduler;
pub mod selector;
pub mod split;
pub mod subset;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod weighted;
pub mod window;

pub use attache_types::params;
pub use booking::{AssumedBooking, Booking, Dispatch, Order};
pub use candidates::Candidate;
pub use choice::{Choice, Choices, Chosen};
pub use decision::{Decision, Ranking, SecondBest, Signal};
pub use objective::Objective;
pub use plugin::{PickContext, Reads, RequestFacts, Strategy};
pub use policy::{ModelPolicies, ModelPolicy};
pub use registry::Registry;
pub use router::{Pool, Router};
pub use scheduler::Scheduler;
pub use split::{Decider, Split, SplitPolicy};
pub use subset::Subset;

#[cfg(test)]
mod tests;
