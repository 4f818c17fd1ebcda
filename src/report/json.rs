//! All figures of a report under stable names. Called by `cli::replay`; [`super::table`], [`super::html`] and
//! [`super::assertion`] are made from it, so that no form shows what another lacks. Pure.
//!
//! The names of fields are a promise: within one [`Document::schema`] fields are added, but none is renamed or removed.
//! Times are seconds, parts are 0..=1, and a figure that does not exist is `null`.

mod figures;
mod programs;

use super::compare::{MeanChange, is_more};
use super::number::{percent, whole};
use super::objective::ObjectiveFigures;
pub use programs::{LengthFigures, ProgramFigures, Summary};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// The number that is raised when a field is renamed or removed.
pub const SCHEMA: u32 = 1;
/// Reasons of rejected and lost requests that a line of text has; [`RunFigures::failures`] has all.
const SHOWN_REASONS: usize = 5;

/// A report as figures, in the structure of the JSON file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Document {
    /// [`SCHEMA`] when it was written.
    pub schema: u32,
    /// The version of the program that wrote it.
    pub version: String,
    /// The command line that makes it again.
    pub command: String,
    /// The seed that all chance came from.
    pub seed: u64,
    /// The text of the config; empty when none was given.
    pub config: String,
    /// The policy that others are compared with.
    pub baseline: String,
    /// All runs, cell by cell.
    pub runs: Vec<RunFigures>,
}

/// Figures of one run: one policy on one workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunFigures {
    /// Name of the policy, as `--compare` names it.
    pub policy: String,
    /// Name of the workload, with its parameters.
    pub workload: String,
    /// What else was set, by name.
    pub cell: BTreeMap<String, String>,
    /// The hash of all decisions: 16 hexadecimal digits, as JSON's numbers lose the low bits of 64.
    pub decisions: String,
    /// Requests by how they ended.
    pub requests: RequestFigures,
    /// Time to the first token.
    #[serde(rename = "ttft_seconds")]
    pub ttft: Distribution,
    /// Time per output token, of each answer of at least 8 tokens.
    #[serde(rename = "tpot_seconds")]
    pub tpot: Distribution,
    /// Time between tokens, each gap counted as the mean of its answer.
    #[serde(rename = "itl_seconds")]
    pub itl: Distribution,
    /// End-to-end latency of whole requests, seconds.
    #[serde(rename = "latency_seconds")]
    pub latency: Distribution,
    /// Tokens of the requests that a server took.
    pub tokens: TokenFigures,
    /// Part of the prompt tokens that servers held.
    pub hit_rate: Option<f64>,
    /// Part of the requests that were refused or lost.
    pub error_rate: Option<f64>,
    /// Part of the requests that kept the targets; `null` without targets.
    pub goodput: Option<f64>,
    /// Times that servers started requests over.
    pub preemptions: u64,
    /// How evenly the computed prompt tokens lay on the endpoints.
    pub imbalance: Option<Imbalance>,
    /// Answers per second of `duration_seconds`.
    pub requests_per_second: Option<f64>,
    /// Tokens of answers per second of `duration_seconds`.
    pub output_tokens_per_second: Option<f64>,
    /// GPU seconds that the cached prompt tokens did not take.
    pub gpu_seconds_saved: f64,
    /// From the first request's coming to the last one's end, virtual time.
    pub duration_seconds: f64,
    /// Virtual time from the start to the last response, seconds.
    pub simulated_seconds: f64,
    /// Wall-clock time of the run, seconds.
    pub took_seconds: f64,
    /// Whether the pool's objective was met; absent where it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub objective: Option<ObjectiveFigures>,
    /// How requests were split between prefill and decode servers; absent where there are no prefill servers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split: Option<SplitFigures>,
    /// How requests waited for their turn; absent where there are no queues.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<QueueFigures>,
    /// Programs of agents; absent when the workload has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub programs: Option<ProgramFigures>,
    /// Rejected and lost requests by reason. Absent for runs without reasons.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub failures: BTreeMap<String, u64>,
    /// By the endpoint's position in the fleet.
    pub endpoints: Vec<EndpointFigures>,
    /// Load and hit rate over virtual time.
    pub timeline: Vec<PointFigures>,
    /// Against the baseline in the same cell; `null` for the baseline itself and where it did not run.
    pub versus_baseline: Option<Versus>,
}

/// Requests by how they ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestFigures {
    /// All requests that have ended.
    pub total: u64,
    /// Requests with a whole response.
    pub answered: u64,
    /// Requests that the picker or a server rejected.
    pub refused: u64,
    /// Their servers or connections died.
    pub lost: u64,
}

impl RequestFigures {
    /// Those without a whole answer.
    #[must_use]
    pub fn unanswered(&self) -> u64 {
        self.refused + self.lost
    }
}

