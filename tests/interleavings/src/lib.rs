//! The prefix index upon atomics that shuttle schedules.
//!
//! A package of its own, because it builds the index's very files anew: here `prefix::atomics` is [`memory`], which lets a scheduler
//! choose who goes on before each access and, where it is asked to, gives readers values as old as the orders of the accesses allow.
//! [`story`] says what a writer does and what was true at each of its steps; [`explore`] plays that beside look-ups.

#[path = "../../../src/clock.rs"]
pub mod clock;
pub mod explore;
pub mod memory;
#[allow(dead_code, reason = "the property tests ask it for more")]
#[path = "../../../src/prefix/index/tests/model.rs"]
mod model;
mod pauses;
pub mod story;

/// The parts of the project's module of that name that the index needs.
#[path = "."]
pub mod prefix {
    #[path = "../../../src/prefix/index/mod.rs"]
    pub mod index;
    #[path = "../../../src/prefix/key.rs"]
    pub mod key;

    pub(crate) use crate::memory as atomics;
}
