//! Which data-parallel rank of an endpoint serves a request, where several stand behind one port and their events or their page tell them
//! apart: each has a cache of its own, and the server's own balancer does not look into it.
//!
//! The rank that holds most of the prompt, the one with fewer requests among equals; one that is [`MAX_AHEAD`] requests ahead of
//! the least loaded gets none, whatever it holds. Requests are ours that are under way and those of others, which are what a page has more than
//! there were of ours when it was asked for: what has begun or ended of ours since counts at once. Asked by `ext_proc`. Pure.

use super::endpoint::{Endpoint, Live};
use super::metrics::EndpointMetrics;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::sync::Arc;

/// 16 requests: AIBrix's spread between decode servers from which on the prefix no longer counts
/// (`AIBRIX_DECODE_LOAD_IMBALANCE_MIN_SPREAD`).
pub const MAX_AHEAD: u32 = 16;

type Counts = SmallVec<[u32; 8]>;

/// Requests of ours that are under way on each rank of one endpoint.
#[derive(Debug, Default)]
pub struct Ranks {
    under_way: Mutex<Counts>,
}

impl Ranks {
    /// Of each rank, by its number; empty when there are none.
    #[must_use]
    pub fn under_way(&self) -> Vec<u32> {
        self.under_way.lock().to_vec()
    }
}

/// A request on its rank; over on Drop.
#[derive(Debug)]
pub struct RankBooking {
    endpoint: Arc<Live>,
    rank: usize,
}

impl RankBooking {
    /// Chooses a rank of `endpoint`; `depths` says how much of the prompt each holds, the `page` how many requests each had. Either may tell of
    /// no ranks, or of one that stands for all. `None` when there is nothing to choose.
    #[must_use]
    pub fn choose(endpoint: &Endpoint, depths: &[u32], page: Option<&EndpointMetrics>) -> Option<Self> {
        let depths = if depths.len() < 2 { &[] } else { depths };
        let ranks = if depths.is_empty() { page.map_or(0, |page| page.ranks.len()) } else { depths.len() };
        if ranks < 2 {
            return None;
        }
        // A page of other ranks tells nothing of these.
        let page = page.filter(|page| page.ranks.len() == ranks);
        let of = |counts: &[u32], rank: usize| counts.get(rank).copied().unwrap_or(0);
        let others =
            |rank: usize| page.map_or(0, |page| of(&page.ranks, rank).saturating_sub(of(&page.ranks_at_scrape, rank)));
        let mut ours = endpoint.ranks.under_way.lock();
        if ours.len() < ranks {
            ours.resize(ranks, 0);
        }
        let loads: Counts = (0..ranks).map(|rank| of(&ours, rank).saturating_add(others(rank))).collect();
        let least = loads.iter().min().copied().unwrap_or(0);
        let open = loads.iter().enumerate().filter(|(_, load)| **load - least < MAX_AHEAD);
        let (rank, _) = open.max_by_key(|(rank, load)| (of(depths, *rank), std::cmp::Reverse((**load, *rank))))?;
        *ours.get_mut(rank)? += 1;
        Some(Self { endpoint: endpoint.live.clone(), rank })
    }

    /// The rank, from 0.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }
}