/// How requests waited for their turn before the pool.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct QueueFigures {
    /// How long those waited that were let through.
    pub waited_seconds: Distribution,
    /// Counts of all flows together.
    pub turns: TurnFigures,
    /// By priority and tenant, the highest priority first.
    pub flows: Vec<FlowFigures>,
}

/// What came of the turns of some requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TurnFigures {
    /// Requests that were let through.
    pub passed: u64,
    /// Requests that an admitter turned away.
    pub shed: u64,
    /// Requests that found no place to wait.
    pub full: u64,
    /// Requests that waited for as long as they may.
    pub expired: u64,
    /// Requests that gave way to others.
    pub evicted: u64,
    /// How long those that were let through waited, in the mean.
    pub mean_seconds: Option<f64>,
    /// Longest time in the queue, seconds.
    pub longest_seconds: f64,
}

impl TurnFigures {
    /// Requests that were turned away, for whatever reason.
    #[must_use]
    pub fn turned_away(&self) -> u64 {
        self.shed + self.full + self.expired + self.evicted
    }
}

/// The turns of one flow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FlowFigures {
    /// Priority band, as the workload sets it.
    pub priority: i32,
    /// Tenant of the flow; empty when the workload has no tenants.
    pub tenant: String,
    /// Queueing counts of this flow alone.
    #[serde(flatten)]
    pub turns: TurnFigures,
}

/// How one duration was distributed, seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Distribution {
    /// Number of values in the distribution.
    pub count: u64,
    /// Arithmetic mean, in the unit of the field; `None` without values.
    pub mean: Option<f64>,
    /// Median, in the unit of the field.
    pub p50: Option<f64>,
    /// 90th percentile, in the unit of the field.
    pub p90: Option<f64>,
    /// 95th percentile, in the unit of the field.
    pub p95: Option<f64>,
    /// 99th percentile, in the unit of the field.
    pub p99: Option<f64>,
    /// Largest value, in the unit of the field.
    pub max: Option<f64>,
    /// `[part, seconds]`: what the part of all (0..=1, ascending) does not exceed.
    pub quantiles: Vec<(f64, f64)>,
}

/// Tokens of the requests that a server took.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenFigures {
    /// Prompt tokens of all requests.
    pub prompt: u64,
    /// Of those, what the picker thought the server holds.
    pub foretold: u64,
    /// Of those, what the server held.
    pub cached: u64,
    /// Generated tokens of all responses.
    pub generated: u64,
}

/// How evenly the computed prompt tokens lay on the endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Imbalance {
    /// The largest share by the mean one: 1 is even.
    pub max_over_mean: f64,
    /// The coefficient of variation: 0 is even.
    pub cv: f64,
    /// Jain's index: 1 is even.
    pub jain: f64,
}

/// How requests were split between prefill and decode servers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SplitFigures {
    /// Part of the requests that two servers shared.
    pub share: Option<f64>,
    /// Requests whose prompt no prefill server computed, though one was asked.
    pub fell_back: u64,
    /// Mean time of a transfer.
    pub transfer_seconds: Option<f64>,
    /// Tokens whose KV blocks were transferred from prefill to decode workers.
    pub received_tokens: u64,
    /// Part of the time in which servers that only compute prompts had something to do.
    pub prefill_busy: Option<f64>,
    /// The same of servers that make answers and compute no prompts for others.
    pub decode_busy: Option<f64>,
}

/// What one endpoint was given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointFigures {
    /// Name from discovery, or from the responses of a real gateway. Empty where neither names it.
    #[serde(default)]
    pub name: String,
    /// Requests that this endpoint served.
    pub requests: u64,
    /// Tokens of the prompts that it computed.
    pub prompt_tokens: u64,
    /// Of those, what it held.
    pub cached_tokens: u64,
    /// Prompts that it computed for others.
    #[serde(default)]
    pub prefills: u64,
}

/// All endpoints over one stretch of time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PointFigures {
    /// Time of its first sample, virtual seconds.
    pub from_seconds: f64,
    /// Time of its last sample, virtual seconds.
    pub until_seconds: f64,
    /// Part of the prompt tokens looked up meanwhile that servers held.
    pub hit_rate: Option<f64>,
    /// Prompt tokens looked up meanwhile.
    pub prefix_queries: u64,
    /// Those of them that servers held.
    pub prefix_hits: u64,
    /// Requests in batch and queue, in the mean, by endpoint; to a thousandth.
    pub in_flight: Vec<f64>,
    /// Part of the blocks in use, in the mean, by endpoint; to a thousandth.
    pub kv_usage: Vec<f64>,
}

