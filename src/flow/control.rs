//! Flow control of one pool: bands by priority, and in each band the queues of its flows.
//!
//! Invariants at the end of each call:
//! * No request waits in a band that has capacity. [`FlowControl::cancel`] and [`FlowControl::expire`] get no
//!   [`Gauge`], so their callers call [`FlowControl::freed`] next.
//! * No band exceeds its limits, and all bands together do not exceed the pool's.
//! * A band is served only when all bands above it are empty.
//!
//! A call costs O(log n) in the queued requests and O(1) for each band. To make a [`Gauge`] costs
//! one look at each endpoint.

mod estimates;
mod eviction;

use super::band::{Band, QueuePosition};
use super::capacity::QueuedBytes;
use super::ceiling::{Ceiling, Ceilings};
use super::drain::Drain;
use super::fairness::{Meter, QueueHead};
use super::item::{Arrival, Cause, Handle, Left, Load, Need, Passage, Refusal, SharedFlow, Verdict};
use super::ordering::Facts;
use super::running::{PreemptibleRequests, Seat};
use super::saturation::Gauge;
use super::settings::Settings;
use super::slab::Slab;
use attache_types::clock::Timestamp;
use attache_types::rng::PickRng;
use smallvec::SmallVec;
use std::collections::BTreeSet;
use std::time::Duration;

/// Idle flows of each band that one call forgets besides its own task.
const FORGOTTEN_PER_CALL: usize = 2;

/// 1 s. After that time the next long request is dispatched by the limit of short ones. Requests that bypass the queue
/// may keep every endpoint above the limit for long ones forever.
const LONGEST_FOR_LONG: Duration = Duration::from_secs(1);

/// A queued request.
#[derive(Debug)]
struct Item<T> {
    kept: T,
    priority: i32,
    flow: u32,
    place: QueuePosition,
    bytes: u64,
    arrived: Timestamp,
    leaves: Expiry,
    prompt_tokens: u32,
    answer_tokens: Option<u32>,
    need: Need,
}

/// When a queued request expires.
#[derive(Clone, Copy, Debug)]
enum Expiry {
    /// At this moment, whether the pool has endpoints or not.
    At(Timestamp),
    /// At this moment if the pool has no endpoints until then; never while it has some.
    WhileEmpty(Option<Timestamp>),
}

impl Expiry {
    fn at(self) -> Option<Timestamp> {
        match self {
            Self::At(at) => Some(at),
            Self::WhileEmpty(at) => at,
        }
    }
}

impl<T> Item<T> {
    fn meter(&self) -> Meter {
        Meter { input: self.prompt_tokens, answer: self.answer_tokens, ..Meter::default() }
    }
}

/// The position of a request in its flow's queue. `ttl` applies to requests that carry no time to live of their own.
fn head(band: &Band, arrival: &Arrival<'_>, ttl: Option<Duration>, sequence: u64, now: Timestamp) -> QueueHead {
    let deadline = now.after(arrival.ttl.filter(|_| !arrival.unvouched).or(ttl).unwrap_or(Duration::MAX));
    let facts = Facts { arrived: now, deadline, ttft: arrival.ttft, work: arrival.need.work, spare: arrival.spare };
    QueueHead { key: band.key(&facts), sequence, arrived: now }
}

/// The queues of one pool. `T` is what the caller keeps with each queued request, for example a channel to its stream.
#[derive(Debug)]
pub struct FlowControl<T> {
    settings: Settings,
    ceiling: Box<dyn Ceiling>,
    items: Slab<Item<T>>,
    /// Bands by priority, the highest first.
    bands: Vec<Band>,
    deadlines: BTreeSet<(Timestamp, u32)>,
    /// When the pool lost its last endpoint; `None` while it has some.
    empty_since: Option<Timestamp>,
    held: QueuedBytes,
    pending: Load,
    running: PreemptibleRequests,
    drain: Drain,
    sequence: u64,
}

impl<T> FlowControl<T> {
    /// Creates empty queues.
    #[must_use]
    pub fn new(settings: Settings, ceiling: Box<dyn Ceiling>) -> Self {
        Self {
            running: PreemptibleRequests::new(settings.evict_running),
            held: QueuedBytes::new(settings.max_bytes, settings.shared.clone()),
            settings,
            ceiling,
            items: Slab::default(),
            bands: Vec::new(),
            deadlines: BTreeSet::new(),
            empty_since: None,
            pending: Load::default(),
            drain: Drain::default(),
            sequence: 0,
        }
    }

