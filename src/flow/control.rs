//! The queues of one pool.
//!
//! What holds at the end of each call: nobody waits whose band has room (after [`FlowControl::cancel`] and [`FlowControl::expire`], which are
//! given no gauge, [`FlowControl::freed`] sees to that); no band and not all of them together hold more than they may; a
//! band is served only when all above it are empty. A call costs the logarithm of what waits, and a look at each band; the [`Gauge`] that it is
//! given has cost whoever made it a look at each endpoint.

use super::band::{Band, Place};
use super::ceiling::{Ceiling, Ceilings};
use super::drain::Drain;
use super::fairness::{Head, Meter};
use super::item::{Arrival, Cause, Handle, Left, Load, Need, Passage, Refusal, Verdict};
use super::ordering::Facts;
use super::pace::{self, SHORTEST_RETRY};
use super::room::Held;
use super::running::{Running, Seat};
use super::saturation::Gauge;
use super::settings::Settings;
use super::slab::Slab;
use attache_types::clock::Timestamp;
use attache_types::rng::PickRng;
use smallvec::SmallVec;
use std::collections::BTreeSet;
use std::time::Duration;

/// Flows of a band that a call which is about something else forgets on its way.
const FORGOTTEN_PER_CALL: usize = 2;

/// 1 s: so long long ones wait for an endpoint that is nearly done. Endpoints that other traffic keeps from it hold nobody up for ever, and those
/// that this traffic alone keeps busy have come to it by then or are full for everybody.
const LONGEST_FOR_LONG: Duration = Duration::from_secs(1);

/// A request that waits.
#[derive(Debug)]
struct Item<T> {
    kept: T,
    priority: i32,
    flow: u32,
    place: Place,
    bytes: u64,
    arrived: Timestamp,
    leaves: Leaves,
    prompt_tokens: u32,
    answer_tokens: Option<u32>,
    need: Need,
}

/// When a request has waited for as long as it may.
#[derive(Clone, Copy, Debug)]
enum Leaves {
    /// At this moment, whatever happens to the pool.
    At(Timestamp),
    /// At this moment if the pool has no endpoints until then; never while it has some.
    WhileEmpty(Option<Timestamp>),
}

impl Leaves {
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

/// Where a request stands in its flow, if those who say nothing wait for `ttl` at most.
fn head(band: &Band, arrival: &Arrival<'_>, ttl: Option<Duration>, sequence: u64, now: Timestamp) -> Head {
    let deadline = now.after(arrival.ttl.filter(|_| !arrival.unvouched).or(ttl).unwrap_or(Duration::MAX));
    let facts = Facts { arrived: now, deadline, ttft: arrival.ttft, work: arrival.need.work, spare: arrival.spare };
    Head { key: band.key(&facts), sequence, arrived: now }
}

/// The queues of one pool. `T` is what is kept of a request that waits, for whoever has to tell it.
#[derive(Debug)]
pub struct FlowControl<T> {
    settings: Settings,
    ceiling: Box<dyn Ceiling>,
    items: Slab<Item<T>>,
    /// The highest priority first.
    bands: Vec<Band>,
    deadlines: BTreeSet<(Timestamp, u32)>,
    /// Since when the pool has had no endpoints.
    empty_since: Option<Timestamp>,
    held: Held,
    pending: Load,
    running: Running,
    drain: Drain,
    sequence: u64,
}

impl<T> FlowControl<T> {
    /// Empty queues.
    #[must_use]
    pub fn new(settings: Settings, ceiling: Box<dyn Ceiling>) -> Self {
        Self {
            running: Running::new(settings.evict_running),
            held: Held::new(settings.max_bytes, settings.shared.clone()),
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

    /// Requests that wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether nobody waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of those that wait.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.held.bytes()
    }

    /// What was let through and has not landed.
    #[must_use]
    pub fn pending(&self) -> Load {
        self.pending
    }

    /// Priority, requests that wait and their bytes, of each band that there is, the highest first.
    pub fn bands(&self) -> impl Iterator<Item = (i32, u64, u64)> + '_ {
        self.bands.iter().map(|b| (b.priority, b.requests, b.bytes))
    }

