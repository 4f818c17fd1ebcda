//! The state of this picker: its requests in flight, the changes that peers have not received yet, and the batches
//! that a peer may ask for again.

use crate::bus::Outbox;
use crate::generated::v1;
use crate::paths::PathBook;
use crate::pools::EndpointKey;
use crate::records::{OwnRecord, sealed};
use crate::stats::{SyncStats, add};
use crate::wire::{digest, encode};
use ahash::AHashMap;
use attache_prefix::key::BlockKey;
use attache_types::clock::Timestamp;
use parking_lot::Mutex;
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use v1::event::Kind;
use v1::message::Body;

/// Changes wait at most this long for others, unless a booking sends them at once.
pub(crate) const BATCH_WAIT: Duration = Duration::from_millis(2);
/// A batch of this size is sent at once, bytes.
const BATCH_BYTES: usize = 64 << 10;
/// Batches are kept for peers that missed them, up to this size in total, bytes.
const KEPT_BYTES: usize = 4 << 20;
/// Number of ended requests whose prompts are kept for peers that ask for them.
const KEPT_PROMPTS: usize = 1_024;
/// A part of a full state ends at this size, bytes. Receivers drop messages above 1 MiB.
const COLUMN_PART_BYTES: usize = 256 << 10;
/// Most counts of pressure, or policies of models, in one message: each has at most about 1.8 KiB.
const STATE_EVENTS: usize = 256;
/// Most batches, and most prompts, that one `Resend` gets.
const MAX_RESENT: usize = 1_024;
/// Most bytes of batches and prompts that one `Resend` gets.
const MAX_RESENT_BYTES: usize = 4 << 20;

/// A booking of this picker.
#[derive(Clone, Copy, Debug)]
pub struct OwnBooking<'a> {
    /// The chosen endpoint.
    pub endpoint: EndpointKey,
    /// Length of the prompt, tokens.
    pub prompt_tokens: u32,
    /// Prompt tokens that the endpoint is expected to have cached.
    pub cached_tokens: u32,
    /// The request was parsed.
    pub understood: bool,
    /// The time of the first token is observed.
    pub streams: bool,
    /// Another server computes the prompt.
    pub arrives: bool,
    /// Name of the model or adapter on the server.
    pub model: &'a str,
    /// Share of the endpoint that the request uses; 0 without an SLO profile.
    pub share: f64,
    /// The data-parallel rank on the endpoint, counted from 0.
    pub rank: Option<usize>,
    /// What the strategy recorded.
    pub record: Option<OwnRecord<'a>>,
    /// Blocks of the prompt; `None` where the engine reports them itself, or where they are unknown.
    pub blocks: Option<BookedBlocks<'a>>,
}

impl<'a> OwnBooking<'a> {
    /// A booking that counts as a request in flight, and as no work that is known.
    #[must_use]
    pub fn bare(endpoint: EndpointKey, model: &'a str) -> Self {
        Self {
            endpoint,
            prompt_tokens: 0,
            cached_tokens: 0,
            understood: false,
            streams: false,
            arrives: false,
            model,
            share: 0.0,
            rank: None,
            record: None,
            blocks: None,
        }
    }
}

/// The blocks of a booked prompt.
#[derive(Clone, Copy, Debug)]
pub struct BookedBlocks<'a> {
    /// Their keys, from the first block on.
    pub keys: &'a [BlockKey],
    /// These are all blocks of the prompt.
    pub whole: bool,
    /// Number of the tenant in the prefix index.
    pub tenant: u32,
    /// Length of the prompt's text in bytes; 0 when it has other content too.
    pub text_bytes: u64,
    /// The keys were made from own tokens or text.
    pub own_keys: bool,
    /// The response's count of cached tokens reflects what the endpoint holds.
    pub tells_cached: bool,
}

/// A prompt that a peer may ask for.
#[derive(Clone, Debug)]
struct KeptPrompt {
    keys: Arc<[BlockKey]>,
    endpoint: u64,
    tenant: u32,
}

/// A request in flight.
#[derive(Debug)]
struct OwnRequest {
    /// As it was sent, without the keys of its blocks.
    booked: v1::Booked,
    keys: Option<Arc<[BlockKey]>>,
    /// Whether the first byte came with a 2xx status.
    good: Option<bool>,
    moved: bool,
}

impl OwnRequest {
    fn digest(&self) -> u64 {
        digest(self.booked.request, self.booked.endpoint, self.booked.begun)
    }

