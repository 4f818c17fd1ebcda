//! Requests of peers for chunks of the prefix index, at a limited rate.

use crate::generated::v1;
use attache_types::clock::Timestamp;
use std::collections::VecDeque;
use std::time::Duration;

/// Shortest time between two chunks, of all peers together.
pub(crate) const CHUNK_EVERY: Duration = Duration::from_millis(5);

/// The last request of each peer that has no chunk yet, the oldest first, and when the last chunk was sent.
#[derive(Debug, Default)]
pub(crate) struct Serving {
    waiting: VecDeque<(u64, v1::SnapshotRequest)>,
    served: Option<Timestamp>,
}

impl Serving {
    /// Adds a request, which replaces an earlier one of the same peer.
    pub(crate) fn ask(&mut self, peer: u64, request: v1::SnapshotRequest) {
        match self.waiting.iter_mut().find(|(other, _)| *other == peer) {
            Some((_, waiting)) => *waiting = request,
            None => self.waiting.push_back((peer, request)),
        }
    }

    /// The oldest request, if its time has come.
    pub(crate) fn due(&mut self, now: Timestamp) -> Option<(u64, v1::SnapshotRequest)> {
        self.next().filter(|at| *at <= now)?;
        self.served = Some(now);
        self.waiting.pop_front()
    }

    /// When the next request is due.
    pub(crate) fn next(&self) -> Option<Timestamp> {
        self.waiting.front()?;
        Some(self.served.map_or(Timestamp(0), |at| at.after(CHUNK_EVERY)))
    }
}
