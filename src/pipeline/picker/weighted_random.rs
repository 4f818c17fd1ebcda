//! `weighted-random-picker`: each candidate with a chance in proportion to its sum; the fallbacks likewise among the rest.
//!
//! Drawn by A-Res: the greatest `u^(1/sum)`, u uniform in (0, 1). A sum of 0 wins only where all are 0, and then all have equal chances.
//! When not: the difference between good and best matters; scores of 0.9 and 1 have nearly the same chance.
//! Source: GIE `weighted-random-picker`; Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006.

use super::{Params, push_greatest};
use attache_scheduling::plugin::{Picker, Plugin, params};
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
    build: |value| params::<Params>(value)?.most().map(|most| Plugin::Picker(Arc::new(WeightedRandom { most }))),
};

#[derive(Debug)]
struct WeightedRandom {
    most: usize,
}

/// `ln(u) / sum`, which grows with `u^(1/sum)` and does not lose small sums to rounding; no NaN.
#[derive(PartialEq)]
struct Key(f64);

impl Eq for Key {}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Key {
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
            // Those without a sum stand behind everybody who has one, in any order.
            if *sum > 0.0 { (1, Key(u.ln() / f64::from(*sum))) } else { (0, Key(u)) }
        };
        push_greatest(sums.iter().map(key), candidates, self.most, ranking);
    }
}
