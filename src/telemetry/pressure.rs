//! Requests of the last minute that were diverted from the endpoint of their prefix because of its load, by pool and
//! model: LocalAI's pressure of a model. From 1 on, LocalAI adds a replica of the model.

use super::names::Names;
use attache_request::settings::NameSettings;
use attache_sync::SharedPressure;
use attache_types::clock::{Clock, Timestamp};
use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt::Error;
use std::sync::Arc;

/// The pressure of one pool.
#[derive(Debug)]
pub struct PoolPressure {
    name: Arc<str>,
    /// The label values of its models.
    labels: Names<()>,
    shared: Arc<SharedPressure>,
}

impl PoolPressure {
    /// Counts a request for `model` that was diverted from the endpoint of its prefix because of its load.
    pub fn divert(&self, model: &str, now: Timestamp) {
        self.shared.divert(&self.name, &self.labels.label(model, now), now);
    }
}

/// The pressure of all pools.
#[derive(Debug, Default)]
pub struct Pressure {
    shared: Arc<SharedPressure>,
    pools: Mutex<BTreeMap<String, Arc<PoolPressure>>>,
    labels: Mutex<NameSettings>,
}

impl Pressure {
    /// Limits the label values of each pool. Must be called before any pool exists.
    pub fn bound(&self, settings: &NameSettings) {
        self.labels.lock().clone_from(settings);
    }

    /// The counts, which peers share.
    #[must_use]
    pub fn shared(&self) -> &Arc<SharedPressure> {
        &self.shared
    }

    /// The pressure of one pool.
    #[must_use]
    pub fn pool(&self, name: &str) -> Arc<PoolPressure> {
        let mut pools = self.pools.lock();
        if let Some(pool) = pools.get(name) {
            return pool.clone();
        }
        let pool = PoolPressure { name: name.into(), labels: Names::default(), shared: self.shared.clone() };
        pool.labels.bound(&self.labels.lock());
        let pool = Arc::new(pool);
        pools.insert(name.to_owned(), pool.clone());
        pool
    }

    /// The models with diverted requests in the last minute, by pool and model. The counts are those of all pickers.
    #[must_use]
    pub fn list(&self, now: Timestamp) -> Vec<ModelPressure> {
        let rows = self.shared.list(now).into_iter();
        rows.map(|row| ModelPressure { pool: (*row.pool).into(), model: (*row.model).into(), count: row.all }).collect()
    }

    /// The own count of each label value, by pool and label value. It may be 0.
    fn own(&self, now: Timestamp) -> BTreeMap<(String, String), u64> {
        let mut counts = BTreeMap::new();
        for (name, pool) in &*self.pools.lock() {
            let Ok::<(), Infallible>(()) = pool.labels.each(|label, ()| {
                counts.insert((name.clone(), label.to_owned()), 0);
                Ok(())
            });
        }
        let rows = self.shared.list(now).into_iter().filter(|row| row.own > 0);
        counts.extend(rows.map(|row| (((*row.pool).into(), (*row.model).into()), row.own)));
        counts
    }

    /// Removes the series of a deleted pool.
    pub(super) fn forget(&self, pool: &str) {
        self.pools.lock().remove(pool);
        self.shared.forget(pool);
    }
}

/// The diverted requests of the last minute for one model of one pool.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct ModelPressure {
    /// Name of the pool.
    pub pool: String,
    /// Model name on the servers; `other` for all models without a label value of their own.
    pub model: String,
    /// Requests.
    pub count: u64,
}

/// The collector that adds [`Pressure`] to the registry. It shows the picker's own counts, so that their sum over all
/// pickers is the pressure, with and without shared state.
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
        for ((pool, model), count) in self.pressure.own(self.clock.now()) {
            let count = i64::try_from(count).unwrap_or(i64::MAX);
            ConstGauge::new(count).encode(gauges.encode_family(&[("pool", &*pool), ("model", &*model)])?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pressure_is_shown_for_label_values_and_consumed_by_model() {
        let at = |seconds: u64| Timestamp(seconds * 1_000_000_000);
        let pressure = Pressure::default();
        pressure.bound(&NameSettings { allow: ["m".to_owned()].into(), top: 0 });
        let pool = pressure.pool("a");
        pool.divert("m", at(0));
        pool.divert("m", at(30));
        pool.divert("made up", at(30));
        pressure.pool("b").divert("m", at(30));
        let row = |pool: &str, model: &str, count| ModelPressure { pool: pool.into(), model: model.into(), count };
        assert_eq!(pressure.list(at(59)), [row("a", "m", 2), row("a", "other", 1), row("b", "m", 1)]);
        assert_eq!(pressure.list(at(60)), [row("a", "m", 1), row("a", "other", 1), row("b", "m", 1)]);
        assert_eq!(pressure.shared().consume("m", None, 9, at(60)), 2);
        assert_eq!(pressure.list(at(60)), [row("a", "other", 1)]);
        let own: Vec<_> = pressure.own(at(60)).into_iter().map(|((pool, model), n)| (pool + "/" + &model, n)).collect();
        let shown = |name: &str, count| (name.to_owned(), count);
        assert_eq!(own, [shown("a/m", 0), shown("a/other", 1), shown("b/m", 0), shown("b/other", 0)]);
        pressure.forget("a");
        assert_eq!((pressure.list(at(60)), pressure.pools.lock().len()), (Vec::new(), 1));
    }
}
