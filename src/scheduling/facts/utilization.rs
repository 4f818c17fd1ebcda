//! Whether an endpoint is full by its reported metrics: the thresholds of `utilization-detector`.
//!
//! The filter of that name and the detector of flow control have the same parameters. The filter checks one endpoint
//! at a time, flow control the whole pool.

use attache_pool::{EndpointMetrics, EndpointState};
use attache_types::clock::Timestamp;
use attache_types::declare::above;
use attache_types::parameters;
use std::ops::Bound::{Excluded, Included};
use std::time::Duration;

/// 5 waiting requests, the default of GIE and llm-d.
pub const DEFAULT_QUEUE_DEPTH_THRESHOLD: u32 = 5;
/// 80 % of the cache, the default of GIE and llm-d.
pub const DEFAULT_KV_CACHE_UTIL_THRESHOLD: f64 = 0.8;

parameters! {
    /// Limits of an endpoint's reported queue and KV cache.
    #[derive(Clone, Copy)]
    pub struct UtilizationLimits {
        /// Waiting requests at which the detector counts an endpoint as full. The filter drops the endpoint above that
        /// number.
        "queueDepthThreshold" => pub queue: u32 {
            default: DEFAULT_QUEUE_DEPTH_THRESHOLD; range: 1..; unit: "requests";
        },
        /// KV cache usage at which the detector counts an endpoint as full. The filter drops the endpoint above that
        /// share.
        "kvCacheUtilThreshold" => pub kv: f64 {
            default: DEFAULT_KV_CACHE_UTIL_THRESHOLD; range: (Excluded(0.0), Included(1.0)); unit: "share";
        },
        /// Age above which metrics are stale. The filter then drops the endpoint; the detector counts Attaché's own
        /// requests instead.
        "metricsStalenessThreshold" => pub fresh_for: Option<Duration> {
            absent: "`scrape.staleAfter` of the pool"; range: above(Duration::ZERO);
        },
        /// Share of the limits by which the filter lets an endpoint exceed them. The detector ignores it.
        "headroom" => headroom: f64 { default: 0.0; range: 0.0..; unit: "share"; },
        /// Whether the detector counts load beyond the limits of an endpoint too, as in GIE and llm-d.
        "compat" => pub compat: bool { default: false; },
    }
}

impl UtilizationLimits {
    /// Limits with these thresholds, without headroom; `compat` as in the field.
    #[must_use]
    pub fn at(queue: u32, kv: f64, compat: bool) -> Self {
        Self { queue, kv, headroom: 0.0, fresh_for: None, compat }
    }

    /// The metrics of an endpoint; `None` if they are stale.
    #[must_use]
    pub fn fresh<'a>(
        &self,
        state: &'a EndpointState,
        now: Timestamp,
        stale_after: Duration,
    ) -> Option<&'a EndpointMetrics> {
        let fresh_for = self.fresh_for.unwrap_or(stale_after);
        state.metrics().filter(|m| now.since(m.scraped_at) <= fresh_for)
    }

    /// Whether an endpoint with these metrics is below both limits, `headroom` included.
    #[must_use]
    pub fn has_capacity(&self, metrics: &EndpointMetrics) -> bool {
        let burst = 1.0 + self.headroom;
        f64::from(metrics.waiting) <= f64::from(self.queue) * burst
            && f64::from(metrics.kv_usage) <= (self.kv * burst).min(1.0)
    }
}
