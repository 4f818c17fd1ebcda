//! `concurrency-detector`: requests or tokens in flight that Attaché has routed, relative to the capacity of all
//! endpoints.
//!
//! ```text
//! saturation = mean over endpoints of min(1, load / capacity); `hybrid`: the greater of both kinds, by endpoint
//! load       = requests: sent and not ended; tokens: prompt tokens sent to endpoints that have not begun to answer
//! ```
//!
//! GIE and llm-d divide the sum of all load by that of all capacity, so that load beyond the capacity of one endpoint
//! makes the others look busy. `compat: true` restores that; `hybrid` is then the greater of both sums.
//! A strategy that prefers full endpoints exceeds their capacity while others are idle. The filter of the same name in
//! the profile prevents that.
//! Its `headroom` has no effect here: it is capacity for bursts on single endpoints, which the filter of the same
//! name uses. Requests of other pickers count if they share state (`sync`). When not: others use the same
//! model servers and share none, so that the detector does not see their requests. Source: GIE and llm-d.

use super::{Detector, Gauge, StageSaturation, View, by_stage, mean};
use crate::registry::PolicyDescriptor;
use attache_pool::EndpointState;
use attache_scheduling::facts::concurrency::{ConcurrencyLimits, ConcurrencyParams};
use attache_scheduling::plugin::{Inert, section};
use serde_json::Value;

/// Entry of this policy in the registry.
pub const PLUGIN: PolicyDescriptor<dyn Detector> = PolicyDescriptor {
    name: "concurrency-detector",
    aliases: &[],
    summary: "Requests or tokens in flight that Attaché has routed, relative to the capacity of all endpoints.",
    source: "GIE and llm-d `concurrency-detector`",
    parameters: section::<ConcurrencyParams>,
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
        let requests = |e: &EndpointState| share(f64::from(e.live().ledger.in_flight()), self.requests);
        let tokens = |e: &EndpointState| share(e.live().ledger.prefill_tokens() as f64, self.tokens);
        by_stage(view, |endpoints| {
            let one = |most: Option<f64>| most.map_or(0.0, |most| 1.0 / (most * endpoints.len() as f64));
            let (by_requests, by_tokens) = if self.compat {
                (mean(endpoints, true, requests), mean(endpoints, true, tokens))
            } else {
                // An endpoint that is full by either has no capacity.
                let full = mean(endpoints, false, |e| requests(e).max(tokens(e)));
                (full, full)
            };
            StageSaturation {
                requests: (by_requests, one(self.requests)),
                tokens: (by_tokens, one(self.tokens)),
                request_tokens: f64::INFINITY,
            }
        })
    }
}

/// The share of a capacity that a load takes; none without a capacity.
fn share(load: f64, most: Option<f64>) -> f64 {
    most.map_or(0.0, |most| load / most)
}