    /// Requests that wait, their bytes, those that are let through and have not ended, and those of them that may be told to end.
    #[cfg(any(test, feature = "testing"))]
    pub fn books(&self) -> (usize, u64, u32, usize) {
        (self.len(), self.bytes(), self.bands.iter().map(Band::under_way).sum(), self.running.len())
    }

    /// Whether the pool has endpoints that serve requests. While it has none, a request without a time to live leaves after the settings'
    /// [`empty_ttl`](Settings::empty_ttl), from its arrival or from when the pool lost its last endpoint.
    pub fn pool_serves(&mut self, serves: bool, now: Timestamp) {
        let since = (!serves).then(|| self.empty_since.unwrap_or(now));
        if since == self.empty_since {
            return;
        }
        self.empty_since = since;
        let leaves = since.map(|since| since.after(self.settings.empty_ttl));
        for (slot, item) in self.items.iter_mut() {
            if let Leaves::WhileEmpty(before) = &mut item.leaves {
                if let Some(at) = std::mem::replace(before, leaves) {
                    self.deadlines.remove(&(at, slot));
                }
                self.deadlines.extend(leaves.map(|at| (at, slot)));
            }
        }
    }

    /// A request comes. `keep` makes what is kept of it, should it wait; `left` gets those whose waiting this has ended.
    pub fn enqueue(
        &mut self,
        arrival: &Arrival<'_>,
        keep: impl FnOnce(Handle) -> T,
        room: &Gauge,
        now: Timestamp,
        rng: &mut PickRng,
        left: &mut Vec<Left<T>>,
    ) -> Verdict {
        self.turn_out_expired(now, left);
        self.forget_idle(FORGOTTEN_PER_CALL, now);
        let at = self.band(arrival.priority);
        let (weight, most) = (self.settings.weight(arrival.flow), self.settings.max_flows);
        let ttl = self.settings.ttl(arrival.priority);
        let Some(band) = self.bands.get_mut(at) else { return Verdict::Rejected(self.refusal(at, Cause::Full, now)) };
        let Some(flow) = band.flow(arrival.flow, weight, most) else {
            return Verdict::Rejected(self.refusal(at, Cause::Full, now));
        };
        let empties = || Leaves::WhileEmpty(self.empty_since.map(|_| now.after(self.settings.empty_ttl)));
        let leaves = arrival.ttl.or(ttl).map_or_else(empties, |ttl| Leaves::At(now.after(ttl)));
        let head = head(band, arrival, ttl, self.sequence, now);
        self.sequence += 1;
        // Those before it go first, should there be room that nobody has told of.
        self.let_through(at, room, now, rng, left);
        let is_next = self.bands.iter().take(at + 1).all(|b| b.requests == 0);
        if is_next {
            self.ceiling.turn(room.saturation(self.pending, arrival.need));
        }
        if is_next && self.has_room(at, arrival.need, room) {
            let passage = self.pass(at, flow, head, arrival, now, rng);
            self.let_through(usize::MAX, room, now, rng, left);
            return Verdict::Dispatch(passage);
        }
        let next = self.make_room(at, flow, arrival.bytes, now, left).and_then(|()| {
            let next = self.items.next().ok_or(Cause::Full)?;
            // Another pool may have taken of the room that they share meanwhile.
            if self.held.take(arrival.bytes) { Ok(next) } else { Err(self.lacking(arrival.bytes)) }
        });
        let (slot, generation) = match next {
            Ok(next) => next,
            Err(cause) => {
                if let Some(band) = self.bands.get_mut(at) {
                    band.settle(flow, now);
                }
                return Verdict::Rejected(self.refusal(at, cause, now));
            }
        };
        let handle = Handle { slot, generation };
        let place = (head, slot);
        self.items.insert(Item {
            kept: keep(handle),
            priority: arrival.priority,
            flow,
            place,
            bytes: arrival.bytes,
            arrived: now,
            leaves,
            prompt_tokens: arrival.prompt_tokens,
            answer_tokens: arrival.answer_tokens,
            need: arrival.need,
        });
        self.deadlines.extend(leaves.at().map(|at| (at, slot)));
        if let Some(band) = self.bands.get_mut(at) {
            band.push(flow, place, arrival.bytes, now);
        }
        self.drain.moved(0, self.items.len() as u64, now);
        // Those before whom it goes may have found no room because they are long, and it is not.
        let is_next = self.bands.iter().take(at).all(|b| b.requests == 0)
            && self.bands.get_mut(at).and_then(Band::next) == Some(slot);
        if is_next && self.has_room(at, arrival.need, room) {
            self.let_through(usize::MAX, room, now, rng, left);
        }
        Verdict::Parked(handle)
    }

