//! The state of one peer: its requests in flight, booked on this picker's view of the endpoints.

use crate::generated::v1;
use crate::policies;
use crate::pools::MAX_EJECTED;
use crate::received::Received;
use crate::records::unseal_service;
use crate::remote_request::{ApplyContext, RemoteRequest, blocks_of, update};
use crate::stats::add;
use crate::wire::{HEARTBEAT_EVERY, digest};
use ahash::{AHashMap, AHashSet};
use attache_prefix::index::TenantId;
use attache_types::clock::Timestamp;
use std::collections::BTreeMap;
use std::time::Duration;
use v1::event::Kind;

/// After this time without a message, a receiver drops the requests in flight of a picker.
pub const SILENT_AFTER: Duration = Duration::from_secs(3);
/// After this time without a message, a receiver forgets which batches of a picker it has.
pub(crate) const FORGET_AFTER: Duration = Duration::from_secs(600);
/// A gap between batches is requested after this time, because messages may overtake each other.
const GAP_WAIT: Duration = Duration::from_millis(20);
/// Shortest time between two requests to one peer.
const RESEND_EVERY: Duration = Duration::from_millis(100);
/// Shortest time between two requests of one peer that are answered. They may arrive in shorter intervals than they
/// were sent.
const ANSWER_EVERY: Duration = Duration::from_millis(50);
/// Most ranges in one request.
const MAX_RANGES: usize = 16;
/// Most events that are kept for bookings that have not arrived yet. With more, the full state is requested.
const MAX_EARLY: usize = 10_000;
/// Most bytes of these events.
const MAX_EARLY_BYTES: usize = 16 << 20;
/// Most bytes of a full state that arrives.
const MAX_COLUMN_BYTES: usize = 64 << 20;
/// Most prompts that are requested at a time; the oldest are given up.
const MAX_UNKNOWN_PATHS: usize = 1_024;
/// Batches that a sender may be ahead of what is known of it: more than it sends between two heartbeats. Behind a longer
/// pause, its next heartbeat comes first.
const MAX_AHEAD: u64 = 1 << 16;
/// Shortest time between two heartbeats that are compared. Messages may overtake each other.
const COMPARE_AFTER: Duration = Duration::from_millis(HEARTBEAT_EVERY.as_millis() as u64 / 2);
/// Most parts of a full state.
const MAX_PARTS: u32 = 4_096;
/// Most requests in flight of one picker. Further ones are not counted.
const MAX_REQUESTS: usize = 1 << 16;
/// Most blocks of their prompts in total: 32 MiB of keys. Prompts of further requests are not recorded.
const MAX_BLOCKS: usize = 1 << 22;

/// A full state that arrives in parts.
#[derive(Debug, Default)]
struct Arriving {
    at_batch: u64,
    parts: BTreeMap<u32, Vec<v1::Booked>>,
    /// Number of requests in the parts, and their size.
    requests: usize,
    bytes: usize,
}

/// What is known of a prompt whose keys are needed. The answer may be of an earlier moment than this.
#[derive(Clone, Copy, Debug, Default)]
struct WantedPrompt {
    /// Its keys are at least this many.
    blocks: usize,
    /// The endpoint that has computed it; 0 if only the answer names it.
    endpoint: u64,
}

