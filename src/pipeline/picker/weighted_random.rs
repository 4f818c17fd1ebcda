//! `weighted-random-picker`: picks each candidate with a probability proportional to its sum, and the fallbacks
//! likewise among the rest.
//!
//! The draw is A-Res: the greatest `u^(1/sum)`, u uniform in (0, 1). A sum of 0 wins only if all are 0; then all have
//! the same probability.
//! When not: the difference between good and best matters; scores of 0.9 and 1 have nearly the same probability.
//! Source: GIE `weighted-random-picker`; Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006.

use super::{Params, push_greatest};
use attache_scheduling::plugin::{Picker, Plugin, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, Ranking};
use attache_types::rng::PickRng;
use rand::RngExt;
use std::cmp::Ordering;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "weighted-random-picker",
    aliases: &[],
    kind: "picker",
    summary: "Picks at random, with chances in proportion to the sums.",
    source: "GIE `weighted-random-picker`",
    parameters: section::<Params>,
    build: |value| params::<Params>(value).map(|p| Plugin::Picker(Arc::new(WeightedRandom { most: p.most() }))),
};

#[derive(Debug)]
struct WeightedRandom {
    most: usize,
}

/// `ln(u) / sum`, which is monotonic in `u^(1/sum)` and keeps small sums distinct under rounding; never NaN.
#[derive(PartialEq)]
struct DrawKey(f64);

impl Eq for DrawKey {}

impl PartialOrd for DrawKey {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for DrawKey {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl Picker for WeightedRandom {
    fn pick(&self, sums: &[f32], candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        ranking.because("drawn at random in proportion to the score");
        let key = |sum: &f32| {
            // In (0, 1]: the logarithm is finite.
            let u = 1.0 - rng.random::<f64>();
            // Candidates with a sum of 0 come last, in random order.
            if *sum > 0.0 { (1, DrawKey(u.ln() / f64::from(*sum))) } else { (0, DrawKey(u)) }
        };
        push_greatest(sums.iter().map(key), candidates, self.most, ranking, |_, _| None);
    }
}
