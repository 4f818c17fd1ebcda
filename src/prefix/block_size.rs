//! How many tokens a pool's blocks have. Keys of blocks of different sizes never meet, so all who make keys share one [`BlockSize`]: prompts
//! are cut by it, and what engines tell of blocks of another size is not taken in.

use super::index::HolderId;
use ahash::{AHashMap, AHashSet};
use attache_types::ids::EndpointId;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Tokens in a block: those that the configuration names; or those that most endpoints of the pool have, each by its events or, as long as it
/// has told of no block, by its page of metrics. A page that the events of its own endpoint contradict, as that of vLLM with context parallelism,
/// says nothing for others either. While some have the size in force, another takes its place only with two more and a tenth of all more:
/// each change costs what is known of blocks.
#[derive(Debug)]
pub struct BlockSize {
    tokens: AtomicU32,
    is_given: bool,
    endpoints: Mutex<AHashMap<EndpointId, Told>>,
}

/// What one endpoint says of its blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Told {
    page: Option<u32>,
    /// By cache, the first that has told before the others.
    events: SmallVec<[(HolderId, u32); 1]>,
}

impl BlockSize {
    /// The size that the configuration asks for, whatever engines say.
    #[must_use]
    pub fn given(tokens: u32) -> Self {
        Self { tokens: AtomicU32::new(tokens), is_given: true, endpoints: Mutex::default() }
    }

    /// The size of the engines' blocks; `until_known` before they have told.
    #[must_use]
    pub fn of_engines(until_known: u32) -> Self {
        Self { tokens: AtomicU32::new(until_known), is_given: false, endpoints: Mutex::default() }
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
        let mut known = self.endpoints.lock();
        let (mut is_news, mut of_pool) = (false, 0);
        for (endpoint, page) in endpoints.clone() {
            if let Some(page) = page.filter(|tokens| *tokens > 0) {
                is_news |= known.entry(endpoint).or_default().page.replace(page) != Some(page);
            }
            of_pool += usize::from(known.contains_key(&endpoint));
        }
        if known.len() > of_pool {
            let there: AHashSet<EndpointId> = endpoints.map(|(endpoint, _)| endpoint).collect();
            for (_, told) in known.iter_mut().filter(|(endpoint, _)| !there.contains(endpoint)) {
                is_news |= told.page.take().is_some();
            }
        }
        if is_news {
            self.elect(&mut known);
        }
    }

    /// The events of one of an endpoint's caches have blocks of `tokens`, which counts until [`BlockSize::forget`].
    pub fn tell(&self, endpoint: EndpointId, cache: HolderId, tokens: u32) {
        let mut known = self.endpoints.lock();
        let told = known.entry(endpoint).or_default();
        match told.events.iter_mut().find(|(known, _)| *known == cache) {
            Some((_, before)) => *before = tokens,
            None => told.events.push((cache, tokens)),
        }
        self.elect(&mut known);
    }

    /// What the events of a cache have told counts no longer.
    pub fn forget(&self, endpoint: EndpointId, cache: HolderId) {
        let mut known = self.endpoints.lock();
        if let Some(told) = known.get_mut(&endpoint) {
            told.events.retain(|(known, _)| *known != cache);
        }
        self.elect(&mut known);
    }

    fn elect(&self, known: &mut AHashMap<EndpointId, Told>) {
        known.retain(|_, told| *told != Told::default());
        if self.is_given {
            return;
        }
        let untrue: AHashSet<u32> = known.values().filter_map(Told::untrue_page).collect();
        let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
        for size in known.values().filter_map(|told| told.size(&untrue)) {
            *counts.entry(size).or_default() += 1;
        }
        let all: usize = counts.values().sum();
        let have_it = counts.get(&self.get()).copied().unwrap_or(0);
        // Of as many it is the smallest.
        if let Some((size, most)) = counts.into_iter().max_by_key(|(size, endpoints)| (*endpoints, Reverse(*size)))
            && (have_it == 0 || (most > have_it + 1 && 10 * (most - have_it) > all))
        {
            self.tokens.store(size, Relaxed);
        }
    }
}

impl Told {
    fn events(&self) -> Option<u32> {
        self.events.first().map(|(_, size)| *size)
    }

