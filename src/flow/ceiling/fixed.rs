//! `static-usage-limit-policy`: one ceiling for all bands.
//!
//! When not: important requests come in bursts; nothing is kept free for them. Source: GIE and llm-d.

use super::{Ceiling, Ceilings};
use crate::registry::PolicyDescriptor;
use attache_scheduling::plugin::{ParamError, params};
use serde::Deserialize;
use serde_json::Value;

/// Entry of this policy in the registry.
pub const PLUGIN: PolicyDescriptor<dyn Ceiling> = PolicyDescriptor {
    name: "static-usage-limit-policy",
    aliases: &["static"],
    summary: "One ceiling for all bands.",
    source: "GIE and llm-d `static-usage-limit-policy`",
    build: |value: &Value| {
        let Params { threshold } = params(value)?;
        if !(0.0..f64::INFINITY).contains(&threshold) {
            return Err(ParamError::value("threshold", threshold, "0 or more is allowed"));
        }
        Ok(Box::new(Fixed(threshold)) as Box<dyn Ceiling>)
    },
};

/// 1, as in GIE and llm-d: the pool is full at the limits of its detector.
pub const DEFAULT_THRESHOLD: f64 = 1.0;

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Params {
    threshold: f64,
}

impl Default for Params {
    fn default() -> Self {
        Self { threshold: DEFAULT_THRESHOLD }
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
