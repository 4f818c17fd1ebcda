//! Picks the data-parallel rank of an endpoint for a request, where KV events or metrics distinguish several ranks
//! behind one port. Each rank has its own cache, which the server's own load balancer ignores.
//!
//! The rank that holds most of the prompt wins; among equals, the one with fewer requests. A rank that is [`MAX_AHEAD`]
//! requests ahead of the least loaded one gets none. Requests are our own in flight, plus those of other clients: the
//! scraped number minus our own at the time of the scrape. Called by `ext_proc`. No I/O.

use super::endpoint::{Endpoint, Live};
use super::metrics::EndpointMetrics;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::sync::Arc;

/// Largest lead of a rank in requests, 16: AIBrix ignores the prefix from this spread
/// between decode workers on (`AIBRIX_DECODE_LOAD_IMBALANCE_MIN_SPREAD`).
pub const MAX_AHEAD: u32 = 16;

/// Highest rank that another picker may name. vLLM has far fewer behind one port.
const MAX_RANK: usize = 1_023;

type Counts = SmallVec<[u32; 8]>;

/// Our requests in flight on each rank of one endpoint.
#[derive(Debug, Default)]
pub struct Ranks {
    under_way: Mutex<Counts>,
}

impl Ranks {
    /// Returns the requests in flight by rank; empty when there are none.
    #[must_use]
    pub fn under_way(&self) -> Vec<u32> {
        self.under_way.lock().to_vec()
    }
}

/// A request in flight on its rank, until Drop.
#[derive(Debug)]
pub struct RankBooking {
    endpoint: Arc<Live>,
    rank: usize,
}

impl RankBooking {
    /// Picks a rank of `endpoint`. `depths` is how much of the prompt each rank holds, `page` the scraped number of
    /// requests on each. Either may have no ranks, or one for all. Returns `None` when there is no choice.
    #[must_use]
    pub fn choose(endpoint: &Endpoint, depths: &[u32], page: Option<&EndpointMetrics>) -> Option<Self> {
        let depths = if depths.len() < 2 { &[] } else { depths };
        let ranks = if depths.is_empty() { page.map_or(0, |page| page.ranks.len()) } else { depths.len() };
        if ranks < 2 {
            return None;
        }
        // Metrics with another number of ranks are ignored.
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

    /// Books the rank that another picker has chosen, counted from 0. `None` above [`MAX_RANK`].
    #[must_use]
    pub fn book(endpoint: &Endpoint, rank: usize) -> Option<Self> {
        if rank > MAX_RANK {
            return None;
        }
        let mut ours = endpoint.ranks.under_way.lock();
        if ours.len() <= rank {
            ours.resize(rank + 1, 0);
        }
        *ours.get_mut(rank)? += 1;
        Some(Self { endpoint: endpoint.live.clone(), rank })
    }

    /// Returns the rank, counted from 0.
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

    /// Metrics that were scraped just now.
    fn page(server: &Endpoint, ranks: &[u32]) -> EndpointMetrics {
        let ranks_at_scrape = server.ranks.under_way();
        EndpointMetrics { ranks: ranks.to_vec(), ranks_at_scrape, ..EndpointMetrics::default() }
    }

    fn many(server: &Endpoint, count: u32, depths: &[u32], page: Option<&EndpointMetrics>) -> Vec<RankBooking> {
        (0..count).map(|_| RankBooking::choose(server, depths, page).unwrap()).collect()
    }

    #[test]
    fn longest_prefix_wins_until_its_rank_is_far_ahead() {
        let server = server();
        let mut held = many(&server, MAX_AHEAD, &[3, 9, 9], None);
        assert_eq!(server.ranks.under_way(), [0, 8, 8]);
        held.extend(many(&server, 2 * MAX_AHEAD, &[0, 9, 0], None));
        let counts = server.ranks.under_way();
        assert_eq!(counts.iter().sum::<u32>(), 3 * MAX_AHEAD);
        assert!(counts[1] <= counts[0] + MAX_AHEAD && counts[0] > 0, "{counts:?}");
        held.clear();
        assert!(server.ranks.under_way().is_empty(), "no request is in flight");
    }

    #[test]
    fn rank_of_another_picker_counts_until_it_is_dropped() {
        let server = server();
        let booked = [RankBooking::book(&server, 2), RankBooking::book(&server, 0)];
        assert_eq!(server.ranks.under_way(), [1, 0, 1]);
        assert_eq!(RankBooking::choose(&server, &[0; 3], None).map(|booking| booking.rank()), Some(1));
        drop(booked);
        assert!(server.ranks.under_way().is_empty() && RankBooking::book(&server, MAX_RANK + 1).is_none());
    }

    #[test]
    fn without_a_prefix_the_ranks_alternate() {
        let server = server();
        let held = many(&server, 8, &[0; 4], None);
        assert_eq!(server.ranks.under_way(), [2, 2, 2, 2]);
        drop(held);
        let chosen = |depths: &[u32]| RankBooking::choose(&server, depths, None).is_some();
        assert!(!chosen(&[7]) && !chosen(&[]), "there is nothing to choose");
    }

    #[test]
    fn scraped_requests_of_other_clients_count() {
        let server = server();
        let rank = |depths: &[u32], reported: &[u32]| {
            RankBooking::choose(&server, depths, Some(&page(&server, reported))).map(|booking| booking.rank())
        };
        assert_eq!((rank(&[], &[3, 0, 2]), rank(&[0; 3], &[3, 0, 2])), (Some(1), Some(1)));
        assert_eq!(rank(&[7], &[3, 0, 2]), Some(1), "events that do not distinguish ranks are ignored");
        assert_eq!(rank(&[], &[4]), None);
        // Other clients send requests as well: more than allowed to the rank that holds the prompt.
        assert_eq!(rank(&[9, 0], &[MAX_AHEAD, 0]), Some(1));
        assert_eq!(rank(&[9, 0], &[MAX_AHEAD - 1, 0]), Some(0));
        assert_eq!(rank(&[9, 0], &[MAX_AHEAD, 0, 0]), Some(0), "metrics with another number of ranks");
        // The scrape may have missed our own requests.
        let held = many(&server, 4, &[], Some(&page(&server, &[0, 0])));
        assert_eq!(server.ranks.under_way(), [2, 2]);
        // The next scrape has them, and one of another client.
        assert_eq!(rank(&[], &[3, 2]), Some(1));
        drop(held);
        let _held = many(&server, 4, &[], Some(&page(&server, &[20, 20])));
        assert_eq!(server.ranks.under_way(), [2, 2], "requests of other clients do not hide ours");
    }

    #[test]
    fn requests_that_ended_since_the_scrape_do_not_count() {
        let server = server();
        let first: u32 = 18;
        // No request is added between the scrape and the end of all, or of some, of our requests.
        for left in [0, 2] {
            let mut held = many(&server, 20, &[9, 0], None);
            assert_eq!(server.ranks.under_way(), [first, 2]);
            let scraped = page(&server, &[first, 2 + 1]);
            held.retain(|booking| booking.rank() == 1);
            held.truncate(left);
            let next: Vec<usize> = many(&server, 2, &[], Some(&scraped)).iter().map(RankBooking::rank).collect();
            assert_eq!(next[0], 0, "{left}: the first is idle, the second has a request of another client");
        }
    }

    proptest! {
        /// For any order of requests, no picked rank was too far ahead, and the counts equal the requests in flight.
        #[test]
        fn counts_equal_the_requests_in_flight(
            steps in proptest::collection::vec(
                (any::<bool>(), proptest::collection::vec(0u32..4, 2..6), 0usize..40),
                1..120,
            ),
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
