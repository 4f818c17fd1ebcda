//! All flow control policies, one line each.

use super::admitter::{self, Admitter};
use super::ceiling::{self, Ceiling};
use super::fairness::{self, Fairness};
use super::ordering::{self, Ordering};
use super::saturation::{self, Detector};
use attache_scheduling::facts::concurrency;
use attache_scheduling::plugin::{Inert, ParamError};
use attache_types::declare::Section;
use serde_json::Value;

/// Name and constructor of a policy: one `pub const PLUGIN` in its file, one line here.
#[derive(Clone, Copy, Debug)]
pub struct PolicyDescriptor<P: ?Sized> {
    /// Unique name in configurations, kebab-case.
    pub name: &'static str,
    /// Further names that select the same policy.
    pub aliases: &'static [&'static str],
    /// One sentence for the reference: what the policy does.
    pub summary: &'static str,
    /// Project or paper that the policy comes from.
    pub source: &'static str,
    /// The declaration of its parameters.
    pub parameters: fn() -> Section,
    /// Builds the policy from its parameters (`null` for none); fails if they are invalid.
    pub build: fn(&Value) -> Result<Box<P>, ParamError>,
}

/// Policies that select the flow that is dequeued next.
pub const FAIRNESS: &[&PolicyDescriptor<dyn Fairness>] = &[
    &fairness::global_strict::PLUGIN,
    &fairness::program_aware::PLUGIN,
    &fairness::round_robin::PLUGIN,
    &fairness::vtc_fair::PLUGIN,
    &fairness::vtc_max_fair::PLUGIN,
    &fairness::vtc_oracle::PLUGIN,
    &fairness::vtc_pred::PLUGIN,
];

/// Policies that order the requests within a flow.
pub const ORDERINGS: &[&PolicyDescriptor<dyn Ordering>] = &[
    &ordering::edf::PLUGIN,
    &ordering::fcfs::PLUGIN,
    &ordering::least_work::PLUGIN,
    &ordering::slo_deadline::PLUGIN,
    &ordering::slo_urgency::PLUGIN,
];

/// Policies that limit how much of the pool a band may use.
pub const CEILINGS: &[&PolicyDescriptor<dyn Ceiling>] =
    &[&ceiling::holdback::PLUGIN, &ceiling::soft_reflective::PLUGIN, &ceiling::fixed::PLUGIN];

/// Policies that measure the saturation of a pool.
pub const DETECTORS: &[&PolicyDescriptor<dyn Detector>] = &[
    &saturation::backlog::PLUGIN,
    &saturation::concurrency::PLUGIN,
    &saturation::recompute::PLUGIN,
    &saturation::slo_load::PLUGIN,
    &saturation::utilization::PLUGIN,
];

/// Policies that reject requests on arrival.
pub const ADMITTERS: &[&PolicyDescriptor<dyn Admitter>] =
    &[&admitter::latency_slo::PLUGIN, &admitter::probabilistic::PLUGIN];

/// The policy called `name` among `policies`.
#[must_use]
pub fn find<P: ?Sized>(policies: &[&'static PolicyDescriptor<P>], name: &str) -> Option<&'static PolicyDescriptor<P>> {
    policies.iter().copied().find(|d| d.name == name || d.aliases.contains(&name))
}

/// The parameters among `given` of the policy called `name` that change nothing, each as an error at its key.
#[must_use]
pub fn inert(name: &str, given: &Value) -> Vec<ParamError> {
    let rules = [concurrency::INERT, saturation::concurrency::INERT, fairness::program_aware::INERT];
    Inert::find(rules.into_iter().flatten(), name, given, given)
}

#[cfg(test)]
mod tests;
