//! `lmetric-scorer`: the prompt tokens that an endpoint would have to compute, times the requests that it would then
//! have.
//!
//! ```text
//! cost  = (prompt − cached) · (requests in flight + 1)
//! score = (max − cost) / (max − min); 1 for all when all costs are equal
//! ```
//!
//! Tokens and requests are those that this replica knows, from the prefix index and the ledger. When not: several
//! replicas share the servers and do not see each other's requests. Source: llm-d `lmetric-scorer`.

use attache_scheduling::plugin::{Plugin, Scorer, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext, Reads, Signal};
use attache_types::parameters;
use serde_json::Value;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "lmetric-scorer",
    aliases: &[],
    kind: "scorer",
    summary: "Prefers endpoints with the least product of uncached prompt tokens and requests in flight.",
    source: "llm-d `lmetric-scorer`",
    parameters: section::<Params>,
    build: |value| params::<Params>(value).map(|_| Plugin::Scorer(Arc::new(LMetric))),
};

parameters! {
    struct Params {
        ignored {
            /// Without effect: there is one index and one ledger.
            "prefixMatchInfoProducerName": Value, "inFlightLoadProducerName": Value,
        }
    }
}

#[derive(Debug)]
struct LMetric;

impl Scorer for LMetric {
    fn score(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f32]) {
        let (mut min, mut max) = (f32::INFINITY, 0.0f32);
        for (score, candidate) in out.iter_mut().zip(candidates) {
            let uncached = cx.request.prompt_tokens.saturating_sub(candidate.cached.any) as f32;
            let requests = candidate.state.live().ledger.in_flight() as f32 + 1.0;
            *score = uncached * requests;
            (min, max) = (min.min(*score), max.max(*score));
        }
        if max > min {
            out.iter_mut().for_each(|score| *score = (max - *score) / (max - min));
        } else {
            out.fill(1.0);
        }
    }

    fn lacks(&self, cx: &PickContext<'_>, _: &[Candidate<'_>]) -> Option<Signal> {
        cx.prefix.is_none().then_some(Signal::Prefix)
    }

    fn reads(&self) -> Reads {
        Reads::PREFIX
    }
}
