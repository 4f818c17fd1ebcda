//! A request in flight of a peer, booked on this picker's view of its endpoint.

use crate::generated::v1;
use crate::paths::PathBook;
use crate::policies;
use crate::pools::{Located, Pools};
use crate::pressure::SharedPressure;
use crate::records::{self, PeerRecord, StoredResponses};
use crate::stats::{SyncStats, add};
use crate::wire::digest;
use attache_pool::Endpoint;
use attache_pool::ranks::RankBooking;
use attache_prefix::cache::PrefixCache;
use attache_prefix::index::TenantId;
use attache_prefix::key::BlockKey;
use attache_prefix::learning::PrefixUpdate;
use attache_protocol::Usage;
use attache_scheduling::policy::Merged;
use attache_scheduling::{Booking, Dispatch, ModelPolicies, Order};
use attache_types::clock::Timestamp;
use parking_lot::Mutex;
use std::sync::Arc;
use v1::event::Kind;

/// Most moves of a request that count. Each costs as much as a booking.
const MAX_MOVES: u32 = 16;
/// Longest prompt that counts, tokens. Without a limit, one message could make an endpoint look busy for days.
const MAX_PROMPT_TOKENS: u32 = 1 << 21;

/// What the events of a peer are applied to.
pub(crate) struct ApplyContext<'s> {
    /// The peer.
    pub(crate) sender: u64,
    /// The cluster's key.
    pub(crate) seed: u64,
    pub(crate) pools: &'s mut Pools,
    pub(crate) paths: &'s Mutex<PathBook>,
    pub(crate) pressure: &'s SharedPressure,
    pub(crate) responses: Option<&'s dyn StoredResponses>,
    pub(crate) policies: Option<&'s ModelPolicies>,
    /// Unix time, milliseconds.
    pub(crate) unix_ms: u64,
    pub(crate) stats: &'s SyncStats,
    pub(crate) now: Timestamp,
}

impl ApplyContext<'_> {
    pub(crate) fn stored(&mut self, stored: &v1::Stored) {
        let (found, responses) = (self.pools.locate(stored.endpoint), self.responses);
        match found.zip(responses) {
            Some((found, responses)) => responses.stored(&found.view.name, stored.response, found.endpoint.id),
            None => add(&self.stats.unknown_endpoints, 1),
        }
    }

    pub(crate) fn policy(&self, event: &v1::Policy) {
        let merged = self.policies.map(|policies| policies.merge(&event.model, policies::change(event), self.unix_ms));
        if merged == Some(Merged::Refused) {
            add(&self.stats.refused_policies, 1);
        }
    }

    pub(crate) fn has_pool(&self, name: &str) -> bool {
        self.pools.view(name).is_some()
    }
}

/// A request in flight of the peer.
#[derive(Debug)]
pub(crate) struct RemoteRequest {
    pub(crate) endpoint: u64,
    pub(crate) begun: bool,
    /// It was booked here as soon as it was sent, so that times since then are those of its endpoint.
    pub(crate) on_time: bool,
    /// Number of the batch that booked it; 0 for a full state.
    pub(crate) booked_in: u64,
    /// Blocks of its prompt, as far as they were sent.
    pub(crate) blocks: usize,
    /// `None` if this picker does not know the endpoint.
    pub(crate) booking: Option<Booking>,
    pub(crate) cache: Option<Arc<PrefixCache>>,
    /// Facts about its blocks, while their keys are requested.
    pub(crate) awaits: Option<v1::Blocks>,
    /// Number of its moves to other endpoints, and the latest batch that named its endpoint.
    moves: u32,
    placed_in: u64,
    /// Its data-parallel rank on the endpoint.
    rank: Option<RankBooking>,
    /// What strategies have recorded about it.
    record: Option<Box<PeerRecord>>,
}

impl RemoteRequest {
    /// Books a request of the peer on this picker's view of the endpoint.
    pub(crate) fn book(booked: v1::Booked, batch: u64, cx: &mut ApplyContext<'_>) -> Self {
        let v1::Booked { endpoint, begun, .. } = booked;
        let mut remote = Self {
            endpoint,
            begun,
            on_time: true,
            booked_in: batch,
            blocks: booked.blocks.as_ref().map_or(0, blocks_of),
            booking: None,
            cache: None,
            awaits: None,
            moves: 0,
            placed_in: batch,
            rank: None,
            record: None,
        };
        let (keys, now) = (booked.blocks.as_ref().map(|blocks| read(blocks, cx.paths)), cx.now);
        let Some(Located { view, snapshot, endpoint }) = cx.pools.locate(endpoint) else {
            add(&cx.stats.unknown_endpoints, 1);
            return remote;
        };
        remote.cache = view.cache.clone();
        let record = booked
            .recorded
            .and_then(|recorded| records::apply(cx.seed, recorded, &booked.model, &*view.records, endpoint.id, now));
        remote.record = record;
        remote.rank = booked.rank.checked_sub(1).and_then(|rank| RankBooking::book(&endpoint, rank as usize));
        let prefix_update = match (booked.blocks, keys, &view.cache) {
            (Some(blocks), Some(Some(keys)), Some(cache)) => {
                Some((cache.clone(), update(&blocks, keys, &endpoint, cache, now)))
            }
            (Some(blocks), Some(None), Some(_)) => {
                remote.awaits = Some(v1::Blocks { keys: Vec::new(), ..blocks });
                None
            }
            _ => None,
        };
        let order = Order {
            model: &booked.model,
            prompt_tokens: booked.prompt_tokens.min(MAX_PROMPT_TOKENS),
            cached_tokens: booked.cached_tokens,
            understood: booked.understood,
            streams: booked.streams,
            arrives: booked.arrives,
            share: booked.share,
            prefix_update,
        };
        let mut booking = Booking::new(endpoint, &snapshot, view.stale_after, order, now);
        if begun {
            // When it began is unknown, so no speed is learned.
            booking.first_byte(true, false, now);
        }
        remote.booking = Some(booking);
        remote
    }

