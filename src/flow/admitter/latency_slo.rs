//! `latency-slo-admitter`: rejects a sheddable request that no endpoint can serve within the latency it asks for.
//!
//! It admits a request that has no latency target or a priority of 0 or more. It also admits all if the pool's speed is
//! unknown, or if an endpoint is idle, cold (less than 2 % of its cache in use) or predicted to meet the targets. When
//! not: no client sends latency targets. Source: GIE and llm-d.

use super::Admitter;
use crate::registry::PolicyDescriptor;
use attache_scheduling::facts::prediction::{Targets, predict};
use attache_scheduling::plugin::{NoParams, params, section};
use attache_scheduling::{Candidate, PickContext};
use attache_types::rng::PickRng;
use serde_json::Value;

/// Entry of this policy in the registry.
pub const PLUGIN: PolicyDescriptor<dyn Admitter> = PolicyDescriptor {
    name: "latency-slo-admitter",
    aliases: &[],
    summary: "Rejects sheddable requests that no endpoint can serve in the time they ask for.",
    source: "GIE and llm-d `latency-slo-admitter`",
    parameters: section::<NoParams>,
    build: |value: &Value| params::<NoParams>(value).map(|NoParams {}| Box::new(LatencySlo) as Box<dyn Admitter>),
};

/// 2 %, as in GIE and llm-d: an endpoint with less of its cache in use has just started.
const COLD: f32 = 0.02;

#[derive(Debug)]
struct LatencySlo;

impl Admitter for LatencySlo {
    fn admits(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], _: &mut PickRng) -> bool {
        let targets = Targets::of(&cx.request);
        // Every endpoint meets a target that is not set.
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
