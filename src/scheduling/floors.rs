//! Ranks endpoints by scores of which only some are computed: those of endpoints whose lower bound, the floor, is low
//! enough for a place in the ranking. Called by strategies whose scores take long among many endpoints; pure.

use crate::plugin::{ordered, score_of};
use crate::{Candidate, Ranking, Signal};
use attache_types::rng::PickRng;
use rand::RngExt;
use smallvec::SmallVec;
use std::cmp::Ordering;

/// Ranks by `score`, the lowest first. It is computed for each candidate whose `floor`, a lower bound of its score, is
/// low enough for a place in the ranking.
///
/// Floors are finite, and endpoints without a score are ordered by their requests ([`crate::plugin::FigureFallback`]).
/// It picks the same endpoints as [`crate::plugin::rank_by_scores`], with the same random numbers.
pub fn rank_by_floors<'c, 'a: 'c>(
    candidates: &'c [Candidate<'a>],
    floor: impl Fn(&'c Candidate<'a>) -> f64,
    score: impl Fn(&'c Candidate<'a>) -> f64,
    rng: &mut PickRng,
    ranking: &mut Ranking,
) {
    let mut floors: SmallVec<[f64; 16]> = candidates.iter().map(floor).collect();
    // The second best endpoint is wanted in any case.
    let wanted = ranking.wanted().max(2);
    let mut lowest = LowestScores::new(wanted);
    // Those with the lowest floors first: their scores exclude most of the others.
    for at in lowest_positions(&floors, wanted) {
        if let (Some(candidate), Some(slot)) = (candidates.get(at), floors.get_mut(at)) {
            *slot = EXCLUDED;
            lowest.take(at, score(candidate));
        }
    }
    for (at, (candidate, floor)) in candidates.iter().zip(&floors).enumerate() {
        // A floor that is no number excludes nothing.
        if floor.partial_cmp(&lowest.bound()) != Some(Ordering::Greater) {
            lowest.take(at, score(candidate));
        }
    }
    lowest.known.sort_unstable_by_key(|(at, _)| *at);
    if lowest.known.iter().all(|(_, score)| score.is_nan()) {
        ranking.lacks(Signal::Metrics);
    }
    let mut known = lowest.known.iter().peekable();
    let keyed = candidates.iter().enumerate().filter_map(|(at, candidate)| {
        // Drawn for each candidate, as without floors.
        let random = rng.random::<u32>();
        let (_, score) = known.next_if(|(known, _)| *known == at)?;
        let is_unscored = score.is_nan();
        let key = if is_unscored { (true, 0, candidate.requests) } else { (false, ordered(*score), 0) };
        Some(((key, random), &candidate.state.endpoint))
    });
    ranking.push_lowest_scores(keyed, |((_, first, _), _), ((is_unscored, second, _), _)| {
        (!is_unscored).then(|| score_of(*second) - score_of(*first))
    });
}

/// The floor of a candidate whose score is known: no bound is as high.
const EXCLUDED: f64 = f64::INFINITY;

/// Scores that are known, and the highest of the `wanted` lowest.
struct LowestScores {
    wanted: usize,
    /// Positions of candidates, and their scores.
    known: SmallVec<[(usize, f64); 16]>,
    /// The lowest scores, ascending; at most `wanted`.
    best: SmallVec<[f64; 8]>,
}

impl LowestScores {
    fn new(wanted: usize) -> Self {
        Self { wanted, known: SmallVec::new(), best: SmallVec::new() }
    }

    /// A candidate with a higher floor has no place in the ranking.
    fn bound(&self) -> f64 {
        if self.best.len() < self.wanted { f64::MAX } else { self.best.last().copied().unwrap_or(f64::MAX) }
    }

    fn take(&mut self, at: usize, score: f64) {
        self.known.push((at, score));
        if score.is_nan() || score > self.bound() {
            return;
        }
        if self.best.len() >= self.wanted {
            self.best.pop();
        }
        self.best.insert(self.best.partition_point(|best| *best <= score), score);
    }
}

/// The positions of the lowest values, at most `count`.
fn lowest_positions(values: &[f64], count: usize) -> SmallVec<[usize; 8]> {
    let mut lowest: SmallVec<[usize; 8]> = SmallVec::new();
    let value = |at: &usize| values.get(*at).copied().unwrap_or(f64::INFINITY);
    let mut highest = f64::INFINITY;
    for (at, new) in values.iter().enumerate() {
        if lowest.len() >= count {
            if *new >= highest {
                continue;
            }
            lowest.pop();
        }
        let place = lowest.partition_point(|low| value(low) <= *new);
        lowest.insert(place, at);
        highest = lowest.last().map_or(f64::INFINITY, value);
    }
    lowest
}
