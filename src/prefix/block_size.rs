//! Number of tokens in a block of a pool. Keys of blocks of different sizes never match, so everything that makes keys
//! shares one [`BlockSize`]: prompts are divided by it, and KV events with blocks of another size are rejected.

use super::index::HolderId;
use ahash::{AHashMap, AHashSet};
use attache_types::ids::EndpointId;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Tokens in a block: the configured number, or else the size that most endpoints of the pool report.
///
/// An endpoint reports its size by KV events. Until its first event with blocks, its scraped metrics count. When
/// events of an endpoint contradict its own metrics, as in vLLM with context parallelism, metrics with that value are
/// ignored for other endpoints too.
///
/// A change makes all known blocks useless. While any endpoint has the current size, another size therefore replaces it
/// only with a lead of two endpoints and of a tenth of all endpoints.
#[derive(Debug)]
pub struct BlockSize {
    tokens: AtomicU32,
    is_given: bool,
    endpoints: Mutex<AHashMap<EndpointId, ReportedSizes>>,
}

/// The block sizes that one endpoint has reported.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ReportedSizes {
    page: Option<u32>,
    /// Sizes from KV events, by cache; the cache that reported first comes first.
    events: SmallVec<[(HolderId, u32); 1]>,
}

impl BlockSize {
    /// A fixed size from the configuration, which reports of endpoints do not change.
    #[must_use]
    pub fn given(tokens: u32) -> Self {
        Self { tokens: AtomicU32::new(tokens), is_given: true, endpoints: Mutex::default() }
    }

    /// A size that follows the endpoints' reports; `until_known` is used before the first report.
    #[must_use]
    pub fn of_engines(until_known: u32) -> Self {
        Self { tokens: AtomicU32::new(until_known), is_given: false, endpoints: Mutex::default() }
    }

    /// Returns the number of tokens in a block.
    #[must_use]
    pub fn get(&self) -> u32 {
        self.tokens.load(Relaxed)
    }

    /// Returns the number of tokens in a block, at least 1, for code that divides by it.
    #[must_use]
    pub fn at_least_one(&self) -> NonZeroUsize {
        NonZeroUsize::new(self.get() as usize).unwrap_or(NonZeroUsize::MIN)
    }

    /// Whether the configuration sets the size.
    #[must_use]
    pub fn is_given(&self) -> bool {
        self.is_given
    }

    /// Records the block size in the scraped metrics of each endpoint of the pool. `None` keeps the endpoint's previous
    /// value. Metrics of endpoints that are not in the list are forgotten.
    pub fn pages(&self, endpoints: impl Iterator<Item = (EndpointId, Option<u32>)> + Clone) {
        let mut known = self.endpoints.lock();
        let (mut is_changed, mut of_pool) = (false, 0);
        for (endpoint, page) in endpoints.clone() {
            if let Some(page) = page.filter(|tokens| *tokens > 0) {
                is_changed |= known.entry(endpoint).or_default().page.replace(page) != Some(page);
            }
            of_pool += usize::from(known.contains_key(&endpoint));
        }
        if known.len() > of_pool {
            let there: AHashSet<EndpointId> = endpoints.map(|(endpoint, _)| endpoint).collect();
            for (_, reported) in known.iter_mut().filter(|(endpoint, _)| !there.contains(endpoint)) {
                is_changed |= reported.page.take().is_some();
            }
        }
        if is_changed {
            self.elect(&mut known);
        }
    }

    /// Records that KV events of one cache of an endpoint have blocks of `tokens`
    /// tokens. This counts until [`BlockSize::forget`].
    pub fn report(&self, endpoint: EndpointId, cache: HolderId, tokens: u32) {
        let mut known = self.endpoints.lock();
        let reported = known.entry(endpoint).or_default();
        match reported.events.iter_mut().find(|(known, _)| *known == cache) {
            Some((_, before)) => *before = tokens,
            None => reported.events.push((cache, tokens)),
        }
        self.elect(&mut known);
    }

    /// Forgets the block size that the events of a cache reported.
    pub fn forget(&self, endpoint: EndpointId, cache: HolderId) {
        let mut known = self.endpoints.lock();
        if let Some(reported) = known.get_mut(&endpoint) {
            reported.events.retain(|(known, _)| *known != cache);
        }
        self.elect(&mut known);
    }

