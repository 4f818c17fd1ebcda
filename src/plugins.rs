//! The plugins of the program.
//!
//! The only place that names the crates with plugins. A program with plugins of its own adds their list here.

use attache_scheduling::Registry;

/// Every strategy and every part of the `pipeline` strategy.
#[must_use]
pub fn registry() -> Registry {
    Registry::new(&[attache_pipeline::PLUGINS, attache_strategies::PLUGINS])
}
