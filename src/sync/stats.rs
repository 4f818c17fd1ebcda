//! Counters of the exchange with peers, since the start of the process.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counters of the exchange with peers.
#[derive(Debug, Default)]
pub struct SyncStats {
    /// Messages that were handed to the transport.
    pub sent_messages: AtomicU64,
    /// Their size, bytes.
    pub sent_bytes: AtomicU64,
    /// Messages that were received and valid.
    pub received_messages: AtomicU64,
    /// Their size, bytes.
    pub received_bytes: AtomicU64,
    /// Received messages that were dropped: too large, not readable, of another version, or sent under another name.
    pub invalid_messages: AtomicU64,
    /// Messages of senders beyond the largest number of peers.
    pub refused_senders: AtomicU64,
    /// Batches, full states and heartbeats whose numbers contradict those that their sender had before.
    pub contradictions: AtomicU64,
    /// Changes of models' policies that were refused: invalid, too many, or too far ahead of the known ones.
    pub refused_policies: AtomicU64,
    /// Received messages that were dropped because their sender exceeded 64 MiB per second.
    pub excess_messages: AtomicU64,
    /// Requests that were not counted, or whose prompts were not recorded, because their picker has too many in flight.
    pub excess_requests: AtomicU64,
    /// Batches that were received a second time and ignored.
    pub duplicate_batches: AtomicU64,
    /// Batches that were requested again because they did not arrive.
    pub requested_batches: AtomicU64,
    /// Heartbeats whose digest differed from the receiver's view, so that it asked for the full state.
    pub digest_mismatches: AtomicU64,
    /// Bookings and losses that named an endpoint which this picker does not know.
    pub unknown_endpoints: AtomicU64,
    /// Bookings whose prompt referred to a path that this picker did not have, so that it asked for all keys.
    pub unknown_paths: AtomicU64,
    /// Full states that were dropped because their picker was silent.
    pub dropped_states: AtomicU64,
    /// Chunks of the prefix index that were sent to peers which asked for them.
    pub sent_chunks: AtomicU64,
    /// Chunks that were received, also those that were not imported.
    pub received_chunks: AtomicU64,
    /// Blocks of chunks that were new to an endpoint.
    pub imported_blocks: AtomicU64,
    /// Imports of a pool that ended after their longest time, before the peer had sent everything.
    pub unfinished_imports: AtomicU64,
    /// Chunks that were dropped because they do not follow the protocol.
    pub invalid_chunks: AtomicU64,
    /// Requests and chunks that were refused because the size of a block differs.
    pub block_mismatches: AtomicU64,
}

pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Relaxed);
}
