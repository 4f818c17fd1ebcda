//! Transfer of prefix indexes between pickers: chunks for peers that ask, and the import from one peer.
//!
//! Exports and imports hold no lock of the replica.

use crate::generated::v1;
use crate::joining::{ChunkOutcome, SnapshotProgress, Source};
use crate::peer::SILENT_AFTER;
use crate::pools::{EndpointKey, PoolView};
use crate::replica::{Peers, Replica};
use crate::snapshot::{self, CHUNK_BYTES, WireUnit};
use crate::stats::add;
use ahash::AHashMap;
use attache_pool::speed::{PoolSpeed, SpeedExport};
use attache_prefix::ExportCursor;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use std::sync::Arc;
use v1::message::Body;

impl Replica {
    /// The progress of the import of a peer's prefix index.
    #[must_use]
    pub fn snapshot(&self) -> SnapshotProgress {
        self.peers.lock().joining.progress()
    }

    /// Sends the chunks that are due to peers. Returns when the next one is.
    pub(crate) fn serve(&self, now: Timestamp) -> Option<Timestamp> {
        loop {
            let mut peers = self.peers.lock();
            let Some((peer, request)) = peers.serving.due(now) else { return peers.serving.next() };
            let view = peers.pools.by_key(request.pool).cloned();
            drop(peers);
            add(&self.stats.sent_chunks, 1);
            let chunk = self.chunk(&request, view, now);
            self.send(peer, Body::SnapshotChunk(chunk));
        }
    }

    /// The chunk that a peer has asked for.
    fn chunk(&self, request: &v1::SnapshotRequest, view: Option<PoolView>, now: Timestamp) -> v1::SnapshotChunk {
        let v1::SnapshotRequest { pool, cursor, block_tokens, block_bytes } = *request;
        let unavailable = v1::SnapshotChunk { pool, cursor, unavailable: true, ..v1::SnapshotChunk::default() };
        let Some(view) = view else { return unavailable };
        let Some(cache) = &view.cache else { return unavailable };
        let unit = WireUnit::of(cache.unit());
        let header = v1::SnapshotChunk { block_tokens: unit.tokens, block_bytes: unit.bytes, ..unavailable };
        if unit != (WireUnit { tokens: block_tokens, bytes: block_bytes }) {
            add(&self.stats.block_mismatches, 1);
            return header;
        }
        let endpoints = view.store.load_full();
        let key = |id, spec| (id, EndpointKey::of(self.settings.seed, &view.name, spec));
        let keys: AHashMap<EndpointId, EndpointKey> =
            endpoints.endpoints.iter().map(|state| key(state.endpoint.id, &state.endpoint.spec)).collect();
        let wanted = |id: EndpointId| keys.contains_key(&id) && cache.learns(id);
        let chunk = cache.export(ExportCursor(cursor), CHUNK_BYTES, &wanted, now);
        let speed = speed(&view).filter(|_| cursor == 0).map(|speed| encode_speed(speed.export()));
        snapshot::encode(chunk, &keys, v1::SnapshotChunk { unavailable: false, speed, ..header })
    }

    /// Requests the chunk that is due. Returns when to call it again at the latest.
    pub(crate) fn pull(&self, now: Timestamp) -> Option<Timestamp> {
        let mut peers = self.peers.lock();
        let Peers { pools, states, joining, .. } = &mut *peers;
        if joining.is_done() {
            return None;
        }
        // Without a name, no heartbeat has arrived.
        let live =
            states.iter().filter(|(_, peer)| !peer.name.is_empty() && peer.last_message.after(SILENT_AFTER) > now);
        let sources: Vec<Source> = live.map(|(sender, peer)| Source { sender: *sender, joins: peer.joins }).collect();
        let request = joining.step(&sources, pools, now);
        let next = joining.next();
        drop(peers);
        if let Some((peer, request)) = request {
            self.send(peer, Body::SnapshotRequest(request));
        }
        next
    }

    /// Imports a chunk if it is the one that was requested, and requests the next one.
    pub(crate) fn import(&self, sender: u64, chunk: v1::SnapshotChunk, now: Timestamp) {
        add(&self.stats.received_chunks, 1);
        let (pool, cursor) = (chunk.pool, chunk.cursor);
        let mut peers = self.peers.lock();
        let Peers { pools, joining, losses, .. } = &mut *peers;
        let Some(asked_at) = joining.accept(sender, &chunk) else { return };
        let view = pools.by_key(pool).cloned();
        // A cache that was lost after the request may still be in the chunk.
        let is_lost = |key: &u64| losses.get(key).is_some_and(|lost_at| *lost_at >= asked_at);
        let mut id = |key: &u64| pools.locate(*key).filter(|_| !is_lost(key)).map(|found| found.endpoint.id);
        let ids: Vec<Option<EndpointId>> = chunk.endpoints.iter().map(&mut id).collect();
        drop(peers);
        let outcome = self.import_chunk(chunk, view, &ids, now);
        if !self.peers.lock().joining.settle(pool, cursor, outcome, now) {
            add(&self.stats.unfinished_imports, 1);
        }
        if self.pull(now).is_some() {
            self.outbox.wake();
        }
    }

    fn import_chunk(
        &self,
        chunk: v1::SnapshotChunk,
        view: Option<PoolView>,
        ids: &[Option<EndpointId>],
        now: Timestamp,
    ) -> ChunkOutcome {
        let Some((view, cache)) = view.and_then(|view| Some((view.clone(), view.cache?))) else {
            return ChunkOutcome::Refused;
        };
        let unit = WireUnit { tokens: chunk.block_tokens, bytes: chunk.block_bytes };
        let has_unit = unit != (WireUnit { tokens: 0, bytes: 0 });
        if has_unit && unit != WireUnit::of(cache.unit()) {
            add(&self.stats.block_mismatches, 1);
            return ChunkOutcome::Refused;
        }
        if chunk.unavailable {
            return ChunkOutcome::Refused;
        }
        if let Some((speed, from)) = speed(&view).zip(chunk.speed.as_ref())
            && !speed.import(&decode_speed(from))
        {
            add(&self.stats.invalid_chunks, 1);
        }
        let next = chunk.next;
        let decoded = snapshot::decode(chunk, ids).ok().filter(|_| has_unit);
        match decoded.and_then(|chunk| cache.import(&chunk, now).ok()) {
            Some(blocks) => {
                add(&self.stats.imported_blocks, blocks);
                ChunkOutcome::Imported(next)
            }
            None => {
                add(&self.stats.invalid_chunks, 1);
                ChunkOutcome::Refused
            }
        }
    }
}

/// The learned speed of a pool; `None` without endpoints.
fn speed(view: &PoolView) -> Option<Arc<PoolSpeed>> {
    view.store.load().endpoints.first().map(|state| state.endpoint.speed.pool().clone())
}

fn encode_speed(speed: SpeedExport) -> v1::PoolSpeed {
    let SpeedExport { first, next, response_tokens } = speed;
    v1::PoolSpeed { first, next, response_tokens }
}

fn decode_speed(speed: &v1::PoolSpeed) -> SpeedExport {
    let v1::PoolSpeed { first, next, response_tokens } = speed.clone();
    SpeedExport { first, next, response_tokens }
}