/// The state of one peer.
#[derive(Debug)]
pub(crate) struct PeerState {
    pub(crate) name: String,
    pub(crate) last_message: Timestamp,
    /// It has not imported a prefix index yet, so it is not asked for its own.
    pub(crate) joins: bool,
    received: Received,
    /// The last batch that a heartbeat named.
    announced: u64,
    /// When a heartbeat was last compared, and the highest batch that was received then.
    compared: Option<(Timestamp, u64)>,
    /// The batch that is applied now arrived later than others of its time.
    late: bool,
    requests: AHashMap<u64, RemoteRequest>,
    /// Blocks of their prompts.
    blocks: usize,
    digest: u64,
    /// The endpoints that it has ejected.
    ejected: AHashSet<u64>,
    /// Its full state is needed, because the requests in flight differ, or because too much was missed.
    needs_state: bool,
    /// The full state that was applied last is that after this batch.
    replaced_to: u64,
    arriving: Arriving,
    /// Its counts of pressure are needed, because some of them did not arrive in time.
    needs_pressure: bool,
    /// Its last heartbeat named other policies than this picker has, and they have not been requested since.
    needs_policies: bool,
    /// Events of requests that are not booked here yet, in the order of their arrival, and the batch of each.
    early: AHashMap<u64, Vec<(Kind, u64)>>,
    early_count: usize,
    early_bytes: usize,
    gap_since: Option<Timestamp>,
    asked_at: Option<Timestamp>,
    /// When a request of the peer was answered.
    answered_at: Option<Timestamp>,
    /// Requests whose keys are needed, because their blocks refer to an unknown path or because their booking was
    /// missed.
    unknown_paths: BTreeMap<u64, WantedPrompt>,
    /// Sessions that the peer has ended, and that this picker still has to end.
    pub(crate) ended_sessions: Vec<u64>,
}

impl PeerState {
    pub(crate) fn new(now: Timestamp) -> Self {
        Self {
            name: String::new(),
            last_message: now,
            joins: false,
            received: Received::default(),
            announced: 0,
            compared: None,
            late: false,
            requests: AHashMap::new(),
            blocks: 0,
            digest: 0,
            ejected: AHashSet::new(),
            needs_state: false,
            replaced_to: 0,
            arriving: Arriving::default(),
            needs_pressure: false,
            needs_policies: false,
            early: AHashMap::new(),
            early_count: 0,
            early_bytes: 0,
            gap_since: None,
            asked_at: None,
            answered_at: None,
            unknown_paths: BTreeMap::new(),
            ended_sessions: Vec::new(),
        }
    }

    /// Drops the requests in flight of a picker that is silent. False if it has none.
    pub(crate) fn silence(&mut self) -> bool {
        let had = !self.requests.is_empty();
        self.drop_requests(|_, _| false);
        self.arriving = Arriving::default();
        self.give_up_early();
        had
    }

    /// Drops the requests in flight for which `stays` is false. How they ended is unknown.
    fn drop_requests(&mut self, stays: impl Fn(u64, &RemoteRequest) -> bool) {
        self.requests.retain(|request, remote| {
            if stays(*request, remote) {
                return true;
            }
            self.digest ^= digest(*request, remote.endpoint, remote.begun);
            self.blocks -= remote.blocks;
            if remote.awaits.is_some() {
                self.unknown_paths.remove(request);
            }
            false
        });
    }

    /// Gives up the bookings of all early events.
    fn give_up_early(&mut self) {
        (self.early_count, self.early_bytes) = (0, 0);
        std::mem::take(&mut self.early).into_values().flatten().for_each(|(kind, _)| self.missed(&kind));
    }

    /// Whether a request of the peer is answered now.
    pub(crate) fn may_ask(&mut self, now: Timestamp) -> bool {
        let may = self.answered_at.is_none_or(|at| at.after(ANSWER_EVERY) <= now);
        if may {
            self.answered_at = Some(now);
        }
        may
    }

    /// Number of requests in flight.
    pub(crate) fn requests(&self) -> usize {
        self.requests.len()
    }

    /// Whether something of the peer is missing.
    pub(crate) fn is_behind(&self) -> bool {
        self.needs_state || self.received.has_gap()
    }

    /// Whether something must be requested from the peer soon.
    pub(crate) fn has_requests(&self) -> bool {
        self.is_behind() || self.needs_pressure || self.needs_policies || !self.unknown_paths.is_empty()
    }

