//! Counters with one label whose values are those of an enum, for the process and by pool.

use attache_types::labels::{Counts, Labelled};
use parking_lot::RwLock;
use prometheus_client::encoding::{EncodeLabelSet, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::registry::Registry;
use std::collections::BTreeMap;
use std::fmt::Error;
use std::sync::Arc;

/// The label of metrics of one pool.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct PoolLabel {
    pool: String,
}

impl PoolLabel {
    /// The label of the pool with this name.
    pub(super) fn of(pool: &str) -> Self {
        Self { pool: pool.to_owned() }
    }
}

/// Registers a counter for each value of `L`, which the label `label` names.
#[must_use]
pub fn register<L: Labelled>(registry: &mut Registry, name: &str, help: &str, label: &'static str) -> Arc<Counts<L>> {
    let counts = Arc::<Counts<L>>::default();
    registry.register(name, help, ByLabel { label, counts: counts.clone() });
    counts
}

/// The counters of the process, as a metric.
#[derive(Debug)]
struct ByLabel<L> {
    label: &'static str,
    counts: Arc<Counts<L>>,
}

impl<L: Labelled> EncodeMetric for ByLabel<L> {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), Error> {
        let mut counts = self.counts.each();
        counts.try_for_each(|(value, count)| {
            ConstCounter::new(count).encode(encoder.encode_family(&[(self.label, value.label())])?)
        })
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Counter
    }
}

type ByPool<L> = RwLock<BTreeMap<Arc<str>, Arc<Counts<L>>>>;

/// The counters of each pool.
#[derive(Debug)]
pub(super) struct PoolCounts<L> {
    label: &'static str,
    pools: Arc<ByPool<L>>,
}

impl<L: Labelled> PoolCounts<L> {
    /// Registers a counter for each pool and each value of `L`, which the label `label` names.
    pub(super) fn register(registry: &mut Registry, name: &str, help: &str, label: &'static str) -> Self {
        let pools = Arc::<ByPool<L>>::default();
        registry.register(name, help, Self { label, pools: pools.clone() });
        Self { label, pools }
    }

    /// The counters of one pool, new ones if it has none.
    pub(super) fn pool(&self, name: &str) -> Arc<Counts<L>> {
        self.pools.write().entry(name.into()).or_default().clone()
    }

    /// Removes the series of a deleted pool.
    pub(super) fn forget(&self, pool: &str) {
        self.pools.write().remove(pool);
    }
}

impl<L: Labelled> EncodeMetric for PoolCounts<L> {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), Error> {
        for (pool, counts) in &*self.pools.read() {
            for (value, count) in counts.each() {
                let labels = [("pool", &**pool), (self.label, value.label())];
                ConstCounter::new(count).encode(encoder.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Counter
    }

    fn is_empty(&self) -> bool {
        self.pools.read().is_empty()
    }
}
