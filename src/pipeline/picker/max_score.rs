//! `max-score-picker`: the greatest sum, ties at random. When not: many replicas decide by the same metrics and would
//! all pick the same endpoint; `weighted-random-picker` spreads them. Source: GIE `max-score-picker`.

use super::{Params, greatest, ordered, push_greatest};
use attache_scheduling::plugin::{Picker, Plugin, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, Ranking};
use attache_types::rng::PickRng;
use rand::RngExt;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "max-score-picker",
    aliases: &[],
    kind: "picker",
    summary: "Picks the greatest sum; ties at random.",
    source: "GIE `max-score-picker`",
    parameters: section::<Params>,
    build: |value| params::<Params>(value).map(|p| Plugin::Picker(Arc::new(MaxScore { most: p.most() }))),
};

/// The picker; the default of profiles without one.
#[derive(Debug)]
pub struct MaxScore {
    most: usize,
}

impl Default for MaxScore {
    fn default() -> Self {
        Self { most: usize::MAX }
    }
}

impl Picker for MaxScore {
    fn pick(&self, sums: &[f32], candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        ranking.because("greatest score");
        if self.most.min(ranking.wanted()) == 1 {
            if let Some((first, second)) = greatest(sums, rng) {
                candidates.get(first).into_iter().for_each(|first| ranking.push(&first.state.endpoint));
                let second = second.and_then(|(at, margin)| Some((candidates.get(at)?, margin)));
                second.into_iter().for_each(|(c, margin)| ranking.precedes(&c.state.endpoint, Some(f64::from(margin))));
            }
            return;
        }
        // The random low half breaks ties.
        let key = |sum: &f32| (u64::from(ordered(*sum)) << 32) | u64::from(rng.random::<u32>());
        let sum = |key: u64| f64::from(f32::from_bits((key >> 32) as u32));
        let margin = |first: &u64, second: &u64| Some(sum(*first) - sum(*second));
        push_greatest(sums.iter().map(key), candidates, self.most, ranking, margin);
    }
}