    /// Number of queued requests.
    #[must_use]
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether the queue is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the bodies of all queued requests.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.held.bytes()
    }

    /// Requests that were dispatched and are not in the ledger yet.
    #[must_use]
    pub fn pending(&self) -> Load {
        self.pending
    }

    /// Priority, queue depth and queued bytes of each existing band, the highest priority first.
    pub fn bands(&self) -> impl Iterator<Item = (i32, u64, u64)> + '_ {
        self.bands.iter().map(|b| (b.priority, b.requests, b.bytes))
    }

    /// Queue depth, queued bytes, requests in flight, and those in flight that may be preempted.
    #[cfg(any(test, feature = "testing"))]
    pub fn books(&self) -> (usize, u64, u32, usize) {
        (self.len(), self.bytes(), self.bands.iter().map(Band::in_flight).sum(), self.running.len())
    }

    /// Records whether the pool has endpoints that serve requests. While it has none, a request without a
    /// time to live expires [`empty_ttl`](Settings::empty_ttl) after its arrival or after the pool lost its
    /// last endpoint, whichever is later.
    pub fn pool_serves(&mut self, serves: bool, now: Timestamp) {
        let since = (!serves).then(|| self.empty_since.unwrap_or(now));
        if since == self.empty_since {
            return;
        }
        self.empty_since = since;
        let leaves = since.map(|since| since.after(self.settings.empty_ttl));
        for (slot, item) in self.items.iter_mut() {
            if let Expiry::WhileEmpty(before) = &mut item.leaves {
                if let Some(at) = std::mem::replace(before, leaves) {
                    self.deadlines.remove(&(at, slot));
                }
                self.deadlines.extend(leaves.map(|at| (at, slot)));
            }
        }
    }

    /// Dispatches, queues or rejects a request. `keep` makes the value that is kept if the request is queued; `left`
    /// receives the requests that leave the queue during this call.
    pub fn enqueue(
        &mut self,
        arrival: &Arrival<'_>,
        keep: impl FnOnce(Handle) -> T,
        gauge: &Gauge,
        now: Timestamp,
        rng: &mut PickRng,
        left: &mut Vec<Left<T>>,
    ) -> Verdict {
        self.refuse_expired(now, left);
        self.forget_idle(FORGOTTEN_PER_CALL, now);
        let at = self.band(arrival.priority);
        let (weight, most) = (self.settings.weight(arrival.flow), self.settings.max_flows);
        let ttl = self.settings.ttl(arrival.priority);
        let Some(band) = self.bands.get_mut(at) else { return Verdict::Rejected(self.refusal(at, Cause::Full, now)) };
        let Some(flow) = band.flow(arrival.flow, weight, most) else {
            return Verdict::Rejected(self.refusal(at, Cause::Full, now));
        };
        let empties = || Expiry::WhileEmpty(self.empty_since.map(|_| now.after(self.settings.empty_ttl)));
        let leaves = arrival.ttl.or(ttl).map_or_else(empties, |ttl| Expiry::At(now.after(ttl)));
        let head = head(band, arrival, ttl, self.sequence, now);
        self.sequence += 1;
        // Requests before this one go first, if capacity was freed without a call.
        self.dispatch_while_free(at, gauge, now, rng, left);
        let is_next = self.bands.iter().take(at + 1).all(|b| b.requests == 0);
        if is_next {
            self.ceiling.turn(gauge.saturation(self.pending, arrival.need));
        }
        if is_next && self.has_capacity(at, arrival.need, gauge) {
            let passage = self.pass(at, flow, head, arrival, now, rng);
            self.dispatch_while_free(usize::MAX, gauge, now, rng, left);
            return Verdict::Dispatch(passage);
        }
        let (slot, generation) = match self.reserve_slot(at, flow, arrival.bytes, now, left) {
            Ok(next) => next,
            Err(cause) => {
                if let Some(band) = self.bands.get_mut(at) {
                    band.settle(flow, now);
                }
                return Verdict::Rejected(self.refusal(at, cause, now));
            }
        };
        let handle = Handle { slot, generation };
        let (place, kept) = ((head, slot), keep(handle));
        let &Arrival { priority, bytes, prompt_tokens, answer_tokens, need, .. } = arrival;
        let item =
            Item { kept, priority, flow, place, bytes, arrived: now, leaves, prompt_tokens, answer_tokens, need };
        self.insert(at, item, now);
        // A long request at the head may lack capacity that this shorter one has.
        let is_next = self.bands.iter().take(at).all(|b| b.requests == 0)
            && self.bands.get_mut(at).and_then(Band::next) == Some(slot);
        if is_next && self.has_capacity(at, arrival.need, gauge) {
            self.dispatch_while_free(usize::MAX, gauge, now, rng, left);
        }
        Verdict::Parked(handle)
    }

    /// Takes queue capacity for a request of `flow`, and evicts others for it if needed.
    /// Returns its slot and generation.
    fn reserve_slot(
        &mut self,
        at: usize,
        flow: u32,
        bytes: u64,
        now: Timestamp,
        left: &mut Vec<Left<T>>,
    ) -> Result<(u32, u32), Cause> {
        self.evict_for(at, flow, bytes, now, left)?;
        let next = self.items.next().ok_or(Cause::Full)?;
        // Another pool may have taken shared capacity meanwhile.
        if self.held.take(bytes) { Ok(next) } else { Err(self.lacking(bytes)) }
    }

    /// Queues a request in the band at `at`, in the slot that its position names.
    fn insert(&mut self, at: usize, item: Item<T>, now: Timestamp) {
        let slot = item.place.1;
        self.deadlines.extend(item.leaves.at().map(|at| (at, slot)));
        if let Some(band) = self.bands.get_mut(at) {
            band.push(item.flow, item.place, item.bytes, now);
        }
        self.items.insert(item);
        self.drain.moved(0, self.items.len() as u64, now);
    }

    /// Whether a band may get capacity by its turns alone, so that the caller should
    /// check again though nothing changed.
    #[must_use]
    pub fn takes_turns(&self) -> bool {
        !self.is_empty() && self.ceiling.takes_turns()
    }

    /// Dispatches what fits, after capacity may have grown: a response began or ended, metrics or an endpoint arrived.
    pub fn freed(&mut self, gauge: &Gauge, now: Timestamp, rng: &mut PickRng, left: &mut Vec<Left<T>>) {
        self.refuse_expired(now, left);
        self.forget_idle(FORGOTTEN_PER_CALL, now);
        self.dispatch_while_free(usize::MAX, gauge, now, rng, left);
    }

    /// When [`FlowControl::expire`] is due; `None` while nothing can expire.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Timestamp> {
        let forgets = self.bands.iter().filter_map(|b| b.forgets_at(self.settings.flow_idle)).min();
        let expires = self.deadlines.first().map(|(at, _)| *at);
        expires.into_iter().chain(forgets).min()
    }

    /// Refuses requests that have waited for their whole time to live, and forgets idle flows.
    pub fn expire(&mut self, now: Timestamp, left: &mut Vec<Left<T>>) {
        self.refuse_expired(now, left);
        self.forget_idle(usize::MAX, now);
    }

    /// Forgets flows that have been idle for `flow_idle`, at most `most` in each band, and bands without flows.
    fn forget_idle(&mut self, most: usize, now: Timestamp) {
        let patience = self.settings.flow_idle;
        self.bands.iter_mut().for_each(|band| band.forget_idle(patience, most, now));
        self.bands.retain(|band| !band.is_void());
    }

    /// Removes a request whose client disconnected, and returns its kept value; `None` if it
    /// has left the queue already.
    pub fn cancel(&mut self, handle: Handle, now: Timestamp) -> Option<T> {
        if self.items.generation(handle.slot)? != handle.generation {
            return None;
        }
        self.take(handle.slot, now).map(|(_, item)| item.kept)
    }

    /// Records that a dispatched request is in the ledger, or never will be. It no longer counts as pending.
    pub fn landed(&mut self, passage: &mut Passage) {
        let Load { requests, tokens } = std::mem::take(&mut passage.load);
        self.pending.requests -= requests;
        self.pending.tokens -= tokens;
    }

    /// Records that `output` tokens of the response have arrived in total.
    pub fn answered(&mut self, passage: &mut Passage, output: u32, now: Timestamp) {
        if let Some(band) = self.existing(passage.priority).and_then(|at| self.bands.get_mut(at)) {
            band.answered(passage.flow, &mut passage.meter, output, now);
        }
    }

    /// Records that the response has begun to reach the client, which may protect the request from preemption.
    pub fn answers(&mut self, passage: &mut Passage) {
        passage.seat.take_if(|seat| self.running.answers(*seat));
    }

    /// Records that a request has ended, and the prompt tokens that the model server reported, if it did.
    pub fn ended(&mut self, mut passage: Passage, input: Option<u32>, now: Timestamp) {
        // A request that is still pending reached no endpoint, so its flow pays for no prompt.
        let input = if passage.load.requests > 0 { Some(0) } else { input };
        self.landed(&mut passage);
        if let Some(seat) = passage.seat {
            self.running.left(seat, now);
        }
        if let Some(band) = self.existing(passage.priority).and_then(|at| self.bands.get_mut(at)) {
            band.ended(passage.flow, &passage.meter, input, now);
        }
    }

    /// The flow of a dispatched request, for other pickers; `None` if its policy counts no service.
    #[must_use]
    pub fn shared_flow(&self, passage: &Passage) -> Option<SharedFlow> {
        let hash = self.bands.get(self.existing(passage.priority)?)?.hash(passage.flow)?;
        Some(SharedFlow { priority: passage.priority, hash })
    }

    /// Another picker has served a request of `flow`, with these tokens of prompt and response. Flows that are not
    /// known here have nothing to yield.
    pub fn served(&mut self, flow: SharedFlow, input: u32, output: u32) {
        if let Some(band) = self.existing(flow.priority).and_then(|at| self.bands.get_mut(at)) {
            band.served(flow.hash, input, output);
        }
    }

    /// The program of this name has ended. Where the order is made for programs, its flow begins anew.
    pub fn end_program(&mut self, name: &str) {
        self.bands.iter_mut().for_each(|band| band.end_program(name));
    }

    /// The request in flight to preempt for a queued one, and the refusal for its client. It counts
    /// as in flight until [`FlowControl::ended`].
    pub fn evict_running(&mut self, gauge: &Gauge, now: Timestamp) -> Option<(Seat, Refusal)> {
        let first = self.bands.iter().position(|b| b.requests > 0)?;
        let seat = self.running.first(self.bands.get(first)?.priority, now)?;
        // By the limit of short work: no request is preempted only because a long one waits for an
        // endpoint to be nearly done.
        let saturation = gauge.saturation(self.pending, Need { work: 0.0, ..self.need_of_next(first, now) });
        let ceiling = *self.ceilings(saturation).get(first)?;
        // A closed band stays closed, whichever request is preempted.
        if ceiling <= 0.0 || saturation < ceiling {
            return None;
        }
        self.running.evict(seat);
        let at = self.existing(seat.priority()).unwrap_or(usize::MAX);
        Some((seat, self.refusal(at, Cause::Preempted, now)))
    }

    fn existing(&self, priority: i32) -> Option<usize> {
        self.bands.binary_search_by(|b| priority.cmp(&b.priority)).ok()
    }

    /// The index of the band of this priority, which is created if it does not exist.
    fn band(&mut self, priority: i32) -> usize {
        self.bands.binary_search_by(|b| priority.cmp(&b.priority)).unwrap_or_else(|at| {
            self.bands.insert(at, Band::new(priority, self.settings.band(priority)));
            at
        })
    }

    /// Whether the next request of a band may be dispatched. A long one has the limit of
    /// short ones once it has lacked capacity for [`LONGEST_FOR_LONG`].
    fn may_dispatch(&mut self, at: usize, gauge: &Gauge, now: Timestamp) -> bool {
        let need = self.need_of_next(at, now);
        let short = Need { work: 0.0, ..need };
        self.ceiling.turn(gauge.saturation(self.pending, short));
        let Some(long) = &gauge.long else { return self.has_capacity(at, need, gauge) };
        let (is_long, has_capacity) = (need.work >= long.from, self.has_capacity(at, need, gauge));
        let Some(band) = self.bands.get_mut(at).filter(|_| is_long) else { return has_capacity };
        if has_capacity {
            band.long_blocked_since = None;
            return true;
        }
        let since = *band.long_blocked_since.get_or_insert(now);
        now.since(since) >= LONGEST_FOR_LONG && self.has_capacity(at, short, gauge)
    }

    /// What the next request of the band at `at` needs.
    fn need_of_next(&mut self, at: usize, now: Timestamp) -> Need {
        let slot = self.bands.get_mut(at).and_then(Band::next);
        slot.and_then(|slot| self.items.get(slot))
            .map_or(Need::default(), |item| Need { waited: now.since(item.arrived).as_secs_f64(), ..item.need })
    }

    /// Whether the band at `at` has capacity for a request with this need, in the present turn.
    fn has_capacity(&self, at: usize, need: Need, gauge: &Gauge) -> bool {
        let saturation = gauge.saturation(self.pending, need);
        self.ceilings(saturation).get(at).is_some_and(|ceiling| saturation < *ceiling)
    }

    fn ceilings(&self, saturation: f64) -> Ceilings {
        let priorities: SmallVec<[i32; 8]> = self.bands.iter().map(|b| b.priority).collect();
        self.ceiling.ceilings(saturation, &priorities)
    }

    /// Makes the record of a dispatched request, and counts it as pending.
    pub(super) fn passage(&mut self, priority: i32, flow: u32, meter: Meter, waited: Duration) -> Passage {
        let load = Load { requests: 1, tokens: u64::from(meter.input) };
        self.pending.requests += load.requests;
        self.pending.tokens += load.tokens;
        let seat = self.running.enter(priority);
        Passage { priority, flow, meter, load, seat, waited }
    }

    fn pass(
        &mut self,
        at: usize,
        flow: u32,
        head: QueueHead,
        arrival: &Arrival<'_>,
        now: Timestamp,
        rng: &mut PickRng,
    ) -> Passage {
        let mut meter = Meter { input: arrival.prompt_tokens, answer: arrival.answer_tokens, ..Meter::default() };
        if let Some(band) = self.bands.get_mut(at) {
            band.pass(flow, head, &mut meter, now, rng);
        }
        self.passage(arrival.priority, flow, meter, Duration::ZERO)
    }

    /// Dispatches the next requests of the bands down to the one at `lowest`, while there is capacity.
    fn dispatch_while_free(
        &mut self,
        lowest: usize,
        gauge: &Gauge,
        now: Timestamp,
        rng: &mut PickRng,
        left: &mut Vec<Left<T>>,
    ) {
        while self.dispatch_next(lowest, gauge, now, rng, left) {}
        self.running.looked();
    }

    /// Dispatches one request; returns false if none waits there or capacity is lacking.
    fn dispatch_next(
        &mut self,
        lowest: usize,
        gauge: &Gauge,
        now: Timestamp,
        rng: &mut PickRng,
        left: &mut Vec<Left<T>>,
    ) -> bool {
        let Some(at) = self.bands.iter().position(|b| b.requests > 0).filter(|at| *at <= lowest) else { return false };
        if !self.may_dispatch(at, gauge, now) {
            return false;
        }
        let Some(slot) = self.bands.get_mut(at).and_then(Band::next) else { return false };
        let Some((generation, item)) = self.items.remove(slot) else { return false };
        self.forget_deadline(slot, item.leaves);
        self.held.give(item.bytes);
        let mut meter = item.meter();
        if let Some(band) = self.bands.get_mut(at) {
            band.dispatch(item.flow, &item.place, item.bytes, &mut meter, now, rng);
        }
        self.drain.moved(1, self.items.len() as u64, now);
        let passage = self.passage(item.priority, item.flow, meter, now.since(item.arrived));
        left.push(Left::Dispatched(Handle { slot, generation }, item.kept, passage));
        true
    }

    fn forget_deadline(&mut self, slot: u32, leaves: Expiry) {
        if let Some(at) = leaves.at() {
            self.deadlines.remove(&(at, slot));
        }
    }

    /// Removes a request from all queues.
    fn take(&mut self, slot: u32, now: Timestamp) -> Option<(u32, Item<T>)> {
        let (generation, item) = self.items.remove(slot)?;
        self.forget_deadline(slot, item.leaves);
        self.held.give(item.bytes);
        self.drain.moved(0, self.items.len() as u64, now);
        let at = self.existing(item.priority)?;
        self.bands.get_mut(at)?.remove(item.flow, &item.place, item.bytes, now);
        Some((generation, item))
    }

    fn refuse(&mut self, slot: u32, cause: Cause, now: Timestamp, left: &mut Vec<Left<T>>) {
        let Some((generation, item)) = self.take(slot, now) else { return };
        let at = self.existing(item.priority).unwrap_or(usize::MAX);
        let refusal = self.refusal(at, cause, now);
        left.push(Left::Refused(Handle { slot, generation }, item.kept, refusal));
    }

    fn refuse_expired(&mut self, now: Timestamp, left: &mut Vec<Left<T>>) {
        while let Some((_, slot)) = self.deadlines.first().copied().filter(|(at, _)| *at <= now) {
            self.refuse(slot, Cause::Expired, now, left);
        }
    }
}