    /// Applies a batch, unless it was applied before.
    pub(crate) fn batch(&mut self, batch: v1::Batch, cx: &mut ApplyContext<'_>) {
        // No times are learned from a batch that was lost and sent again: its changes were made some time ago.
        self.late = batch.number <= self.received.last().max(self.announced);
        if self.is_beyond(batch.number) {
            return add(&cx.stats.contradictions, 1);
        }
        if batch.number > 0 {
            // The full state has its changes.
            if self.received.is_hopeless() {
                return;
            }
            if !self.received.insert(batch.number) {
                return add(&cx.stats.duplicate_batches, 1);
            }
            self.needs_state |= self.received.is_hopeless();
        } else if !batch.events.iter().any(|event| matches!(event.kind, Some(Kind::Placed(_) | Kind::Policy(_)))) {
            self.needs_pressure = false;
        }
        let is_in_state = batch.number > 0 && batch.number <= self.replaced_to;
        let mut frees = false;
        for kind in batch.events.into_iter().filter_map(|event| event.kind) {
            frees |= matches!(kind, Kind::FirstByte(_) | Kind::Ended(_) | Kind::Dispatched(_) | Kind::Moved(_));
            match kind {
                Kind::Booked(_) | Kind::Moved(_) | Kind::Dispatched(_) | Kind::FirstByte(_) if is_in_state => {}
                // The full state does not name a request that has ended.
                Kind::Ended(_) if is_in_state => self.missed(&kind),
                _ => self.event(kind, batch.number, cx),
            }
        }
        self.settle(cx.now);
        if frees {
            cx.pools.freed(cx.now);
        }
    }

    /// Ends or begins waiting for missing batches.
    fn settle(&mut self, now: Timestamp) {
        self.gap_since = self.received.has_gap().then(|| self.gap_since.unwrap_or(now));
        if !self.is_behind() {
            self.give_up_early();
        }
    }

    /// Handles an event of a request whose booking is not known and will not arrive.
    fn missed(&mut self, kind: &Kind) {
        // Its endpoint has computed the prompt, which is requested.
        if let Kind::Ended(v1::Ended { request, good: Some(true), moved_to, .. }) = kind {
            self.want_path(*request, WantedPrompt { blocks: 0, endpoint: *moved_to });
        }
    }

    fn want_path(&mut self, request: u64, wanted: WantedPrompt) {
        if self.unknown_paths.len() == MAX_UNKNOWN_PATHS {
            self.unknown_paths.pop_first();
        }
        self.unknown_paths.insert(request, wanted);
    }

    fn event(&mut self, kind: Kind, batch: u64, cx: &mut ApplyContext<'_>) {
        match kind {
            Kind::Booked(booked) => self.booked(booked, batch, cx),
            Kind::Lost(lost) => Self::lost(lost.endpoint, cx),
            Kind::Stored(stored) => cx.stored(&stored),
            Kind::Policy(policy) => cx.policy(&policy),
            Kind::SessionEnded(ended) => self.ended_sessions.push(ended.session),
            Kind::Served(served) => {
                let flows = cx.pools.by_key(served.pool).and_then(|view| view.flows.as_ref());
                flows.into_iter().for_each(|flows| flows.served(unseal_service(cx.seed, &served)));
            }
            // A batch that is sent again may be older than the window of pressure.
            Kind::Diverted(_) if self.late && batch > 0 => self.needs_pressure = true,
            Kind::Diverted(event) if cx.has_pool(&event.pool) => {
                cx.pressure.diverted(cx.sender, &event, cx.now);
            }
            Kind::Consumed(event) if cx.has_pool(&event.pool) => cx.pressure.consumed(&event, cx.now),
            Kind::Diverted(_) | Kind::Consumed(_) => {}
            Kind::Placed(placed) => self.placed(placed, cx),
            Kind::Moved(v1::Moved { request, .. })
            | Kind::Dispatched(v1::Dispatched { request, .. })
            | Kind::FirstByte(v1::FirstByte { request, .. }) => match self.requests.get_mut(&request) {
                Some(remote) => {
                    remote.on_time &= !self.late;
                    remote.change(&mut self.digest, request, &kind, batch, cx);
                }
                None => self.keep_early(request, kind, batch),
            },
            Kind::Ended(ended) => match self.requests.remove(&ended.request) {
                Some(mut remote) => {
                    self.blocks -= remote.blocks;
                    remote.catch_up(&ended, batch, &mut self.digest, cx);
                    self.digest ^= digest(ended.request, remote.endpoint, remote.begun);
                    // A full state of an earlier moment may still name it.
                    if self.needs_state {
                        self.keep_early(ended.request, Kind::Ended(ended.clone()), batch);
                    }
                    match remote.awaits {
                        Some(_) if ended.good == Some(true) => {
                            let blocks = remote.blocks + ended.keys.len();
                            self.want_path(ended.request, WantedPrompt { blocks, endpoint: remote.endpoint });
                        }
                        // How much of the prompt its endpoint has computed is unknown.
                        Some(_) => drop(self.unknown_paths.remove(&ended.request)),
                        None => {}
                    }
                    remote.end(&ended, cx);
                }
                None => self.keep_early(ended.request, Kind::Ended(ended), batch),
            },
        }
    }

