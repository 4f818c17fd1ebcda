//! `latency-slo-admitter`: a sheddable request that no endpoint can serve in the time it asks for is turned away.
//!
//! It stays where it asks for nothing, its priority is 0 or more, nothing is known of the pool's speed, or some endpoint is idle, cold (less than
//! 2 % of its cache in use) or foretold to meet what is asked. When not: no client names times. Source: GIE and llm-d.

use super::Admitter;
use crate::registry::Descriptor;
use attache_scheduling::facts::prediction::{Targets, predict};
use attache_scheduling::plugin::{NoParams, params};
use attache_scheduling::{Candidate, PickContext};
use attache_types::rng::PickRng;
use serde_json::Value;

/// Registry entry.
pub const PLUGIN: Descriptor<dyn Admitter> = Descriptor {
    name: "latency-slo-admitter",
    aliases: &[],
    summary: "Turns sheddable requests away that no endpoint can serve in the time they ask for.",
    source: "GIE and llm-d `latency-slo-admitter`",
    build: |value: &Value| params::<NoParams>(value).map(|NoParams {}| Box::new(LatencySlo) as Box<dyn Admitter>),
};

/// 2 %, as both have it: an endpoint that holds so little has just begun.
const COLD: f32 = 0.02;

#[derive(Debug)]
struct LatencySlo;

impl Admitter for LatencySlo {
    fn admits(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], _: &mut PickRng) -> bool {
        let targets = Targets::of(&cx.request);
        // What is not asked for is met by everybody.
        let asked = |ms: f64| if ms > 0.0 { ms } else { f64::INFINITY };
        let targets = Targets { ttft_ms: asked(targets.ttft_ms), tpot_ms: asked(targets.tpot_ms) };
        if cx.request.priority >= 0 || (targets.ttft_ms.is_infinite() && targets.tpot_ms.is_infinite()) {
            return true;
        }
        candidates.iter().any(|candidate| {
            let idle = candidate.requests == 0;
            let cold = candidate.is_fresh && candidate.kv_usage < COLD;
            idle || cold || predict(cx, candidate).is_none_or(|p| targets.headroom(p).is_met())
        })
    }
}
