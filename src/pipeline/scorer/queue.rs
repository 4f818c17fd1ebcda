//! `queue-scorer`: fewer waiting requests score higher, `(max − waiting) / (max − min)`; all equal score 1.
//!
//! An endpoint without fresh metrics counts the requests that this replica has in flight there. When not: queues are
//! empty because the engines batch everything; then use running requests. Source: GIE `queue-scorer`.

use super::{fewer_is_better, no_metrics};
use attache_scheduling::plugin::{NoParams, Plugin, Scorer, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext, Signal};
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "queue-scorer",
    aliases: &[],
    kind: "scorer",
    summary: "Prefers endpoints with fewer waiting requests.",
    source: "GIE `queue-scorer`",
    parameters: section::<NoParams>,
    build: |value| params::<NoParams>(value).map(|NoParams {}| Plugin::Scorer(Arc::new(Queue))),
};

#[derive(Debug)]
struct Queue;

impl Scorer for Queue {
    fn score(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f32]) {
        fewer_is_better(candidates, |c| c.waiting, out);
    }

    fn lacks(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>]) -> Option<Signal> {
        no_metrics(candidates)
    }
}
