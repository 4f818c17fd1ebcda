//! `random-picker`: any candidate that the filters kept, with the same probability; sums are ignored. When not: load
//! differs between endpoints. Source: GIE `random-picker`.

use super::{Params, push_greatest};
use attache_scheduling::plugin::{Picker, Plugin, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, Ranking};
use attache_types::rng::PickRng;
use rand::RngExt;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "random-picker",
    aliases: &[],
    kind: "picker",
    summary: "Picks at random among what the filters left.",
    source: "GIE `random-picker`",
    parameters: section::<Params>,
    build: |value| params::<Params>(value).map(|p| Plugin::Picker(Arc::new(Random { most: p.most() }))),
};

#[derive(Debug)]
struct Random {
    most: usize,
}

impl Picker for Random {
    fn pick(&self, sums: &[f32], candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        ranking.because("drawn at random");
        push_greatest(sums.iter().map(|_| rng.random::<u64>()), candidates, self.most, ranking, |_, _| None);
    }
}
