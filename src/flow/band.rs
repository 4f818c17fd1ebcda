//! One band: the flows of requests that are equally important, and whose turn it is among them. Called by [`super::control`] alone.

use super::drain::Drain;
use super::fairness::{Fairness, Head, Meter};
use super::ordering::{Facts, Ordering};
use super::pace::Pace;
use super::settings::{BandSettings, Overflow};
use super::slab::Slab;
use ahash::AHashMap;
use attache_types::clock::Timestamp;
use attache_types::rng::PickRng;
use sha2::{Digest, Sha256};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// The flow of all that are named beyond those that are told apart.
const OTHERS: &str = "";

/// 128 bytes: ids of tenants are shorter, and 10,000 names that somebody makes up stay below 2 MB.
const MAX_NAME_BYTES: usize = 128;

/// The name by which a flow is kept: a long one by its hash.
fn short(name: &str) -> Cow<'_, str> {
    if name.len() <= MAX_NAME_BYTES { name.into() } else { Sha256::digest(name).escape_ascii().to_string().into() }
}

/// 1,024 requests are counted one by one to tell where a newcomer would stand: some microseconds, however many wait.
const COUNTED: usize = 1_024;

/// Where a request stands in its flow, and its number.
pub(super) type Place = (Head, u32);

/// How many of `queue` go before `place`, counted from the nearer end; where both ends are more than `counted` away, no fewer than there are.
fn before(queue: &BTreeSet<Place>, place: &Place, counted: usize) -> u64 {
    let behind = queue.range(place..).take(counted).count();
    let before = if behind < counted { counted } else { queue.range(..place).take(counted).count() };
    (if before < counted { before } else { queue.len() - behind }) as u64
}

#[derive(Debug)]
struct Flow {
    name: Arc<str>,
    weight: f64,
    queue: BTreeSet<Place>,
    /// Requests that were let through and have not ended.
    under_way: u32,
    idle_since: Option<Timestamp>,
}

#[derive(Debug)]
pub(super) struct Band {
    pub(super) priority: i32,
    ordering: Arc<dyn Ordering>,
    fairness: Box<dyn Fairness>,
    overflow: Overflow,
    max_requests: u64,
    max_bytes: u64,
    flows: Slab<Flow>,
    names: AHashMap<Arc<str>, u32>,
    /// The flows by what they have queued, where the longest gives way.
    lengths: BTreeSet<(usize, u32)>,
    /// Those with nothing here, by when that began.
    idle: BTreeSet<(Timestamp, u32)>,
    pub(super) requests: u64,
    pub(super) bytes: u64,
    /// Flows that have something queued.
    waiting: u64,
    pub(super) pace: Pace,
    pub(super) drain: Drain,
    /// Since when long ones have been next and found no room by their own limit.
    pub(super) no_room_for_long: Option<Timestamp>,
}

impl Band {
    pub(super) fn new(priority: i32, settings: &BandSettings) -> Self {
        Self {
            priority,
            ordering: settings.ordering.clone(),
            fairness: settings.fairness.fresh(),
            overflow: settings.overflow,
            max_requests: settings.max_requests,
            max_bytes: settings.max_bytes,
            flows: Slab::default(),
            names: AHashMap::new(),
            lengths: BTreeSet::new(),
            idle: BTreeSet::new(),
            requests: 0,
            bytes: 0,
            waiting: 0,
            pace: Pace::default(),
            drain: Drain::default(),
            no_room_for_long: None,
        }
    }

    /// Nothing of it is left.
    pub(super) fn is_void(&self) -> bool {
        self.flows.len() == 0
    }

    pub(super) fn key(&self, facts: &Facts) -> u64 {
        self.ordering.key(facts)
    }

    /// Whether one more of so many bytes may wait when `requests` with `held` bytes have gone.
    pub(super) fn has_room_without(&self, requests: u64, held: u64, bytes: u64) -> bool {
        self.requests - requests < self.max_requests && (self.bytes - held).saturating_add(bytes) <= self.max_bytes
    }

