//! The pickers of the pipeline, one file each: they turn sums into an order.
//!
//! All have the parameter `maxNumOfEndpoints`: the most endpoints that a decision names, the first for the request
//! and the others for retries. By default that is as many as the pool's `destination` allows: one, unless the gateway
//! retries along a list. The parameter can only lower it.

pub mod max_score;
pub mod random;
pub mod weighted_random;

use attache_scheduling::Candidate;
use attache_scheduling::decision::Ranking;
use attache_types::parameters;
use attache_types::rng::PickRng;
use rand::RngExt;
use smallvec::SmallVec;

parameters! {
    struct Params {
        /// Most endpoints in a decision: the first for the request, the others for retries. It can only lower the
        /// pool's number.
        "maxNumOfEndpoints" => max_num_of_endpoints: Option<usize> {
            absent: "as many as the pool's `destination` allows"; range: 1..; unit: "endpoints";
        },
    }
}

impl Params {
    fn most(&self) -> usize {
        self.max_num_of_endpoints.unwrap_or(usize::MAX)
    }
}

/// Position of the greatest sum, ties at random; and the position of the second greatest, with its distance.
fn greatest(sums: &[f32], rng: &mut PickRng) -> Option<(usize, Option<(usize, f32)>)> {
    let (mut best, mut second, mut ties) = (None::<(usize, f32)>, None::<(usize, f32)>, 0u32);
    for (i, sum) in sums.iter().enumerate() {
        match best {
            Some((_, greatest)) if *sum < greatest => {
                if second.is_none_or(|(_, known)| *sum > known) {
                    second = Some((i, *sum));
                }
                continue;
            }
            Some((_, greatest)) if *sum == greatest => ties += 1,
            _ => ties = 0,
        }
        // Reservoir sampling: the n-th of equal sums replaces the pick with probability 1/n.
        if ties == 0 || rng.random_range(0..=ties) == 0 {
            second = best.replace((i, *sum));
        } else {
            second = Some((i, *sum));
        }
    }
    best.map(|(i, greatest)| (i, second.map(|(at, sum)| (at, greatest - sum))))
}

/// Fills `ranking` with the candidates of the greatest keys, at most `most`. `margin` is the difference between the
/// scores in the greatest key and in the second greatest, if keys have scores.
fn push_greatest<K: Ord>(
    keys: impl Iterator<Item = K>,
    candidates: &[Candidate<'_>],
    most: usize,
    ranking: &mut Ranking,
    margin: impl FnOnce(&K, &K) -> Option<f64>,
) {
    let wanted = most.min(ranking.wanted());
    let push = |i: usize, ranking: &mut Ranking| {
        if let Some(candidate) = candidates.get(i) {
            ranking.push(&candidate.state.endpoint);
        }
    };
    if wanted == 1 {
        if let Some((i, _)) = keys.enumerate().max_by(|a, b| a.1.cmp(&b.1)) {
            push(i, ranking);
        }
        return;
    }
    let mut order: SmallVec<[(K, usize); 16]> = keys.zip(0..).collect();
    order.sort_unstable_by(|a, b| b.0.cmp(&a.0));
    if let [(first, _), (second, at), ..] = order.as_slice()
        && let Some(candidate) = candidates.get(*at)
    {
        ranking.precedes(&candidate.state.endpoint, margin(first, second));
    }
    order.iter().take(wanted).for_each(|(_, i)| push(*i, ranking));
}

/// The bits of a non-negative number, which sort like the number.
fn ordered(number: f32) -> u32 {
    number.max(0.0).to_bits()
}

#[cfg(test)]
mod tests;
