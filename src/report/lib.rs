//! Reports of runs: figures, comparisons of policies, and the formats in which they are written.
//!
//! # What is here
//!
//! | module | owns |
//! |---|---|
//! | [`served`] | the outcome of one request |
//! | `observer` | the trait that players of workloads report to |
//! | [`tally`] | counts and distributions of one run, in constant memory |
//! | [`compare`] | one policy against another, with confidence intervals |
//! | [`json`] | all figures under stable names; every other format is made from them |
//! | [`metric`] | figures by name, for assertions |
//! | [`assertion`] | `--assert` |
//! | [`objective`] | whether a pool's objective was met |
//! | [`table`] | tables for the terminal |
//! | [`markdown`] | Markdown tables |
//! | [`html`] | one HTML page without other files |
//! | [`plots`], [`chart`], [`svg`] | charts: chosen, laid out, written |
//! | [`number`] | spelling of figures |
//!
//! **Called by** `replay` and `loadgen`, which feed tallies, and by `cli::replay`, which writes the formats.
//! **Must not** write files or ask for the time: it returns text.
//!
//! Read first: `tally.rs`, `json.rs`, `compare.rs`.

pub mod assertion;
pub mod chart;
pub mod compare;
pub mod html;
pub mod json;
pub mod markdown;
pub mod metric;
pub mod number;
pub mod objective;
mod observer;
pub mod plots;
pub mod served;
pub mod svg;
pub mod table;
pub mod tally;

pub use observer::Observer;

#[cfg(test)]
mod tests;

use crate::tally::Tally;
use std::collections::BTreeMap;
use std::time::Duration;

/// One workload, played once with one policy.
#[derive(Clone, Debug)]
pub struct RunResult {
    /// Name of the policy, as `--compare` names it.
    pub policy: String,
    /// Name of the workload, with its parameters.
    pub workload: String,
    /// What else was set, by name: the number of endpoints, the speed of the trace. Runs that agree in this and in the
    /// workload are one cell, and are compared.
    pub cell: BTreeMap<String, String>,
    /// What became of the requests.
    pub tally: Tally,
    /// The hash of all decisions, in their order.
    pub decisions: u64,
    /// The servers, by their positions in the fleet; those of a real gateway in the order in which
    /// they were first heard of.
    pub servers: Vec<ServerFacts>,
    /// Rejected and lost requests by reason. Empty for simulated runs, which give no reasons.
    pub failures: BTreeMap<String, u64>,
    /// Virtual time from the start to the last response.
    pub simulated: Duration,
    /// Wall-clock time of the run.
    pub took: Duration,
}

/// What is known of a server beside what became of its requests.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerFacts {
    /// As the reader knows it.
    pub name: String,
    /// GPU seconds that computing one prompt token takes there: the price of a token that was not cached; 0
    /// when it is not known.
    pub gpu_seconds_per_token: f64,
}

/// Runs, and how they came about.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// All runs, of all cells.
    pub runs: Vec<RunResult>,
    /// The position among the runs of one whose policy is the one that others are compared with, in every cell.
    pub baseline: usize,
    /// The command line that makes this report again.
    pub command: String,
    /// The seed that all chance came from.
    pub seed: u64,
    /// The text of the config; empty when none was given.
    pub config: String,
}