impl Drop for RankBooking {
    fn drop(&mut self) {
        let mut ours = self.endpoint.ranks.under_way.lock();
        if let Some(count) = ours.get_mut(self.rank) {
            *count = count.saturating_sub(1);
        }
        if ours.iter().all(|count| *count == 0) {
            ours.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EndpointSpec;
    use attache_types::ids::EndpointId;
    use proptest::prelude::*;

    fn server() -> Endpoint {
        Endpoint::new(EndpointId(1), EndpointSpec::at(([10, 0, 0, 1], 8000).into()))
    }

    /// A page that was asked for just now.
    fn page(server: &Endpoint, ranks: &[u32]) -> EndpointMetrics {
        let ranks_at_scrape = server.ranks.under_way();
        EndpointMetrics { ranks: ranks.to_vec(), ranks_at_scrape, ..EndpointMetrics::default() }
    }

    fn many(server: &Endpoint, count: u32, depths: &[u32], page: Option<&EndpointMetrics>) -> Vec<RankBooking> {
        (0..count).map(|_| RankBooking::choose(server, depths, page).unwrap()).collect()
    }

    #[test]
    fn the_longest_prefix_wins_until_its_rank_is_far_ahead() {
        let server = server();
        let mut held = many(&server, MAX_AHEAD, &[3, 9, 9], None);
        assert_eq!(server.ranks.under_way(), [0, 8, 8]);
        held.extend(many(&server, 2 * MAX_AHEAD, &[0, 9, 0], None));
        let counts = server.ranks.under_way();
        assert_eq!(counts.iter().sum::<u32>(), 3 * MAX_AHEAD);
        assert!(counts[1] <= counts[0] + MAX_AHEAD && counts[0] > 0, "{counts:?}");
        held.clear();
        assert!(server.ranks.under_way().is_empty(), "nothing is left behind");
    }

    #[test]
    fn without_a_prefix_the_ranks_take_turns() {
        let server = server();
        let held = many(&server, 8, &[0; 4], None);
        assert_eq!(server.ranks.under_way(), [2, 2, 2, 2]);
        drop(held);
        let chosen = |depths: &[u32]| RankBooking::choose(&server, depths, None).is_some();
        assert!(!chosen(&[7]) && !chosen(&[]), "there is nothing to choose");
    }

    #[test]
    fn what_the_page_tells_counts_too() {
        let server = server();
        let rank = |depths: &[u32], reported: &[u32]| {
            RankBooking::choose(&server, depths, Some(&page(&server, reported))).map(|booking| booking.rank())
        };
        assert_eq!((rank(&[], &[3, 0, 2]), rank(&[0; 3], &[3, 0, 2])), (Some(1), Some(1)));
        assert_eq!(rank(&[7], &[3, 0, 2]), Some(1), "events of all ranks as one tell nothing of each");
        assert_eq!(rank(&[], &[4]), None);
        // Others send requests as well: to the one that holds the prompt more than it should have.
        assert_eq!(rank(&[9, 0], &[MAX_AHEAD, 0]), Some(1));
        assert_eq!(rank(&[9, 0], &[MAX_AHEAD - 1, 0]), Some(0));
        assert_eq!(rank(&[9, 0], &[MAX_AHEAD, 0, 0]), Some(0), "a page of other ranks");
        // Of ours the page may not know yet.
        let held = many(&server, 4, &[], Some(&page(&server, &[0, 0])));
        assert_eq!(server.ranks.under_way(), [2, 2]);
        // The next has them, and one of others.
        assert_eq!(rank(&[], &[3, 2]), Some(1));
        drop(held);
        let _held = many(&server, 4, &[], Some(&page(&server, &[20, 20])));
        assert_eq!(server.ranks.under_way(), [2, 2], "what others do hides nothing of ours");
    }

    #[test]
    fn what_has_ended_since_the_page_came_counts_no_longer() {
        let server = server();
        let first: u32 = 18;
        // Nobody is booked between the page and what ends; then all of them, and some of them.
        for left in [0, 2] {
            let mut held = many(&server, 20, &[9, 0], None);
            assert_eq!(server.ranks.under_way(), [first, 2]);
            let told = page(&server, &[first, 2 + 1]);
            held.retain(|booking| booking.rank() == 1);
            held.truncate(left);
            let next: Vec<usize> = many(&server, 2, &[], Some(&told)).iter().map(RankBooking::rank).collect();
            assert_eq!(next[0], 0, "{left}: the first has nothing to do, the second has one of others");
        }
    }

    proptest! {
        /// However requests come and go, no rank that was booked was too far ahead, and the counts are those of the bookings.
        #[test]
        fn counts_are_those_of_the_bookings(
            steps in proptest::collection::vec((any::<bool>(), proptest::collection::vec(0u32..4, 2..6), 0usize..40), 1..120),
        ) {
            let (server, mut held) = (server(), Vec::new());
            for (comes, depths, at) in steps {
                if comes || held.is_empty() {
                    let before = server.ranks.under_way();
                    let of = |rank: usize| before.get(rank).copied().unwrap_or(0);
                    let booking = RankBooking::choose(&server, &depths, None).unwrap();
                    let least = (0..depths.len()).map(of).min().unwrap();
                    prop_assert!(of(booking.rank()) - least < MAX_AHEAD);
                    held.push(booking);
                } else {
                    held.swap_remove(at % held.len());
                }
                for (rank, count) in server.ranks.under_way().into_iter().enumerate() {
                    prop_assert_eq!(count as usize, held.iter().filter(|b| b.rank() == rank).count());
                }
            }
        }
    }
}
