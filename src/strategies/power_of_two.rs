//! `power-of-two`: draws two candidates at random and picks the one with fewer requests.
//!
//! Balances almost as evenly as `least-request`, and avoids its herding when several replicas share a pool without
//! seeing each other's picks. When not: one replica sees all requests; then `least-request` is better.
//! With `compat: true` only this replica's requests count; AIBrix adds up its gateways' counts in Redis.
//! Source: Mitzenmacher, "The power of two choices in randomized load balancing" (2001); AIBrix `power-of-two`.

use attache_scheduling::plugin::{CountParams, params, section};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::{Candidate, PickContext, Ranking, Strategy};
use attache_types::rng::PickRng;
use rand::seq::index;
use smallvec::SmallVec;

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "power-of-two",
    summary: "Draws two ready endpoints at random and picks the one with fewer requests.",
    source: "Mitzenmacher 2001; AIBrix `power-of-two`",
    parameters: section::<CountParams>,
    build: |value, _| params(value).map(|params| Box::new(PowerOfTwo(params)) as Box<dyn Strategy>),
};

#[derive(Debug)]
struct PowerOfTwo(CountParams);

impl Strategy for PowerOfTwo {
    fn rank(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        ranking.because("fewer requests of two");
        let drawn = ranking.wanted().max(2).min(candidates.len());
        let mut picks: SmallVec<[Candidate<'_>; 8]> = index::sample(rng, candidates.len(), drawn)
            .into_iter()
            .filter_map(|i| candidates.get(i).copied())
            .collect();
        let compat = self.0.compat;
        let requests = |c: &Candidate<'_>| if compat { c.own_requests() } else { c.requests };
        // Only the first two compete; the others are fallbacks in the order in which they were drawn.
        if let [a, b, ..] = picks.as_mut_slice()
            && requests(b) < requests(a)
        {
            std::mem::swap(a, b);
        }
        for pick in picks {
            ranking.push(&pick.state.endpoint);
        }
    }
}
