//! Rejected requests, by pool and reason.

use attache_types::error::{Fault, Reason};
use attache_types::labels::Counts;
use parking_lot::RwLock;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use std::collections::BTreeMap;
use std::fmt::Error;
use std::sync::Arc;

/// Rejections since the start. Only a rejection takes the lock, and only to read.
#[derive(Debug, Default)]
pub struct Rejections {
    /// Requests without a pool: invalid ones, and those that no pool matches.
    unrouted: Counts<Reason>,
    by_pool: RwLock<BTreeMap<Arc<str>, Arc<Counts<Reason>>>>,
}

impl Rejections {
    /// Counts a rejection. A pool that was deleted is not counted any more.
    pub fn add(&self, pool: Option<&str>, reason: Reason) {
        match pool {
            None => self.unrouted.count(reason),
            Some(pool) => self.by_pool.read().get(pool).into_iter().for_each(|counts| counts.count(reason)),
        }
    }

    /// Shows a pool without rejections as 0, so that the first rejection is an increase.
    pub(super) fn know(&self, pool: &str) {
        self.by_pool.write().entry(pool.into()).or_default();
    }

    /// Removes the series of a deleted pool.
    pub(super) fn forget(&self, pool: &str) {
        self.by_pool.write().remove(pool);
    }

    /// The rejections of each pool and reason, without those that never occurred.
    pub(super) fn all(&self) -> Vec<RejectionCount> {
        let of = |pool: Option<&Arc<str>>, counts: &Counts<Reason>| -> Vec<RejectionCount> {
            let counted = counts.each().filter(|(_, count)| *count > 0);
            counted
                .map(|(reason, count)| RejectionCount { pool: pool.cloned(), reason: reason.code(), count })
                .collect()
        };
        let mut all = of(None, &self.unrouted);
        all.extend(self.by_pool.read().iter().flat_map(|(pool, counts)| of(Some(pool), counts)));
        all
    }

    /// The reasons for which requests were rejected, with the number of requests of all pools.
    pub(super) fn totals(&self) -> Vec<(&'static str, u64)> {
        let mut totals: Vec<_> = self.unrouted.each().map(|(reason, count)| (reason.code(), count)).collect();
        for counts in self.by_pool.read().values() {
            totals.iter_mut().zip(counts.each()).for_each(|((_, total), (_, count))| *total += count);
        }
        totals.retain(|(_, count)| *count > 0);
        totals
    }
}

/// Number of rejections of one pool for one reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectionCount {
    /// Name of the pool; `None` if no pool was chosen.
    pub pool: Option<Arc<str>>,
    /// Code of the reason.
    pub reason: &'static str,
    /// Rejections since the start.
    pub count: u64,
}

/// The collector that adds [`Rejections`] to the registry.
#[derive(Debug)]
pub struct RejectionCollector(pub Arc<Rejections>);

impl Collector for RejectionCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let help = "rejected requests, by reason; the label `pool` is empty if no pool was chosen yet";
        let mut family = encoder.encode_descriptor("rejections", help, None, MetricType::Counter)?;
        let mut show = |pool: &str, counts: &Counts<Reason>, shown: fn(Reason) -> bool| {
            for (reason, count) in counts.each().filter(|(reason, count)| *count > 0 || shown(*reason)) {
                let labels = [("pool", pool), ("reason", reason.code())];
                ConstCounter::new(count).encode(family.encode_family(&labels)?)?;
            }
            Ok::<_, Error>(())
        };
        show("", &self.0.unrouted, |_| true)?;
        // Most faults of clients are found before a pool is chosen, so each pool does without 20 series of zeros.
        self.0
            .by_pool
            .read()
            .iter()
            .try_for_each(|(pool, counts)| show(pool, counts, |reason| reason.fault() != Fault::Client))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;

    #[test]
    fn rejections_count_by_pool_until_the_pool_is_deleted() {
        let rejections = Arc::new(Rejections::default());
        let mut registry = Registry::with_prefix("attache");
        registry.register_collector(Box::new(RejectionCollector(rejections.clone())));
        let page = || {
            let mut text = String::new();
            encode(&mut text, &registry).unwrap();
            text
        };
        rejections.know("a");
        rejections.add(None, Reason::InvalidJson);
        rejections.add(Some("a"), Reason::QueueFull);
        rejections.add(Some("a"), Reason::QueueFull);
        rejections.add(Some("a"), Reason::ModelNotFound);
        rejections.add(Some("deleted"), Reason::Shed);
        rejections.know("a");
        for (line, shown) in [
            ("{pool=\"\",reason=\"invalid_json\"} 1", true),
            ("{pool=\"\",reason=\"queue_full\"} 0", true),
            ("{pool=\"a\",reason=\"queue_full\"} 2", true),
            ("{pool=\"a\",reason=\"shed\"} 0", true),
            ("{pool=\"a\",reason=\"model_not_found\"} 1", true),
            ("{pool=\"a\",reason=\"invalid_json\"} 0", false),
        ] {
            let line = format!("attache_rejections_total{line}");
            assert_eq!(page().lines().any(|l| l == line), shown, "{line}\n{}", page());
        }
        assert_eq!(rejections.totals(), [("invalid_json", 1), ("model_not_found", 1), ("queue_full", 2)]);
        let by_pool: Vec<_> = rejections.all().into_iter().map(|r| (r.pool, r.reason, r.count)).collect();
        let a = || Some("a".into());
        assert_eq!(by_pool, [(None, "invalid_json", 1), (a(), "model_not_found", 1), (a(), "queue_full", 2)]);
        rejections.forget("a");
        assert!(!page().contains("pool=\"a\""), "{}", page());
        assert_eq!(rejections.totals(), [("invalid_json", 1)]);
    }
}
