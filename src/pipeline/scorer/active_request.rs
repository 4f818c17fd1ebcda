//! `active-request-scorer`: endpoints with fewer in-flight requests of this Attaché replica score higher.
//!
//! ```text
//! active <= idleThreshold: 1
//! else:                    (max − active) / max * maxBusyScore
//! ```
//!
//! It reacts at once; scraped metrics lag by a scrape interval. When not: other clients send to the same servers,
//! since their requests are not counted. Source: llm-d `active-request-scorer`.

use attache_scheduling::plugin::{Inert, Plugin, Scorer, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext};
use attache_types::parameters;
use serde_json::Value;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "active-request-scorer",
    aliases: &[],
    kind: "scorer",
    summary: "Prefers endpoints on which this replica has fewer requests in flight.",
    source: "llm-d `active-request-scorer`",
    parameters: section::<ActiveRequest>,
    build: |value| params::<ActiveRequest>(value).map(|p| Plugin::Scorer(Arc::new(p))),
};

/// Parameters that change nothing.
pub(crate) const INERT: &[Inert] = &[Inert {
    plugins: &[PLUGIN.name],
    keys: &["requestTimeout"],
    when: |_| true,
    why: "a request counts until it ends",
}];

parameters! {
    // The defaults are llm-d's.
    struct ActiveRequest {
        /// Requests in flight up to which an endpoint is idle and scores 1.
        "idleThreshold" => idle: u32 { default: 0; unit: "requests"; },
        /// Upper bound of the scores of endpoints that are not idle.
        "maxBusyScore" => busy: f32 { default: 1.0; range: 0.0..=1.0; unit: "score"; },
        ignored {
            /// Without effect: there is one ledger, which counts every request until it ends.
            "inFlightLoadProducerName": Value, "requestTimeout": Value,
        }
    }
}

impl Scorer for ActiveRequest {
    fn score(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f32]) {
        for (score, candidate) in out.iter_mut().zip(candidates) {
            *score = candidate.state.live().ledger.in_flight() as f32;
        }
        let most = out.iter().copied().fold(0.0, f32::max);
        for score in out {
            *score = if *score <= self.idle as f32 { 1.0 } else { (most - *score) / most * self.busy };
        }
    }
}