    /// Sets the size, for the replay of a recorded change.
    pub fn replay(&self, tokens: u32) {
        self.tokens.store(tokens, Relaxed);
    }

    fn elect(&self, known: &mut AHashMap<EndpointId, ReportedSizes>) {
        known.retain(|_, reported| *reported != ReportedSizes::default());
        if self.is_given {
            return;
        }
        let untrue: AHashSet<u32> = known.values().filter_map(ReportedSizes::untrue_page).collect();
        let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
        for size in known.values().filter_map(|reported| reported.size(&untrue)) {
            *counts.entry(size).or_default() += 1;
        }
        let all: usize = counts.values().sum();
        let have_it = counts.get(&self.get()).copied().unwrap_or(0);
        // Of sizes with equally many endpoints, the smallest wins.
        if let Some((size, most)) = counts.into_iter().max_by_key(|(size, endpoints)| (*endpoints, Reverse(*size)))
            && (have_it == 0 || (most > have_it + 1 && 10 * (most - have_it) > all))
        {
            self.tokens.store(size, Relaxed);
        }
    }
}

impl ReportedSizes {
    fn events(&self) -> Option<u32> {
        self.events.first().map(|(_, size)| *size)
    }

    /// The size in the scraped metrics, if the endpoint's events contradict it.
    fn untrue_page(&self) -> Option<u32> {
        self.page.filter(|page| self.events().is_some_and(|size| size != *page))
    }

