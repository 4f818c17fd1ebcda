//! Which endpoint was sent which prefix, and when. Memory is bounded, entries expire, and the weight of each endpoint
//! is kept up to date.
//!
//! A block's hash identifies everything before it, so the tree of prefixes is a map from hash to the endpoints that
//! were sent it.
//! One list holds all entries by age. Expired entries and those beyond the bound leave from its old end; of one
//! prompt, the last block leaves first.
//!
//! Entries name an [`EndpointSlot`], which represents an endpoint until that is lost. A loss marks the slot, so its
//! entries stop counting at once, however many there are. Later requests free their memory, [`SWEEP`] entries at a
//! time.

use ahash::AHashMap;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use std::cmp::Reverse;
use std::time::Duration;

/// At most this many endpoints are recorded for one prefix, the latest ones. Routing needs no more choices than that.
const MAX_OWNERS: usize = 8;
/// The most expired entries that one request removes, and the most entries that it checks for lost endpoints. Bounds
/// the time of a request.
const SWEEP: usize = 256;
const NONE: u32 = u32::MAX;

/// How long and how many entries are kept.
#[derive(Clone, Copy, Debug)]
pub(super) struct Retention {
    /// Older entries expire.
    pub(super) ttl: Duration,
    /// An entry's weight halves in this time; zero for never.
    pub(super) half_life: Duration,
    /// Most entries; an entry is one pair of a prefix and an endpoint.
    pub(super) max_entries: u32,
    /// A prefix belongs only to the last endpoint that was sent it, as in LocalAI.
    pub(super) last_writer: bool,
}

/// One endpoint was sent one prefix.
#[derive(Debug)]
struct PrefixEntry {
    hash: u64,
    /// The hash of the model's name.
    model: u64,
    at: Timestamp,
    /// Position of the endpoint's [`EndpointSlot`]; [`NONE`] for a free entry.
    owner: u32,
    /// How many requests with this prefix the endpoint was sent, without those that another endpoint served.
    requests: u32,
    /// The next entry of the same hash, or the next free entry.
    sibling: u32,
    older: u32,
    newer: u32,
}

/// An endpoint, from its first entry until it is lost or has no entries left.
#[derive(Debug)]
struct EndpointSlot {
    endpoint: EndpointId,
    entries: u32,
    is_lost: bool,
}

/// Sum of the decayed weights of an endpoint's entries for one model, as of `at`.
#[derive(Clone, Copy, Debug, Default)]
struct DecayedWeight {
    sum: f64,
    at: Timestamp,
    entries: u32,
}

/// The endpoint that was sent the longest prefix of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HotEndpoint {
    /// Position of the endpoint among the candidates.
    pub(super) candidate: usize,
    /// Length of the prefix in blocks.
    pub(super) depth: usize,
}

