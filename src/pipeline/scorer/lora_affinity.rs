//! `lora-affinity-scorer`: 1 if the adapter is active, 0.8 if it can be loaded, 0.6 if it already waits, else 0.
//!
//! It can be loaded if fewer adapters are active or waiting than the server holds at once. An adapter that is both
//! counts once. When not: adapters are pinned to endpoints by labels. Source: GIE `lora-affinity-scorer` (order of the
//! checks: active, loadable, waiting), which counts such an adapter twice.

use super::no_metrics;
use attache_scheduling::plugin::{NoParams, Plugin, Scorer, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext, Signal};
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "lora-affinity-scorer",
    aliases: &[],
    kind: "scorer",
    summary: "Prefers endpoints where the request's LoRA adapter is loaded or can be.",
    source: "GIE `lora-affinity-scorer`",
    parameters: section::<NoParams>,
    build: |value| params::<NoParams>(value).map(|NoParams {}| Plugin::Scorer(Arc::new(LoraAffinity))),
};

#[derive(Debug)]
struct LoraAffinity;

impl Scorer for LoraAffinity {
    fn score(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f32]) {
        for (score, candidate) in out.iter_mut().zip(candidates) {
            let Some(lora) = candidate.lora() else {
                *score = 0.0;
                continue;
            };
            let holds = |names: &[std::sync::Arc<str>]| names.iter().any(|n| **n == *cx.request.model);
            *score = if holds(&lora.running) {
                1.0
            } else if lora.used_slots() < lora.max as usize {
                0.8
            } else if holds(&lora.waiting) {
                0.6
            } else {
                0.0
            };
        }
    }

    fn lacks(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>]) -> Option<Signal> {
        no_metrics(candidates)
    }
}
