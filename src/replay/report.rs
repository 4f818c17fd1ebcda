//! What runs showed: figures, comparisons, and the forms in which they are read.
//!
//! | module | owns |
//! |---|---|
//! | [`compare`] | one policy against another, with intervals |
//! | [`json`] | all figures under stable names; every other form is made from them |
//! | [`metric`] | the figures that can be asked for by name |
//! | [`assertion`] | `--assert` |
//! | [`objective`] | whether a pool's objective was met |
//! | [`table`] | the terminal |
//! | [`markdown`] | a file beside the code |
//! | [`html`] | one page that needs nothing else |
//! | [`plots`], [`chart`], [`svg`], [`png`] | pictures: drawn once, written twice |
//! | [`number`] | how figures are written |
//!
//! Called by `cli::replay`. Pure: gives text and bytes, and writes no file.

pub mod assertion;
pub mod chart;
pub mod compare;
pub mod html;
pub mod json;
pub mod markdown;
pub mod metric;
pub mod number;
pub mod objective;
pub mod plots;
pub mod png;
pub mod svg;
pub mod table;

#[cfg(test)]
mod tests;

use crate::tally::Tally;
use std::collections::BTreeMap;
use std::time::Duration;

/// One workload, played once with one policy.
#[derive(Clone, Debug)]
pub struct Run {
    /// The policy.
    pub policy: String,
    /// The workload.
    pub workload: String,
    /// What else was set, by name: the number of endpoints, the speed of the trace. Runs that agree in this and in the workload are one
    /// cell, and are compared.
    pub cell: BTreeMap<String, String>,
    /// What became of the requests.
    pub tally: Tally,
    /// The hash of all decisions, in their order.
    pub decisions: u64,
    /// The servers, by their positions in the fleet; those of a real gateway in the order in which they were first heard of.
    pub servers: Vec<ServerFacts>,
    /// Why requests were refused or lost, and how many, where that was told.
    pub failures: BTreeMap<String, u64>,
    /// Virtual time that passed.
    pub simulated: Duration,
    /// Real time that passed.
    pub took: Duration,
}

/// What is known of a server beside what became of its requests.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerFacts {
    /// As the reader knows it.
    pub name: String,
    /// GPU seconds that computing one prompt token takes there: the price of a token that was not cached; 0 when it is not known.
    pub gpu_seconds_per_token: f64,
}

/// Runs, and how they came about.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// All runs, of all cells.
    pub runs: Vec<Run>,
    /// The position among the runs of one whose policy is the one that others are compared with, in every cell.
    pub baseline: usize,
    /// The command line that makes this report again.
    pub command: String,
    /// The seed that all chance came from.
    pub seed: u64,
    /// The text of the config; empty when none was given.
    pub config: String,
}
