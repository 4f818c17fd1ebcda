//! The column of one peer: its requests in flight, booked on this picker's view of the endpoints.

use crate::generated::v1;
use crate::mirror::{Mirror, Scene, blocks_of, update};
use crate::policies;
use crate::pools::MAX_EJECTED;
use crate::received::Received;
use crate::records::unseal_service;
use crate::stats::add;
use crate::wire::{HEARTBEAT_EVERY, digest};
use ahash::{AHashMap, AHashSet};
use attache_prefix::index::TenantId;
use attache_types::clock::Timestamp;
use std::collections::{BTreeMap, BTreeSet};
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
/// Most events that are kept for bookings that have not arrived yet. With more, the column is requested.
const MAX_EARLY: usize = 10_000;
/// Most bytes of these events.
const MAX_EARLY_BYTES: usize = 16 << 20;
/// Most bytes of a column that arrives.
const MAX_COLUMN_BYTES: usize = 64 << 20;
/// Most prompts that are requested at a time; the oldest are given up.
const MAX_UNKNOWN_PATHS: usize = 1_024;
/// Batches that a sender may be ahead of what is known of it: more than it sends between two heartbeats. Behind a longer
/// pause, its next heartbeat comes first.
const MAX_AHEAD: u64 = 1 << 16;
/// Shortest time between two heartbeats that are compared. Messages may overtake each other.
const COMPARE_AFTER: Duration = Duration::from_millis(HEARTBEAT_EVERY.as_millis() as u64 / 2);
/// Most parts of a column.
const MAX_PARTS: u32 = 4_096;
/// Most requests in flight of one picker. Further ones are not counted.
const MAX_REQUESTS: usize = 1 << 16;
/// Most blocks of their prompts in total: 32 MiB of keys. Prompts of further requests are not recorded.
const MAX_BLOCKS: usize = 1 << 22;

/// A column that arrives in parts.
#[derive(Debug, Default)]
struct Arriving {
    at_batch: u64,
    parts: BTreeMap<u32, Vec<v1::Booked>>,
    /// Number of requests in the parts, and their size.
    requests: usize,
    bytes: usize,
}

/// The column of one peer.
#[derive(Debug)]
pub(crate) struct PeerColumn {
    pub(crate) name: String,
    pub(crate) last_heard: Timestamp,
    /// It has not imported a prefix index yet, so it is not asked for its own.
    pub(crate) joins: bool,
    received: Received,
    /// The last batch that a heartbeat named.
    announced: u64,
    /// When a heartbeat was last compared, and the highest batch that was received then.
    compared: Option<(Timestamp, u64)>,
    /// The batch that is applied now arrived later than others of its time.
    late: bool,
    requests: AHashMap<u64, Mirror>,
    /// Blocks of their prompts.
    blocks: usize,
    digest: u64,
    /// The endpoints that it has ejected.
    ejected: AHashSet<u64>,
    /// Its column is needed, because too much was missed to ask for batches.
    needs_column: bool,
    arriving: Arriving,
    /// Its counts of pressure are needed, because some of them did not arrive in time.
    needs_pressure: bool,
    /// Its last heartbeat named other policies than this picker has, and they have not been requested since.
    needs_policies: bool,
    /// Events of requests that are not booked here yet, in the order of their arrival.
    early: AHashMap<u64, Vec<Kind>>,
    early_count: usize,
    early_bytes: usize,
    gap_since: Option<Timestamp>,
    asked_at: Option<Timestamp>,
    /// When a request of the peer was answered.
    answered_at: Option<Timestamp>,
    /// Bookings whose blocks refer to an unknown path, until their keys arrive.
    unknown_paths: BTreeSet<u64>,
}

impl PeerColumn {
    pub(crate) fn new(now: Timestamp) -> Self {
        Self {
            name: String::new(),
            last_heard: now,
            joins: false,
            received: Received::default(),
            announced: 0,
            compared: None,
            late: false,
            requests: AHashMap::new(),
            blocks: 0,
            digest: 0,
            ejected: AHashSet::new(),
            needs_column: false,
            arriving: Arriving::default(),
            needs_pressure: false,
            needs_policies: false,
            early: AHashMap::new(),
            early_count: 0,
            early_bytes: 0,
            gap_since: None,
            asked_at: None,
            answered_at: None,
            unknown_paths: BTreeSet::new(),
        }
    }

    /// Drops the requests in flight of a picker that is silent. False if it has none.
    pub(crate) fn silence(&mut self) -> bool {
        let had = !self.requests.is_empty();
        self.requests.clear();
        (self.blocks, self.digest) = (0, 0);
        self.arriving = Arriving::default();
        self.give_up_early();
        had
    }

