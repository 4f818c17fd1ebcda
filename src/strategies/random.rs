//! `random`: every candidate with the same probability.
//!
//! When not: load or caches matter. It is a baseline for other strategies.
//! Source: AIBrix `random`, GIE `random-picker`.

use attache_scheduling::plugin::{NoParams, params, section};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::{Candidate, PickContext, Ranking, Strategy};
use attache_types::rng::PickRng;
use rand::seq::index;

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "random",
    summary: "Picks any ready endpoint with equal probability.",
    source: "AIBrix `random`, GIE `random-picker`",
    parameters: section::<NoParams>,
    build: |value, _| params::<NoParams>(value).map(|NoParams {}| Box::new(Random) as Box<dyn Strategy>),
};

#[derive(Debug)]
struct Random;

impl Strategy for Random {
    fn rank(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        ranking.because("random");
        let wanted = ranking.wanted().min(candidates.len());
        for i in index::sample(rng, candidates.len(), wanted) {
            if let Some(candidate) = candidates.get(i) {
                ranking.push(&candidate.state.endpoint);
            }
        }
    }
}
