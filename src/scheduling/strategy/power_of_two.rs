//! `power-of-two`: two different candidates drawn at random, the one with fewer requests wins.
//!
//! Nearly as even as `least-request` and immune to its herds when several pickers share a pool without seeing each other's
//! picks. When not: one picker sees everything; then `least-request` is better.
//! Source: Mitzenmacher, "The power of two choices in randomized load balancing" (2001); AIBrix `power-of-two`.

use crate::rng::PickRng;
use crate::scheduling::plugin::{Descriptor, NoParams, params};
use crate::scheduling::{Candidate, PickContext, Ranking, Strategy};
use rand::seq::index;
use smallvec::SmallVec;

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "power-of-two",
    summary: "Draws two ready endpoints at random and picks the one with fewer requests.",
    source: "Mitzenmacher 2001; AIBrix `power-of-two`",
    build: |value| params::<NoParams>(value).map(|NoParams {}| Box::new(PowerOfTwo) as Box<dyn Strategy>),
};

#[derive(Debug)]
struct PowerOfTwo;

impl Strategy for PowerOfTwo {
    fn rank(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        ranking.because("fewer requests of two");
        let drawn = ranking.wanted().max(2).min(candidates.len());
        let mut picks: SmallVec<[Candidate<'_>; 8]> = index::sample(rng, candidates.len(), drawn)
            .into_iter()
            .filter_map(|i| candidates.get(i).copied())
            .collect();
        // Only the first two compete; the others are fallbacks in the order in which they were drawn.
        if let [a, b, ..] = picks.as_mut_slice()
            && b.requests < a.requests
        {
            std::mem::swap(a, b);
        }
        for pick in picks {
            ranking.push(&pick.state.endpoint);
        }
    }
}
