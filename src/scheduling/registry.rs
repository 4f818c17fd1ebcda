//! Every plugin there is: one line each.

use super::plugin::{Descriptor, ScorerDescriptor};
use super::{scorer, strategy};

/// All strategies, in the order in which `attache plugins` and the README list them.
pub const STRATEGIES: &[&Descriptor] = &[
    &strategy::least_request::PLUGIN,
    &strategy::pipeline::PLUGIN,
    &strategy::power_of_two::PLUGIN,
    &strategy::prefix_cache::PLUGIN,
    &strategy::random::PLUGIN,
    &strategy::round_robin::PLUGIN,
];

/// All scorers of the `pipeline` strategy.
pub const SCORERS: &[&ScorerDescriptor] =
    &[&scorer::kv_cache::PLUGIN, &scorer::lora_affinity::PLUGIN, &scorer::prefix_cache::PLUGIN, &scorer::queue::PLUGIN];

/// The scorer called `name`.
#[must_use]
pub fn scorer(name: &str) -> Option<&'static ScorerDescriptor> {
    SCORERS.iter().copied().find(|d| d.name == name)
}

/// The strategy called `name`.
#[must_use]
pub fn strategy(name: &str) -> Option<&'static Descriptor> {
    STRATEGIES.iter().copied().find(|d| d.name == name)
}