    /// Makes the booking equal to what its picker says about the request in the full state after `batch`.
    pub(crate) fn correct(&mut self, booked: &v1::Booked, batch: u64, digests: &mut u64, cx: &mut ApplyContext<'_>) {
        let v1::Booked { request, endpoint, .. } = *booked;
        self.change(digests, request, &Kind::Moved(v1::Moved { request, endpoint }), batch, cx);
        if booked.begun {
            let first = v1::FirstByte { request, good: true, ..v1::FirstByte::default() };
            self.change(digests, request, &Kind::FirstByte(first), batch, cx);
        }
    }

    /// Applies the changes that the end names and that have not arrived. `batch` has the end.
    pub(crate) fn catch_up(&mut self, ended: &v1::Ended, batch: u64, digests: &mut u64, cx: &mut ApplyContext<'_>) {
        let v1::Ended { request, moved_to, .. } = *ended;
        if let Some(good) = ended.good {
            let first = v1::FirstByte { request, good, is_first_token: false, moved_to };
            self.change(digests, request, &Kind::FirstByte(first), batch, cx);
        }
    }

    /// Applies a change of a request in flight. `batch` has the change.
    pub(crate) fn change(
        &mut self,
        digests: &mut u64,
        request: u64,
        kind: &Kind,
        batch: u64,
        cx: &mut ApplyContext<'_>,
    ) {
        *digests ^= digest(request, self.endpoint, self.begun);
        match kind {
            Kind::Moved(moved) => self.move_to(moved.endpoint, batch, cx),
            Kind::Dispatched(dispatched) => self.dispatch(dispatched, cx),
            Kind::FirstByte(first) if !self.begun => {
                self.begun = true;
                self.move_to(first.moved_to, batch, cx);
                if let Some(booking) = &mut self.booking {
                    booking.first_byte(first.good, first.is_first_token && self.on_time, cx.now);
                }
            }
            _ => {}
        }
        *digests ^= digest(request, self.endpoint, self.begun);
    }

    /// Moves the request, unless it is there already or a later batch has said where it is.
    fn move_to(&mut self, endpoint: u64, batch: u64, cx: &mut ApplyContext<'_>) {
        if endpoint == 0 || batch < self.placed_in {
            return;
        }
        self.placed_in = batch;
        if endpoint == self.endpoint || self.moves == MAX_MOVES {
            return;
        }
        self.moves += 1;
        self.endpoint = endpoint;
        self.rank = None;
        match cx.pools.locate(endpoint) {
            Some(found) => {
                let Some(booking) = &mut self.booking else { return };
                let (from, to) = (booking.endpoint().id, found.endpoint.id);
                self.record.iter().for_each(|record| found.view.records.moved(record, from, to, cx.now));
                booking.move_to(&found.endpoint, cx.now);
            }
            None => {
                add(&cx.stats.unknown_endpoints, 1);
                self.booking = None;
            }
        }
    }

    fn dispatch(&mut self, dispatched: &v1::Dispatched, cx: &mut ApplyContext<'_>) {
        let Some(booking) = &mut self.booking else { return };
        let from = cx.pools.locate(dispatched.prefill_endpoint).map(|found| found.endpoint);
        let Some(Located { view, snapshot, .. }) = cx.pools.locate(self.endpoint) else { return };
        let how = match &from {
            Some(from) => Dispatch::Arrives(from, dispatched.seconds),
            None => Dispatch::Whole,
        };
        booking.dispatch(how, &snapshot, view.stale_after, cx.now);
    }

    pub(crate) fn end(self, ended: &v1::Ended, cx: &mut ApplyContext<'_>) {
        let Some(booking) = self.booking else { return };
        let usage = Usage {
            prompt_tokens: ended.prompt_tokens,
            completion_tokens: ended.completion_tokens,
            cached_tokens: ended.cached_tokens,
        };
        let (paths, added) = (cx.paths, &ended.keys);
        let extend = |keys: &mut Vec<BlockKey>| {
            if added.is_empty() {
                return false;
            }
            keys.extend(added.iter().copied().map(BlockKey));
            paths.lock().keep(keys);
            true
        };
        booking.end(ended.complete, &usage, extend, cx.now);
    }
}

/// Number of the blocks of a booked prompt.
pub(crate) fn blocks_of(blocks: &v1::Blocks) -> usize {
    blocks.base_blocks as usize + blocks.keys.len()
}

/// The keys of a booked prompt; `None` if they refer to an unknown path.
fn read(blocks: &v1::Blocks, paths: &Mutex<PathBook>) -> Option<Vec<BlockKey>> {
    paths.lock().extend(blocks.base, blocks.base_blocks, &blocks.keys)
}

/// The updates of this picker's prefix cache that a prompt on `endpoint` causes.
pub(crate) fn update(
    blocks: &v1::Blocks,
    keys: Vec<BlockKey>,
    endpoint: &Endpoint,
    cache: &PrefixCache,
    now: Timestamp,
) -> PrefixUpdate {
    let found = cache.lookup(&mut &keys[..], now).of_own_keys(blocks.own_keys);
    let whole = blocks.whole && !found.is_exact(endpoint.id);
    PrefixUpdate {
        tenant: TenantId(blocks.tenant),
        text_bytes: blocks.text_bytes,
        tells_cached: blocks.tells_cached,
        ..found.prefix_update(endpoint.id, keys, whole)
    }
}