#[derive(Debug)]
pub(super) struct Memory {
    retention: Retention,
    first: AHashMap<u64, u32>,
    entries: Vec<PrefixEntry>,
    held: u32,
    free: u32,
    oldest: u32,
    newest: u32,
    /// By the model's hash and the position of the slot.
    weights: AHashMap<(u64, u32), DecayedWeight>,
    slots: Vec<EndpointSlot>,
    free_slots: Vec<u32>,
    by_endpoint: AHashMap<EndpointId, u32>,
    /// The next entry to check for a lost endpoint.
    cursor: usize,
    /// Entries still to check since the last loss.
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
            slots: Vec::new(),
            free_slots: Vec::new(),
            by_endpoint: AHashMap::new(),
            cursor: 0,
            unswept: 0,
        }
    }

    /// Entries of endpoints that are not lost.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        let weighed: u32 = self.weights.values().map(|w| w.entries).sum();
        let placed: u32 = self.slots.iter().map(|slot| slot.entries).sum();
        assert_eq!([weighed, placed], [self.held; 2]);
        self.slots.iter().filter(|slot| !slot.is_lost).map(|slot| slot.entries as usize).sum()
    }

    /// Entries in memory, including those of lost endpoints.
    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        self.held as usize
    }

    fn entry(&self, at: u32) -> Option<&PrefixEntry> {
        self.entries.get(at as usize)
    }

    fn entry_mut(&mut self, at: u32) -> Option<&mut PrefixEntry> {
        self.entries.get_mut(at as usize)
    }

    /// The endpoint of an entry; `None` if the entry has expired or its endpoint is lost.
    fn live(&self, entry: &PrefixEntry, now: Timestamp) -> Option<EndpointId> {
        let slot = self.slots.get(entry.owner as usize).filter(|slot| !slot.is_lost)?;
        self.is_fresh(entry, now).then_some(slot.endpoint)
    }

    fn is_fresh(&self, entry: &PrefixEntry, now: Timestamp) -> bool {
        now.since(entry.at) <= self.retention.ttl
    }

    fn is_lost(&self, entry: &PrefixEntry) -> bool {
        self.slots.get(entry.owner as usize).is_some_and(|slot| slot.is_lost)
    }

    /// Decayed weight of an entry of this age; 1 at age 0.
    fn decay(&self, age: Duration) -> f64 {
        let half_life = self.retention.half_life.as_secs_f64();
        if half_life > 0.0 { (-age.as_secs_f64() / half_life).exp2() } else { 1.0 }
    }

    /// The entries of one hash, with their positions.
    fn owners(&self, hash: u64) -> impl Iterator<Item = (u32, &PrefixEntry)> {
        let mut at = self.first.get(&hash).copied().unwrap_or(NONE);
        std::iter::from_fn(move || {
            let (here, entry) = (at, self.entry(at)?);
            at = entry.sibling;
            Some((here, entry))
        })
    }

    /// The longest prefix of `chain` that a candidate was sent. `candidate` maps an endpoint to its position and its
    /// requests, `None` if it is not a candidate.
    /// Of several endpoints, the one with the fewest requests is returned, then the latest. With `last_writer`, only
    /// the last one counts.
    pub(super) fn hot(
        &self,
        chain: &[u64],
        now: Timestamp,
        candidate: impl Fn(EndpointId) -> Option<(usize, u32)>,
    ) -> Option<HotEndpoint> {
        let known = chain.iter().take_while(|hash| self.first.contains_key(hash)).count();
        for (i, hash) in chain.iter().enumerate().take(known).rev() {
            let live = self.owners(*hash).filter_map(|(_, e)| Some((e.at, self.live(e, now)?)));
            let mut live = live.peekable();
            let owned = live.peek().is_some();
            let named = live.filter_map(|(at, owner)| {
                candidate(owner).map(|(position, requests)| (requests, Reverse(at), position))
            });
            if let Some((.., candidate)) = named.min() {
                return Some(HotEndpoint { candidate, depth: i + 1 });
            }
            if owned && self.retention.last_writer {
                return None;
            }
        }
        None
    }

    /// DecayedWeight of what the endpoint was sent for the model of this hash.
    pub(super) fn weight(&self, model: u64, endpoint: EndpointId, now: Timestamp) -> f64 {
        let weight = self.by_endpoint.get(&endpoint).and_then(|slot| self.weights.get(&(model, *slot)));
        weight.map_or(0.0, |w| w.sum * self.decay(now.since(w.at)))
    }

    /// Whether the oldest entry has expired.
    pub(super) fn is_stale(&self, now: Timestamp) -> bool {
        self.entry(self.oldest).is_some_and(|e| !self.is_fresh(e, now))
    }

    /// Drops expired entries, at most [`SWEEP`].
    pub(super) fn expire(&mut self, now: Timestamp) {
        for _ in 0..SWEEP {
            if !self.is_stale(now) {
                break;
            }
            self.remove(self.oldest, now);
        }
    }

    /// Undoes one [`Self::observe`]: another endpoint served the request. Entries that no other request recorded are
    /// dropped.
    pub(super) fn retract(&mut self, chain: &[u64], endpoint: EndpointId, now: Timestamp) {
        let Some(slot) = self.by_endpoint.get(&endpoint).copied() else { return };
        for hash in chain {
            let own = self.owners(*hash).find(|(_, e)| e.owner == slot).map(|(at, _)| at);
            let Some((at, entry)) = own.and_then(|at| Some((at, self.entry_mut(at)?))) else { continue };
            entry.requests = entry.requests.saturating_sub(1);
            if entry.requests == 0 {
                self.remove(at, now);
            }
        }
    }

    /// Drops all entries of the endpoints in `lost`, in time that does not depend on their number.
    pub(super) fn forget(&mut self, lost: &[EndpointId]) {
        for endpoint in lost {
            // Most endpoints that are removed have no entries.
            let Some(at) = self.by_endpoint.remove(endpoint) else { continue };
            if let Some(slot) = self.slots.get_mut(at as usize) {
                slot.is_lost = true;
                self.unswept = self.entries.len();
            }
        }
    }

    /// Frees entries of lost endpoints; checks at most [`SWEEP`] entries.
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

    /// Records that `endpoint` was sent the prompt of `chain`, for the model of the hash `model`.
    pub(super) fn observe(&mut self, model: u64, chain: &[u64], endpoint: EndpointId, now: Timestamp) {
        self.expire(now);
        self.sweep(now);
        if chain.is_empty() {
            return;
        }
        let slot = self.slot(endpoint);
        // From the last block to the first, so that the first block is the youngest entry.
        for hash in chain.iter().rev() {
            self.touch(*hash, model, slot, now);
        }
        while self.held > self.retention.max_entries {
            self.remove(self.oldest, now);
        }
    }

    /// Position of the endpoint's slot; creates the slot for its first entry.
    fn slot(&mut self, endpoint: EndpointId) -> u32 {
        if let Some(at) = self.by_endpoint.get(&endpoint) {
            return *at;
        }
        let slot = EndpointSlot { endpoint, entries: 0, is_lost: false };
        let free = self.free_slots.pop();
        let at = match free.and_then(|at| Some((at, self.slots.get_mut(at as usize)?))) {
            Some((at, free)) => {
                *free = slot;
                at
            }
            None => {
                self.slots.push(slot);
                u32::try_from(self.slots.len() - 1).unwrap_or(NONE)
            }
        };
        self.by_endpoint.insert(endpoint, at);
        at
    }

    fn touch(&mut self, hash: u64, model: u64, owner: u32, now: Timestamp) {
        let mut own = None;
        let mut count = 0;
        // The owner to drop when there are too many: one of a lost endpoint, else the oldest.
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
                let at = self.allocate(PrefixEntry { hash, model, at: now, owner, requests: 1, sibling, older, newer });
                self.first.insert(hash, at);
                self.weigh((model, owner), 1.0, 1, now);
                self.held += 1;
                if let Some(slot) = self.slots.get_mut(owner as usize) {
                    slot.entries += 1;
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
            // Rounding must not make the sum negative.
            self.weights.insert(owner, DecayedWeight { sum: (left + by).max(0.0), at: now, entries });
        }
    }

    fn allocate(&mut self, entry: PrefixEntry) -> u32 {
        let at = self.free;
        if let Some(slot) = self.entries.get_mut(at as usize) {
            self.free = slot.sibling;
            *slot = entry;
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

    /// Removes one entry from the count of the slot at `at`; frees the slot when none is left.
    fn leave(&mut self, at: u32) {
        let Some(slot) = self.slots.get_mut(at as usize) else { return };
        slot.entries = slot.entries.saturating_sub(1);
        if slot.entries > 0 {
            return;
        }
        if !slot.is_lost {
            self.by_endpoint.remove(&slot.endpoint);
        }
        self.free_slots.push(at);
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
