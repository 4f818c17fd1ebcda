//! Who was sent which beginnings, and when: bounded, forgotten by age, and the weight of each endpoint at hand without a walk.
//!
//! A chain's hash stands for everything before it, so the tree of beginnings is a map from hash to those that were sent it. All entries
//! are in one list by age: what is too old goes from its end, and so does what is one too many; of one prompt the tail goes first.
//!
//! Entries name a [`Place`], which stands for an endpoint until that is lost. A loss marks the place, so that its entries count no more from then
//! on, however many there are; their memory is given back by the requests that follow, [`SWEEP`] at a time.

use ahash::AHashMap;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use std::cmp::Reverse;
use std::time::Duration;

/// Endpoints that are remembered for one beginning; of more, the latest. What eight endpoints hold finds a place anyway.
const MAX_OWNERS: usize = 8;
/// Entries that a request removes at most of those that are too old, and looks at of those that may be lost: no request waits long for it.
const SWEEP: usize = 256;
const NONE: u32 = u32::MAX;

/// How long and how much is remembered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Retention {
    /// What is older is forgotten.
    pub(super) ttl: Duration,
    /// An entry's weight halves in this time; zero for never.
    pub(super) half_life: Duration,
    /// Pairs of a beginning and an endpoint.
    pub(super) max_entries: u32,
    /// Only the last endpoint that was sent a beginning owns it, as in LocalAI.
    pub(super) last_writer: bool,
}

/// That an endpoint was sent a beginning.
#[derive(Debug)]
struct Entry {
    hash: u64,
    /// The hash of the model's name.
    model: u64,
    at: Timestamp,
    /// Position of the endpoint's [`Place`]; [`NONE`] for a free entry.
    owner: u32,
    /// Requests that were sent the beginning there, without those that were served elsewhere.
    requests: u32,
    /// The next entry of the same hash, or the next free one.
    sibling: u32,
    older: u32,
    newer: u32,
}

/// An endpoint, from its first entry until it is lost or has no entries left.
#[derive(Debug)]
struct Place {
    endpoint: EndpointId,
    entries: u32,
    is_lost: bool,
}

/// The weights of an endpoint's entries for one model, added up.
#[derive(Clone, Copy, Debug, Default)]
struct Weight {
    sum: f64,
    at: Timestamp,
    entries: u32,
}

/// The longest known beginning of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hot {
    /// The position of its endpoint among the candidates.
    pub(super) candidate: usize,
    /// Blocks.
    pub(super) depth: usize,
}

#[derive(Debug)]
pub(super) struct Memory {
    retention: Retention,
    first: AHashMap<u64, u32>,
    entries: Vec<Entry>,
    held: u32,
    free: u32,
    oldest: u32,
    newest: u32,
    /// By the model's hash and the position of the place.
    weights: AHashMap<(u64, u32), Weight>,
    places: Vec<Place>,
    free_places: Vec<u32>,
    by_endpoint: AHashMap<EndpointId, u32>,
    /// The next entry that a request looks at for lost endpoints.
    cursor: usize,
    /// Entries that are to be looked at since the last loss.
    unswept: usize,
}

impl Memory {
    pub(super) fn new(retention: Retention) -> Self {
        Self {
            retention,
            first: AHashMap::new(),
            entries: Vec::new(),
            held: 0,
            free: NONE,
            oldest: NONE,
            newest: NONE,
            weights: AHashMap::new(),
            places: Vec::new(),
            free_places: Vec::new(),
            by_endpoint: AHashMap::new(),
            cursor: 0,
            unswept: 0,
        }
    }

