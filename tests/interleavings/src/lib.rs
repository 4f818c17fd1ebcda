//! The prefix index on atomics that shuttle schedules.
//!
//! This is a separate package because it compiles the index's files again, with [`memory`] as `atomics`. A scheduler
//! chooses the next thread before each access. On request, readers get values as old as the memory orders allow.
//! [`story`] defines the writes and what is true at each step. [`explore`] runs them concurrently with look-ups.

pub mod explore;
#[path = "../../../src/prefix/index/mod.rs"]
pub mod index;
#[path = "../../../src/prefix/key.rs"]
pub mod key;
pub mod memory;
#[allow(dead_code, reason = "the property tests ask it for more")]
#[path = "../../../src/prefix/index/tests/model.rs"]
mod model;
mod pauses;
pub mod story;

pub(crate) use memory as atomics;