    /// Keeps an event of a request whose booking may still arrive.
    fn keep_early(&mut self, request: u64, kind: Kind, batch: u64) {
        if !self.is_behind() {
            return self.missed(&kind);
        }
        let bytes = kind.encoded_len();
        if self.early_count == MAX_EARLY || self.early_bytes + bytes > MAX_EARLY_BYTES {
            self.give_up_early();
            self.needs_state = true;
        }
        self.early_count += 1;
        self.early_bytes += bytes;
        self.early.entry(request).or_default().push((kind, batch));
    }

    fn booked(&mut self, mut booked: v1::Booked, batch: u64, cx: &mut ApplyContext<'_>) {
        let request = booked.request;
        if self.requests.contains_key(&request) {
            return;
        }
        if self.requests.len() >= MAX_REQUESTS {
            return add(&cx.stats.excess_requests, 1);
        }
        if booked.blocks.take_if(|blocks| self.blocks + blocks_of(blocks) > MAX_BLOCKS).is_some() {
            add(&cx.stats.excess_requests, 1);
        }
        let mut remote = RemoteRequest::book(booked, batch, cx);
        remote.on_time = !self.late;
        if remote.awaits.is_some() {
            add(&cx.stats.unknown_paths, 1);
            self.want_path(request, WantedPrompt { blocks: remote.blocks, endpoint: 0 });
        }
        self.digest ^= digest(request, remote.endpoint, remote.begun);
        self.blocks += remote.blocks;
        self.requests.insert(request, remote);
        for (kind, batch) in self.early.remove(&request).unwrap_or_default() {
            self.early_count -= 1;
            self.early_bytes -= kind.encoded_len();
            self.event(kind, batch, cx);
        }
    }

    fn lost(endpoint: u64, cx: &mut ApplyContext<'_>) {
        match cx.pools.locate(endpoint) {
            Some(found) => found.view.losses.cache_lost(found.endpoint.id),
            None => add(&cx.stats.unknown_endpoints, 1),
        }
    }

    /// The keys of a prompt that this picker has asked for.
    fn placed(&mut self, placed: v1::Placed, cx: &mut ApplyContext<'_>) {
        let Some(WantedPrompt { blocks, endpoint }) = self.unknown_paths.get(&placed.request).copied() else { return };
        if !placed.keys.is_empty() && placed.keys.len() < blocks {
            return;
        }
        self.unknown_paths.remove(&placed.request);
        if placed.keys.is_empty() {
            return;
        }
        let Some(keys) = cx.paths.lock().extend(0, 0, &placed.keys) else { return };
        let booked = self.requests.get_mut(&placed.request);
        let awaiting = booked.and_then(|remote| Some((remote.awaits.take()?, remote)));
        match awaiting {
            Some((blocks, remote)) if remote.blocks == keys.len() => {
                let Some((booking, cache)) = remote.booking.as_mut().zip(remote.cache.clone()) else { return };
                let update = update(&blocks, keys, booking.endpoint(), &cache, cx.now);
                booking.learn(cache, update, remote.begun, cx.now);
            }
            // The request has ended, so the endpoint has computed the prompt. If its end has not arrived yet, it shows
            // in the number of blocks: there are more than were booked, because those of the response follow.
            _ => {
                let endpoint = if endpoint == 0 { placed.endpoint } else { endpoint };
                let Some(found) = cx.pools.locate(endpoint) else { return };
                if let Some(cache) = &found.view.cache {
                    cache.record(found.endpoint.id, &keys, TenantId(placed.tenant), cx.now);
                }
            }
        }
    }