    /// Whether those who wait may have room though nothing changes, when they are looked at again.
    #[must_use]
    pub fn takes_turns(&self) -> bool {
        !self.is_empty() && self.ceiling.takes_turns()
    }

    /// How long a request that came now would wait for its turn, were it a short one; `None` when it would not have to, or too few have had their
    /// turn to tell. As fast as the queues empty, and as its own band does while somebody waits there, which tells of what comes above it meanwhile.
    #[must_use]
    pub fn wait(&mut self, arrival: &Arrival<'_>, room: &Gauge, now: Timestamp) -> Option<Duration> {
        let (above, before) = self.ahead(arrival, room, now)?;
        let band = self.existing(arrival.priority).and_then(|at| self.bands.get(at)).filter(|band| band.requests > 0);
        let own = band.and_then(|band| band.drain.wait(before, now));
        self.drain.wait(above + before, now).max(own)
    }

    /// Requests above its band and in it that would have their turn before one that came now, were it a short one; `None` when it would not have
    /// to wait. By what waits now, and in turns: a flow that has had much of late may find others going before it more often.
    pub(super) fn ahead(&mut self, arrival: &Arrival<'_>, room: &Gauge, now: Timestamp) -> Option<(u64, u64)> {
        let at = self.band(arrival.priority);
        let above: u64 = self.bands.iter().take(at).map(|b| b.requests).sum();
        let band = self.bands.get(at)?;
        let head = head(band, arrival, self.settings.ttl(arrival.priority), self.sequence, now);
        let before = band.ahead(arrival.flow, head, self.settings.max_flows);
        let short = Need { work: 0.0, ..arrival.need };
        (above + before > 0 || !self.has_room(at, short, room)).then_some((above, before))
    }

    /// The pool may have more room than before: an answer has begun or ended, a page has come, an endpoint has.
    pub fn freed(&mut self, room: &Gauge, now: Timestamp, rng: &mut PickRng, left: &mut Vec<Left<T>>) {
        self.turn_out_expired(now, left);
        self.forget_idle(FORGOTTEN_PER_CALL, now);
        self.let_through(usize::MAX, room, now, rng, left);
    }

    /// When [`FlowControl::expire`] is due; `None` when nothing is kept.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Timestamp> {
        let forgets = self.bands.iter().filter_map(|b| b.forgets_at(self.settings.flow_idle)).min();
        let expires = self.deadlines.first().map(|(at, _)| *at);
        expires.into_iter().chain(forgets).min()
    }

    /// Turns out those who have waited for as long as they may, and forgets flows that have had nothing here for long.
    pub fn expire(&mut self, now: Timestamp, left: &mut Vec<Left<T>>) {
        self.turn_out_expired(now, left);
        self.forget_idle(usize::MAX, now);
    }

    /// Forgets flows that have had nothing here for long, `most` of each band, and bands that have none left: no ceiling is kept for those.
    fn forget_idle(&mut self, most: usize, now: Timestamp) {
        let patience = self.settings.flow_idle;
        self.bands.iter_mut().for_each(|band| band.forget_idle(patience, most, now));
        self.bands.retain(|band| !band.is_void());
    }

