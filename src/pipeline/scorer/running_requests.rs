//! `running-requests-size-scorer`: fewer running requests score higher, `(max − running) / (max − min)`; all equal
//! score 1.
//!
//! An endpoint without fresh metrics counts the requests that this replica has in flight there. When not: batches are
//! full everywhere; then use queues. Source: GIE `running-requests-size-scorer`.

use super::{fewer_is_better, no_metrics};
use attache_scheduling::plugin::{NoParams, Plugin, Scorer, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext, Signal};
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "running-requests-size-scorer",
    aliases: &[],
    kind: "scorer",
    summary: "Prefers endpoints with fewer running requests.",
    source: "GIE `running-requests-size-scorer`",
    parameters: section::<NoParams>,
    build: |value| params::<NoParams>(value).map(|NoParams {}| Plugin::Scorer(Arc::new(RunningRequests))),
};

#[derive(Debug)]
struct RunningRequests;

impl Scorer for RunningRequests {
    fn score(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f32]) {
        fewer_is_better(candidates, |c| c.running, out);
    }

    fn lacks(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>]) -> Option<Signal> {
        no_metrics(candidates)
    }
}