    /// What its page names, if its events contradict that.
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
        assert_eq!(pages(&size, &[64, 32, 32, 32]), 32);
        assert_eq!(told(&size, 0, 64), 32, "one of four");
        assert_eq!((told(&size, 1, 32), told(&size, 2, 64)), (32, 32), "two of four");
        assert_eq!(told(&size, 3, 64), 64, "three of four: their events count before their pages");
        assert_eq!(pages(&size, &[64, 32, 32, 32]), 64, "which say the same as before");
        size.forget(EndpointId(2), CACHE);
        size.forget(EndpointId(3), CACHE);
        assert_eq!((told(&size, 0, 32), size.get()), (32, 32), "nobody has it any more");
    }

    #[test]
    fn a_page_that_events_contradict_says_nothing_for_those_that_have_not_told() {
        let size = BlockSize::of_engines(8);
        assert_eq!(pages(&size, &[16; 10]), 16);
        assert_eq!(told(&size, 0, 32), 32, "context parallelism: as large on two ranks together");
        assert_eq!(pages(&size, &[16; 10]), 32);
        assert_eq!((told(&size, 1, 32), told(&size, 2, 16), told(&size, 3, 16)), (32, 32, 32));
        assert_eq!((told(&size, 4, 16), told(&size, 5, 16)), (32, 16), "the events of most");
        let mixed = BlockSize::of_engines(8);
        assert_eq!((pages(&mixed, &[16, 16, 64, 64, 64]), told(&mixed, 0, 32)), (64, 64), "other pages count");
        mixed.forget(EndpointId(0), CACHE);
        assert_eq!(pages(&mixed, &[16, 16, 16, 16, 64]), 16, "and so does that one again");
    }

    #[test]
    fn it_changes_where_another_leads_clearly() {
        for in_force in [16, 32] {
            for order in [[16, 16, 32, 32], [32, 16, 32, 16]] {
                assert_eq!(pages(&BlockSize::of_engines(in_force), &order), in_force, "as many");
            }
        }
        let size = BlockSize::of_engines(8);
        assert_eq!(pages(&size, &[64, 32]), 32, "the smallest where none of them is in force");
        assert_eq!(pages(&size, &[64, 32, 64]), 32, "one more");
        assert_eq!(pages(&size, &[64, 32, 64, 64]), 64, "two more");
        assert_eq!(pages(&size, &[64, 32, 64, 32, 32]), 64, "back it goes as late");
        assert_eq!(pages(&size, &[32, 32, 32, 32, 32]), 32, "nobody has it");
        let parted = |of_64: usize| -> Vec<u32> { (0..40).map(|i| if i < of_64 { 64 } else { 32 }).collect() };
        assert_eq!([20, 21, 22].map(|of_64| pages(&size, &parted(of_64))), [32; 3], "a tenth, not more");
        assert_eq!([23, 18, 17].map(|of_64| pages(&size, &parted(of_64))), [64, 64, 32]);
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
        assert!(size.endpoints.lock().is_empty(), "nothing is left behind");
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
        assert_eq!(pages(&size, &[32, 32, 32]), 32);
    }

    proptest! {
        /// Whatever comes and goes, no size leads clearly before the one in force, and that changes for no other.
        #[test]
        fn it_is_the_size_of_most(steps in proptest::collection::vec((0u32..4, 0u32..5, 0u32..4), 1..60)) {
            let size = BlockSize::of_engines(1);
            let (mut named, mut told) = ([0; 5], [0; 5]);
            for (what, at, tokens) in steps {
                let (endpoint, before) = (EndpointId(at), size.get());
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
                let is_untrue = |page: u32| (0..5).any(|i| named[i] == page && told[i] > 0 && told[i] != page);
                let vote = |i: usize| if told[i] > 0 { told[i] } else if is_untrue(named[i]) { 0 } else { named[i] };
                let all: Vec<u32> = (0..5).map(vote).filter(|t| *t > 0).collect();
                let of = |tokens: u32| all.iter().filter(|t| **t == tokens).count();
                let leads = |size: u32, before: u32| of(before) == 0 || of(size) > of(before) + 1;
                let now = size.get();
                prop_assert!(all.is_empty() || (1..6).all(|other| of(other) == 0 || !leads(other, now)), "{:?} {}", all, now);
                prop_assert!(now == before || leads(now, before), "{:?} {} {}", all, before, now);
            }
        }
    }
}