    /// Nobody waits for this one any longer. What was kept of it; `None` when it has left already.
    pub fn cancel(&mut self, handle: Handle, now: Timestamp) -> Option<T> {
        if self.items.generation(handle.slot)? != handle.generation {
            return None;
        }
        self.take(handle.slot, now).map(|(_, item)| item.kept)
    }

    /// A request that was let through is in the ledger, or never will be: it is on its way no longer.
    pub fn landed(&mut self, passage: &mut Passage) {
        let Load { requests, tokens } = std::mem::take(&mut passage.load);
        self.pending.requests -= requests;
        self.pending.tokens -= tokens;
    }

    /// So many tokens of its answer have come in all.
    pub fn answered(&mut self, passage: &mut Passage, output: u32, now: Timestamp) {
        if let Some(band) = self.existing(passage.priority).and_then(|at| self.bands.get_mut(at)) {
            band.answered(passage.flow, &mut passage.meter, output, now);
        }
    }

    /// Its answer goes on to the client, which may keep it from being told to end.
    pub fn answers(&mut self, passage: &mut Passage) {
        passage.seat.take_if(|seat| self.running.answers(*seat));
    }

    /// It has ended, and the server has told how long its prompt was, perhaps.
    pub fn ended(&mut self, mut passage: Passage, input: Option<u32>, now: Timestamp) {
        // One that is on its way still has come to nothing: its flow pays for no prompt that nobody was sent.
        let input = if passage.load.requests > 0 { Some(0) } else { input };
        self.landed(&mut passage);
        if let Some(seat) = passage.seat {
            self.running.left(seat, now);
        }
        if let Some(band) = self.existing(passage.priority).and_then(|at| self.bands.get_mut(at)) {
            band.ended(passage.flow, &passage.meter, input, now);
        }
    }

    /// The request under way that is to end for the sake of one that waits, and what its client is told. It counts as under way until
    /// [`FlowControl::ended`].
    pub fn evict_running(&mut self, room: &Gauge, now: Timestamp) -> Option<(Seat, Refusal)> {
        let first = self.bands.iter().position(|b| b.requests > 0)?;
        let seat = self.running.first(self.bands.get(first)?.priority, now)?;
        // By the room for short work: nobody ends for the sake of one who only waits for an endpoint to be nearly done.
        let saturation = room.saturation(self.pending, Need { work: 0.0, ..self.need_of_next(first) });
        let ceiling = *self.ceilings(saturation).get(first)?;
        // A band that is closed stays closed, whoever ends.
        if ceiling <= 0.0 || saturation < ceiling {
            return None;
        }
        self.running.evict(seat);
        let at = self.existing(seat.priority()).unwrap_or(usize::MAX);
        Some((seat, self.refusal(at, Cause::Outranked, now)))
    }

    /// When what waits in the band of this priority will have left, as things have gone of late.
    #[must_use]
    pub fn clears(&self, priority: i32, now: Timestamp) -> Duration {
        self.existing(priority).map_or(SHORTEST_RETRY, |at| self.clears_at(at, now))
    }

    fn refusal(&self, at: usize, cause: Cause, now: Timestamp) -> Refusal {
        let clears = self.clears_at(at, now);
        let retry_after = if cause == Cause::RoomTaken { clears.max(pace::ELSEWHERE_RETRY) } else { clears };
        Refusal { cause, retry_after }
    }

    /// When what waits in the band at `at` and above it will have left: as fast as the queues empty, and as the band does, which tells of what
    /// comes above it meanwhile. Where nobody has had to wait of late, the pace at which requests have come through is the best that is known.
    fn clears_at(&self, at: usize, now: Timestamp) -> Duration {
        let before = self.bands.iter().take(at.saturating_add(1));
        let (queued, pace) = before.fold((0, 0.0), |(q, r), b| (q + b.requests, r + b.pace.rate(now)));
        let own = |b: &Band| pace::clears(b.requests, b.drain.rate(now).unwrap_or_else(|| b.pace.rate(now)));
        let own = self.bands.get(at).map_or(SHORTEST_RETRY, own);
        own.max(pace::clears(queued, self.drain.rate(now).unwrap_or(pace)))
    }

