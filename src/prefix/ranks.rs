//! Which data-parallel rank of an endpoint serves a request, where several stand behind one port and their events tell them apart: each has
//! a cache of its own, and the server's own balancer does not look into it.
//!
//! The rank that holds most of the prompt, the one with fewer requests of ours among equals; one that is [`MAX_AHEAD`] requests ahead of
//! the least loaded gets none, whatever it holds. Owned by a [`PrefixCache`](super::cache::PrefixCache), asked by `ext_proc`. Pure.

use crate::ids::EndpointId;
use ahash::AHashMap;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::sync::Arc;

/// 16 requests: AIBrix's spread between decode servers from which on the prefix no longer counts
/// (`AIBRIX_DECODE_LOAD_IMBALANCE_MIN_SPREAD`).
pub const MAX_AHEAD: u32 = 16;

type UnderWay = AHashMap<EndpointId, SmallVec<[u32; 8]>>;

/// Requests of ours that are under way on each rank.
#[derive(Clone, Debug, Default)]
pub struct Ranks {
    under_way: Arc<Mutex<UnderWay>>,
}

/// A request on its rank; over on Drop.
#[derive(Debug)]
pub struct RankBooking {
    ranks: Ranks,
    endpoint: EndpointId,
    rank: usize,
}

impl Ranks {
    /// Chooses a rank of `endpoint`; `depths` says how much of the prompt each holds. `None` when there is nothing to choose.
    #[must_use]
    pub fn book(&self, endpoint: EndpointId, depths: &[u32]) -> Option<RankBooking> {
        if depths.len() < 2 {
            return None;
        }
        let mut under_way = self.under_way.lock();
        let counts = under_way.entry(endpoint).or_default();
        if counts.len() < depths.len() {
            counts.resize(depths.len(), 0);
        }
        let least = counts.iter().take(depths.len()).min().copied().unwrap_or(0);
        let open =
            depths.iter().zip(counts.iter_mut()).enumerate().filter(|(_, (_, count))| **count - least < MAX_AHEAD);
        let best = open.max_by_key(|(rank, (depth, count))| (**depth, std::cmp::Reverse((**count, *rank))));
        let (rank, (_, count)) = best?;
        *count += 1;
        Some(RankBooking { ranks: self.clone(), endpoint, rank })
    }

    /// Requests under way on each rank of `endpoint`; empty when there are none.
    #[must_use]
    pub fn under_way(&self, endpoint: EndpointId) -> Vec<u32> {
        self.under_way.lock().get(&endpoint).map(|counts| counts.to_vec()).unwrap_or_default()
    }
}

impl RankBooking {
    /// The rank, from 0.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }
}

impl Drop for RankBooking {
    fn drop(&mut self) {
        let mut under_way = self.ranks.under_way.lock();
        let Some(counts) = under_way.get_mut(&self.endpoint) else { return };
        if let Some(count) = counts.get_mut(self.rank) {
            *count = count.saturating_sub(1);
        }
        if counts.iter().all(|count| *count == 0) {
            under_way.remove(&self.endpoint);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const A: EndpointId = EndpointId(1);

    #[test]
    fn the_longest_prefix_wins_until_its_rank_is_far_ahead() {
        let ranks = Ranks::default();
        let mut held = Vec::new();
        for _ in 0..MAX_AHEAD {
            held.push(ranks.book(A, &[3, 9, 9]).unwrap());
        }
        assert_eq!(ranks.under_way(A), [0, 8, 8]);
        for _ in 0..2 * MAX_AHEAD {
            held.push(ranks.book(A, &[0, 9, 0]).unwrap());
        }
        let counts = ranks.under_way(A);
        assert_eq!(counts.iter().sum::<u32>(), 3 * MAX_AHEAD);
        assert!(counts[1] <= counts[0] + MAX_AHEAD && counts[0] > 0, "{counts:?}");
        held.clear();
        assert!(ranks.under_way(A).is_empty() && ranks.under_way.lock().is_empty(), "nothing is left behind");
    }

    #[test]
    fn without_a_prefix_the_ranks_take_turns() {
        let ranks = Ranks::default();
        let held: Vec<RankBooking> = (0..8).filter_map(|_| ranks.book(A, &[0; 4])).collect();
        assert_eq!(ranks.under_way(A), [2, 2, 2, 2]);
        drop(held);
        assert!(ranks.book(A, &[7]).is_none() && ranks.book(A, &[]).is_none(), "there is nothing to choose");
    }

    proptest! {
        /// However requests come and go, no rank that was booked was too far ahead, and the counts are those of the bookings.
        #[test]
        fn counts_are_those_of_the_bookings(
            steps in proptest::collection::vec((any::<bool>(), proptest::collection::vec(0u32..4, 2..6), 0usize..40), 1..120),
        ) {
            let (ranks, mut held) = (Ranks::default(), Vec::new());
            for (comes, depths, at) in steps {
                if comes || held.is_empty() {
                    let before = ranks.under_way(A);
                    let of = |rank: usize| before.get(rank).copied().unwrap_or(0);
                    let booking = ranks.book(A, &depths).unwrap();
                    let least = (0..depths.len()).map(of).min().unwrap();
                    prop_assert!(of(booking.rank()) - least < MAX_AHEAD);
                    held.push(booking);
                } else {
                    held.swap_remove(at % held.len());
                }
                for (rank, count) in ranks.under_way(A).into_iter().enumerate() {
                    prop_assert_eq!(count as usize, held.iter().filter(|b| b.rank() == rank).count());
                }
            }
        }
    }
}
