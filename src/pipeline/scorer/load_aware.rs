//! `load-aware-scorer`: short queues score up to 0.5, `0.5 * (1 − waiting / threshold)`; at `threshold` and beyond 0.
//!
//! The other half of the range is for what a cache hit can save. An endpoint without fresh metrics counts the
//! requests that this replica has in flight there. When not: queues stay far below the threshold, since then all
//! score the same. Source: llm-d `load-aware-scorer`.

use super::no_metrics;
use attache_scheduling::plugin::{ParamError, Plugin, Scorer, params};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext, Signal};
use serde::Deserialize;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "load-aware-scorer",
    aliases: &[],
    kind: "scorer",
    summary: "Prefers endpoints whose queue is below a threshold.",
    source: "llm-d `load-aware-scorer`",
    build: |value| params::<Params>(value)?.build().map(|p| Plugin::Scorer(Arc::new(p))),
};

/// 128 waiting requests, llm-d's default.
pub const DEFAULT_THRESHOLD: u32 = 128;

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Params {
    threshold: u32,
}

impl Default for Params {
    fn default() -> Self {
        Self { threshold: DEFAULT_THRESHOLD }
    }
}

impl Params {
    fn build(self) -> Result<LoadAware, ParamError> {
        if self.threshold == 0 {
            return Err(ParamError::value("threshold", self.threshold, "at least 1 is needed"));
        }
        Ok(LoadAware { threshold: self.threshold as f32 })
    }
}

#[derive(Debug)]
struct LoadAware {
    threshold: f32,
}

impl Scorer for LoadAware {
    fn score(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f32]) {
        for (score, candidate) in out.iter_mut().zip(candidates) {
            *score = 0.5 * (1.0 - (candidate.waiting as f32 / self.threshold).min(1.0));
        }
    }

    fn lacks(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>]) -> Option<Signal> {
        no_metrics(candidates)
    }
}
