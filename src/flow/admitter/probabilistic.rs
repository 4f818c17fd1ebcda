//! `probabilistic-admitter`: rejects sheddable requests at random, the more the higher the saturation.
//!
//! ```text
//! p = min(saturation^power · k, 1); saturation and `compat` as of `utilization-detector`
//! ```
//!
//! With the defaults it rejects 2 % at a saturation of 0.15, 73 % at 0.3, and all from 0.32 on. It admits requests with
//! a priority of 0 or more, and all requests to a pool without endpoints. When not: sheddable requests should wait
//! instead; queues do that. Source: llm-d.

use super::Admitter;
use crate::item::{Load, Need, Way};
use crate::registry::PolicyDescriptor;
use crate::saturation::View;
use crate::saturation::utilization::Utilization;
use attache_pool::health::HealthPolicy;
use attache_scheduling::facts::utilization::{
    DEFAULT_KV_CACHE_UTIL_THRESHOLD, DEFAULT_QUEUE_DEPTH_THRESHOLD, UtilizationLimits,
};
use attache_scheduling::plugin::{ParamError, params, section};
use attache_scheduling::{Candidate, PickContext};
use attache_types::declare::above;
use attache_types::parameters;
use attache_types::rng::PickRng;
use rand::RngExt;
use serde_json::Value;
use std::ops::Bound::{Excluded, Included};

/// Entry of this policy in the registry.
pub const PLUGIN: PolicyDescriptor<dyn Admitter> = PolicyDescriptor {
    name: "probabilistic-admitter",
    aliases: &[],
    summary: "Rejects sheddable requests at random, the more the higher the saturation.",
    source: "llm-d `probabilistic-admitter`",
    parameters: section::<Params>,
    build: |value: &Value| Probabilistic::new(value).map(|p| Box::new(p) as Box<dyn Admitter>),
};

parameters! {
    struct Params {
        /// Waiting requests at which an endpoint is full.
        "queueDepthThreshold" => queue: u32 { default: DEFAULT_QUEUE_DEPTH_THRESHOLD; range: 1..; unit: "requests"; },
        /// KV cache usage at which an endpoint is full.
        "kvCacheUtilThreshold" => kv: f64 {
            default: DEFAULT_KV_CACHE_UTIL_THRESHOLD; range: (Excluded(0.0), Included(1.0)); unit: "share";
        },
        /// Exponent of the saturation. 5 is llm-d's default: few requests are rejected at low saturation, and many
        /// above it.
        "power" => power: f64 { default: 5.0; range: above(0.0); unit: "exponent"; },
        /// Factor of the power. With llm-d's default of 300, all sheddable requests are rejected from a saturation of
        /// 0.32 on.
        "k" => k: f64 { default: 300.0; range: above(0.0); unit: "factor"; },
        /// Whether load beyond the limits of an endpoint counts too, as in llm-d.
        "compat" => compat: bool { default: false; },
    }
}

#[derive(Debug)]
struct Probabilistic {
    utilization: Utilization,
    power: f64,
    k: f64,
}

impl Probabilistic {
    fn new(parameters: &Value) -> Result<Self, ParamError> {
        let Params { queue, kv, power, k, compat } = params(parameters)?;
        let thresholds = UtilizationLimits::at(queue, kv, compat);
        Ok(Self { utilization: Utilization(thresholds), power, k })
    }

    /// Probability that a sheddable request is rejected, 0 to 1.
    fn shed(&self, saturation: f64) -> f64 {
        (saturation.powf(self.power) * self.k).min(1.0)
    }
}

impl Admitter for Probabilistic {
    fn admits(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng) -> bool {
        if cx.request.priority >= 0 || candidates.is_empty() {
            return true;
        }
        // Under any health policy that ejects, an endpoint that is ejected now stays so for this decision.
        let health = HealthPolicy::default();
        let view = View { pool: cx.snapshot, health: &health, split: None, stale_after: cx.stale_after, now: cx.now };
        // With prefill workers, the fuller of both kinds counts.
        let need = Need { way: Way::Pair, ..Need::default() };
        rng.random::<f64>() >= self.shed(self.utilization.saturation(&view).saturation(Load::default(), need))
    }
}
