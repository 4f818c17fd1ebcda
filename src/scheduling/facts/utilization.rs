//! Whether an endpoint is full by its reported metrics: the thresholds of `utilization-detector`.
//!
//! The filter of that name and the detector of flow control have the same parameters. The filter checks one endpoint
//! at a time, flow control the whole pool.

use crate::plugin::{ParamError, params};
use attache_pool::{EndpointMetrics, EndpointState};
use attache_types::clock::Timestamp;
use attache_types::units::parse_duration;
use serde::Deserialize;
use serde_json::Value;
use std::time::Duration;

/// 5 waiting requests, the default of GIE and llm-d.
pub const DEFAULT_QUEUE_DEPTH_THRESHOLD: u32 = 5;
/// 80 % of the cache, the default of GIE and llm-d.
pub const DEFAULT_KV_CACHE_UTIL_THRESHOLD: f64 = 0.8;

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Params {
    queue_depth_threshold: u32,
    kv_cache_util_threshold: f64,
    metrics_staleness_threshold: Option<String>,
    headroom: f64,
    compat: bool,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            queue_depth_threshold: DEFAULT_QUEUE_DEPTH_THRESHOLD,
            kv_cache_util_threshold: DEFAULT_KV_CACHE_UTIL_THRESHOLD,
            metrics_staleness_threshold: None,
            headroom: 0.0,
            compat: false,
        }
    }
}

/// Limits of an endpoint's reported queue and KV cache.
#[derive(Clone, Copy, Debug)]
pub struct UtilizationLimits {
    /// Most waiting requests on one endpoint.
    pub queue: f64,
    /// Highest KV cache usage, 0..=1.
    pub kv: f64,
    /// Age up to which metrics are fresh; `None` for the pool's own limit.
    pub fresh_for: Option<Duration>,
    /// The detector counts load beyond the limits of an endpoint too.
    pub compat: bool,
    headroom: f64,
}

impl UtilizationLimits {
    /// Limits from the plugin's parameters.
    ///
    /// # Errors
    /// A threshold is out of range.
    pub fn new(parameters: &Value) -> Result<Self, ParamError> {
        let Params {
            queue_depth_threshold: queue,
            kv_cache_util_threshold: kv,
            metrics_staleness_threshold: age,
            headroom,
            compat,
        } = params(parameters)?;
        if !(0.0..f64::INFINITY).contains(&headroom) {
            return Err(ParamError::value("headroom", headroom, "0 or more is allowed"));
        }
        let fresh_for = age.map(|text| match parse_duration(&text) {
            Ok(age) if age.is_zero() => Err("more than 0 is allowed".to_owned()),
            other => other,
        });
        let fresh_for = fresh_for
            .transpose()
            .map_err(|e| ParamError::new(e).named("metricsStalenessThreshold").under("metricsStalenessThreshold"))?;
        Ok(Self { headroom, fresh_for, ..Self::at(queue, kv, compat)? })
    }

    /// Limits with these thresholds, without headroom; `compat` as in the field.
    ///
    /// # Errors
    /// A threshold is out of range.
    pub fn at(queue: u32, kv: f64, compat: bool) -> Result<Self, ParamError> {
        if queue == 0 {
            return Err(ParamError::value("queueDepthThreshold", queue, "at least 1 is needed"));
        }
        if !(kv > 0.0 && kv <= 1.0) {
            return Err(ParamError::value("kvCacheUtilThreshold", kv, "above 0 to 1 is allowed"));
        }
        Ok(Self { queue: f64::from(queue), kv, headroom: 0.0, fresh_for: None, compat })
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
        f64::from(metrics.waiting) <= self.queue * burst && f64::from(metrics.kv_usage) <= (self.kv * burst).min(1.0)
    }
}
