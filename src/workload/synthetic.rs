//! Workloads that are made up: published benchmarks and the shapes of traffic that policies differ on.
//!
//! One file each, with its doc, its parameters and its requests, and one line in [`WORKLOADS`]. All that is random
//! follows from the seed, and a request's texts and lengths follow from its number (in conversations: from the
//! conversation's and the turn's), so that two runs with one seed ask the same, however fast they are answered. Called
//! by `cli::replay` and tests. Pure.

mod adapter_churn;
mod agentic_code;
mod arrivals;
mod burst;
mod code_completion;
mod conversations;
mod floor_bursts;
mod hot_prefix;
mod interactive_chat;
mod long_short;
mod lora_mix;
mod multi_turn;
mod parameters;
mod reasoning;
mod retrieval;
mod shared_prefix;
mod tool_agents;
mod unique;

use crate::Workload;
use attache_types::params::ParamError;
use attache_types::spelling::closest;
pub use parameters::{Parameter, Values};

/// A workload, or the parameter that it can't be made with.
pub type Built = Result<Box<dyn Workload>, ParamError>;

/// How a workload is known and made: one `pub const WORKLOAD` in its file, one line in [`WORKLOADS`].
#[derive(Clone, Copy, Debug)]
pub struct Descriptor {
    /// Unique name in kebab case.
    pub name: &'static str,
    /// One sentence: what it asks.
    pub summary: &'static str,
    /// Publication or data set that the numbers follow.
    pub source: &'static str,
    /// Whether requests wait for answers (conversations); else they come when they come.
    pub is_closed: bool,
    /// Parameters with their defaults, as `--list` shows them.
    pub parameters: &'static [Parameter],
    /// Makes it from its parameters and a seed.
    pub build: fn(&Values<'_>, u64) -> Built,
}

/// All of them, in the order of their names.
pub const WORKLOADS: &[&Descriptor] = &[
    &adapter_churn::WORKLOAD,
    &agentic_code::WORKLOAD,
    &burst::WORKLOAD,
    &code_completion::WORKLOAD,
    &floor_bursts::WORKLOAD,
    &hot_prefix::WORKLOAD,
    &interactive_chat::WORKLOAD,
    &long_short::WORKLOAD,
    &lora_mix::WORKLOAD,
    &multi_turn::WORKLOAD,
    &reasoning::WORKLOAD,
    &retrieval::WORKLOAD,
    &shared_prefix::SYNTHETIC,
    &shared_prefix::LADDER,
    &tool_agents::WORKLOAD,
    &unique::WORKLOAD,
];

/// The workload called `name`.
#[must_use]
pub fn workload(name: &str) -> Option<&'static Descriptor> {
    WORKLOADS.iter().copied().find(|d| d.name == name)
}

/// The workload that `spelling` stands for: its name, and behind a colon its parameters (`unique:qps=20,seconds=60`).
///
/// # Errors
/// When no workload is called so, a parameter is not one of its own, is given twice, or has a
/// value that is not allowed.
pub fn build(spelling: &str, seed: u64) -> Built {
    let (name, parameters) = spelling.split_once(':').unwrap_or((spelling, ""));
    let Some(descriptor) = workload(name) else {
        let name: String = name.chars().filter(|c| !c.is_control()).take(64).collect();
        let meant = closest(&name, WORKLOADS.iter().map(|d| d.name));
        let hint = meant.map(|meant| format!("; did you mean `{meant}`?")).unwrap_or_default();
        return Err(ParamError::new(format!("no workload is called `{name}`{hint}")));
    };
    (descriptor.build)(&Values::read(descriptor, parameters)?, seed)
}

/// Whether the requests of what `spelling` stands for follow from answers.
#[must_use]
pub fn is_closed(spelling: &str) -> bool {
    let name = spelling.split_once(':').map_or(spelling, |(name, _)| name);
    workload(name).is_some_and(|descriptor| descriptor.is_closed)
}

#[cfg(test)]
mod tests;
