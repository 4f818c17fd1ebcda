//! Which data-parallel rank of an endpoint serves a request, where several stand behind one port and their events or their page tell them
//! apart: each has a cache of its own, and the server's own balancer does not look into it.
//!
//! The rank that holds most of the prompt, the one with fewer requests among equals; one that is [`MAX_AHEAD`] requests ahead of
//! the least loaded gets none, whatever it holds. Requests are ours that are under way, or those of the page where these are more: others send
//! some too. Owned by a [`PrefixCache`](super::cache::PrefixCache), asked by `ext_proc`. Pure.

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
    /// Chooses a rank of `endpoint`; `depths` says how much of the prompt each holds, `reported` how many requests each has by its page. Either may
    /// be empty. `None` when there is nothing to choose.
    #[must_use]
    pub fn book(&self, endpoint: EndpointId, depths: &[u32], reported: &[u32]) -> Option<RankBooking> {
        let ranks = if depths.is_empty() { reported.len() } else { depths.len() };
        if ranks < 2 {
            return None;
        }
        let mut under_way = self.under_way.lock();
        let counts = under_way.entry(endpoint).or_default();
        if counts.len() < ranks {
            counts.resize(ranks, 0);
        }
        // A page of other ranks tells nothing of these.
        let reported = if reported.len() == ranks { reported } else { &[] };
        let of = |told: &[u32], rank: usize| told.get(rank).copied().unwrap_or(0);
        let loads = counts.iter().take(ranks).enumerate().map(|(rank, count)| (*count).max(of(reported, rank)));
        let loads: SmallVec<[u32; 8]> = loads.collect();
        let least = loads.iter().min().copied().unwrap_or(0);
        let open = loads.iter().enumerate().filter(|(_, load)| **load - least < MAX_AHEAD);
        // Where a page's counts hide ours, ours tell equals apart: all that come before the next page would go to one of them.
        let own = |rank: usize| of(counts, rank);
        let least = |(rank, load): (usize, u32)| std::cmp::Reverse((load, own(rank), rank));
        let (rank, _) = open.max_by_key(|(rank, load)| (of(depths, *rank), least((*rank, **load))))?;
        *counts.get_mut(rank)? += 1;
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
            held.push(ranks.book(A, &[3, 9, 9], &[]).unwrap());
        }
        assert_eq!(ranks.under_way(A), [0, 8, 8]);
        for _ in 0..2 * MAX_AHEAD {
            held.push(ranks.book(A, &[0, 9, 0], &[]).unwrap());
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
        let held: Vec<RankBooking> = (0..8).filter_map(|_| ranks.book(A, &[0; 4], &[])).collect();
        assert_eq!(ranks.under_way(A), [2, 2, 2, 2]);
        drop(held);
        assert!(ranks.book(A, &[7], &[]).is_none() && ranks.book(A, &[], &[]).is_none(), "there is nothing to choose");
    }

    #[test]
    fn what_the_page_tells_counts_too() {
        let ranks = Ranks::default();
        let rank = |depths: &[u32], reported: &[u32]| ranks.book(A, depths, reported).map(|booking| booking.rank());
        assert_eq!((rank(&[], &[3, 0, 2]), rank(&[0; 3], &[3, 0, 2])), (Some(1), Some(1)));
        assert_eq!(rank(&[], &[4]), None);
        // Others send requests as well: to the one that holds the prompt more than it should have.
        assert_eq!(rank(&[9, 0], &[MAX_AHEAD, 0]), Some(1));
        assert_eq!(rank(&[9, 0], &[MAX_AHEAD - 1, 0]), Some(0));
        assert_eq!(rank(&[9, 0], &[MAX_AHEAD, 0, 0]), Some(0), "a page of other ranks");
        // Of ours the page may not know yet.
        let held: Vec<RankBooking> = (0..4).filter_map(|_| ranks.book(A, &[], &[0, 0])).collect();
        assert_eq!((held.len(), ranks.under_way(A)), (4, vec![2, 2]));
        assert_eq!(rank(&[], &[2, 1]), Some(0), "as many, and the first of them");
        drop(held);
        let held: Vec<RankBooking> = (0..4).filter_map(|_| ranks.book(A, &[], &[20, 20])).collect();
        assert_eq!(
            (held.len(), ranks.under_way(A)),
            (4, vec![2, 2]),
            "a page that hides ours does not send all to one"
        );
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
                    let booking = ranks.book(A, &depths, &[]).unwrap();
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
