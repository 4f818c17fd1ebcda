//! Requests of peers for chunks of the prefix index, at a limited rate.

use crate::generated::v1;
use ahash::AHashMap;
use attache_types::clock::Timestamp;
use std::time::Duration;

/// Shortest time between two chunks for one peer.
pub(crate) const CHUNK_EVERY: Duration = Duration::from_millis(5);

/// The last request of each peer that has no chunk yet, and when each peer got its last chunk.
#[derive(Debug, Default)]
pub(crate) struct Serving {
    waiting: AHashMap<u64, v1::SnapshotRequest>,
    served: AHashMap<u64, Timestamp>,
}

impl Serving {
    /// Adds a request, which replaces an earlier one of the same peer.
    pub(crate) fn ask(&mut self, peer: u64, request: v1::SnapshotRequest) {
        self.waiting.insert(peer, request);
    }

    /// A request whose time has come.
    pub(crate) fn due(&mut self, now: Timestamp) -> Option<(u64, v1::SnapshotRequest)> {
        let peer = self.waiting.keys().copied().find(|peer| self.due_at(*peer) <= now)?;
        self.served.retain(|_, at| at.after(CHUNK_EVERY) > now);
        self.served.insert(peer, now);
        Some((peer, self.waiting.remove(&peer)?))
    }

    /// When the next request is due.
    pub(crate) fn next(&self) -> Option<Timestamp> {
        self.waiting.keys().map(|peer| self.due_at(*peer)).min()
    }

    fn due_at(&self, peer: u64) -> Timestamp {
        self.served.get(&peer).map_or(Timestamp(0), |at| at.after(CHUNK_EVERY))
    }
}
