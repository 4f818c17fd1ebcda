//! `slo-headroom-tier-filter`: endpoints that would meet the request's latency targets, before those that would not.
//!
//! ```text
//! met = headroom to the first token >= 0 and headroom per token >= 0      (targets: `x-slo-ttft-ms`, `x-slo-tpot-ms`)
//! both tiers have members: those that meet the targets stay; with probability epsilonExploreNeg the others, so that
//!                          their predictions stay fresh
//! ```
//!
//! An endpoint without a prediction counts as late; if no endpoint has one, all stay. When not: requests have no
//! targets. Source: GIE and llm-d.

use super::{happens, keep_or_all};
use attache_scheduling::facts::prediction::{Targets, predict};
use attache_scheduling::plugin::{Filter, Plugin, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext, Reads, Signal};
use attache_types::parameters;
use attache_types::rng::PickRng;
use serde_json::Value;
use smallvec::SmallVec;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "slo-headroom-tier-filter",
    aliases: &[],
    kind: "filter",
    summary: "Keeps endpoints that are expected to meet the request's latency targets.",
    source: "GIE and llm-d `slo-headroom-tier-filter`",
    parameters: section::<SloHeadroomTier>,
    build: |value| params::<SloHeadroomTier>(value).map(|p| Plugin::Filter(Arc::new(p))),
};

parameters! {
    struct SloHeadroomTier {
        /// Probability that the endpoints that miss the targets stay instead, so that their predictions stay fresh.
        /// 0.01 is the default of GIE and llm-d.
        "epsilonExploreNeg" => epsilon: f64 { default: 0.01; range: 0.0..=1.0; unit: "probability"; },
        ignored {
            /// Without effect: there is one predictor.
            "latencyPredictionInfoProducerName": Value,
        }
    }
}

impl SloHeadroomTier {
    /// Keeps one tier. `met` says whether each endpoint meets the targets, `None` if unknown.
    fn tier(&self, met: &[Option<bool>], rng: &mut PickRng, keep: &mut [bool]) {
        if met.len() < 2 || met.iter().all(Option::is_none) {
            return;
        }
        let in_time = |i: usize| met.get(i).copied().flatten() == Some(true);
        let explore = happens(self.epsilon, rng);
        keep_or_all(keep, |i| in_time(i) != explore);
    }
}

impl Filter for SloHeadroomTier {
    fn keep(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, keep: &mut [bool]) {
        let targets = Targets::of(&cx.request);
        let met = |c: &Candidate<'_>| predict(cx, c).map(|p| targets.headroom(p).is_met());
        let met: SmallVec<[Option<bool>; 64]> = candidates.iter().map(met).collect();
        self.tier(&met, rng, keep);
    }

    fn lacks(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>]) -> Option<Signal> {
        candidates.iter().all(|c| predict(cx, c).is_none()).then_some(Signal::Latency)
    }

    fn reads(&self) -> Reads {
        Reads::PREFIX
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attache_types::rng::for_request;

    #[test]
    fn tiers() {
        // Rows of llm-d's `sloheadroomtier` tests, with and without exploration.
        for (name, epsilon, met, expected) in [
            ("both tiers", 0.0, vec![Some(true), Some(false), None], vec![true, false, false]),
            ("both tiers, exploring", 1.0, vec![Some(true), Some(false), None], vec![false, true, true]),
            ("all in time", 1.0, vec![Some(true), Some(true)], vec![true, true]),
            ("all late", 0.0, vec![Some(false), Some(false)], vec![true, true]),
            ("late and unknown", 0.0, vec![Some(false), None], vec![true, true]),
            ("nothing known", 1.0, vec![None, None], vec![true, true]),
            ("one only", 1.0, vec![Some(true)], vec![true]),
        ] {
            let mut keep = vec![true; met.len()];
            SloHeadroomTier { epsilon }.tier(&met, &mut for_request(1, 1), &mut keep);
            assert_eq!(keep, expected, "{name}");
        }
    }
}
