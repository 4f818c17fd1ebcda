//! `probabilistic-admitter`: rejects sheddable requests at random, the more the higher the saturation.
//!
//! ```text
//! p = min(saturation^power · k, 1); saturation and `compat` as of `utilization-detector`
//! ```
//!
//! With the defaults it rejects 2 % at a saturation of 0.15, 73 % at 0.3, and all from 0.34 on. It admits requests with
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
use attache_scheduling::plugin::{ParamError, params};
use attache_scheduling::{Candidate, PickContext};
use attache_types::rng::PickRng;
use rand::RngExt;
use serde::Deserialize;
use serde_json::Value;

/// Entry of this policy in the registry.
pub const PLUGIN: PolicyDescriptor<dyn Admitter> = PolicyDescriptor {
    name: "probabilistic-admitter",
    aliases: &[],
    summary: "Rejects sheddable requests at random, the more the higher the saturation.",
    source: "llm-d `probabilistic-admitter`",
    build: |value: &Value| Probabilistic::new(value).map(|p| Box::new(p) as Box<dyn Admitter>),
};

/// 5, as in llm-d: little is shed at low load, and much above it.
pub(crate) const DEFAULT_POWER: f64 = 5.0;
/// 300, as in llm-d: everything sheddable is shed from a saturation of 0.34 on.
pub(crate) const DEFAULT_K: f64 = 300.0;

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Params {
    queue_depth_threshold: u32,
    kv_cache_util_threshold: f64,
    power: f64,
    k: f64,
    compat: bool,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            queue_depth_threshold: DEFAULT_QUEUE_DEPTH_THRESHOLD,
            kv_cache_util_threshold: DEFAULT_KV_CACHE_UTIL_THRESHOLD,
            power: DEFAULT_POWER,
            k: DEFAULT_K,
            compat: false,
        }
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
        let Params { queue_depth_threshold, kv_cache_util_threshold, power, k, compat } = params(parameters)?;
        for (name, value) in [("power", power), ("k", k)] {
            if !(value > 0.0 && value.is_finite()) {
                return Err(ParamError::value(name, value, "more than 0 is allowed"));
            }
        }
        let thresholds = UtilizationLimits::at(queue_depth_threshold, kv_cache_util_threshold, compat)?;
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
