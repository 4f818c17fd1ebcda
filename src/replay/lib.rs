//! Replay: workloads against simulated servers in virtual time with the production scheduler, and recordings decided
//! again.
//!
//! # What is here
//!
//! | module | owns | pure |
//! |---|---|---|
//! | [`world`] | virtual time: servers, the picker, delays of its signals | yes |
//! | `front` | the picker without Envoy | yes |
//! | [`legs`] | prefill legs, as the picker sees them | yes |
//! | `queue` | future events, in order of time | yes |
//! | `page` | metrics that a simulated server exports | yes |
//! | [`record`] | recorded decisions, made again | no |
//! | [`fit`] | engine constants, estimated from a recording | no |
//!
//! **Called by** `cli::replay` and by tests.
//! **Must not** decide by rules of its own: scheduler, strategies, caches, queues and quotas are those of production.
//!
//! Read first: `world.rs`, `front.rs`, `record.rs`.

pub mod fit;
pub mod front;
pub mod legs;
mod page;
mod queue;
pub mod record;
pub mod world;

/// All plugins, for the tests of this crate.
#[cfg(test)]
fn registry() -> attache_scheduling::Registry {
    attache_scheduling::Registry::new(&[attache_pipeline::PLUGINS, attache_strategies::PLUGINS])
}
