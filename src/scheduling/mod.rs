//! Deciding where a request goes.
//!
//! [`Scheduler::decide`] narrows the pool to the endpoints that may serve the request and lets one [`Strategy`] put them in order.
//! Strategies are one file each and one line in the [`registry`]. Pure: `now` and the random numbers are arguments.
//!
//! May import: `ids`, `clock`, `rng`, `error`, `spelling`, `pool`, `prefix`, `protocol`, `config::units`.

pub mod booking;
pub mod candidates;
pub mod choice;
pub mod decision;
pub mod digest;
pub mod facts;
pub mod filter;
pub mod losses;
pub mod messages;
pub mod objective;
pub mod params;
pub mod picker;
pub mod plugin;
pub mod policy;
pub mod profile;
pub mod registry;
pub mod ring;
pub mod router;
pub mod scheduler;
pub mod scorer;
pub mod selector;
pub mod split;
pub mod strategy;
pub mod window;

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
