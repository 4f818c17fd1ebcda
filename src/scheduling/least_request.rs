//! `least-request`: the endpoint with the fewest requests, ties at random.
//!
//! Requests are counted as in [`attache_pool::ledger::requests`]: the server's reported number, corrected by requests
//! that were sent or ended since. With `compat: true` only this replica's requests count, as in AIBrix.
//! When not: prompts share prefixes, since caches are ignored, or differ much in length. Source: AIBrix
//! `least-request`, Envoy `LEAST_REQUEST`.

use crate::plugin::{Better, CountParams, params, section};
use crate::registry::Descriptor;
use crate::{Candidate, PickContext, Ranking, Strategy};
use attache_types::rng::PickRng;
use rand::RngExt;

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "least-request",
    summary: "Picks the ready endpoint with the fewest requests waiting and running; ties at random.",
    source: "AIBrix `least-request`, Envoy `LEAST_REQUEST`",
    parameters: section::<CountParams>,
    build: |value, _| {
        let CountParams { compat } = params(value)?;
        Ok(if compat { Box::new(LeastOwnRequest) as Box<dyn Strategy> } else { Box::new(LeastRequest) })
    },
};

/// The strategy over all known requests.
#[derive(Clone, Copy, Debug, Default)]
pub struct LeastRequest;

/// The strategy over this replica's own requests.
#[derive(Clone, Copy, Debug)]
struct LeastOwnRequest;

fn rank_by(
    requests: impl Fn(&Candidate<'_>) -> u32,
    candidates: &[Candidate<'_>],
    rng: &mut PickRng,
    ranking: &mut Ranking,
) {
    ranking.because("fewest requests");
    // The random low half breaks ties.
    let mut key = |c: &Candidate<'_>| (u64::from(requests(c)) << 32) | u64::from(rng.random::<u32>());
    let keyed = candidates.iter().map(|c| (key(c), &c.state.endpoint));
    let count = |key: u64| (key >> 32) as f64;
    ranking.push_lowest_scores(keyed, |first, second| Some(count(*second) - count(*first)));
}

fn score_by(requests: impl Fn(&Candidate<'_>) -> u32, candidates: &[Candidate<'_>], out: &mut [f64]) -> Option<Better> {
    for (score, candidate) in out.iter_mut().zip(candidates) {
        *score = f64::from(requests(candidate));
    }
    Some(Better::Lower)
}

impl Strategy for LeastOwnRequest {
    fn rank(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        rank_by(|c| c.own_requests(), candidates, rng, ranking);
    }

    fn scores(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f64]) -> Option<Better> {
        score_by(|c| c.own_requests(), candidates, out)
    }
}

impl Strategy for LeastRequest {
    fn rank(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        rank_by(|c| c.requests, candidates, rng, ranking);
    }

    fn scores(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f64]) -> Option<Better> {
        score_by(|c| c.requests, candidates, out)
    }
}
