//! `static-usage-limit-policy`: one ceiling for all bands.
//!
//! When not: important requests come in bursts; nothing is kept free for them. Source: GIE and llm-d.

use super::{Ceiling, Ceilings};
use crate::registry::PolicyDescriptor;
use attache_scheduling::plugin::{params, section};
use attache_types::parameters;
use serde_json::Value;

/// Entry of this policy in the registry.
pub const PLUGIN: PolicyDescriptor<dyn Ceiling> = PolicyDescriptor {
    name: "static-usage-limit-policy",
    aliases: &["static"],
    summary: "One ceiling for all bands.",
    source: "GIE and llm-d `static-usage-limit-policy`",
    parameters: section::<Params>,
    build: |value: &Value| params(value).map(|Params { threshold }| Box::new(Fixed(threshold)) as Box<dyn Ceiling>),
};

/// 1, as in GIE and llm-d: the pool is full at the limits of its detector.
pub const DEFAULT_THRESHOLD: f64 = 1.0;

parameters! {
    struct Params {
        /// Saturation below which requests are dequeued. At 1 the pool is full by the limits of its detector. 0: never.
        "threshold" => threshold: f64 { default: DEFAULT_THRESHOLD; range: 0.0..; unit: "share"; },
    }
}

/// One ceiling for all bands.
#[derive(Clone, Copy, Debug)]
pub struct Fixed(f64);

impl Default for Fixed {
    fn default() -> Self {
        Self(DEFAULT_THRESHOLD)
    }
}

impl Ceiling for Fixed {
    fn ceilings(&self, _: f64, priorities: &[i32]) -> Ceilings {
        priorities.iter().map(|_| self.0).collect()
    }
}