    fn existing(&self, priority: i32) -> Option<usize> {
        self.bands.binary_search_by(|b| priority.cmp(&b.priority)).ok()
    }

    /// Where the band of this priority is, which is made if there is none.
    fn band(&mut self, priority: i32) -> usize {
        self.bands.binary_search_by(|b| priority.cmp(&b.priority)).unwrap_or_else(|at| {
            self.bands.insert(at, Band::new(priority, self.settings.band(priority)));
            at
        })
    }

    /// Whether whoever is next in a band may go. Long ones go by the limit of the others when none has found room by their own for long.
    fn may_go(&mut self, at: usize, room: &Gauge, now: Timestamp) -> bool {
        let need = self.need_of_next(at);
        let short = Need { work: 0.0, ..need };
        self.ceiling.turn(room.saturation(self.pending, short));
        let Some(long) = &room.long else { return self.has_room(at, short, room) };
        let (is_long, has_room) = (need.work >= long.from, self.has_room(at, need, room));
        let Some(band) = self.bands.get_mut(at).filter(|_| is_long) else { return has_room };
        if has_room {
            band.no_room_for_long = None;
            return true;
        }
        let since = *band.no_room_for_long.get_or_insert(now);
        now.since(since) >= LONGEST_FOR_LONG && self.has_room(at, short, room)
    }

    /// What the request needs whose turn it is in the band at `at`.
    fn need_of_next(&mut self, at: usize) -> Need {
        let slot = self.bands.get_mut(at).and_then(Band::next);
        slot.and_then(|slot| self.items.get(slot)).map_or(Need::default(), |item| item.need)
    }

    /// Whether there is room for one of the band at `at`, in the present turn.
    fn has_room(&self, at: usize, need: Need, room: &Gauge) -> bool {
        let saturation = room.saturation(self.pending, need);
        self.ceilings(saturation).get(at).is_some_and(|ceiling| saturation < *ceiling)
    }

    fn ceilings(&self, saturation: f64) -> Ceilings {
        let priorities: SmallVec<[i32; 8]> = self.bands.iter().map(|b| b.priority).collect();
        self.ceiling.ceilings(saturation, &priorities)
    }

    /// Counts it as on its way.
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
        head: Head,
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

    /// Lets through whoever is next in the bands down to the one at `lowest`, while there is room.
    fn let_through(&mut self, lowest: usize, room: &Gauge, now: Timestamp, rng: &mut PickRng, left: &mut Vec<Left<T>>) {
        while self.let_next_through(lowest, room, now, rng, left) {}
        self.running.looked();
    }

