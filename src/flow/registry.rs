//! Every policy there is: one line each.

use super::admitter::{self, Admitter};
use super::ceiling::{self, Ceiling};
use super::fairness::{self, Fairness};
use super::ordering::{self, Ordering};
use super::saturation::{self, Detector};
use attache_scheduling::plugin::ParamError;
use serde_json::Value;

/// How a policy is known and made: one `pub const PLUGIN` in its file, one line here.
#[derive(Clone, Copy, Debug)]
pub struct Descriptor<P: ?Sized> {
    /// The name in configurations: kebab-case, unique.
    pub name: &'static str,
    /// Other names of the same.
    pub aliases: &'static [&'static str],
    /// One sentence: what it does.
    pub summary: &'static str,
    /// Where it comes from.
    pub source: &'static str,
    /// Makes it from its parameters (`null` for none).
    pub build: fn(&Value) -> Result<Box<P>, ParamError>,
}

/// Whose turn it is.
pub const FAIRNESS: &[&Descriptor<dyn Fairness>] = &[
    &fairness::global_strict::PLUGIN,
    &fairness::program_aware::PLUGIN,
    &fairness::round_robin::PLUGIN,
    &fairness::vtc_fair::PLUGIN,
    &fairness::vtc_max_fair::PLUGIN,
    &fairness::vtc_oracle::PLUGIN,
    &fairness::vtc_pred::PLUGIN,
];

/// The order within a flow.
pub const ORDERINGS: &[&Descriptor<dyn Ordering>] = &[
    &ordering::edf::PLUGIN,
    &ordering::fcfs::PLUGIN,
    &ordering::least_work::PLUGIN,
    &ordering::slo_deadline::PLUGIN,
    &ordering::slo_urgency::PLUGIN,
];

/// How much of the pool a band may use.
pub const CEILINGS: &[&Descriptor<dyn Ceiling>] =
    &[&ceiling::holdback::PLUGIN, &ceiling::soft_reflective::PLUGIN, &ceiling::fixed::PLUGIN];

/// How full a pool is.
pub const DETECTORS: &[&Descriptor<dyn Detector>] = &[
    &saturation::backlog::PLUGIN,
    &saturation::concurrency::PLUGIN,
    &saturation::slo_load::PLUGIN,
    &saturation::utilization::PLUGIN,
];

/// Who is turned away at once.
pub const ADMITTERS: &[&Descriptor<dyn Admitter>] = &[&admitter::latency_slo::PLUGIN, &admitter::probabilistic::PLUGIN];

/// The policy called `name` among `policies`.
#[must_use]
pub fn find<P: ?Sized>(policies: &[&'static Descriptor<P>], name: &str) -> Option<&'static Descriptor<P>> {
    policies.iter().copied().find(|d| d.name == name || d.aliases.contains(&name))
}

#[cfg(test)]
mod tests;
