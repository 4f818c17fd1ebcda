//! Every plugin there is: one line each.

use super::plugin::{Descriptor, PluginDescriptor};
use super::{scorer, strategy};

/// All strategies, in the order in which `attache plugins` and the README list them.
pub const STRATEGIES: &[&Descriptor] = &[
    &strategy::least_request::PLUGIN,
    &strategy::pipeline::PLUGIN,
    &strategy::power_of_two::PLUGIN,
    &strategy::predicted_latency::PLUGIN,
    &strategy::prefix_cache::PLUGIN,
    &strategy::random::PLUGIN,
    &strategy::round_robin::PLUGIN,
];

/// All parts of the `pipeline` strategy, by kind.
pub const PLUGINS: &[&PluginDescriptor] =
    &[&scorer::kv_cache::PLUGIN, &scorer::lora_affinity::PLUGIN, &scorer::prefix_cache::PLUGIN, &scorer::queue::PLUGIN];

/// The part of a pipeline whose type, or an older name of it, is `name`.
#[must_use]
pub fn plugin(name: &str) -> Option<&'static PluginDescriptor> {
    PLUGINS.iter().copied().find(|d| d.name == name || d.aliases.contains(&name))
}

/// The strategy called `name`.
#[must_use]
pub fn strategy(name: &str) -> Option<&'static Descriptor> {
    STRATEGIES.iter().copied().find(|d| d.name == name)
}
