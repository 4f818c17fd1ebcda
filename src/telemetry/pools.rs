//! The metrics of pools, endpoints and feeds, read off their stores when somebody asks.

use crate::clock::{Clock, Timestamp};
use crate::discovery::dns::DnsStats;
use crate::pool::health::{Availability, HealthPolicy};
use crate::pool::{EndpointState, SnapshotStore};
use crate::scrape::{ErrorReason, ScrapeStats};
use arc_swap::ArcSwap;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::{MetricType, TypedMetric};
use std::fmt::Error;
use std::sync::Arc;
use std::time::Duration;

/// What the collector reads of one pool.
#[derive(Clone, Debug)]
pub struct PoolView {
    /// Its name.
    pub name: Arc<str>,
    /// How it decides.
    pub strategy: String,
    /// Metrics older than this say nothing.
    pub stale_after: Duration,
    /// Its snapshots.
    pub store: Arc<SnapshotStore>,
    /// When endpoints are ejected.
    pub health: HealthPolicy,
    /// What the scraper counts.
    pub scrape: Arc<ScrapeStats>,
    /// What resolving names counts.
    pub dns: Arc<DnsStats>,
}

/// All pools, replaced on a reload.
#[derive(Debug)]
pub struct PoolViews {
    views: ArcSwap<Vec<PoolView>>,
    clock: Clock,
}

/// Whether an endpoint gets requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Standing {
    /// It does.
    Ready,
    /// It gets one, to see how it fares.
    HalfOpen,
    /// It came back a moment ago.
    SlowStart,
    /// It failed too often.
    Ejected,
    /// It gets nothing new.
    Draining,
}

impl Standing {
    const ALL: [Standing; 5] =
        [Standing::Ready, Standing::HalfOpen, Standing::SlowStart, Standing::Ejected, Standing::Draining];

    /// The standing of an endpoint.
    #[must_use]
    pub fn of(state: &EndpointState, health: &HealthPolicy, now: Timestamp) -> Self {
        if state.endpoint.spec.draining {
            return Standing::Draining;
        }
        match state.endpoint.health.availability(now, health) {
            Availability::Open => Standing::Ready,
            Availability::SlowStart(_) => Standing::SlowStart,
            Availability::HalfOpen => Standing::HalfOpen,
            Availability::Ejected => Standing::Ejected,
        }
    }

    fn label(self) -> &'static str {
        match self {
            Standing::Ready => "ready",
            Standing::HalfOpen => "half-open",
            Standing::SlowStart => "slow-start",
            Standing::Ejected => "ejected",
            Standing::Draining => "draining",
        }
    }
}

impl PoolViews {
    /// No pools yet.
    #[must_use]
    pub fn new(clock: Clock) -> Self {
        Self { views: ArcSwap::default(), clock }
    }

    /// Replaces the pools.
    pub fn set(&self, views: Vec<PoolView>) {
        self.views.store(Arc::new(views));
    }

    /// The pools of now.
    #[must_use]
    pub fn load(&self) -> Arc<Vec<PoolView>> {
        self.views.load_full()
    }

    /// Seconds since the endpoint's last page; `None` before the first.
    #[must_use]
    pub fn metrics_age(&self, state: &EndpointState) -> Option<f64> {
        state.metrics.as_ref().map(|m| self.clock.now().since(m.scraped_at).as_secs_f64())
    }
}

/// The collector that puts [`PoolViews`] into the registry.
#[derive(Debug)]
pub struct PoolCollector(pub Arc<PoolViews>);

type EndpointGauge = (&'static str, &'static str, fn(&PoolViews, &EndpointState) -> Option<f64>);