    /// The endpoint if the request was moved, else 0.
    fn moved_to(&self) -> u64 {
        if self.moved { self.booked.endpoint } else { 0 }
    }

    fn prompt(&self) -> Option<KeptPrompt> {
        let tenant = self.booked.blocks.as_ref().map_or(0, |blocks| blocks.tenant);
        Some(KeptPrompt { keys: self.keys.clone()?, endpoint: self.booked.endpoint, tenant })
    }

    /// With the keys of its blocks, shortened by what peers know.
    fn with_keys(&self, paths: &Mutex<PathBook>) -> v1::Booked {
        let mut booked = self.booked.clone();
        if let (Some(blocks), Some(keys)) = (&mut booked.blocks, &self.keys) {
            shorten(blocks, keys, paths);
        }
        booked
    }
}

fn shorten(blocks: &mut v1::Blocks, keys: &[BlockKey], paths: &Mutex<PathBook>) {
    let shortened = paths.lock().shorten(keys);
    blocks.base = shortened.base;
    blocks.base_blocks = shortened.base_blocks;
    blocks.keys = shortened.rest.iter().map(|key| key.0).collect();
}

/// The state of this picker.
#[derive(Debug)]
pub(crate) struct Own {
    sender: u64,
    seed: u64,
    outbox: Arc<dyn Outbox>,
    stats: Arc<SyncStats>,
    next_request: u64,
    requests: AHashMap<u64, OwnRequest>,
    digest: u64,
    pending: Vec<v1::Event>,
    pending_bytes: usize,
    /// When the oldest pending change was made.
    pending_since: Option<Timestamp>,
    last_batch: u64,
    kept: VecDeque<(u64, Arc<[u8]>)>,
    kept_bytes: usize,
    ended: VecDeque<(u64, KeptPrompt)>,
}

impl Own {
    /// The empty state of `sender`. `seed` is the cluster's key.
    pub(crate) fn new(sender: u64, seed: u64, outbox: Arc<dyn Outbox>, stats: Arc<SyncStats>) -> Self {
        Self {
            sender,
            seed,
            outbox,
            stats,
            next_request: 0,
            requests: AHashMap::new(),
            digest: 0,
            pending: Vec::new(),
            pending_bytes: 0,
            pending_since: None,
            last_batch: 0,
            kept: VecDeque::new(),
            kept_bytes: 0,
            ended: VecDeque::new(),
        }
    }

    /// Adds a booking, and sends it at once with all pending changes. Returns its number.
    pub(crate) fn book(&mut self, booking: &OwnBooking<'_>, paths: &Mutex<PathBook>, now: Timestamp) -> u64 {
        self.next_request += 1;
        let request = self.next_request;
        let blocks = booking.blocks.map(|blocks| v1::Blocks {
            whole: blocks.whole,
            tenant: blocks.tenant,
            text_bytes: blocks.text_bytes,
            own_keys: blocks.own_keys,
            tells_cached: blocks.tells_cached,
            ..v1::Blocks::default()
        });
        let booked = v1::Booked {
            request,
            endpoint: booking.endpoint.0,
            prompt_tokens: booking.prompt_tokens,
            cached_tokens: booking.cached_tokens,
            understood: booking.understood,
            streams: booking.streams,
            arrives: booking.arrives,
            model: booking.model.to_owned(),
            share: booking.share,
            blocks,
            begun: false,
            recorded: None,
            rank: booking.rank.and_then(|rank| u32::try_from(rank + 1).ok()).unwrap_or(0),
        };
        let own =
            OwnRequest { booked, keys: booking.blocks.map(|blocks| blocks.keys.into()), good: None, moved: false };
        let recorded = booking.record.as_ref().and_then(|record| sealed(self.seed, record));
        let sent = v1::Booked { recorded, ..own.with_keys(paths) };
        self.digest ^= own.digest();
        self.requests.insert(request, own);
        self.append(Kind::Booked(sent), now);
        self.flush();
        request
    }

    /// Changes a request in flight, and reports the change.
    fn update(&mut self, request: u64, kind: Kind, now: Timestamp, change: impl FnOnce(&mut OwnRequest)) {
        let Some(own) = self.requests.get_mut(&request) else { return };
        self.digest ^= own.digest();
        change(own);
        self.digest ^= own.digest();
        self.push(kind, now);
    }

