//! Workloads: streams of requests, read from traces or generated from a seed, and the times at which they arrive.
//!
//! # What is here
//!
//! | module | owns | pure |
//! |---|---|---|
//! | `request` | [`Request`], the trait [`Workload`], the headers that clients send | yes |
//! | [`trace`] | recorded workloads, read from files | no |
//! | [`synthetic`] | generated workloads, by name | yes |
//! | [`pace`] | the same requests at other times: faster, resampled, closed loop | yes |
//! | [`sessions`] | sessions of agents, and their player | yes |
//! | [`draw`] | random variables | yes |
//! | [`names`] | names of texts: equal names stand for equal tokens | yes |
//!
//! **Called by** `replay`, `loadgen`, `cli::replay` and tests.
//! **Must not** know of schedulers, servers or the clock: times are offsets from the start of a workload.
//!
//! Read first: `request.rs`, `synthetic.rs`, `trace.rs`.

pub mod draw;
pub mod names;
pub mod pace;
mod request;
pub mod sessions;
pub mod synthetic;
pub mod trace;

pub use request::{Headers, PromptPart, Request, Speaker, TraceError, Workload, client_headers};