/// One run against the baseline in the same cell.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Versus {
    /// The mean time to the first token.
    pub ttft: Option<MeanChange>,
    /// The mean time per output token.
    pub tpot: Option<MeanChange>,
    /// The mean time of whole requests.
    pub latency: Option<MeanChange>,
    /// How many more requests than of the baseline's were rejected or lost; negative when they are fewer.
    pub unanswered: i64,
}

/// Runs of one workload with one setting.
#[derive(Debug)]
pub struct Cell<'d> {
    /// The workload and what else was set, in words.
    pub name: String,
    /// Its runs, in the report's order.
    pub runs: Vec<&'d RunFigures>,
}

impl<'d> Cell<'d> {
    /// The run with the lowest mean time to the first token, of those that answer as many requests as any; `None`
    /// when no request got one.
    #[must_use]
    pub fn lowest(&self) -> Option<&'d RunFigures> {
        self.lowest_of(|run| run.ttft.mean)
    }

    /// The run with the lowest figure, of those that answer as many requests as any; `None` when none has one.
    #[must_use]
    pub fn lowest_of(&self, figure: fn(&RunFigures) -> Option<f64>) -> Option<&'d RunFigures> {
        let least = self.runs.iter().map(|run| run.requests.unanswered()).min().unwrap_or_default();
        let able = self.runs.iter().filter(|run| !is_more(run.requests.unanswered(), least));
        let figures = able.filter_map(|run| Some((figure(run)?, *run)));
        figures.min_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, run)| run)
    }

    /// Whether [`Self::lowest`] is `run`.
    #[must_use]
    pub fn is_lowest(&self, run: &RunFigures) -> bool {
        self.lowest().is_some_and(|lowest| std::ptr::eq(lowest, run))
    }

    /// Which runs left requests unanswered, how many of how many, and for which reasons; `None` when each request was
    /// answered.
    #[must_use]
    pub fn unanswered(&self) -> Option<String> {
        let of = |run: &&RunFigures| {
            let RequestFigures { total, refused, lost, .. } = run.requests;
            let share = percent(run.error_rate?);
            (refused + lost > 0).then(|| {
                format!(
                    "{} {} rejected, {} lost of {} ({share}){}",
                    run.policy,
                    whole(refused),
                    whole(lost),
                    whole(total),
                    run.reasons()
                )
            })
        };
        let runs: Vec<String> = self.runs.iter().filter_map(of).collect();
        (!runs.is_empty()).then(|| format!("Rejected or lost: {}", runs.join("; ")))
    }
}

impl RunFigures {
    /// The reasons of rejected and lost requests, the most frequent first; empty for runs without reasons.
    fn reasons(&self) -> String {
        let mut reasons: Vec<(&str, u64)> = self.failures.iter().map(|(reason, count)| (&**reason, *count)).collect();
        reasons.sort_by_key(|(_, count)| Reverse(*count));
        let of = |(reason, count): &(&str, u64)| format!("{} {reason}", whole(*count));
        let mut shown: Vec<String> = reasons.iter().take(SHOWN_REASONS).map(of).collect();
        let others: u64 = reasons.iter().skip(SHOWN_REASONS).map(|(_, count)| count).sum();
        shown.extend((others > 0).then(|| format!("{} for other reasons", whole(others))));
        if shown.is_empty() { String::new() } else { format!(": {}", shown.join(", ")) }
    }
}

impl Document {
    /// As JSON on one line: indented it is three times as long, as most of it are series.
    ///
    /// # Errors
    /// None that are known of: all keys are strings, and figures that are not finite are written as `null`.
    pub fn to_json(&self) -> serde_json::Result<String> {
        serde_json::to_string(self)
    }

    /// The policies, in the order in which they first ran.
    #[must_use]
    pub fn policies(&self) -> Vec<&str> {
        let mut policies: Vec<&str> = Vec::new();
        for run in &self.runs {
            if !policies.contains(&run.policy.as_str()) {
                policies.push(&run.policy);
            }
        }
        policies
    }

    /// Runs by cell, in the order in which they first ran.
    #[must_use]
    pub fn cells(&self) -> Vec<Cell<'_>> {
        let mut cells: Vec<Cell<'_>> = Vec::new();
        for run in &self.runs {
            let name = run.cell_name();
            match cells.iter_mut().find(|cell| cell.name == name) {
                Some(cell) => cell.runs.push(run),
                None => cells.push(Cell { name, runs: vec![run] }),
            }
        }
        cells
    }
}

impl EndpointFigures {
    /// What it is called in pictures, at position `number` in the fleet.
    #[must_use]
    pub fn label(&self, number: usize) -> String {
        if self.name.is_empty() { format!("endpoint {number}") } else { self.name.clone() }
    }
}

impl RunFigures {
    /// The workload and what else was set, in words.
    #[must_use]
    pub fn cell_name(&self) -> String {
        self.cell.iter().fold(self.workload.clone(), |name, (key, value)| format!("{name}, {key} {value}"))
    }
}