    pub(crate) fn moved(&mut self, request: u64, endpoint: EndpointKey, now: Timestamp) {
        let kind = Kind::Moved(v1::Moved { request, endpoint: endpoint.0 });
        // The rank belongs to the endpoint that was tried first.
        let change = |own: &mut OwnRequest| (own.booked.endpoint, own.booked.rank, own.moved) = (endpoint.0, 0, true);
        self.update(request, kind, now, change);
    }

    pub(crate) fn dispatched(&mut self, request: u64, from: Option<EndpointKey>, seconds: f64, now: Timestamp) {
        let prefill_endpoint = from.map_or(0, |key| key.0);
        let kind = Kind::Dispatched(v1::Dispatched { request, prefill_endpoint, seconds });
        self.update(request, kind, now, |own| own.booked.arrives = false);
    }

    pub(crate) fn first_byte(&mut self, request: u64, good: bool, is_first_token: bool, now: Timestamp) {
        let moved_to = self.requests.get(&request).map_or(0, OwnRequest::moved_to);
        let kind = Kind::FirstByte(v1::FirstByte { request, good, is_first_token, moved_to });
        self.update(request, kind, now, |own| (own.booked.begun, own.good) = (true, Some(good)));
    }

    /// Ends a request. Peers append the keys of the response to those of the prompt.
    pub(crate) fn ended(&mut self, mut ended: v1::Ended, paths: &Mutex<PathBook>, now: Timestamp) {
        let Some(own) = self.requests.remove(&ended.request) else { return };
        self.digest ^= own.digest();
        ended.good = own.good;
        ended.moved_to = own.moved_to();
        if let Some(mut prompt) = own.prompt() {
            if !ended.keys.is_empty() {
                let added = ended.keys.iter().copied().map(BlockKey);
                prompt.keys = prompt.keys.iter().copied().chain(added).collect();
                paths.lock().keep(&prompt.keys);
            }
            if own.good == Some(true) {
                if self.ended.len() == KEPT_PROMPTS {
                    self.ended.pop_front();
                }
                self.ended.push_back((ended.request, prompt));
            }
        }
        self.push(Kind::Ended(ended), now);
    }

    /// Announces that an endpoint stores a response.
    pub(crate) fn stored(&mut self, endpoint: EndpointKey, response: u64, now: Timestamp) {
        self.push(Kind::Stored(v1::Stored { endpoint: endpoint.0, response }), now);
    }

    /// Announces that a session has ended.
    pub(crate) fn session_ended(&mut self, session: u64, now: Timestamp) {
        self.push(Kind::SessionEnded(v1::SessionEnded { session }), now);
    }

    /// Reports the service of a queue's flow.
    pub(crate) fn served(&mut self, served: v1::Served, now: Timestamp) {
        self.push(Kind::Served(served), now);
    }

    /// Announces that an endpoint has lost its cache.
    pub(crate) fn lost(&mut self, endpoint: EndpointKey, now: Timestamp) {
        self.push(Kind::Lost(v1::Lost { endpoint: endpoint.0 }), now);
    }

    fn append(&mut self, kind: Kind, now: Timestamp) {
        let event = v1::Event { kind: Some(kind) };
        self.pending_bytes += prost::Message::encoded_len(&event);
        self.pending.push(event);
        self.pending_since.get_or_insert(now);
    }

    /// Appends a change that may wait for others.
    pub(crate) fn push(&mut self, kind: Kind, now: Timestamp) {
        let waits = self.pending_since.is_some();
        self.append(kind, now);
        if self.pending_bytes >= BATCH_BYTES {
            self.flush();
        } else if !waits {
            self.outbox.wake();
        }
    }

    /// When pending changes must be sent.
    pub(crate) fn flush_at(&self) -> Option<Timestamp> {
        self.pending_since.map(|since| since.after(BATCH_WAIT))
    }

    /// Sends the pending changes as one batch.
    pub(crate) fn flush(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        self.last_batch += 1;
        let batch = v1::Batch { number: self.last_batch, events: std::mem::take(&mut self.pending) };
        (self.pending_bytes, self.pending_since) = (0, None);
        let message = self.publish(None, Body::Batch(batch));
        self.kept_bytes += message.len();
        self.kept.push_back((self.last_batch, message));
        while self.kept_bytes > KEPT_BYTES
            && let Some((_, oldest)) = self.kept.pop_front()
        {
            self.kept_bytes -= oldest.len();
        }
    }

