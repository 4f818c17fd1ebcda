//! One band: the flows of requests with equal priority, and the order in which they are
//! dequeued. Called by [`super::control`] alone.

use super::drain::Drain;
use super::fairness::{Fairness, Meter, QueueHead};
use super::ordering::{Facts, Ordering};
use super::pace::DepartureRate;
use super::settings::{BandSettings, Overflow};
use super::slab::Slab;
use ahash::AHashMap;
use attache_scheduling::digest::name_hash;
use attache_types::clock::Timestamp;
use attache_types::rng::PickRng;
use sha2::{Digest, Sha256};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// The flow that all names share beyond the limit of flows.
const OTHERS: &str = "";

/// 128 bytes: ids of tenants are shorter, and 10,000 invented names stay below 2 MB.
const MAX_NAME_BYTES: usize = 128;

/// The name under which a flow is kept. A name over [`MAX_NAME_BYTES`] is replaced by its hash.
fn short(name: &str) -> Cow<'_, str> {
    if name.len() <= MAX_NAME_BYTES { name.into() } else { Sha256::digest(name).escape_ascii().to_string().into() }
}

/// 1,024 requests are counted one by one to predict a newcomer's position. That takes some microseconds,
/// however deep the queue is.
const COUNTED: usize = 1_024;

/// A request's sort key within its flow, and its slot.
pub(super) type QueuePosition = (QueueHead, u32);

/// How many requests of `queue` go before `place`, counted from the nearer end. If both ends are more than
/// `counted` away, an upper bound.
fn before(queue: &BTreeSet<QueuePosition>, place: &QueuePosition, counted: usize) -> u64 {
    let behind = queue.range(place..).take(counted).count();
    let before = if behind < counted { counted } else { queue.range(..place).take(counted).count() };
    (if before < counted { before } else { queue.len() - behind }) as u64
}

