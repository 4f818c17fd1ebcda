//! What each policy buys: workloads played to simulated servers in virtual time, with the picker that production runs in between.
//!
//! # What is here
//!
//! | module | owns | pure |
//! |---|---|---|
//! | [`workload`] | what a workload is: requests, and what follows from their answers | yes |
//! | [`served`] | what became of one request | yes |
//!
//! Called by `cli::replay` and by tests; imports the pure core and `sim`.

pub mod served;
pub mod workload;