/// One gauge an endpoint: name, help, value.
const ENDPOINT_GAUGES: &[EndpointGauge] = &[
    ("endpoint_in_flight", "requests sent to the endpoint that have not ended", |_, s| {
        Some(f64::from(s.endpoint.ledger.in_flight()))
    }),
    ("endpoint_prefill_tokens", "prompt tokens of requests without a first byte yet", |_, s| {
        u32::try_from(s.endpoint.ledger.prefill_tokens()).ok().map(f64::from)
    }),
    ("endpoint_waiting", "waiting requests, as the server reports", |_, s| {
        s.metrics.as_ref().map(|m| f64::from(m.waiting))
    }),
    ("endpoint_running", "running requests, as the server reports", |_, s| {
        s.metrics.as_ref().map(|m| f64::from(m.running))
    }),
    ("endpoint_kv_usage", "KV cache in use, 0 to 1, as the server reports", |_, s| {
        s.metrics.as_ref().map(|m| f64::from(m.kv_usage))
    }),
    ("endpoint_metrics_age_seconds", "time since the server's last page", PoolViews::metrics_age),
];

type PoolCounter = (&'static str, &'static str, fn(&PoolView) -> u64);

/// One counter a pool: name, help, value.
const POOL_COUNTERS: &[PoolCounter] = &[
    ("scrape_pages", "metrics pages read", |p| p.scrape.pages()),
    ("scrape_bytes", "bytes of metrics pages read", |p| p.scrape.bytes()),
    ("scrape_restarts", "restarts of servers that were noticed", |p| p.scrape.restarts()),
    ("scrape_malformed_lines", "lines of metrics pages that could not be read", |p| p.scrape.malformed_lines()),
    ("scrape_unusable_samples", "samples that are NaN, infinite, negative or no number", |p| {
        p.scrape.unusable_samples()
    }),
    ("dns_lookups", "names resolved", |p| p.dns.lookups()),
    ("dns_failures", "names that did not resolve", |p| p.dns.failures()),
];

impl Collector for PoolCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let pools = self.0.load();
        self.standings(&pools, &mut encoder)?;
        for (name, help, value) in ENDPOINT_GAUGES {
            let mut gauges = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for pool in pools.iter() {
                for state in &pool.store.load().endpoints {
                    if let Some(value) = value(&self.0, state) {
                        let labels = [("pool", &*pool.name), ("endpoint", &*state.endpoint.authority)];
                        ConstGauge::new(value).encode(gauges.encode_family(&labels)?)?;
                    }
                }
            }
        }
        let routed_help = "requests sent to the endpoint";
        let mut routed = encoder.encode_descriptor("endpoint_requests", routed_help, None, MetricType::Counter)?;
        for pool in pools.iter() {
            for state in &pool.store.load().endpoints {
                let labels = [("pool", &*pool.name), ("endpoint", &*state.endpoint.authority)];
                ConstCounter::new(state.endpoint.ledger.routed()).encode(routed.encode_family(&labels)?)?;
            }
        }
        for (name, help, value) in POOL_COUNTERS {
            let mut counters = encoder.encode_descriptor(name, help, None, ConstCounter::<u64>::TYPE)?;
            for pool in pools.iter() {
                let labels = [("pool", &*pool.name)];
                ConstCounter::new(value(pool)).encode(counters.encode_family(&labels)?)?;
            }
        }
        let mut errors =
            encoder.encode_descriptor("scrape_errors", "scrapes that failed", None, MetricType::Counter)?;
        for pool in pools.iter() {
            for reason in ErrorReason::ALL {
                let labels = [("pool", &*pool.name), ("reason", reason.label())];
                ConstCounter::new(pool.scrape.errors(reason)).encode(errors.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

impl PoolCollector {
    fn standings(&self, pools: &[PoolView], encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
        let help = "endpoints of the pool, by whether they get requests";
        let mut gauges = encoder.encode_descriptor("pool_endpoints", help, None, MetricType::Gauge)?;
        for pool in pools {
            let (snapshot, now) = (pool.store.load(), self.0.clock.now());
            for standing in Standing::ALL {
                let count =
                    snapshot.endpoints.iter().filter(|s| Standing::of(s, &pool.health, now) == standing).count();
                let labels = [("pool", &*pool.name), ("state", standing.label())];
                let count = i64::try_from(count).unwrap_or(i64::MAX);
                ConstGauge::new(count).encode(gauges.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}
