//! Requests of the last minute that were diverted from the endpoint of their prefix because of its load, by pool and
//! model: LocalAI's pressure of a model. From 1 on, LocalAI adds a replica of the model.

use super::names::Names;
use attache_config::settings::NameSettings;
use attache_scheduling::window::{SlidingSum, Window};
use attache_types::clock::{Clock, Timestamp};
use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use std::collections::BTreeMap;
use std::fmt::Error;
use std::sync::Arc;
use std::time::Duration;

/// 1 minute, as in LocalAI.
const WINDOW: Duration = Duration::from_secs(60);

/// Diverted requests of the last minute, for one model.
#[derive(Debug, Default)]
pub struct Recent(Mutex<SlidingSum>);

/// The models of one pool.
pub type Models = Names<Recent>;

/// The pressure of all pools.
#[derive(Debug, Default)]
pub struct Pressure {
    pools: Mutex<BTreeMap<String, Arc<Models>>>,
    labels: Mutex<NameSettings>,
}

impl Pressure {
    /// Limits the label values of each pool. Must be called before any pool exists.
    pub fn bound(&self, settings: &NameSettings) {
        self.labels.lock().clone_from(settings);
    }

    /// The pressure of one pool.
    #[must_use]
    pub fn pool(&self, name: &str) -> Arc<Models> {
        let mut pools = self.pools.lock();
        if let Some(models) = pools.get(name) {
            return models.clone();
        }
        let models = Arc::<Models>::default();
        models.bound(&self.labels.lock());
        pools.insert(name.to_owned(), models.clone());
        models
    }

    /// Removes the series of a deleted pool.
    pub(super) fn forget(&self, pool: &str) {
        self.pools.lock().remove(pool);
    }
}

/// Counts a request for `model` that was diverted from the endpoint of its prefix because of its load.
pub(super) fn diverted(models: &Models, model: &str, now: Timestamp) {
    models.of(model, now).0.lock().add(Window::new(WINDOW).slot(now), 1);
}

/// The collector that adds [`Pressure`] to the registry.
#[derive(Debug)]
pub struct PressureCollector {
    /// The counters to show.
    pub pressure: Arc<Pressure>,
    /// Clock that ends the minute.
    pub clock: Clock,
}

impl Collector for PressureCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let help =
            "requests of the last minute that did not go to the endpoint with their cached prefix because of its load";
        let mut gauges = encoder.encode_descriptor("model_pressure", help, None, MetricType::Gauge)?;
        let slot = Window::new(WINDOW).slot(self.clock.now());
        let pools: Vec<_> =
            self.pressure.pools.lock().iter().map(|(name, models)| (name.clone(), models.clone())).collect();
        for (pool, models) in pools {
            models.each(|model, recent| {
                let mut recent = recent.0.lock();
                recent.expire(slot);
                let total = i64::try_from(recent.total()).unwrap_or(i64::MAX);
                ConstGauge::new(total).encode(gauges.encode_family(&[("pool", &*pool), ("model", model)])?)
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pressure_is_of_the_last_minute() {
        let at = |seconds: u64| Timestamp(seconds * 1_000_000_000);
        let pressure = Pressure::default();
        let pool = pressure.pool("a");
        diverted(&pool, "m", at(0));
        diverted(&pool, "m", at(30));
        diverted(&pressure.pool("b"), "m", at(30));
        let total = |now| {
            let models = pressure.pool("a");
            let recent = models.of("m", at(now));
            let mut recent = recent.0.lock();
            recent.expire(Window::new(WINDOW).slot(at(now)));
            recent.total()
        };
        assert_eq!([total(59), total(60), total(90)], [2, 1, 0]);
        pressure.forget("b");
        assert_eq!(pressure.pools.lock().len(), 1);
    }
}
