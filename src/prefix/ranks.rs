//! Which data-parallel rank of an endpoint serves a request, where several stand behind one port and their events or their page tell them
//! apart: each has a cache of its own, and the server's own balancer does not look into it.
//!
//! The rank that holds most of the prompt, the one with fewer requests among equals; one that is [`MAX_AHEAD`] requests ahead of
//! the least loaded gets none, whatever it holds. Requests are ours that are under way and those of others, which are what a page has more than
//! there were of ours when it came: what has begun or ended of ours since counts at once. Owned by a [`PrefixCache`](super::cache::PrefixCache), asked by `ext_proc`. Pure.

use crate::clock::Timestamp;
use crate::ids::EndpointId;
use ahash::AHashMap;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::sync::Arc;

/// 16 requests: AIBrix's spread between decode servers from which on the prefix no longer counts
/// (`AIBRIX_DECODE_LOAD_IMBALANCE_MIN_SPREAD`).
pub const MAX_AHEAD: u32 = 16;

type Counts = SmallVec<[u32; 8]>;
type UnderWay = AHashMap<EndpointId, Loads>;

/// Requests on each rank of one endpoint.
#[derive(Debug, Default)]
struct Loads {
    ours: Counts,
    others: Counts,
    /// The page that told of the others.
    page: Option<Timestamp>,
}

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
    /// Chooses a rank of `endpoint`; `depths` says how much of the prompt each holds, `page` how many requests each had and when. Either may
    /// be empty. `None` when there is nothing to choose.
    #[must_use]
    pub fn book(&self, endpoint: EndpointId, depths: &[u32], page: Option<(&[u32], Timestamp)>) -> Option<RankBooking> {
        let ranks = if depths.is_empty() { page.map_or(0, |(reported, _)| reported.len()) } else { depths.len() };
        if ranks < 2 {
            return None;
        }
        let mut under_way = self.under_way.lock();
        let Loads { ours, others, page: told } = under_way.entry(endpoint).or_default();
        if ours.len() < ranks {
            ours.resize(ranks, 0);
        }
        // A page of other ranks tells nothing of these.
        let page = page.filter(|(reported, _)| reported.len() == ranks);
        if *told != page.map(|(_, at)| at) {
            *told = page.map(|(_, at)| at);
            let reported = page.into_iter().flat_map(|(reported, _)| reported);
            *others = reported.zip(&*ours).map(|(all, ours)| all.saturating_sub(*ours)).collect();
        }
        let of = |counts: &[u32], rank: usize| counts.get(rank).copied().unwrap_or(0);
        let loads: Counts = (0..ranks).map(|rank| of(ours, rank).saturating_add(of(others, rank))).collect();
        let least = loads.iter().min().copied().unwrap_or(0);
        let open = loads.iter().enumerate().filter(|(_, load)| **load - least < MAX_AHEAD);
        let (rank, _) = open.max_by_key(|(rank, load)| (of(depths, *rank), std::cmp::Reverse((**load, *rank))))?;
        *ours.get_mut(rank)? += 1;
        Some(RankBooking { ranks: self.clone(), endpoint, rank })
    }

    /// Requests under way on each rank of `endpoint`; empty when there are none.
    #[must_use]
    pub fn under_way(&self, endpoint: EndpointId) -> Vec<u32> {
        self.under_way.lock().get(&endpoint).map(|loads| loads.ours.to_vec()).unwrap_or_default()
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
        let Some(Loads { ours, .. }) = under_way.get_mut(&self.endpoint) else { return };
        if let Some(count) = ours.get_mut(self.rank) {
            *count = count.saturating_sub(1);
        }
        if ours.iter().all(|count| *count == 0) {
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
            held.push(ranks.book(A, &[3, 9, 9], None).unwrap());
        }
        assert_eq!(ranks.under_way(A), [0, 8, 8]);
        for _ in 0..2 * MAX_AHEAD {
            held.push(ranks.book(A, &[0, 9, 0], None).unwrap());
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
        let held: Vec<RankBooking> = (0..8).filter_map(|_| ranks.book(A, &[0; 4], None)).collect();
        assert_eq!(ranks.under_way(A), [2, 2, 2, 2]);
        drop(held);
        assert!(
            ranks.book(A, &[7], None).is_none() && ranks.book(A, &[], None).is_none(),
            "there is nothing to choose"
        );
    }

    #[test]
    fn what_the_page_tells_counts_too() {
        let ranks = Ranks::default();
        let book = |depths: &[u32], reported: &[u32], page| ranks.book(A, depths, Some((reported, Timestamp(page))));
        let rank = |depths: &[u32], reported: &[u32]| book(depths, reported, 1).map(|booking| booking.rank());
        assert_eq!((rank(&[], &[3, 0, 2]), rank(&[0; 3], &[3, 0, 2])), (Some(1), Some(1)));
        assert_eq!(rank(&[], &[4]), None);
        // Others send requests as well: to the one that holds the prompt more than it should have.
        assert_eq!(rank(&[9, 0], &[MAX_AHEAD, 0]), Some(1));
        assert_eq!(rank(&[9, 0], &[MAX_AHEAD - 1, 0]), Some(0));
        assert_eq!(rank(&[9, 0], &[MAX_AHEAD, 0, 0]), Some(0), "a page of other ranks");
        // Of ours the page may not know yet.
        let held: Vec<RankBooking> = (0..4).filter_map(|_| book(&[], &[0, 0], 1)).collect();
        assert_eq!((held.len(), ranks.under_way(A)), (4, vec![2, 2]));
        // The next has them, and one of others.
        assert_eq!(book(&[], &[3, 2], 2).map(|booking| booking.rank()), Some(1));
        drop(held);
        let held: Vec<RankBooking> = (0..4).filter_map(|_| book(&[], &[20, 20], 3)).collect();
        assert_eq!((held.len(), ranks.under_way(A)), (4, vec![2, 2]), "what others do hides nothing of ours");
    }

    #[test]
    fn what_has_ended_since_the_page_came_counts_no_longer() {
        let ranks = Ranks::default();
        let mut held: Vec<RankBooking> = (0..20).filter_map(|_| ranks.book(A, &[9, 0], None)).collect();
        let on_first = |held: &[RankBooking]| held.iter().filter(|booking| booking.rank() == 0).count();
        assert_eq!(on_first(&held), 18);
        let page: (&[u32], Timestamp) = (&[18, 2], Timestamp(1));
        held.extend(ranks.book(A, &[], Some(page)));
        assert_eq!(ranks.under_way(A), [18, 3]);
        held.retain(|booking| booking.rank() == 1);
        let next: Vec<usize> = (0..3)
            .filter_map(|_| {
                held.push(ranks.book(A, &[], Some(page))?);
                held.last().map(RankBooking::rank)
            })
            .collect();
        assert_eq!(next, [0, 0, 0], "the first has nothing to do, whatever the page says");
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
                    let booking = ranks.book(A, &depths, None).unwrap();
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