    /// Reads a heartbeat. Returns what must be requested.
    pub(crate) fn heartbeat(&mut self, heartbeat: v1::Heartbeat, cx: &mut ApplyContext<'_>) -> Option<v1::Resend> {
        (self.name, self.joins) = (heartbeat.name, heartbeat.joining);
        self.compare(heartbeat.last_batch, cx);
        self.announced = heartbeat.last_batch;
        self.warn(heartbeat.ejected, cx);
        let is_other = |policies| heartbeat.policies != 0 && heartbeat.policies != policies::digest(policies);
        self.needs_policies = cx.policies.is_some_and(is_other);
        if !self.is_behind() && self.received.last() == heartbeat.last_batch {
            let equal = (heartbeat.digest, heartbeat.requests) == (self.digest, self.requests.len() as u64);
            if !equal {
                add(&cx.stats.digest_mismatches, 1);
                self.needs_state = true;
            }
        }
        self.missing(heartbeat.last_batch, cx)
    }

    /// Whether a batch is further ahead than its sender can be.
    fn is_beyond(&self, number: u64) -> bool {
        let known = self.received.last().max(self.announced);
        known > 0 && number > known.saturating_add(MAX_AHEAD)
    }

    /// Begins anew where a heartbeat names a batch before one that was received some time ago. Someone else has used
    /// the sender's identity, or numbers that it never sent.
    fn compare(&mut self, last_batch: u64, cx: &ApplyContext<'_>) {
        let Some((at, received)) = self.compared else {
            self.compared = Some((cx.now, self.received.last()));
            return;
        };
        if cx.now.since(at) < COMPARE_AFTER {
            return;
        }
        if last_batch < received {
            add(&cx.stats.contradictions, 1);
            self.silence();
            (self.received, self.replaced_to) = (Received::default(), 0);
            self.needs_state = true;
        }
        self.compared = Some((cx.now, self.received.last()));
    }

    /// Passes on which endpoints the peer has ejected since its last heartbeat.
    fn warn(&mut self, ejected: Vec<u64>, cx: &mut ApplyContext<'_>) {
        let ejected: AHashSet<u64> = ejected.into_iter().take(MAX_EJECTED).collect();
        for key in ejected.difference(&self.ejected) {
            if let Some(found) = cx.pools.locate(*key) {
                found.endpoint.health.warn(&found.view.health);
            }
        }
        self.ejected = ejected;
    }

    /// What must be requested of a gap that is old enough.
    pub(crate) fn overdue(&mut self, cx: &mut ApplyContext<'_>) -> Option<v1::Resend> {
        let due = self.gap_since.is_some_and(|since| since.after(GAP_WAIT) <= cx.now);
        let needs = self.needs_state || self.needs_pressure || self.needs_policies;
        if due || needs || !self.unknown_paths.is_empty() {
            return self.missing(self.received.last(), cx);
        }
        None
    }

