//! What each policy buys: workloads played to simulated servers in virtual time, with the picker that production runs in between.
//!
//! # What is here
//!
//! | module | owns | pure |
//! |---|---|---|
//! | [`world`] | virtual time: servers, the picker, how late it hears of them | yes |
//! | `front` | the picker without its wire | yes |
//! | [`turns`] | the queues before the pool | yes |
//! | [`legs`] | prompts that other servers compute, at the picker | yes |
//! | [`record`] | recorded runs, decided again | no |
//! | [`fit`] | what the servers of a recorded run cost | no |
//! | `queue` | what will happen, in order | yes |
//! | `page` | what a simulated server reports | yes |
//! | [`trace`] | recorded workloads, read from files | no |
//! | [`synthetic`] | workloads that are made up, by name | yes |
//! | [`pace`] | the same requests at other times | yes |
//! | [`live`] | real time: a real gateway, and what its clients see | no |
//! | [`draw`], [`names`] | random variables, names of texts | yes |
//! | [`workload`] | what a workload is: requests, and what follows from their answers | yes |
//! | [`served`] | what became of one request | yes |
//! | [`tally`] | what became of all of them, in constant memory | yes |
//! | [`report`] | what runs showed: comparisons, tables, a page, a picture, assertions | yes |
//!
//! **Called by** `cli::replay` and by tests.
//! **Must not** decide by rules of its own: scheduler, strategies, caches and queues are those of production.
//!
//! Read first: `world.rs`, `front.rs`, `workload.rs`.

pub mod draw;
pub mod fit;
pub mod front;
pub mod legs;
pub mod live;
pub mod names;
pub mod pace;
mod page;
mod queue;
pub mod record;
pub mod report;
pub mod served;
pub mod synthetic;
pub mod tally;
pub mod trace;
pub mod turns;
pub mod workload;
pub mod world;