    /// Lets one through; false when nobody waits there, or there is no room.
    fn let_next_through(
        &mut self,
        lowest: usize,
        room: &Gauge,
        now: Timestamp,
        rng: &mut PickRng,
        left: &mut Vec<Left<T>>,
    ) -> bool {
        let Some(at) = self.bands.iter().position(|b| b.requests > 0).filter(|at| *at <= lowest) else { return false };
        if !self.may_go(at, room, now) {
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

    fn forget_deadline(&mut self, slot: u32, leaves: Leaves) {
        if let Some(at) = leaves.at() {
            self.deadlines.remove(&(at, slot));
        }
    }

    /// Takes one out of all queues.
    fn take(&mut self, slot: u32, now: Timestamp) -> Option<(u32, Item<T>)> {
        let (generation, item) = self.items.remove(slot)?;
        self.forget_deadline(slot, item.leaves);
        self.held.give(item.bytes);
        self.drain.moved(0, self.items.len() as u64, now);
        let at = self.existing(item.priority)?;
        self.bands.get_mut(at)?.remove(item.flow, &item.place, item.bytes, now);
        Some((generation, item))
    }

    fn turn_out(&mut self, slot: u32, cause: Cause, now: Timestamp, left: &mut Vec<Left<T>>) {
        let Some((generation, item)) = self.take(slot, now) else { return };
        let at = self.existing(item.priority).unwrap_or(usize::MAX);
        let refusal = self.refusal(at, cause, now);
        left.push(Left::Refused(Handle { slot, generation }, item.kept, refusal));
    }

    fn turn_out_expired(&mut self, now: Timestamp, left: &mut Vec<Left<T>>) {
        while let Some((_, slot)) = self.deadlines.first().copied().filter(|(at, _)| *at <= now) {
            self.turn_out(slot, Cause::Expired, now, left);
        }
    }

    /// Makes room for one more of `flow` in the band at `at`, if anybody must give way to it. Nobody is turned out in vain, unless another pool takes
    /// meanwhile what has been left of the room that they share.
    fn make_room(
        &mut self,
        at: usize,
        flow: u32,
        bytes: u64,
        now: Timestamp,
        left: &mut Vec<Left<T>>,
    ) -> Result<(), Cause> {
        let Some(band) = self.bands.get(at) else { return Err(Cause::Full) };
        let in_band = |requests, held| band.has_room_without(requests, held, bytes);
        let Some(mut own) = self.own_give_way(band, flow, in_band) else { return Err(Cause::BandFull) };
        let (priority, gone) = (band.priority, (own.len() as u64, own.iter().map(|(_, held)| held).sum::<u64>()));
        let (requests, held) = self.sheddable(priority).fold(gone, |(r, h), b| (r + b.requests, h + b.bytes));
        if !self.fits(requests, held, bytes) {
            // What is sheddable would not do.
            let everywhere = |requests, held| in_band(requests, held) && self.fits(requests, held, bytes);
            own = self.own_give_way(band, flow, everywhere).ok_or_else(|| self.lacking(bytes))?;
        }
        for (slot, _) in own {
            self.turn_out(slot, Cause::Evicted, now, left);
        }
        while !self.fits(0, 0, bytes) {
            let lowest = self.sheddable(priority).map(|b| b.priority).last();
            let lowest = lowest.and_then(|priority| self.existing(priority));
            let Some(slot) = lowest.and_then(|at| self.bands.get_mut(at)).and_then(Band::last) else {
                return Err(self.lacking(bytes));
            };
            self.turn_out(slot, Cause::Evicted, now, left);
        }
        Ok(())
    }

    /// Those of a band who give way to one more of `flow`, with their bytes: as many as it takes until `suffices` says that it does, by how many
    /// have gone and the bytes that they held. `None` if it never does.
    fn own_give_way(
        &self,
        band: &Band,
        flow: u32,
        suffices: impl Fn(u64, u64) -> bool,
    ) -> Option<SmallVec<[(u32, u64); 4]>> {
        let (mut own, mut held, mut next) = (SmallVec::new(), 0, band.giving_way(flow));
        while !suffices(own.len() as u64, held) {
            let slot = next.next()?;
            let bytes = self.items.get(slot)?.bytes;
            own.push((slot, bytes));
            held += bytes;
        }
        Some(own)
    }

    /// Whether one more of `bytes` fits when `requests` with `held` bytes have gone.
    fn fits(&self, requests: u64, held: u64, bytes: u64) -> bool {
        let count = self.items.len() as u64 - requests;
        count < self.settings.max_requests && self.held.fits(held, bytes)
    }

    /// Why one more of `bytes` does not fit.
    fn lacking(&self, bytes: u64) -> Cause {
        // Also where others hold some of the room: its own would do by leaving.
        let own_would_do = self.held.fits(self.held.bytes(), bytes);
        let is_own =
            self.items.len() as u64 >= self.settings.max_requests || !self.held.fits_alone(bytes) || own_would_do;
        if is_own { Cause::Full } else { Cause::RoomTaken }
    }

    /// The bands that give way to a request of this priority, and hold something.
    fn sheddable(&self, priority: i32) -> impl Iterator<Item = &Band> {
        let gives_way = self.settings.evict_sheddable;
        self.bands.iter().filter(move |b| gives_way && b.requests > 0 && b.priority < priority.min(0))
    }
}
