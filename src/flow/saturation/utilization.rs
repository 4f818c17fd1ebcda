//! `utilization-detector`: the queues and the KV caches of the endpoints, as they are by now.
//!
//! ```text
//! saturation = mean over endpoints of max(queue / queueDepthThreshold, kv / kvCacheUtilThreshold)
//! queue      = what the page reports, and what came and went since, where it reports a queue;
//!              else, and without a fresh page, our own requests that wait for a first token
//! ```
//!
//! Not as there: a page that is too old (`metricsStalenessThreshold`, by default the pool's) counts as full there, so that a scrape
//! that is late stalls the pool; here the ledger takes its place. And a page is corrected by what was sent since, so that a burst
//! between two scrapes does not overshoot. When not: the servers' queues are to be kept short; by the time that one is reported it is
//! there. Source: GIE and llm-d.

use super::{Detector, Gauge, View, by_stage, mean};
use crate::config::units::parse_duration;
use crate::flow::registry::Descriptor;
use crate::pool::EndpointState;
use crate::scheduling::filter::utilization_detector::{DEFAULT_KV_CACHE_UTIL_THRESHOLD, DEFAULT_QUEUE_DEPTH_THRESHOLD};
use crate::scheduling::plugin::{ParamError, params};
use serde::Deserialize;
use serde_json::Value;
use std::time::Duration;

/// Registry entry.
pub const PLUGIN: Descriptor<dyn Detector> = Descriptor {
    name: "utilization-detector",
    aliases: &[],
    summary: "The endpoints' queues and KV caches, as they report them, and what was sent since.",
    source: "GIE and llm-d `utilization-detector`",
    build: |value: &Value| Utilization::new(value).map(|p| Box::new(p) as Box<dyn Detector>),
};

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub(in crate::flow) struct Params {
    pub(in crate::flow) queue_depth_threshold: u32,
    pub(in crate::flow) kv_cache_util_threshold: f64,
    metrics_staleness_threshold: Option<String>,
    // Room for bursts is the filter's of the same name.
    #[serde(rename = "headroom")]
    _headroom: Option<f64>,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            queue_depth_threshold: DEFAULT_QUEUE_DEPTH_THRESHOLD,
            kv_cache_util_threshold: DEFAULT_KV_CACHE_UTIL_THRESHOLD,
            metrics_staleness_threshold: None,
            _headroom: None,
        }
    }
}

/// How full endpoints are by their queues and caches.
#[derive(Clone, Copy, Debug)]
pub(in crate::flow) struct Utilization {
    queue: f64,
    kv: f64,
    fresh_for: Option<Duration>,
}

impl Utilization {
    fn new(parameters: &Value) -> Result<Self, ParamError> {
        let Params { queue_depth_threshold: queue, kv_cache_util_threshold: kv, metrics_staleness_threshold, .. } =
            params(parameters)?;
        let fresh_for = metrics_staleness_threshold.map(|text| match parse_duration(&text) {
            Ok(age) if age.is_zero() => Err("more than 0 is allowed".to_owned()),
            other => other,
        });
        let fresh_for = fresh_for.transpose().map_err(|e| ParamError(format!("`metricsStalenessThreshold`: {e}")))?;
        Ok(Self { fresh_for, ..Self::at(queue, kv)? })
    }

    /// With these thresholds.
    pub(in crate::flow) fn at(queue: u32, kv: f64) -> Result<Self, ParamError> {
        if queue == 0 {
            return Err(ParamError::value("queueDepthThreshold", queue, "at least 1 is needed"));
        }
        if !(kv > 0.0 && kv <= 1.0) {
            return Err(ParamError::value("kvCacheUtilThreshold", kv, "above 0 to 1 is allowed"));
        }
        Ok(Self { queue: f64::from(queue), kv, fresh_for: None })
    }

    /// How full one endpoint is.
    fn of(&self, state: &EndpointState, view: &View<'_>) -> f64 {
        let fresh = state.fresh(view.now, self.fresh_for.unwrap_or(view.stale_after));
        let live = state.live();
        let queue = match fresh.filter(|m| m.waiting > 0) {
            // The seats are taken: whoever came since waits, and whoever went let one in.
            Some(m) => live.ledger.requests(fresh).saturating_sub(m.running),
            None => live.speed.pending(),
        };
        let kv = fresh.map_or(0.0, |m| f64::from(m.kv_usage.max(0.0)));
        (f64::from(queue) / self.queue).max(kv / self.kv)
    }

    /// How full a pool is.
    pub(in crate::flow) fn saturation(&self, view: &View<'_>) -> Gauge {
        by_stage(view, |endpoints| Gauge {
            base: 0.0,
            requests: (mean(endpoints, |e| self.of(e, view)), 1.0 / (self.queue * endpoints.len() as f64)),
            tokens: (0.0, 0.0),
        })
    }
}

impl Detector for Utilization {
    fn gauge(&self, view: &View<'_>) -> Gauge {
        self.saturation(view)
    }
}
