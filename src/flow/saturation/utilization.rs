//! `utilization-detector`: queue depth and KV cache usage of the endpoints, as scraped and corrected by requests since.
//!
//! ```text
//! saturation = mean over endpoints of min(1, max(queue / queueDepthThreshold, kv / kvCacheUtilThreshold))
//! queue      = the scraped queue depth, plus requests that came and minus those that ended since the scrape;
//!              without one or with stale metrics: this process's requests without a first token, where
//!              responses that do not stream count until their prefill is expected to be done
//! ```
//!
//! Three differences from GIE and llm-d. There, an endpoint counts beyond 1 too: one of eight with a long queue makes the
//! pool saturated while seven are idle. `compat: true` restores that. There, an endpoint with metrics older than `metricsStalenessThreshold` counts as
//! full, so a late scrape stalls the pool; here the ledger replaces them (the threshold is the pool's by default). And
//! scraped metrics are corrected by the requests since, so that a burst between two scrapes does not overshoot. Its
//! `headroom` is that of the filter of the same name. When not: the queues of the model servers should stay short; a
//! queue is reported only when it exists. Source: GIE and llm-d.

use super::{Detector, Gauge, StageSaturation, View, by_stage, mean};
use crate::registry::PolicyDescriptor;
use attache_pool::EndpointState;
use attache_scheduling::facts::utilization::UtilizationLimits;
use attache_scheduling::plugin::{params, section};
use serde_json::Value;
use std::time::Duration;

/// Entry of this policy in the registry.
pub const PLUGIN: PolicyDescriptor<dyn Detector> = PolicyDescriptor {
    name: "utilization-detector",
    aliases: &[],
    summary: "Queue depth and KV cache usage of the endpoints, as scraped and corrected by requests since.",
    source: "GIE and llm-d `utilization-detector`",
    parameters: section::<UtilizationLimits>,
    build: |value: &Value| params(value).map(|p| Box::new(Utilization(p)) as Box<dyn Detector>),
};

/// Saturation by queue depth and KV cache usage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Utilization(pub(crate) UtilizationLimits);

impl Utilization {
    /// The saturation of one endpoint.
    fn of(&self, state: &EndpointState, view: &View<'_>) -> f64 {
        let fresh = state.fresh(view.now, self.0.fresh_for.unwrap_or(view.stale_after));
        let live = state.live();
        let queue = match fresh.filter(|m| m.waiting > 0) {
            // The batch is full: a request that came since the scrape waits, and one that ended let another in.
            Some(m) => f64::from(live.ledger.requests(fresh).saturating_sub(m.running)),
            None => live.speed.awaited(view.now),
        };
        let kv = fresh.map_or(0.0, |m| f64::from(m.kv_usage.max(0.0)));
        (queue / f64::from(self.0.queue)).max(kv / self.0.kv)
    }

    /// The saturation of the pool.
    pub(crate) fn saturation(&self, view: &View<'_>) -> Gauge {
        by_stage(view, |endpoints| StageSaturation {
            requests: (
                mean(endpoints, self.0.compat, |e| self.of(e, view)),
                1.0 / (f64::from(self.0.queue) * endpoints.len() as f64),
            ),
            ..StageSaturation::default()
        })
    }
}

impl Detector for Utilization {
    fn gauge(&self, view: &View<'_>) -> Gauge {
        self.saturation(view)
    }

    fn changes_in(&self, view: &View<'_>) -> Option<Duration> {
        view.computes_in()
    }
}
