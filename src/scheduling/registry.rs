//! Every plugin there is: one line each.

use super::plugin::{Descriptor, ParamError, PluginDescriptor, Strategy};
use super::weighted::{self, Weighted};
use super::{filter, least_request, picker, profile, scorer, strategy};
use serde_json::Value;

/// All strategies, in the order in which `attache plugins` and the README list them.
pub const STRATEGIES: &[&Descriptor] = &[
    &strategy::cache_aware::PLUGIN,
    &strategy::chwbl::PLUGIN,
    &strategy::chwbl::CONSISTENT_HASH,
    &strategy::dynamo_kv::PLUGIN,
    &strategy::fallback::PLUGIN,
    &strategy::least_busy_time::PLUGIN,
    &strategy::least_gpu_cache::PLUGIN,
    &strategy::least_kv_cache::PLUGIN,
    &strategy::least_latency::PLUGIN,
    &least_request::PLUGIN,
    &strategy::least_utilization::PLUGIN,
    &strategy::load_balance::PLUGIN,
    &strategy::pd::PLUGIN,
    &strategy::pipeline::PLUGIN,
    &strategy::power_of_two::PLUGIN,
    &strategy::predicted_latency::PLUGIN,
    &strategy::prefix_affinity::PLUGIN,
    &strategy::prefix_cache::PLUGIN,
    &strategy::prefix_cache_preble::PLUGIN,
    &strategy::prefix_hash::PLUGIN,
    &strategy::random::PLUGIN,
    &strategy::round_robin::PLUGIN,
    &strategy::session_affinity::PLUGIN,
    &strategy::slo::PLUGIN,
    &strategy::slo::LEAST_LOAD,
    &strategy::slo::LEAST_LOAD_PULLING,
    &strategy::slo::PACK_LOAD,
    &strategy::throughput::PLUGIN,
    &strategy::vtc_basic::PLUGIN,
    &strategy::vtc_queue::FAIR,
    &strategy::vtc_queue::MAX_FAIR,
    &strategy::vtc_queue::PRED,
];

/// All parts of the `pipeline` strategy, by name.
pub const PLUGINS: &[&PluginDescriptor] = &[
    &scorer::active_request::PLUGIN,
    &profile::decider::ALWAYS_MULTIMODAL,
    &profile::decider::ALWAYS,
    &filter::concurrency_detector::PLUGIN,
    &filter::context_length_aware::PLUGIN,
    &profile::data_parallel::PLUGIN,
    &filter::role::DECODE,
    &profile::disagg::DISAGG,
    &filter::role::ENCODE,
    &filter::endpoint_attribute::PLUGIN,
    &scorer::endpoint_attribute::PLUGIN,
    &filter::header_based_testing::PLUGIN,
    &scorer::header_label_affinity::PLUGIN,
    &profile::header::PLUGIN,
    &scorer::kv_cache::PLUGIN,
    &filter::label_selector::PLUGIN,
    &scorer::latency::PLUGIN,
    &scorer::lmetric::PLUGIN,
    &scorer::load_aware::PLUGIN,
    &scorer::lora_affinity::PLUGIN,
    &picker::max_score::PLUGIN,
    &scorer::mm_embeddings_cache::PLUGIN,
    &scorer::no_hit_lru::PLUGIN,
    &profile::disagg::PD,
    &scorer::precise_prefix_cache::PLUGIN,
    &filter::role::PREFILL,
    &profile::decider::PREFIX_BASED,
    &filter::prefix_cache_affinity::PLUGIN,
    &scorer::prefix_cache::PLUGIN,
    &scorer::queue::PLUGIN,
    &picker::random::PLUGIN,
    &scorer::running_requests::PLUGIN,
    &filter::session_affinity::PLUGIN,
    &scorer::session_affinity::PLUGIN,
    &profile::single::PLUGIN,
    &filter::slo_headroom_tier::PLUGIN,
    &scorer::token_load::PLUGIN,
    &filter::topology_affinity::PLUGIN,
    &scorer::topology_affinity::PLUGIN,
    &filter::utilization_detector::PLUGIN,
    &filter::utilization::PLUGIN,
    &picker::weighted_random::PLUGIN,
];

/// The part of a pipeline whose type, or an older name of it, is `name`.
#[must_use]
pub fn plugin(name: &str) -> Option<&'static PluginDescriptor> {
    PLUGINS.iter().copied().find(|d| d.name == name || d.aliases.contains(&name))
}

/// Names that other products have for strategies, with the names here.
const OTHER_NAMES: &[(&str, &str)] = &[
    // The default that AIBrix's documentation gives for its environment variable.
    ("prefix-aware", "prefix-cache"),
    // Neutree's names; its API writes them into `scheduler.type`.
    ("consistent_hash", "consistent-hash"),
    ("pow2", "power-of-two"),
    ("roundrobin", "round-robin"),
    ("static_hash", "consistent-hash"),
];

/// The name here of a strategy that another product calls `name`; otherwise `name` itself.
#[must_use]
pub fn canonical(name: &str) -> &str {
    OTHER_NAMES.iter().find(|(other, _)| *other == name).map_or(name, |(_, own)| own)
}

/// The strategy called `name`, here or in another product.
#[must_use]
pub fn strategy(name: &str) -> Option<&'static Descriptor> {
    let name = canonical(name);
    STRATEGIES.iter().copied().find(|d| d.name == name)
}

/// Why there is no such strategy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// No strategy is called so.
    #[error("no strategy is called `{0}`")]
    Unknown(String),
    /// It does not take these parameters, or the parts of a weighted name can't be read or added up.
    #[error(transparent)]
    Parameters(#[from] ParamError),
}

/// The strategy that `name` stands for: one of [`STRATEGIES`], or several with weights (`prefix-cache:2,least-latency`).
///
/// # Errors
/// As [`BuildError`].
pub fn build(name: &str, parameters: &Value) -> Result<Box<dyn Strategy>, BuildError> {
    match strategy(name) {
        Some(descriptor) => Ok((descriptor.build)(parameters)?),
        None if weighted::is_weighted(name) || name.is_empty() => Weighted::build(name, parameters),
        None => Err(BuildError::Unknown(name.chars().filter(|c| !c.is_control()).take(64).collect())),
    }
}
