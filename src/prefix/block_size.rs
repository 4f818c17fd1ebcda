//! How many tokens a pool's blocks have. Keys of blocks of different sizes never meet, so all who make keys share one [`BlockSize`]: prompts
//! are cut by it, and what engines tell of blocks of another size is not taken in.

use super::index::HolderId;
use crate::ids::EndpointId;
use ahash::{AHashMap, AHashSet};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Tokens in a block: those that the configuration names; or those that most endpoints of the pool have, each by its events or, as long as it
/// has told of no block, by its page of metrics. Where as many have blocks of another size, it stays what it is.
#[derive(Debug)]
pub struct BlockSize {
    tokens: AtomicU32,
    is_given: bool,
    sizes: Mutex<Sizes>,
}

/// What is known of the endpoints' blocks.
#[derive(Debug, Default)]
struct Sizes {
    endpoints: AHashMap<EndpointId, Told>,
    /// Endpoints by the size of their blocks.
    counts: BTreeMap<u32, usize>,
}

/// What one endpoint says of its blocks.
#[derive(Debug, Default)]
struct Told {
    page: Option<u32>,
    /// By cache, the first that has told before the others.
    events: SmallVec<[(HolderId, u32); 1]>,
}

impl BlockSize {
    /// The size that the configuration asks for, whatever engines say.
    #[must_use]
    pub fn given(tokens: u32) -> Self {
        Self { tokens: AtomicU32::new(tokens), is_given: true, sizes: Mutex::default() }
    }

    /// The size of the engines' blocks; `until_known` before they have told.
    #[must_use]
    pub fn of_engines(until_known: u32) -> Self {
        Self { tokens: AtomicU32::new(until_known), is_given: false, sizes: Mutex::default() }
    }

    /// Tokens in a block.
    #[must_use]
    pub fn get(&self) -> u32 {
        self.tokens.load(Relaxed)
    }

    /// The same as a number that prompts can be cut by.
    #[must_use]
    pub fn at_least_one(&self) -> NonZeroUsize {
        NonZeroUsize::new(self.get() as usize).unwrap_or(NonZeroUsize::MIN)
    }

    /// Whether the configuration names it.
    #[must_use]
    pub fn is_given(&self) -> bool {
        self.is_given
    }

    /// These are the pool's endpoints, with the size that the page of each names. One whose page names none just now keeps what it named
    /// before; the pages of endpoints that are not among them are forgotten.
    pub fn pages(&self, endpoints: impl Iterator<Item = (EndpointId, Option<u32>)> + Clone) {
        let mut sizes = self.sizes.lock();
        let mut known = 0;
        for (endpoint, page) in endpoints.clone() {
            known += usize::from(sizes.change(endpoint, |told| told.page = page.filter(|t| *t > 0).or(told.page)));
        }
        if sizes.endpoints.len() > known {
            let there: AHashSet<EndpointId> = endpoints.map(|(endpoint, _)| endpoint).collect();
            let gone: Vec<EndpointId> = sizes.endpoints.keys().filter(|e| !there.contains(e)).copied().collect();
            for endpoint in gone {
                sizes.change(endpoint, |told| told.page = None);
            }
        }
        self.elect(&sizes);
    }

    /// The events of one of an endpoint's caches have blocks of `tokens`, which counts until [`BlockSize::forget`].
    pub fn tell(&self, endpoint: EndpointId, cache: HolderId, tokens: u32) {
        let mut sizes = self.sizes.lock();
        sizes.change(endpoint, |told| match told.events.iter_mut().find(|(known, _)| *known == cache) {
            Some((_, before)) => *before = tokens,
            None => told.events.push((cache, tokens)),
        });
        self.elect(&sizes);
    }

    /// What the events of a cache have told counts no longer.
    pub fn forget(&self, endpoint: EndpointId, cache: HolderId) {
        let mut sizes = self.sizes.lock();
        sizes.change(endpoint, |told| told.events.retain(|(known, _)| *known != cache));
        self.elect(&sizes);
    }

    fn elect(&self, sizes: &Sizes) {
        let now = self.get();
        // Of as many it is the one that is in force, or else the smallest.
        let most = sizes.counts.iter().max_by_key(|(size, endpoints)| (**endpoints, **size == now, Reverse(**size)));
        if let Some((size, _)) = most.filter(|_| !self.is_given) {
            self.tokens.store(*size, Relaxed);
        }
    }
}

