//! `slo-load-detector`: whether some endpoint has room for one more request, by the profile of its deployment.
//!
//! ```text
//! saturation = least utilization + usual share       utilization: Σ share of what runs there; share: what the strategy says that a request takes
//! usual      = Σ utilization / Σ requests, of all endpoints
//! ```
//!
//! For the strategies of the `slo` family: their requests wait here where AIBrix's wait in a queue of their own, until one fits under the cap
//! of 1. Which request is next is not known here, so a usual one has to fit; where requests are alike that is the same. Where nothing runs, one
//! goes to each endpoint, and shows what is usual. A pool of which no share is known is never full once one runs, as there; nor
//! is one with an endpoint of which none is, which looks empty: each deployment needs its profile. When not: the strategy is of another family. Source: AIBrix `slo`.

use super::{Detector, Gauge, Stage, View, by_stage};
use crate::registry::Descriptor;
use attache_scheduling::plugin::{NoParams, params};
use serde_json::Value;

/// Registry entry.
pub const PLUGIN: Descriptor<dyn Detector> = Descriptor {
    name: "slo-load-detector",
    aliases: &[],
    summary: "Whether some endpoint has room for one more request, by the profile of its deployment.",
    source: "AIBrix's SLO queue",
    build: |value: &Value| params::<NoParams>(value).map(|NoParams {}| Box::new(SloLoad) as Box<dyn Detector>),
};

/// Full is above 1, not at it: a request that just fits is let through.
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
                // What a request takes is not known before one runs: each is thought to take a server.
                return Stage { requests: (0.0, 1.0 / endpoints.len().max(1) as f64), ..Stage::default() };
            }
            let usual = used / running;
            let least = ledgers().map(|l| l.utilization()).fold(f64::INFINITY, f64::min);
            let full = if usual > 0.0 { least + usual - ROUNDING } else { 0.0 };
            Stage { requests: (full, usual / endpoints.len() as f64), ..Stage::default() }
        })
    }
}