    /// Gives up the bookings of all early events.
    fn give_up_early(&mut self) {
        (self.early_count, self.early_bytes) = (0, 0);
        std::mem::take(&mut self.early).into_values().flatten().for_each(|kind| self.missed(&kind));
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
        self.needs_column || self.received.has_gap()
    }

    /// Whether something must be requested from the peer soon.
    pub(crate) fn has_requests(&self) -> bool {
        self.is_behind() || self.needs_pressure || self.needs_policies || !self.unknown_paths.is_empty()
    }

    /// Applies a batch, unless it was applied before.
    pub(crate) fn batch(&mut self, batch: v1::Batch, scene: &mut Scene<'_>) {
        // No times are learned from a batch that was lost and sent again: its changes were made some time ago.
        self.late = batch.number <= self.received.last().max(self.announced);
        if self.is_beyond(batch.number) {
            return add(&scene.stats.contradictions, 1);
        }
        if batch.number > 0 {
            // The column has its changes.
            if self.received.is_hopeless() {
                return;
            }
            if !self.received.insert(batch.number) {
                return add(&scene.stats.duplicate_batches, 1);
            }
            self.needs_column |= self.received.is_hopeless();
        } else if !batch.events.iter().any(|event| matches!(event.kind, Some(Kind::Placed(_) | Kind::Policy(_)))) {
            self.needs_pressure = false;
        }
        let mut frees = false;
        for kind in batch.events.into_iter().filter_map(|event| event.kind) {
            frees |= matches!(kind, Kind::FirstByte(_) | Kind::Ended(_) | Kind::Dispatched(_) | Kind::Moved(_));
            self.event(kind, batch.number, scene);
        }
        self.settle(scene.now);
        if frees {
            scene.pools.freed(scene.now);
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
        if let Kind::Ended(v1::Ended { request, good: Some(true), .. }) = kind {
            self.want_path(*request);
        }
    }

    fn want_path(&mut self, request: u64) {
        if self.unknown_paths.len() == MAX_UNKNOWN_PATHS {
            self.unknown_paths.pop_first();
        }
        self.unknown_paths.insert(request);
    }

    fn event(&mut self, kind: Kind, batch: u64, scene: &mut Scene<'_>) {
        match kind {
            Kind::Booked(booked) => self.booked(booked, batch, scene),
            Kind::Lost(lost) => Self::lost(lost.endpoint, scene),
            Kind::Stored(stored) => scene.stored(&stored),
            Kind::Policy(policy) => scene.policy(&policy),
            Kind::Served(served) => {
                let flows = scene.pools.by_key(served.pool).and_then(|view| view.flows.as_ref());
                flows.into_iter().for_each(|flows| flows.served(unseal_service(scene.seed, &served)));
            }
            // A batch that is sent again may be older than the window of pressure.
            Kind::Diverted(_) if self.late && batch > 0 => self.needs_pressure = true,
            Kind::Diverted(event) if scene.has_pool(&event.pool) => {
                scene.pressure.diverted(scene.sender, &event, scene.now);
            }
            Kind::Consumed(event) if scene.has_pool(&event.pool) => scene.pressure.consumed(&event, scene.now),
            Kind::Diverted(_) | Kind::Consumed(_) => {}
            Kind::Placed(placed) => self.placed(placed, scene),
            Kind::Moved(v1::Moved { request, .. })
            | Kind::Dispatched(v1::Dispatched { request, .. })
            | Kind::FirstByte(v1::FirstByte { request, .. }) => match self.requests.get_mut(&request) {
                Some(mirror) => {
                    mirror.on_time &= !self.late;
                    mirror.change(&mut self.digest, request, &kind, scene);
                }
                None => self.keep_early(request, kind),
            },
            Kind::Ended(ended) => match self.requests.remove(&ended.request) {
                Some(mut mirror) => {
                    self.blocks -= mirror.blocks;
                    mirror.catch_up(&ended, &mut self.digest, scene);
                    self.digest ^= digest(ended.request, mirror.endpoint, mirror.begun);
                    // A column of an earlier state may still name it.
                    if self.needs_column {
                        self.keep_early(ended.request, Kind::Ended(ended.clone()));
                    }
                    mirror.end(&ended, scene);
                }
                None => self.keep_early(ended.request, Kind::Ended(ended)),
            },
        }
    }

    /// Keeps an event of a request whose booking may still arrive.
    fn keep_early(&mut self, request: u64, kind: Kind) {
        if !self.is_behind() {
            return self.missed(&kind);
        }
        let bytes = kind.encoded_len();
        if self.early_count == MAX_EARLY || self.early_bytes + bytes > MAX_EARLY_BYTES {
            self.give_up_early();
            self.needs_column = true;
        }
        self.early_count += 1;
        self.early_bytes += bytes;
        self.early.entry(request).or_default().push(kind);
    }

    fn booked(&mut self, mut booked: v1::Booked, batch: u64, scene: &mut Scene<'_>) {
        let request = booked.request;
        if self.requests.contains_key(&request) {
            return;
        }
        if self.requests.len() >= MAX_REQUESTS {
            return add(&scene.stats.excess_requests, 1);
        }
        if booked.blocks.take_if(|blocks| self.blocks + blocks_of(blocks) > MAX_BLOCKS).is_some() {
            add(&scene.stats.excess_requests, 1);
        }
        let mut mirror = Mirror::book(booked, batch, scene);
        mirror.on_time = !self.late;
        if mirror.awaits.is_some() {
            add(&scene.stats.unknown_paths, 1);
            self.want_path(request);
        }
        self.digest ^= digest(request, mirror.endpoint, mirror.begun);
        self.blocks += mirror.blocks;
        self.requests.insert(request, mirror);
        for kind in self.early.remove(&request).unwrap_or_default() {
            self.early_count -= 1;
            self.early_bytes -= kind.encoded_len();
            self.event(kind, batch, scene);
        }
    }

    fn lost(endpoint: u64, scene: &mut Scene<'_>) {
        match scene.pools.locate(endpoint) {
            Some(found) => found.view.losses.cache_lost(found.endpoint.id),
            None => add(&scene.stats.unknown_endpoints, 1),
        }
    }

    /// The keys of a prompt that this picker has asked for.
    fn placed(&mut self, placed: v1::Placed, scene: &mut Scene<'_>) {
        if !self.unknown_paths.remove(&placed.request) || placed.keys.is_empty() {
            return;
        }
        let Some(keys) = scene.paths.lock().extend(0, 0, &placed.keys) else { return };
        let awaiting = self.requests.get_mut(&placed.request).and_then(|mirror| Some((mirror.awaits.take()?, mirror)));
        match awaiting {
            // Not the prompt that was booked.
            Some((_, mirror)) if mirror.blocks != keys.len() => {}
            Some((blocks, mirror)) => {
                let Some((booking, cache)) = mirror.booking.as_mut().zip(mirror.cache.clone()) else { return };
                let update = update(&blocks, keys, booking.endpoint(), &cache, scene.now);
                booking.learn(cache, update, mirror.begun, scene.now);
            }
            // It has ended: the endpoint has computed the prompt.
            None => {
                let Some(found) = scene.pools.locate(placed.endpoint) else { return };
                if let Some(cache) = &found.view.cache {
                    cache.record(found.endpoint.id, &keys, TenantId(placed.tenant), scene.now);
                }
            }
        }
    }

    /// Reads a heartbeat. Returns what must be requested.
    pub(crate) fn heartbeat(&mut self, heartbeat: v1::Heartbeat, scene: &mut Scene<'_>) -> Option<v1::Resend> {
        (self.name, self.joins) = (heartbeat.name, heartbeat.joining);
        self.compare(heartbeat.last_batch, scene);
        self.announced = heartbeat.last_batch;
        self.warn(heartbeat.ejected, scene);
        let is_other = |policies| heartbeat.policies != 0 && heartbeat.policies != policies::digest(policies);
        self.needs_policies = scene.policies.is_some_and(is_other);
        if !self.needs_column && !self.received.has_gap() && self.received.last() == heartbeat.last_batch {
            let equal = (heartbeat.digest, heartbeat.requests) == (self.digest, self.requests.len() as u64);
            if !equal {
                add(&scene.stats.digest_mismatches, 1);
                self.needs_column = true;
            }
        }
        self.missing(heartbeat.last_batch, scene)
    }

    /// Whether a batch is further ahead than its sender can be.
    fn is_beyond(&self, number: u64) -> bool {
        let known = self.received.last().max(self.announced);
        known > 0 && number > known.saturating_add(MAX_AHEAD)
    }

    /// Begins anew where a heartbeat names a batch before one that was received some time ago. Someone else has used
    /// the sender's identity, or numbers that it never sent.
    fn compare(&mut self, last_batch: u64, scene: &Scene<'_>) {
        let Some((at, received)) = self.compared else {
            self.compared = Some((scene.now, self.received.last()));
            return;
        };
        if scene.now.since(at) < COMPARE_AFTER {
            return;
        }
        if last_batch < received {
            add(&scene.stats.contradictions, 1);
            self.silence();
            self.received = Received::default();
            self.needs_column = true;
        }
        self.compared = Some((scene.now, self.received.last()));
    }

    /// Passes on which endpoints the peer has ejected since its last heartbeat.
    fn warn(&mut self, ejected: Vec<u64>, scene: &mut Scene<'_>) {
        let ejected: AHashSet<u64> = ejected.into_iter().take(MAX_EJECTED).collect();
        for key in ejected.difference(&self.ejected) {
            if let Some(found) = scene.pools.locate(*key) {
                found.endpoint.health.warn(&found.view.health);
            }
        }
        self.ejected = ejected;
    }

    /// What must be requested of a gap that is old enough.
    pub(crate) fn overdue(&mut self, scene: &mut Scene<'_>) -> Option<v1::Resend> {
        let due = self.gap_since.is_some_and(|since| since.after(GAP_WAIT) <= scene.now);
        let needs = self.needs_column || self.needs_pressure || self.needs_policies;
        if due || needs || !self.unknown_paths.is_empty() {
            return self.missing(self.received.last(), scene);
        }
        None
    }

    fn missing(&mut self, last: u64, scene: &mut Scene<'_>) -> Option<v1::Resend> {
        if self.asked_at.is_some_and(|at| at.after(RESEND_EVERY) > scene.now) {
            return None;
        }
        let batches = match self.needs_column {
            true => Vec::new(),
            false => self.received.missing(last, MAX_RANGES),
        };
        let requests: Vec<u64> = self.unknown_paths.iter().copied().collect();
        let (column, pressure, policies) = (self.needs_column, self.needs_pressure, self.needs_policies);
        if batches.is_empty() && requests.is_empty() && !column && !pressure && !policies {
            return None;
        }
        // The next heartbeat says whether the answer has arrived.
        self.needs_policies = false;
        self.asked_at = Some(scene.now);
        add(&scene.stats.requested_batches, batches.iter().map(|range| range.end() - range.start() + 1).sum());
        let range = |range: std::ops::RangeInclusive<u64>| v1::Range { first: *range.start(), last: *range.end() };
        Some(v1::Resend { batches: batches.into_iter().map(range).collect(), column, requests, pressure, policies })
    }

    /// Takes one part of the column. The last one replaces the requests in flight.
    pub(crate) fn column(&mut self, column: v1::Column, scene: &mut Scene<'_>) {
        // A picker that no longer has a requested batch sends its column instead.
        let needed = self.needs_column || (self.asked_at.is_some() && self.received.lacks(column.at_batch));
        if self.is_beyond(column.at_batch) {
            return add(&scene.stats.contradictions, 1);
        }
        if !needed || column.parts > MAX_PARTS || column.part >= column.parts {
            return;
        }
        if column.at_batch != self.arriving.at_batch {
            self.arriving = Arriving { at_batch: column.at_batch, ..Arriving::default() };
        }
        if self.arriving.parts.contains_key(&column.part) {
            return;
        }
        self.arriving.requests += column.requests.len();
        self.arriving.bytes += column.requests.iter().map(prost::Message::encoded_len).sum::<usize>();
        if self.arriving.requests > MAX_REQUESTS || self.arriving.bytes > MAX_COLUMN_BYTES {
            self.arriving = Arriving::default();
            return add(&scene.stats.excess_requests, 1);
        }
        self.arriving.parts.insert(column.part, column.requests);
        if self.arriving.parts.len() == column.parts as usize {
            let Arriving { at_batch, parts, .. } = std::mem::take(&mut self.arriving);
            self.replace(at_batch, parts.into_values().flatten().collect(), scene);
        }
    }

    /// Replaces the requests in flight by those `at_batch`, and keeps what later batches have changed.
    fn replace(&mut self, at_batch: u64, requests: Vec<v1::Booked>, scene: &mut Scene<'_>) {
        let named: AHashSet<u64> = requests.iter().map(|booked| booked.request).collect();
        let (digests, blocks) = (&mut self.digest, &mut self.blocks);
        self.requests.retain(|request, mirror| {
            let stays = mirror.booked_in > at_batch || named.contains(request);
            if !stays {
                *digests ^= digest(*request, mirror.endpoint, mirror.begun);
                *blocks -= mirror.blocks;
            }
            stays
        });
        let later = self.received.last() > at_batch;
        self.late = true;
        self.received.skip_to(at_batch);
        for booked in requests {
            match self.requests.get_mut(&booked.request) {
                None => self.booked(booked, at_batch, scene),
                // What later batches say counts.
                Some(_) if later => {}
                Some(mirror) => mirror.correct(&booked, &mut self.digest, scene),
            }
        }
        self.needs_column = false;
        // The batches that the column replaces may have contained some.
        self.needs_pressure = true;
        self.settle(scene.now);
    }
}
