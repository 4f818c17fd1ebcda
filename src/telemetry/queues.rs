//! Metrics of the queues of pools.

use super::counts::{PoolCounts, PoolLabel};
use attache_flow::SharedCapacity;
use attache_request::event::{DeadlineOutcome, QueueOutcome};
use attache_types::labels::Counts;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::time::Duration;

/// Buckets of queue wait, seconds: from an unnoticeable pause to the longest that clients wait.
const WAITS: [f64; 12] = [0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 60.0];

/// Queue metrics of all pools.
#[derive(Debug)]
pub(super) struct QueueFamilies {
    fates: PoolCounts<QueueOutcome>,
    requests: Family<PoolLabel, Gauge>,
    bytes: Family<PoolLabel, Gauge>,
    waits: Family<PoolLabel, Histogram, fn() -> Histogram>,
}

impl QueueFamilies {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let families = Self {
            fates: PoolCounts::register(
                registry,
                "queue_turns",
                "requests that asked for admission: `passed` at once, `dispatched` after a wait, `full`, `expired`, \
                 `evicted`, `shed`, `left` by the client, `unqueued` because the body mode of Envoy does not allow a wait",
                "outcome",
            ),
            requests: Family::default(),
            bytes: Family::default(),
            waits: Family::new_with_constructor(|| Histogram::new(WAITS)),
        };
        registry.register("queued_requests", "requests in the queue", families.requests.clone());
        registry.register("queued_bytes", "bodies of queued requests", families.bytes.clone());
        let help = "time in the queue, of requests that waited";
        registry.register_with_unit("queue_wait", help, Unit::Seconds, families.waits.clone());
        families
    }

    pub(super) fn pool(&self, name: &str, deadlines: Arc<Counts<DeadlineOutcome>>) -> QueueMetrics {
        let label = PoolLabel::of(name);
        QueueMetrics {
            fates: self.fates.pool(name),
            requests: self.requests.get_or_create_owned(&label),
            bytes: self.bytes.get_or_create_owned(&label),
            held: Default::default(),
            waits: self.waits.get_or_create_owned(&label),
            deadlines,
        }
    }

    pub(super) fn depth(&self, name: &str) -> QueueDepth {
        let label = PoolLabel::of(name);
        QueueDepth {
            requests: self.requests.get_or_create_owned(&label),
            bytes: self.bytes.get_or_create_owned(&label),
        }
    }

    pub(super) fn forget(&self, pool: &str) {
        let label = PoolLabel::of(pool);
        self.fates.forget(pool);
        self.requests.remove(&label);
        self.bytes.remove(&label);
        self.waits.remove(&label);
    }
}

/// The current content of the queue of one pool.
#[derive(Clone, Debug, Default)]
pub struct QueueDepth {
    /// Number of queued requests.
    pub requests: Gauge,
    /// Bytes of their bodies.
    pub bytes: Gauge,
}

/// Reads the queue depth of each band of one pool.
#[derive(Clone)]
pub struct BandDepths(Arc<dyn Fn() -> Vec<(i32, u64)> + Send + Sync>);

impl BandDepths {
    /// Depths that `read` returns: priority and queued requests of each band.
    pub fn new(read: impl Fn() -> Vec<(i32, u64)> + Send + Sync + 'static) -> Self {
        Self(Arc::new(read))
    }

    /// Priority and queued requests of each band, the highest priority first; empty without a queue.
    #[must_use]
    pub fn read(&self) -> Vec<(i32, u64)> {
        (self.0)()
    }
}

impl std::fmt::Debug for BandDepths {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.read()).finish()
    }
}

/// Collector of the queue capacity that pools share.
#[derive(Debug)]
pub struct QueuedBytesCollector(pub Arc<SharedCapacity>);

impl Collector for QueuedBytesCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        for (name, help, bytes) in [
            ("queue_room_bytes", "capacity for queued bodies that all discovered pools share", self.0.most()),
            ("queue_room_held_bytes", "queued bodies of all discovered pools", self.0.held()),
        ] {
            let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
            ConstGauge::new(bytes).encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
        }
        Ok(())
    }
}

/// Queue metrics of one pool.
#[derive(Debug)]
pub struct QueueMetrics {
    /// Requests that asked for admission.
    pub fates: Arc<Counts<QueueOutcome>>,
    requests: Gauge,
    bytes: Gauge,
    /// The part of both gauges that belongs to these queues; queues from before a reload have their own.
    held: [AtomicI64; 2],
    waits: Histogram,
    /// Requests with a deadline.
    pub deadlines: Arc<Counts<DeadlineOutcome>>,
}

impl QueueMetrics {
    /// Records the wait of a dequeued request.
    pub fn waited(&self, duration: Duration) {
        self.fates.count(QueueOutcome::Dispatched);
        self.waits.observe(duration.as_secs_f64());
    }

    /// Sets the current queue depth and queued bytes.
    pub fn holds(&self, requests: usize, bytes: u64) {
        let now = [i64::try_from(requests).unwrap_or(i64::MAX), i64::try_from(bytes).unwrap_or(i64::MAX)];
        for ((gauge, held), now) in [&self.requests, &self.bytes].into_iter().zip(&self.held).zip(now) {
            gauge.inc_by(now - held.swap(now, Relaxed));
        }
    }
}

/// Dropped queues hold nothing.
impl Drop for QueueMetrics {
    fn drop(&mut self) {
        self.holds(0, 0);
    }
}

#[cfg(test)]
mod tests {
    use crate::metrics::Metrics;
    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;

    #[test]
    fn what_waits_by_settings_of_before_a_reload_is_counted_with_the_rest() {
        let mut registry = Registry::default();
        let metrics = Metrics::register(&mut registry);
        let held = |name: &str| {
            let mut text = String::new();
            encode(&mut text, &registry).unwrap();
            let line = text.lines().find(|line| line.starts_with(name) && line.contains("\"pool\"")).unwrap();
            line.rsplit_once(' ').unwrap().1.parse::<i64>().unwrap()
        };
        let (old, new) = (metrics.queues("pool"), metrics.queues("pool"));
        for (before, after) in [((5, 50), (0, 0)), ((4, 40), (2, 7)), ((0, 0), (3, 9))] {
            old.holds(before.0, before.1);
            new.holds(after.0, after.1);
            let sum = (before.0 + after.0, before.1 + after.1);
            assert_eq!((held("queued_requests") as usize, held("queued_bytes") as u64), sum);
        }
        old.holds(2, 2);
        drop(old);
        assert_eq!((held("queued_requests"), held("queued_bytes")), (3, 9));
    }
}
