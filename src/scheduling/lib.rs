//! Deciding where a request goes.
//!
//! [`Scheduler::decide`] narrows the pool to the endpoints that may serve the request and lets one [`Strategy`] order them.
//! Strategies, filters, scorers, pickers and profile handlers are one file each and one line in the [`registry`].
//!
//! **Owns** the plugin traits ([`plugin`]), the [`router`], the [`scheduler`], what a decision books ([`booking`]), and splitting
//! over prefill and decode ([`split`]).
//! **Called by** `ext_proc` and `replay` for each request, by `flow` for predictions, and by `config`, which builds a scheduler
//! for each pool.
//! **Must not** do I/O, or ask for the time or for random numbers: both are arguments.
//!
//! Read first: `scheduler.rs`, `plugin.rs`, `scorer/queue.rs` (a whole plugin).

pub mod booking;
pub mod candidates;
pub mod choice;
pub mod decision;
pub mod digest;
pub mod division;
pub mod facts;
pub mod filter;
pub mod least_request;
pub mod losses;
pub mod messages;
pub mod objective;
pub mod picker;
pub mod plugin;
pub mod policy;
pub mod prefilling;
pub mod profile;
pub mod registry;
pub mod ring;
pub mod router;
pub mod scheduler;
pub mod scorer;
pub mod selector;
pub mod split;
pub mod strategy;
pub mod weighted;
pub mod window;

pub use attache_types::params;
pub use booking::{Booking, Dispatch, Order};
pub use candidates::Candidate;
pub use choice::{Choice, Choices, Chosen};
pub use decision::{Decision, Ranking, Signal};
pub use objective::Objective;
pub use plugin::{PickContext, Reads, RequestFacts, Strategy};
pub use policy::{ModelPolicies, ModelPolicy};
pub use router::{Pool, Router};
pub use scheduler::Scheduler;
pub use split::{Decider, Split, SplitPolicy};

#[cfg(test)]
mod tests;