    /// A name, or that of all who are not told apart.
    fn told_apart<'n>(&self, name: &'n str, most: usize) -> &'n str {
        if self.names.contains_key(name) || self.names.len() < most { name } else { OTHERS }
    }

    /// Requests that would have their turn before one of this flow at `head`. Where flows take turns, each of the others is thought to have as
    /// many as this one until then.
    pub(super) fn ahead(&self, flow: &str, head: Head, most: usize) -> u64 {
        let queue = |flow: u32| self.flows.get(flow).map(|flow| &flow.queue);
        let place = (head, 0);
        if let Some(flows) = self.fairness.before(&head, COUNTED) {
            let counted = COUNTED / flows.len().max(1);
            let queues = flows.iter().filter_map(|flow| queue(*flow));
            return if flows.len() < COUNTED {
                queues.map(|q| before(q, &place, counted)).sum()
            } else {
                self.requests
            };
        }
        let own = self.names.get(self.told_apart(&short(flow), most)).and_then(|flow| queue(*flow));
        let own = own.filter(|queue| !queue.is_empty());
        let before = own.map_or(0, |queue| before(queue, &place, COUNTED));
        let others = self.waiting - u64::from(own.is_some());
        let theirs = self.requests - own.map_or(0, |queue| queue.len() as u64);
        before + (before + 1).saturating_mul(others).min(theirs)
    }

    /// The flow of this name.
    pub(super) fn flow(&mut self, name: &str, weight: f64, most: usize) -> Option<u32> {
        let name = &*short(name);
        let name = self.told_apart(name, most);
        if let Some(flow) = self.names.get(name) {
            return Some(*flow);
        }
        let (flow, _) = self.flows.next()?;
        let name: Arc<str> = name.into();
        let weight = if &*name == OTHERS { 1.0 } else { weight };
        self.names.insert(name.clone(), flow);
        self.flows.insert(Flow { name, weight, queue: BTreeSet::new(), under_way: 0, idle_since: None });
        Some(flow)
    }

    /// What is known of the flow's being here, set right after a change.
    fn look_after(&mut self, flow: u32, length_before: usize, now: Timestamp) {
        let Some(entry) = self.flows.get_mut(flow) else { return };
        let length = entry.queue.len();
        if self.overflow == Overflow::LongestFlow && length != length_before {
            self.lengths.remove(&(length_before, flow));
            if length > 0 {
                self.lengths.insert((length, flow));
            }
        }
        let is_idle = length == 0 && entry.under_way == 0;
        match (entry.idle_since, is_idle) {
            (Some(since), false) => {
                self.idle.remove(&(since, flow));
                entry.idle_since = None;
            }
            (None, true) => {
                self.idle.insert((now, flow));
                entry.idle_since = Some(now);
            }
            _ => {}
        }
    }

    /// One more waits.
    pub(super) fn push(&mut self, flow: u32, place: Place, bytes: u64, now: Timestamp) {
        let Some(entry) = self.flows.get_mut(flow) else { return };
        let before = entry.queue.len();
        let is_first = entry.queue.first().is_none_or(|first| place < *first);
        entry.queue.insert(place);
        self.requests += 1;
        self.bytes += bytes;
        self.drain.moved(0, self.requests, now);
        if before == 0 {
            self.waiting += 1;
            self.fairness.wakes(flow, entry.weight, place.0, now);
        } else if is_first {
            self.fairness.head(flow, place.0);
        }
        self.look_after(flow, before, now);
    }

    /// One waits no longer, and has not had its turn.
    pub(super) fn remove(&mut self, flow: u32, place: &Place, bytes: u64, now: Timestamp) {
        self.take_out(flow, place, bytes, now);
        self.drain.moved(0, self.requests, now);
    }

    fn take_out(&mut self, flow: u32, place: &Place, bytes: u64, now: Timestamp) {
        let Some(entry) = self.flows.get_mut(flow) else { return };
        let before = entry.queue.len();
        let was_first = entry.queue.first() == Some(place);
        if !entry.queue.remove(place) {
            return;
        }
        self.requests -= 1;
        self.bytes -= bytes;
        if self.requests == 0 {
            self.no_room_for_long = None;
        }
        match entry.queue.first() {
            None => {
                self.waiting -= 1;
                self.fairness.sleeps(flow);
            }
            Some((head, _)) if was_first => self.fairness.head(flow, *head),
            Some(_) => {}
        }
        self.look_after(flow, before, now);
    }

    /// The request whose turn it is.
    pub(super) fn next(&mut self) -> Option<u32> {
        let flow = self.fairness.next()?;
        self.flows.get(flow)?.queue.first().map(|(_, slot)| *slot)
    }

    /// The request that would come last.
    pub(super) fn last(&mut self) -> Option<u32> {
        let flow = self.fairness.last()?;
        self.flows.get(flow)?.queue.last().map(|(_, slot)| *slot)
    }

    /// Those who give way to one more of `newcomer`'s, one after the other: the last request of the flow that has most queued by then.
    pub(super) fn giving_way(&self, newcomer: u32) -> impl Iterator<Item = u32> {
        let own = self.flows.get(newcomer).map_or(0, |f| f.queue.len());
        let mut others = self.lengths.iter().rev().copied().peekable();
        // Flows that have given something, by what is left of them.
        let mut cut = BTreeMap::new();
        std::iter::from_fn(move || {
            let ((length, flow), mut queue) = if cut.last_key_value().map(|(key, _)| *key) > others.peek().copied() {
                cut.pop_last()?
            } else {
                let (length, flow) = others.next()?;
                ((length, flow), self.flows.get(flow)?.queue.iter().rev())
            };
            // Who would have as much then has no better claim.
            if flow == newcomer || length <= own + 1 {
                return None;
            }
            let (_, slot) = queue.next()?;
            cut.insert((length - 1, flow), queue);
            Some(*slot)
        })
    }

    /// The request at `place`, the first of its flow, is let through.
    pub(super) fn dispatch(
        &mut self,
        flow: u32,
        place: &Place,
        bytes: u64,
        meter: &mut Meter,
        now: Timestamp,
        rng: &mut PickRng,
    ) {
        self.fairness.dispatched(flow, meter, now, rng);
        if let Some(entry) = self.flows.get_mut(flow) {
            entry.under_way += 1;
        }
        self.take_out(flow, place, bytes, now);
        self.pace.departed(now);
        self.drain.moved(1, self.requests, now);
    }

    /// A request of a flow that has nothing queued is let through without having waited.
    pub(super) fn pass(&mut self, flow: u32, head: Head, meter: &mut Meter, now: Timestamp, rng: &mut PickRng) {
        let Some(entry) = self.flows.get_mut(flow) else { return };
        entry.under_way += 1;
        self.fairness.wakes(flow, entry.weight, head, now);
        self.fairness.dispatched(flow, meter, now, rng);
        self.fairness.sleeps(flow);
        self.pace.departed(now);
        self.look_after(flow, 0, now);
    }

    /// So much of an answer has come.
    pub(super) fn answered(&mut self, flow: u32, meter: &mut Meter, output: u32, now: Timestamp) {
        self.fairness.answered(flow, meter, output, now);
    }

    /// A request that was let through has ended.
    pub(super) fn ended(&mut self, flow: u32, meter: &Meter, input: Option<u32>, now: Timestamp) {
        self.fairness.ended(flow, meter, input, now);
        let Some(entry) = self.flows.get_mut(flow) else { return };
        entry.under_way = entry.under_way.saturating_sub(1);
        let length = entry.queue.len();
        self.look_after(flow, length, now);
    }

    /// A request of a flow was turned away: a flow that is here for it alone is idle.
    pub(super) fn settle(&mut self, flow: u32, now: Timestamp) {
        let length = self.flows.get(flow).map_or(0, |f| f.queue.len());
        self.look_after(flow, length, now);
    }

    /// Requests that were let through and have not ended.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn under_way(&self) -> u32 {
        self.flows.iter().map(|flow| flow.under_way).sum()
    }

    /// When the next flow will have had nothing here for `patience`.
    pub(super) fn forgets_at(&self, patience: Duration) -> Option<Timestamp> {
        self.idle.first().map(|(since, _)| since.after(patience))
    }

    /// Forgets the flows that have had nothing here for `patience`, `most` of them.
    pub(super) fn forget_idle(&mut self, patience: Duration, most: usize, now: Timestamp) {
        for _ in 0..most {
            let Some((since, flow)) = self.idle.first().copied().filter(|(since, _)| since.after(patience) <= now)
            else {
                return;
            };
            self.idle.remove(&(since, flow));
            self.fairness.forget(flow);
            if let Some((_, entry)) = self.flows.remove(flow) {
                self.names.remove(&entry.name);
            }
        }
    }
}
