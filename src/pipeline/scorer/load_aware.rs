//! `load-aware-scorer`: short queues score up to 0.5, `0.5 * (1 − waiting / threshold)`; at `threshold` and beyond 0.
//!
//! The other half of the range is for what a cache hit can save. An endpoint without fresh metrics counts the
//! requests that this replica has in flight there. When not: queues stay far below the threshold, since then all
//! score the same. Source: llm-d `load-aware-scorer`.

use super::no_metrics;
use attache_scheduling::plugin::{Plugin, Scorer, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext, Signal};
use attache_types::parameters;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "load-aware-scorer",
    aliases: &[],
    kind: "scorer",
    summary: "Prefers endpoints whose queue is below a threshold.",
    source: "llm-d `load-aware-scorer`",
    parameters: section::<Params>,
    build: |value| {
        let Params { threshold } = params(value)?;
        Ok(Plugin::Scorer(Arc::new(LoadAware { threshold: threshold as f32 })))
    },
};

parameters! {
    struct Params {
        /// Waiting requests from which an endpoint scores 0. An endpoint without any scores 0.5. 128 is llm-d's
        /// default.
        "threshold" => threshold: u32 { default: 128; range: 1..; unit: "requests"; },
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