#[derive(Debug)]
struct FlowQueue {
    name: Arc<str>,
    /// Of the name, where [`Fairness::counts_service`]; else 0.
    hash: u64,
    weight: f64,
    queue: BTreeSet<QueuePosition>,
    /// Dispatched requests that have not ended.
    in_flight: u32,
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
    flows: Slab<FlowQueue>,
    names: AHashMap<Arc<str>, u32>,
    /// The flows by the hash of their name.
    hashes: AHashMap<u64, u32>,
    /// The flows by queue length. The longest loses a request when the band is full.
    lengths: BTreeSet<(usize, u32)>,
    /// Flows with nothing queued or in flight, by the start of that state.
    idle: BTreeSet<(Timestamp, u32)>,
    pub(super) requests: u64,
    pub(super) bytes: u64,
    /// Flows that have something queued.
    waiting: u64,
    pub(super) pace: DepartureRate,
    pub(super) drain: Drain,
    /// Since when long requests have been next without capacity by their own limit.
    pub(super) long_blocked_since: Option<Timestamp>,
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
            hashes: AHashMap::new(),
            lengths: BTreeSet::new(),
            idle: BTreeSet::new(),
            requests: 0,
            bytes: 0,
            waiting: 0,
            pace: DepartureRate::default(),
            drain: Drain::default(),
            long_blocked_since: None,
        }
    }

    /// Whether the band has no flows left.
    pub(super) fn is_void(&self) -> bool {
        self.flows.len() == 0
    }

    pub(super) fn key(&self, facts: &Facts) -> u64 {
        self.ordering.key(facts)
    }

    /// Whether a request of `bytes` fits once `requests` with `held` bytes have left.
    pub(super) fn fits_without(&self, requests: u64, held: u64, bytes: u64) -> bool {
        self.requests - requests < self.max_requests && (self.bytes - held).saturating_add(bytes) <= self.max_bytes
    }

    /// The name of the flow that serves requests of `name`: its own, or that of all names beyond
    /// the limit of `most` flows.
    fn flow_name<'n>(&self, name: &'n str, most: usize) -> &'n str {
        if self.names.contains_key(name) || self.names.len() < most { name } else { OTHERS }
    }

    /// Requests that would be dequeued before one of this flow at `head`. Where flows take turns, each of the others is
    /// assumed to have as many turns as this one until then.
    pub(super) fn ahead(&self, flow: &str, head: QueueHead, most: usize) -> u64 {
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
        let own = self.names.get(self.flow_name(&short(flow), most)).and_then(|flow| queue(*flow));
        let own = own.filter(|queue| !queue.is_empty());
        let before = own.map_or(0, |queue| before(queue, &place, COUNTED));
        let others = self.waiting - u64::from(own.is_some());
        let theirs = self.requests - own.map_or(0, |queue| queue.len() as u64);
        before + (before + 1).saturating_mul(others).min(theirs)
    }

    /// The number of the flow of this name, which is created if needed; `None` if no number is free.
    pub(super) fn flow(&mut self, name: &str, weight: f64, most: usize) -> Option<u32> {
        let name = &*short(name);
        let name = self.flow_name(name, most);
        if let Some(flow) = self.names.get(name) {
            return Some(*flow);
        }
        let (flow, _) = self.flows.next()?;
        let name: Arc<str> = name.into();
        let weight = if &*name == OTHERS { 1.0 } else { weight };
        let hash = if self.fairness.counts_service() { name_hash(&name) } else { 0 };
        if hash != 0 {
            self.hashes.insert(hash, flow);
        }
        self.names.insert(name.clone(), flow);
        self.flows.insert(FlowQueue { name, hash, weight, queue: BTreeSet::new(), in_flight: 0, idle_since: None });
        Some(flow)
    }

    /// Hash of the name of `flow`; `None` if the policy counts no service.
    pub(super) fn hash(&self, flow: u32) -> Option<u64> {
        self.flows.get(flow).map(|entry| entry.hash).filter(|hash| *hash != 0)
    }

    /// Another picker has served a request of the flow whose name has this hash.
    pub(super) fn served(&mut self, hash: u64, input: u32, output: u32) {
        if let Some(flow) = self.hashes.get(&hash) {
            self.fairness.served(*flow, input, output);
        }
    }

    /// The program of this name has ended: if its flow is known, it begins anew.
    pub(super) fn end_program(&mut self, name: &str) {
        if let Some(flow) = self.names.get(&*short(name)).filter(|_| self.fairness.orders_programs()) {
            self.fairness.restart(*flow);
        }
    }

    /// Updates the indexes of a flow after a change: queue length, idle since.
    fn update_indexes(&mut self, flow: u32, length_before: usize, now: Timestamp) {
        let Some(entry) = self.flows.get_mut(flow) else { return };
        let length = entry.queue.len();
        if self.overflow == Overflow::LongestFlow && length != length_before {
            self.lengths.remove(&(length_before, flow));
            if length > 0 {
                self.lengths.insert((length, flow));
            }
        }
        let is_idle = length == 0 && entry.in_flight == 0;
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

    /// Queues a request.
    pub(super) fn push(&mut self, flow: u32, place: QueuePosition, bytes: u64, now: Timestamp) {
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
        self.update_indexes(flow, before, now);
    }

    /// Removes a queued request that was not dequeued: it was cancelled, evicted or has expired.
    pub(super) fn remove(&mut self, flow: u32, place: &QueuePosition, bytes: u64, now: Timestamp) {
        self.detach(flow, place, bytes, now);
        self.drain.moved(0, self.requests, now);
    }

    fn detach(&mut self, flow: u32, place: &QueuePosition, bytes: u64, now: Timestamp) {
        let Some(entry) = self.flows.get_mut(flow) else { return };
        let before = entry.queue.len();
        let was_first = entry.queue.first() == Some(place);
        if !entry.queue.remove(place) {
            return;
        }
        self.requests -= 1;
        self.bytes -= bytes;
        if self.requests == 0 {
            self.long_blocked_since = None;
        }
        match entry.queue.first() {
            None => {
                self.waiting -= 1;
                self.fairness.sleeps(flow);
            }
            Some((head, _)) if was_first => self.fairness.head(flow, *head),
            Some(_) => {}
        }
        self.update_indexes(flow, before, now);
    }

    /// Slot of the request that is dequeued next.
    pub(super) fn next(&mut self) -> Option<u32> {
        let flow = self.fairness.next()?;
        self.flows.get(flow)?.queue.first().map(|(_, slot)| *slot)
    }

    /// Slot of the request that would be dequeued last.
    pub(super) fn last(&mut self) -> Option<u32> {
        let flow = self.fairness.last()?;
        self.flows.get(flow)?.queue.last().map(|(_, slot)| *slot)
    }

    /// Slots of the requests to evict, in order, for one more of `newcomer`: each is the last request of the
    /// flow that is then longest.
    pub(super) fn eviction_order(&self, newcomer: u32) -> impl Iterator<Item = u32> {
        let own = self.flows.get(newcomer).map_or(0, |f| f.queue.len());
        let mut others = self.lengths.iter().rev().copied().peekable();
        // Flows that lost a request, by the length that is left.
        let mut cut = BTreeMap::new();
        std::iter::from_fn(move || {
            let ((length, flow), mut queue) = if cut.last_key_value().map(|(key, _)| *key) > others.peek().copied() {
                cut.pop_last()?
            } else {
                let (length, flow) = others.next()?;
                ((length, flow), self.flows.get(flow)?.queue.iter().rev())
            };
            // A flow that would be as short as the newcomer's loses nothing.
            if flow == newcomer || length <= own + 1 {
                return None;
            }
            let (_, slot) = queue.next()?;
            cut.insert((length - 1, flow), queue);
            Some(*slot)
        })
    }

    /// Dispatches the request at `place`, the first of its flow.
    pub(super) fn dispatch(
        &mut self,
        flow: u32,
        place: &QueuePosition,
        bytes: u64,
        meter: &mut Meter,
        now: Timestamp,
        rng: &mut PickRng,
    ) {
        self.fairness.dispatched(flow, meter, now, rng);
        if let Some(entry) = self.flows.get_mut(flow) {
            entry.in_flight += 1;
        }
        self.detach(flow, place, bytes, now);
        self.pace.departed(now);
        self.drain.moved(1, self.requests, now);
    }

    /// Dispatches a request that never waited, of a flow with nothing queued.
    pub(super) fn pass(&mut self, flow: u32, head: QueueHead, meter: &mut Meter, now: Timestamp, rng: &mut PickRng) {
        let Some(entry) = self.flows.get_mut(flow) else { return };
        entry.in_flight += 1;
        self.fairness.wakes(flow, entry.weight, head, now);
        self.fairness.dispatched(flow, meter, now, rng);
        self.fairness.sleeps(flow);
        self.pace.departed(now);
        self.update_indexes(flow, 0, now);
    }

    /// Records the tokens of a response that have arrived in total.
    pub(super) fn answered(&mut self, flow: u32, meter: &mut Meter, output: u32, now: Timestamp) {
        self.fairness.answered(flow, meter, output, now);
    }

    /// Records that a dispatched request has ended.
    pub(super) fn ended(&mut self, flow: u32, meter: &Meter, input: Option<u32>, now: Timestamp) {
        self.fairness.ended(flow, meter, input, now);
        let Some(entry) = self.flows.get_mut(flow) else { return };
        entry.in_flight = entry.in_flight.saturating_sub(1);
        let length = entry.queue.len();
        self.update_indexes(flow, length, now);
    }

    /// Marks the flow of a rejected request as idle if it has no other request.
    pub(super) fn settle(&mut self, flow: u32, now: Timestamp) {
        let length = self.flows.get(flow).map_or(0, |f| f.queue.len());
        self.update_indexes(flow, length, now);
    }

    /// Dispatched requests that have not ended.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn in_flight(&self) -> u32 {
        self.flows.iter().map(|flow| flow.in_flight).sum()
    }

    /// When the next flow will have been idle for `patience`.
    pub(super) fn forgets_at(&self, patience: Duration) -> Option<Timestamp> {
        self.idle.first().map(|(since, _)| since.after(patience))
    }

    /// Forgets flows that have been idle for `patience`, at most `most` of them.
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
                self.hashes.remove(&entry.hash);
            }
        }
    }
}
