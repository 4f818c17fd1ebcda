//! The registry of metrics, and the objects that parts of the process count with.

use attache_admin::Refusals;
use attache_admin::pools::{PoolCollector, PoolViews};
use attache_config::Settings;
use attache_serving::connections::{Listeners, descriptor_limit};
use attache_telemetry::listeners::ListenerCollector;
use attache_telemetry::metrics::Metrics;
use attache_telemetry::operating_system::OperatingSystemCollector;
use attache_telemetry::pressure::PressureCollector;
use attache_types::clock::Clock;
use prometheus_client::registry::Registry;
use std::sync::Arc;

/// The prefix of the names of metrics, except those that the operating system counts.
pub(super) const PREFIX: &str = "attache";

/// Metrics before any pool exists.
pub(super) struct Instruments {
    pub(super) registry: Registry,
    pub(super) metrics: Arc<Metrics>,
    pub(super) refusals: Refusals,
    pub(super) listeners: Listeners,
    pub(super) views: Arc<PoolViews>,
}

impl Instruments {
    pub(super) fn register(settings: &Settings, clock: Clock) -> Self {
        let mut root = Registry::default();
        root.register_collector(Box::new(OperatingSystemCollector));
        let registry = root.sub_registry_with_prefix(PREFIX);
        let metrics = Metrics::register(registry);
        let refusals = Refusals::register(registry);
        let listeners = Listeners::of(descriptor_limit(), settings.limits.max_streams as usize);
        registry.register_collector(Box::new(ListenerCollector(listeners.clone())));
        metrics.by_name.bound(&settings.telemetry.labels);
        metrics.pressure.bound(&settings.telemetry.labels.models);
        registry.register_collector(Box::new(PressureCollector { pressure: metrics.pressure.clone(), clock }));
        let views = Arc::new(PoolViews::new(clock));
        registry.register_collector(Box::new(PoolCollector(views.clone())));
        Self { registry: root, metrics, refusals, listeners, views }
    }
}
