//! The prefix index upon atomics that shuttle schedules.
//!
//! A package of its own, because it builds the index's very files anew: here `atomics` is [`memory`], which lets a
//! scheduler choose who goes on before each access and, where it is asked to, gives readers values as old as the orders
//! of the accesses allow. [`story`] says what a writer does and what was true at each of its steps; [`explore`] plays
//! that beside look-ups.

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