    /// Sends the heartbeat, which describes the state after all changes so far. `joining`: this picker has no index
    /// for others yet. `ejected`: the endpoints that it has ejected. `policies`: the digest of models' policies.
    pub(crate) fn heartbeat(&mut self, name: &str, joining: bool, ejected: Vec<u64>, policies: u64) {
        self.flush();
        let heartbeat = v1::Heartbeat {
            name: name.to_owned(),
            last_batch: self.last_batch,
            requests: self.requests.len() as u64,
            digest: self.digest,
            joining,
            ejected,
            policies,
        };
        self.publish(None, Body::Heartbeat(heartbeat));
    }

    /// Answers the peer `to`, which missed something.
    pub(crate) fn resend(&mut self, to: u64, asked: &v1::Resend, paths: &Mutex<PathBook>) {
        self.flush();
        let first = self.kept.front().map_or(u64::MAX, |(number, _)| *number);
        let ranges = || asked.batches.iter().take(MAX_RESENT);
        let numbers =
            ranges().flat_map(|range| (range.first.max(first)..=range.last.min(self.last_batch)).take(MAX_RESENT));
        let numbers: BTreeSet<u64> = numbers.take(MAX_RESENT).collect();
        let mut left = MAX_RESENT_BYTES;
        for (_, message) in numbers.into_iter().filter_map(|number| self.kept.get((number - first) as usize)) {
            let Some(rest) = left.checked_sub(message.len()) else { break };
            left = rest;
            self.hand_over(Some(to), message.to_vec());
        }
        if asked.column || ranges().any(|range| range.first < first) {
            self.send_full_state(to, paths);
        }
        let requests: BTreeSet<u64> = asked.requests.iter().take(MAX_RESENT).copied().collect();
        for placed in requests.into_iter().map(|request| self.placed(request)) {
            let Some(rest) = left.checked_sub(8 * placed.keys.len()) else { break };
            left = rest;
            self.send_events(to, vec![Kind::Placed(placed)]);
        }
    }

    /// Sends all counts of pressure, or all policies, to the peer `to`. Without any, it gets an empty batch.
    pub(crate) fn send_state(&self, to: u64, mut events: Vec<Kind>) {
        while events.len() > STATE_EVENTS {
            self.send_events(to, events.split_off(events.len() - STATE_EVENTS));
        }
        self.send_events(to, events);
    }

    /// Sends events to one peer that are not counted as a batch.
    fn send_events(&self, to: u64, kinds: Vec<Kind>) {
        let events = kinds.into_iter().map(|kind| v1::Event { kind: Some(kind) }).collect();
        self.publish(Some(to), Body::Batch(v1::Batch { number: 0, events }));
    }

    /// The prompt of a request, without keys if it is not known any more.
    fn placed(&self, request: u64) -> v1::Placed {
        let in_flight = self.requests.get(&request).and_then(OwnRequest::prompt);
        let ended = || self.ended.iter().rev().find(|(number, _)| *number == request).map(|(_, prompt)| prompt.clone());
        let Some(KeptPrompt { keys, endpoint, tenant }) = in_flight.or_else(ended) else {
            return v1::Placed { request, ..v1::Placed::default() };
        };
        v1::Placed { request, keys: keys.iter().map(|key| key.0).collect(), endpoint, tenant }
    }

    fn send_full_state(&mut self, to: u64, paths: &Mutex<PathBook>) {
        let mut filled = Vec::new();
        let (mut requests, mut bytes) = (Vec::new(), 0);
        for booked in self.requests.values().map(|own| own.with_keys(paths)) {
            bytes += prost::Message::encoded_len(&booked);
            requests.push(booked);
            if bytes >= COLUMN_PART_BYTES {
                filled.push(std::mem::take(&mut requests));
                bytes = 0;
            }
        }
        // A full state without requests has one part, too.
        filled.push(requests);
        let (at_batch, parts) = (self.last_batch, u32::try_from(filled.len()).unwrap_or(u32::MAX));
        let first_kept = self.kept.front().map_or(at_batch + 1, |(number, _)| *number);
        for (part, requests) in (0..parts).zip(filled) {
            self.publish(Some(to), Body::Column(v1::Column { at_batch, part, parts, requests, first_kept }));
        }
    }

    fn publish(&self, to: Option<u64>, body: Body) -> Arc<[u8]> {
        let message = encode(self.sender, to, body);
        let kept = message.as_slice().into();
        self.hand_over(to, message);
        kept
    }

    fn hand_over(&self, to: Option<u64>, message: Vec<u8>) {
        add(&self.stats.sent_messages, 1);
        add(&self.stats.sent_bytes, message.len() as u64);
        self.outbox.publish(to, message);
    }
}