    fn size(&self, untrue: &AHashSet<u32>) -> Option<u32> {
        self.events().or(self.page.filter(|page| !untrue.contains(page)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CACHE: HolderId = HolderId(1);

    fn pages(size: &BlockSize, pages: &[u32]) -> u32 {
        size.pages((0..).map(EndpointId).zip(pages.iter().map(|page| Some(*page).filter(|p| *p > 0))));
        size.get()
    }

    fn after_report(size: &BlockSize, endpoint: u32, tokens: u32) -> u32 {
        size.report(EndpointId(endpoint), CACHE, tokens);
        size.get()
    }

    #[test]
    fn configured_size_never_changes() {
        let size = BlockSize::given(16);
        assert_eq!((pages(&size, &[32, 32]), after_report(&size, 0, 32)), (16, 16));
    }

    #[test]
    fn events_of_one_endpoint_do_not_outweigh_the_metrics_of_most() {
        let size = BlockSize::of_engines(16);
        assert_eq!(pages(&size, &[64, 32, 32, 32]), 32);
        assert_eq!(after_report(&size, 0, 64), 32, "one of four");
        assert_eq!((after_report(&size, 1, 32), after_report(&size, 2, 64)), (32, 32), "two of four");
        assert_eq!(after_report(&size, 3, 64), 64, "three of four: their events precede their metrics");
        assert_eq!(pages(&size, &[64, 32, 32, 32]), 64, "whose metrics are unchanged");
        size.forget(EndpointId(2), CACHE);
        size.forget(EndpointId(3), CACHE);
        assert_eq!((after_report(&size, 0, 32), size.get()), (32, 32), "no endpoint has it any more");
    }

    #[test]
    fn metrics_that_events_contradict_are_ignored_for_other_endpoints() {
        let size = BlockSize::of_engines(8);
        assert_eq!(pages(&size, &[16; 10]), 16);
        assert_eq!(after_report(&size, 0, 32), 32, "context parallelism: one size for two ranks together");
        assert_eq!(pages(&size, &[16; 10]), 32);
        assert_eq!((after_report(&size, 1, 32), after_report(&size, 2, 16), after_report(&size, 3, 16)), (32, 32, 32));
        assert_eq!((after_report(&size, 4, 16), after_report(&size, 5, 16)), (32, 16), "the events of most");
        let mixed = BlockSize::of_engines(8);
        assert_eq!(
            (pages(&mixed, &[16, 16, 64, 64, 64]), after_report(&mixed, 0, 32)),
            (64, 64),
            "other metrics count"
        );
        mixed.forget(EndpointId(0), CACHE);
        assert_eq!(pages(&mixed, &[16, 16, 16, 16, 64]), 16, "and so do the ignored ones again");
    }

    #[test]
    fn size_changes_when_another_leads_clearly() {
        for in_force in [16, 32] {
            for order in [[16, 16, 32, 32], [32, 16, 32, 16]] {
                assert_eq!(pages(&BlockSize::of_engines(in_force), &order), in_force, "as many");
            }
        }
        let size = BlockSize::of_engines(8);
        assert_eq!(pages(&size, &[64, 32]), 32, "the smallest, as none of them is the current one");
        assert_eq!(pages(&size, &[64, 32, 64]), 32, "one more");
        assert_eq!(pages(&size, &[64, 32, 64, 64]), 64, "two more");
        assert_eq!(pages(&size, &[64, 32, 64, 32, 32]), 64, "the change back needs the same lead");
        assert_eq!(pages(&size, &[32, 32, 32, 32, 32]), 32, "no endpoint has it");
        let parted = |of_64: usize| -> Vec<u32> { (0..40).map(|i| if i < of_64 { 64 } else { 32 }).collect() };
        assert_eq!([20, 21, 22].map(|of_64| pages(&size, &parted(of_64))), [32; 3], "a tenth, not more");
        assert_eq!([23, 18, 17].map(|of_64| pages(&size, &parted(of_64))), [64, 64, 32]);
    }

    #[test]
    fn missing_metric_keeps_the_size_and_a_leaving_endpoint_changes_it() {
        let size = BlockSize::of_engines(8);
        assert_eq!(pages(&size, &[32, 32, 16]), 32);
        assert_eq!(pages(&size, &[0, 0, 16]), 32);
        size.pages([(EndpointId(2), None)].into_iter());
        assert_eq!(size.get(), 16);
        size.pages(std::iter::empty());
        assert_eq!(size.get(), 16, "until an endpoint reports another one");
        assert!(size.endpoints.lock().is_empty(), "the table is empty");
    }

    #[test]
    fn ranks_of_an_endpoint_count_as_one() {
        let size = BlockSize::of_engines(8);
        assert_eq!(pages(&size, &[16, 16, 32]), 16);
        for rank in 0..8 {
            size.report(EndpointId(2), HolderId(rank), 32);
            assert_eq!(size.get(), 16);
        }
        (0..8).for_each(|rank| size.forget(EndpointId(2), HolderId(rank)));
        assert_eq!(pages(&size, &[32, 32, 32]), 32);
    }

    proptest! {
        /// After any sequence of reports, no size leads clearly over the current one, and the size changes only
        /// to one that leads clearly.
        #[test]
        fn size_is_that_of_most_endpoints(steps in proptest::collection::vec((0u32..4, 0u32..5, 0u32..4), 1..60)) {
            let size = BlockSize::of_engines(1);
            let (mut named, mut reported) = ([0; 5], [0; 5]);
            for (what, at, tokens) in steps {
                let (endpoint, before) = (EndpointId(at), size.get());
                match what {
                    0 => {
                        named[at as usize] = if tokens > 0 { tokens } else { named[at as usize] };
                        pages(&size, &named);
                    }
                    1 => {
                        size.forget(endpoint, CACHE);
                        reported[at as usize] = 0;
                    }
                    _ => {
                        let tokens = tokens + 1;
                        reported[at as usize] = tokens;
                        size.report(endpoint, CACHE, tokens);
                    }
                }
                let is_untrue = |page: u32| (0..5).any(|i| named[i] == page && reported[i] > 0 && reported[i] != page);
                let vote = |i: usize| if reported[i] > 0 { reported[i] } else if is_untrue(named[i]) { 0 } else { named[i] };
                let all: Vec<u32> = (0..5).map(vote).filter(|t| *t > 0).collect();
                let of = |tokens: u32| all.iter().filter(|t| **t == tokens).count();
                let leads = |size: u32, before: u32| of(before) == 0 || of(size) > of(before) + 1;
                let now = size.get();
                let none_leads = (1..6).all(|other| of(other) == 0 || !leads(other, now));
                prop_assert!(all.is_empty() || none_leads, "{:?} {}", all, now);
                prop_assert!(now == before || leads(now, before), "{:?} {} {}", all, before, now);
            }
        }
    }
}
