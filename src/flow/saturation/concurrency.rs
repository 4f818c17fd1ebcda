//! `concurrency-detector`: requests or tokens in flight that Attaché has routed, relative to the capacity of all
//! endpoints.
//!
//! ```text
//! saturation = Σ load / Σ capacity; `hybrid`: the greater of both kinds
//! load       = requests: sent and not ended; tokens: prompt tokens sent to endpoints that have not begun to answer
//! ```
//!
//! Its `headroom` has no effect here: it is capacity for bursts on single endpoints, which the filter of the same
//! name uses. Requests of other pickers count if they share state (`sync`). When not: others use the same
//! model servers and share none, so that the detector does not see their requests. Source: GIE and llm-d.

use super::{Detector, Gauge, StageSaturation, View, by_stage, mean};
use crate::registry::PolicyDescriptor;
use attache_scheduling::facts::concurrency::ConcurrencyLimits;
use attache_scheduling::plugin::Inert;
use serde_json::Value;

/// Entry of this policy in the registry.
pub const PLUGIN: PolicyDescriptor<dyn Detector> = PolicyDescriptor {
    name: "concurrency-detector",
    aliases: &[],
    summary: "Requests or tokens in flight that Attaché has routed, relative to the capacity of all endpoints.",
    source: "GIE and llm-d `concurrency-detector`",
    build: |value: &Value| ConcurrencyLimits::new(value).map(|p| Box::new(p) as Box<dyn Detector>),
};

/// Parameters of detectors that change nothing.
pub(crate) const INERT: &[Inert] = &[Inert {
    plugins: &[PLUGIN.name, super::utilization::PLUGIN.name],
    keys: &["headroom"],
    when: |_| true,
    why: "only the filter of the same name has it, in a profile",
}];

impl Detector for ConcurrencyLimits {
    fn gauge(&self, view: &View<'_>) -> Gauge {
        by_stage(view, |endpoints| {
            let share = |most: Option<f64>, load: f64| {
                most.map_or((0.0, 0.0), |most| (load / most, 1.0 / (most * endpoints.len() as f64)))
            };
            StageSaturation {
                requests: share(self.requests, mean(endpoints, |e| f64::from(e.live().ledger.in_flight()))),
                tokens: share(self.tokens, mean(endpoints, |e| e.live().ledger.prefill_tokens() as f64)),
                request_tokens: f64::INFINITY,
            }
        })
    }
}
