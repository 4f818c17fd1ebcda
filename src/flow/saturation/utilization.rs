//! `utilization-detector`: the queues and the KV caches of the endpoints, as they are by now.
//!
//! ```text
//! saturation = mean over endpoints of max(queue / queueDepthThreshold, kv / kvCacheUtilThreshold)
//! queue      = what the page reports, and what came and went since, where it reports a queue;
//!              else, and without a fresh page, our own requests that wait for a first token; of those that are answered as a whole as
//!              many as are thought not to be computed by now
//! ```
//!
//! Not as there: a page that is too old (`metricsStalenessThreshold`, by default the pool's) counts as full there, so that a scrape
//! that is late stalls the pool; here the ledger takes its place. And a page is corrected by what was sent since, so that a burst
//! between two scrapes does not overshoot. Its `headroom` is the filter's of the same
//! name. When not: the servers' queues are to be kept short; by the time that one is reported it is
//! there. Source: GIE and llm-d.

use super::{Detector, Gauge, Stage, View, by_stage, mean};
use crate::registry::Descriptor;
use attache_pool::EndpointState;
use attache_scheduling::filter::utilization_detector::UtilizationDetector;
use serde_json::Value;
use std::time::Duration;

/// Registry entry.
pub const PLUGIN: Descriptor<dyn Detector> = Descriptor {
    name: "utilization-detector",
    aliases: &[],
    summary: "The endpoints' queues and KV caches, as they report them, and what was sent since.",
    source: "GIE and llm-d `utilization-detector`",
    build: |value: &Value| UtilizationDetector::new(value).map(|p| Box::new(Utilization(p)) as Box<dyn Detector>),
};

/// How full endpoints are by their queues and caches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Utilization(pub(crate) UtilizationDetector);

impl Utilization {
    /// How full one endpoint is.
    fn of(&self, state: &EndpointState, view: &View<'_>) -> f64 {
        let fresh = state.fresh(view.now, self.0.fresh_for.unwrap_or(view.stale_after));
        let live = state.live();
        let queue = match fresh.filter(|m| m.waiting > 0) {
            // The seats are taken: whoever came since waits, and whoever went let one in.
            Some(m) => f64::from(live.ledger.requests(fresh).saturating_sub(m.running)),
            None => live.speed.awaited(view.now),
        };
        let kv = fresh.map_or(0.0, |m| f64::from(m.kv_usage.max(0.0)));
        (queue / self.0.queue).max(kv / self.0.kv)
    }

    /// How full a pool is.
    pub(crate) fn saturation(&self, view: &View<'_>) -> Gauge {
        by_stage(view, |endpoints| Stage {
            requests: (mean(endpoints, |e| self.of(e, view)), 1.0 / (self.0.queue * endpoints.len() as f64)),
            ..Stage::default()
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