    /// Entries of endpoints that are not lost.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        let weighed: u32 = self.weights.values().map(|w| w.entries).sum();
        let placed: u32 = self.places.iter().map(|place| place.entries).sum();
        assert_eq!([weighed, placed], [self.held; 2]);
        self.places.iter().filter(|place| !place.is_lost).map(|place| place.entries as usize).sum()
    }

    /// Entries that take memory, those of lost endpoints among them.
    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        self.held as usize
    }

    fn entry(&self, at: u32) -> Option<&Entry> {
        self.entries.get(at as usize)
    }

    fn entry_mut(&mut self, at: u32) -> Option<&mut Entry> {
        self.entries.get_mut(at as usize)
    }

    /// The endpoint of an entry that counts; `None` for one that is too old, and for one of a lost endpoint.
    fn live(&self, entry: &Entry, now: Timestamp) -> Option<EndpointId> {
        let place = self.places.get(entry.owner as usize).filter(|place| !place.is_lost)?;
        self.is_fresh(entry, now).then_some(place.endpoint)
    }

    fn is_fresh(&self, entry: &Entry, now: Timestamp) -> bool {
        now.since(entry.at) <= self.retention.ttl
    }

    fn is_lost(&self, entry: &Entry) -> bool {
        self.places.get(entry.owner as usize).is_some_and(|place| place.is_lost)
    }

    /// What is left of a weight of 1 after `age`.
    fn decay(&self, age: Duration) -> f64 {
        let half_life = self.retention.half_life.as_secs_f64();
        if half_life > 0.0 { (-age.as_secs_f64() / half_life).exp2() } else { 1.0 }
    }

    /// The entries of one hash.
    fn owners(&self, hash: u64) -> impl Iterator<Item = (u32, &Entry)> {
        let mut at = self.first.get(&hash).copied().unwrap_or(NONE);
        std::iter::from_fn(move || {
            let (here, entry) = (at, self.entry(at)?);
            at = entry.sibling;
            Some((here, entry))
        })
    }

    /// The longest beginning of `chain` that a candidate was sent; `candidate` gives the position of an endpoint and its requests. Of several
    /// that were sent it the one with the fewest requests, then the latest. With a last writer only, that one or nobody.
    pub(super) fn hot(
        &self,
        chain: &[u64],
        now: Timestamp,
        candidate: impl Fn(EndpointId) -> Option<(usize, u32)>,
    ) -> Option<Hot> {
        let known = chain.iter().take_while(|hash| self.first.contains_key(hash)).count();
        for (i, hash) in chain.iter().enumerate().take(known).rev() {
            let live = self.owners(*hash).filter_map(|(_, e)| Some((e.at, self.live(e, now)?)));
            let mut live = live.peekable();
            let owned = live.peek().is_some();
            let named =
                live.filter_map(|(at, owner)| candidate(owner).map(|(place, requests)| (requests, Reverse(at), place)));
            if let Some((.., candidate)) = named.min() {
                return Some(Hot { candidate, depth: i + 1 });
            }
            if owned && self.retention.last_writer {
                return None;
            }
        }
        None
    }

    /// How much an endpoint was sent of late for the model of this hash.
    pub(super) fn weight(&self, model: u64, endpoint: EndpointId, now: Timestamp) -> f64 {
        let weight = self.by_endpoint.get(&endpoint).and_then(|place| self.weights.get(&(model, *place)));
        weight.map_or(0.0, |w| w.sum * self.decay(now.since(w.at)))
    }

    /// Whether something is held that is too old.
    pub(super) fn is_stale(&self, now: Timestamp) -> bool {
        self.entry(self.oldest).is_some_and(|e| !self.is_fresh(e, now))
    }

    /// Forgets what is too old, a good part at a time.
    pub(super) fn expire(&mut self, now: Timestamp) {
        for _ in 0..SWEEP {
            if !self.is_stale(now) {
                break;
            }
            self.remove(self.oldest, now);
        }
    }

    /// A request for the prompt of `chain` was not served by `endpoint`, which was sent it: what no other request was sent there is forgotten.
    pub(super) fn retract(&mut self, chain: &[u64], endpoint: EndpointId, now: Timestamp) {
        let Some(place) = self.by_endpoint.get(&endpoint).copied() else { return };
        for hash in chain {
            let own = self.owners(*hash).find(|(_, e)| e.owner == place).map(|(at, _)| at);
            let Some((at, entry)) = own.and_then(|at| Some((at, self.entry_mut(at)?))) else { continue };
            entry.requests = entry.requests.saturating_sub(1);
            if entry.requests == 0 {
                self.remove(at, now);
            }
        }
    }

    /// Forgets all that the endpoints in `lost` were sent, of all models. Takes no longer where they were sent more.
    pub(super) fn forget(&mut self, lost: &[EndpointId]) {
        for endpoint in lost {
            // Most endpoints that come and go were sent nothing.
            let Some(at) = self.by_endpoint.remove(endpoint) else { continue };
            if let Some(place) = self.places.get_mut(at as usize) {
                place.is_lost = true;
                self.unswept = self.entries.len();
            }
        }
    }

    /// Gives back the memory of lost endpoints' entries, a good part at a time.
    fn sweep(&mut self, now: Timestamp) {
        let part = self.unswept.min(SWEEP);
        self.unswept -= part;
        for _ in 0..part {
            let at = self.cursor;
            self.cursor = if at + 1 < self.entries.len() { at + 1 } else { 0 };
            if self.entries.get(at).is_some_and(|entry| self.is_lost(entry)) {
                self.remove(u32::try_from(at).unwrap_or(NONE), now);
            }
        }
    }

    /// `endpoint` is sent the prompt of `chain`, which is for the model of the hash `model`.
    pub(super) fn observe(&mut self, model: u64, chain: &[u64], endpoint: EndpointId, now: Timestamp) {
        self.expire(now);
        self.sweep(now);
        if chain.is_empty() {
            return;
        }
        let place = self.place(endpoint);
        // From the tail, so that the head is the youngest.
        for hash in chain.iter().rev() {
            self.touch(*hash, model, place, now);
        }
        while self.held > self.retention.max_entries {
            self.remove(self.oldest, now);
        }
    }

    /// The position of the endpoint's place, which is a new one for its first entry.
    fn place(&mut self, endpoint: EndpointId) -> u32 {
        if let Some(at) = self.by_endpoint.get(&endpoint) {
            return *at;
        }
        let place = Place { endpoint, entries: 0, is_lost: false };
        let free = self.free_places.pop();
        let at = match free.and_then(|at| Some((at, self.places.get_mut(at as usize)?))) {
            Some((at, free)) => {
                *free = place;
                at
            }
            None => {
                self.places.push(place);
                u32::try_from(self.places.len() - 1).unwrap_or(NONE)
            }
        };
        self.by_endpoint.insert(endpoint, at);
        at
    }

    fn touch(&mut self, hash: u64, model: u64, owner: u32, now: Timestamp) {
        let mut own = None;
        let mut count = 0;
        // The first to go: lost ones, then the oldest.
        let mut last: Option<(bool, Timestamp, u32)> = None;
        for (at, entry) in self.owners(hash) {
            if entry.owner == owner {
                own = Some((at, entry.at));
            } else {
                count += 1;
                let order = (!self.is_lost(entry), entry.at, at);
                last = Some(last.unwrap_or(order).min(order));
            }
        }
        let most = if self.retention.last_writer { 1 } else { MAX_OWNERS };
        if let Some((.., at)) = last.filter(|_| count >= most) {
            self.remove(at, now);
        }
        match own {
            Some((at, before)) => {
                let left = self.decay(now.since(before));
                self.weigh((model, owner), 1.0 - left, 0, now);
                if let Some(entry) = self.entry_mut(at) {
                    entry.requests = entry.requests.saturating_add(1);
                }
                self.unlink(at);
                self.link_newest(at, now);
            }
            None => {
                let sibling = self.first.get(&hash).copied().unwrap_or(NONE);
                let (older, newer) = (NONE, NONE);
                let at = self.allocate(Entry { hash, model, at: now, owner, requests: 1, sibling, older, newer });
                self.first.insert(hash, at);
                self.weigh((model, owner), 1.0, 1, now);
                self.held += 1;
                if let Some(place) = self.places.get_mut(owner as usize) {
                    place.entries += 1;
                }
                self.link_newest(at, now);
            }
        }
    }

    fn weigh(&mut self, owner: (u64, u32), by: f64, entries: i32, now: Timestamp) {
        let weight = self.weights.get(&owner).copied().unwrap_or_default();
        let left = weight.sum * self.decay(now.since(weight.at));
        let entries = weight.entries.saturating_add_signed(entries);
        if entries == 0 {
            self.weights.remove(&owner);
        } else {
            // Rounding must not make less than nothing of it.
            self.weights.insert(owner, Weight { sum: (left + by).max(0.0), at: now, entries });
        }
    }

    fn allocate(&mut self, entry: Entry) -> u32 {
        let at = self.free;
        if let Some(place) = self.entries.get_mut(at as usize) {
            self.free = place.sibling;
            *place = entry;
            return at;
        }
        self.entries.push(entry);
        u32::try_from(self.entries.len() - 1).unwrap_or(NONE)
    }

    fn remove(&mut self, at: u32, now: Timestamp) {
        let entry = self.entry(at).map(|e| (e.hash, (e.model, e.owner), e.at, e.sibling));
        let Some((hash, owner, before, sibling)) = entry else { return };
        let left = self.decay(now.since(before));
        self.weigh(owner, -left, -1, now);
        self.held -= 1;
        self.leave(owner.1);
        self.unlink(at);
        let previous = self.owners(hash).find(|(_, e)| e.sibling == at).map(|(i, _)| i);
        match previous.and_then(|i| self.entry_mut(i)) {
            Some(previous) => previous.sibling = sibling,
            None if sibling == NONE => drop(self.first.remove(&hash)),
            None => drop(self.first.insert(hash, sibling)),
        }
        let free = std::mem::replace(&mut self.free, at);
        if let Some(entry) = self.entry_mut(at) {
            (entry.sibling, entry.owner) = (free, NONE);
        }
    }

    /// The place at `at` has an entry less; without any it is given back.
    fn leave(&mut self, at: u32) {
        let Some(place) = self.places.get_mut(at as usize) else { return };
        place.entries = place.entries.saturating_sub(1);
        if place.entries > 0 {
            return;
        }
        if !place.is_lost {
            self.by_endpoint.remove(&place.endpoint);
        }
        self.free_places.push(at);
    }

    fn unlink(&mut self, at: u32) {
        let Some((older, newer)) = self.entry(at).map(|e| (e.older, e.newer)) else { return };
        match self.entry_mut(older) {
            Some(entry) => entry.newer = newer,
            None => self.oldest = newer,
        }
        match self.entry_mut(newer) {
            Some(entry) => entry.older = older,
            None => self.newest = older,
        }
    }

    fn link_newest(&mut self, at: u32, now: Timestamp) {
        let older = std::mem::replace(&mut self.newest, at);
        match self.entry_mut(older) {
            Some(entry) => entry.newer = at,
            None => self.oldest = at,
        }
        if let Some(entry) = self.entry_mut(at) {
            (entry.at, entry.older, entry.newer) = (now, older, NONE);
        }
    }
}
