//! `slo-load-detector`: whether some endpoint has capacity for one more request, by the profile of its deployment.
//!
//! ```text
//! saturation = least utilization + usual share
//!              utilization: Σ share of requests in flight
//!              share: part of an endpoint that a request takes, by the strategy
//! usual      = Σ utilization / Σ requests, of all endpoints
//! ```
//!
//! For the strategies of the `slo` family. AIBrix keeps their requests in a queue of its own; here they wait in flow
//! control until one fits under the limit of 1. The detector does not know which request is next, so it assumes one
//! of the usual share. While no request runs, one goes to each endpoint, and shows the usual share. An endpoint
//! without a known share looks empty, as in AIBrix, so each deployment needs its profile. When not: the strategy is
//! of another family. Source: AIBrix `slo`.

use super::{Detector, Gauge, StageSaturation, View, by_stage};
use crate::registry::PolicyDescriptor;
use attache_scheduling::plugin::{NoParams, params, section};
use serde_json::Value;

/// Entry of this policy in the registry.
pub const PLUGIN: PolicyDescriptor<dyn Detector> = PolicyDescriptor {
    name: "slo-load-detector",
    aliases: &[],
    summary: "Whether some endpoint has capacity for one more request, by the profile of its deployment.",
    source: "AIBrix's SLO queue",
    parameters: section::<NoParams>,
    build: |value: &Value| params::<NoParams>(value).map(|NoParams {}| Box::new(SloLoad) as Box<dyn Detector>),
};

/// The pool is full above 1, not at 1: a request that just fits is dispatched.
const ROUNDING: f64 = 1e-6;

#[derive(Debug)]
struct SloLoad;

impl Detector for SloLoad {
    fn gauge(&self, view: &View<'_>) -> Gauge {
        by_stage(view, |endpoints| {
            let ledgers = || endpoints.iter().map(|e| &e.live().ledger);
            let running: f64 = ledgers().map(|l| f64::from(l.in_flight())).sum();
            let used: f64 = ledgers().map(|l| l.utilization()).sum();
            if running == 0.0 {
                // The share of a request is unknown before one runs: each is assumed to take a whole endpoint.
                return StageSaturation {
                    requests: (0.0, 1.0 / endpoints.len().max(1) as f64),
                    ..StageSaturation::default()
                };
            }
            let usual = used / running;
            let least = ledgers().map(|l| l.utilization()).fold(f64::INFINITY, f64::min);
            let full = if usual > 0.0 { least + usual - ROUNDING } else { 0.0 };
            StageSaturation { requests: (full, usual / endpoints.len() as f64), ..StageSaturation::default() }
        })
    }
}