    fn missing(&mut self, last: u64, cx: &mut ApplyContext<'_>) -> Option<v1::Resend> {
        if self.asked_at.is_some_and(|at| at.after(RESEND_EVERY) > cx.now) {
            return None;
        }
        let batches = match self.needs_state {
            true => Vec::new(),
            false => self.received.missing(last, MAX_RANGES),
        };
        let requests: Vec<u64> = self.unknown_paths.keys().copied().collect();
        let (state, pressure, policies) = (self.needs_state, self.needs_pressure, self.needs_policies);
        if batches.is_empty() && requests.is_empty() && !state && !pressure && !policies {
            return None;
        }
        // The next heartbeat says whether the answer has arrived.
        self.needs_policies = false;
        self.asked_at = Some(cx.now);
        add(&cx.stats.requested_batches, batches.iter().map(|range| range.end() - range.start() + 1).sum());
        let range = |range: std::ops::RangeInclusive<u64>| v1::Range { first: *range.start(), last: *range.end() };
        Some(v1::Resend {
            batches: batches.into_iter().map(range).collect(),
            column: state,
            requests,
            pressure,
            policies,
        })
    }

    /// Takes one part of the full state, the message `Column`. The last one replaces the requests in flight.
    pub(crate) fn full_state(&mut self, state: v1::Column, cx: &mut ApplyContext<'_>) {
        let needed = match self.needs_state {
            true => state.at_batch >= self.replaced_to,
            // A picker that no longer has a requested batch sends its full state too.
            false => {
                let is_newer = state.at_batch > self.replaced_to && self.received.lacks(state.at_batch);
                is_newer && self.asked_at.is_some()
            }
        };
        if self.is_beyond(state.at_batch) {
            return add(&cx.stats.contradictions, 1);
        }
        if !needed || state.parts > MAX_PARTS || state.part >= state.parts {
            return;
        }
        if state.at_batch != self.arriving.at_batch {
            self.arriving = Arriving { at_batch: state.at_batch, ..Arriving::default() };
        }
        if self.arriving.parts.contains_key(&state.part) {
            return;
        }
        self.arriving.requests += state.requests.len();
        self.arriving.bytes += state.requests.iter().map(prost::Message::encoded_len).sum::<usize>();
        if self.arriving.requests > MAX_REQUESTS || self.arriving.bytes > MAX_COLUMN_BYTES {
            self.arriving = Arriving::default();
            return add(&cx.stats.excess_requests, 1);
        }
        self.arriving.parts.insert(state.part, state.requests);
        if self.arriving.parts.len() == state.parts as usize {
            let Arriving { at_batch, parts, .. } = std::mem::take(&mut self.arriving);
            self.replace(at_batch, parts.into_values().flatten().collect(), cx);
            self.skip_to(at_batch, state.first_kept);
            self.settle(cx.now);
        }
    }

    /// Gives up the missing batches up to `at_batch` that their sender no longer has. It says in its full state which
    /// is the first one that it has; 0 is unknown.
    fn skip_to(&mut self, at_batch: u64, first_kept: u64) {
        // All of them, if the picker has just met the peer: it imports the prompts with an index.
        let skips_all = self.received.is_hopeless() || self.received.lacks(1);
        let gone = first_kept.checked_sub(1).filter(|_| !skips_all);
        self.received.skip_to(gone.map_or(at_batch, |gone| gone.min(at_batch)));
    }

    /// Replaces the requests in flight by those `at_batch`, and keeps what later batches have changed.
    fn replace(&mut self, at_batch: u64, requests: Vec<v1::Booked>, cx: &mut ApplyContext<'_>) {
        let named: AHashSet<u64> = requests.iter().map(|booked| booked.request).collect();
        self.drop_requests(|request, remote| remote.booked_in > at_batch || named.contains(&request));
        let later = self.received.last() > at_batch;
        self.late = true;
        self.replaced_to = at_batch;
        for booked in requests {
            match self.requests.get_mut(&booked.request) {
                None => self.booked(booked, at_batch, cx),
                // What later batches say counts.
                Some(_) if later => {}
                Some(remote) => remote.correct(&booked, at_batch, &mut self.digest, cx),
            }
        }
        self.needs_state = false;
        // The batches that the full state replaces may have contained some.
        self.needs_pressure = true;
    }
}