impl Sizes {
    /// Changes what an endpoint says; whether it says anything now.
    fn change(&mut self, endpoint: EndpointId, change: impl FnOnce(&mut Told)) -> bool {
        let told = self.endpoints.entry(endpoint).or_default();
        let before = told.size();
        change(told);
        let after = told.size();
        if before != after {
            if let Some(endpoints) = after.map(|size| self.counts.entry(size).or_default()) {
                *endpoints += 1;
            }
            if let Some(size) = before
                && let Entry::Occupied(mut endpoints) = self.counts.entry(size)
            {
                *endpoints.get_mut() -= 1;
                if *endpoints.get() == 0 {
                    endpoints.remove();
                }
            }
        }
        if after.is_none() {
            self.endpoints.remove(&endpoint);
        }
        after.is_some()
    }
}

impl Told {
    fn size(&self) -> Option<u32> {
        self.events.first().map(|(_, size)| *size).or(self.page)
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

    fn told(size: &BlockSize, endpoint: u32, tokens: u32) -> u32 {
        size.tell(EndpointId(endpoint), CACHE, tokens);
        size.get()
    }

    #[test]
    fn what_the_configuration_names_stays() {
        let size = BlockSize::given(16);
        assert_eq!((pages(&size, &[32, 32]), told(&size, 0, 32)), (16, 16));
    }

    #[test]
    fn one_engines_events_do_not_outweigh_the_pages_of_most() {
        let size = BlockSize::of_engines(16);
        assert_eq!(pages(&size, &[32, 32, 32]), 32);
        assert_eq!(told(&size, 0, 64), 32, "one of three");
        assert_eq!(told(&size, 1, 64), 64, "two of three: their events count before their pages");
        assert_eq!(pages(&size, &[32, 32, 32]), 64, "which say the same as before");
        size.forget(EndpointId(1), CACHE);
        assert_eq!(size.get(), 32, "its page counts again");
    }

    #[test]
    fn where_as_many_have_blocks_of_another_size_it_stays() {
        for order in [[16, 16, 32, 32], [32, 16, 32, 16]] {
            for in_force in [16, 32] {
                assert_eq!(pages(&BlockSize::of_engines(in_force), &order), in_force);
            }
        }
        let size = BlockSize::of_engines(8);
        assert_eq!(pages(&size, &[64, 32]), 32, "the smallest where none of them is in force");
        assert_eq!(told(&size, 2, 64), 64, "two of three");
        assert_eq!(pages(&size, &[64, 32, 32]), 64, "endpoint 2 says it by its events");
    }

    #[test]
    fn a_page_that_names_none_for_once_changes_nothing_and_an_endpoint_that_is_gone_does() {
        let size = BlockSize::of_engines(8);
        assert_eq!(pages(&size, &[32, 32, 16]), 32);
        assert_eq!(pages(&size, &[0, 0, 16]), 32);
        size.pages([(EndpointId(2), None)].into_iter());
        assert_eq!(size.get(), 16);
        size.pages(std::iter::empty());
        assert_eq!(size.get(), 16, "until somebody says otherwise");
        assert!(
            size.sizes.lock().endpoints.is_empty() && size.sizes.lock().counts.is_empty(),
            "nothing is left behind"
        );
    }

    #[test]
    fn the_ranks_of_an_endpoint_count_as_one() {
        let size = BlockSize::of_engines(8);
        assert_eq!(pages(&size, &[16, 16, 32]), 16);
        for rank in 0..8 {
            size.tell(EndpointId(2), HolderId(rank), 32);
            assert_eq!(size.get(), 16);
        }
        (0..8).for_each(|rank| size.forget(EndpointId(2), HolderId(rank)));
        assert_eq!(pages(&size, &[32, 16, 32]), 32);
    }

    proptest! {
        /// Whatever comes and goes, no size has more endpoints than the one in force.
        #[test]
        fn it_is_the_size_of_most(steps in proptest::collection::vec((0u32..4, 0u32..5, 0u32..4), 1..60)) {
            let size = BlockSize::of_engines(1);
            let (mut named, mut told) = ([0; 5], [0; 5]);
            for (what, at, tokens) in steps {
                let endpoint = EndpointId(at);
                match what {
                    0 => {
                        named[at as usize] = if tokens > 0 { tokens } else { named[at as usize] };
                        pages(&size, &named);
                    }
                    1 => {
                        size.forget(endpoint, CACHE);
                        told[at as usize] = 0;
                    }
                    _ => {
                        let tokens = tokens + 1;
                        told[at as usize] = tokens;
                        size.tell(endpoint, CACHE, tokens);
                    }
                }
                let all: Vec<u32> = (0..5).map(|i| if told[i] > 0 { told[i] } else { named[i] }).filter(|t| *t > 0).collect();
                let of = |tokens: u32| all.iter().filter(|t| **t == tokens).count();
                prop_assert!(all.is_empty() || (1..6).all(|other| of(other) <= of(size.get())), "{:?} {}", all, size.get());
            }
        }
    }
}
