//! Counters of the feed. Written by its tasks, read by telemetry.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// The counters, in the order of their metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// Frames received on the live stream.
    Frames,
    /// Bytes of the payloads of live frames.
    Bytes,
    /// Events in all batches that were applied.
    Events,
    /// Blocks that events added to the index.
    BlocksStored,
    /// Blocks that events removed from the index.
    BlocksRemoved,
    /// Events of an unknown type.
    UnknownEvents,
    /// Events of a known type that were invalid.
    RefusedEvents,
    /// Batches that could not be decoded, and messages that are not frames.
    DecodeErrors,
    /// Frames that were received before.
    Duplicates,
    /// Gaps in the sequence of frames.
    Gaps,
    /// Replays that were requested.
    Replays,
    /// Replays that did not complete.
    ReplaysFailed,
    /// Frames that replays returned.
    ReplayedFrames,
    /// Replays that no longer had all missing frames.
    ReplaysTruncated,
    /// Restarts of engines that were detected.
    Restarts,
    /// Store events that were queued because their parent is unknown.
    OrphansParked,
    /// Queued store events whose parent arrived.
    OrphansAdopted,
    /// Queued store events that were dropped over the limit, or because their blocks were removed.
    OrphansDropped,
    /// Frames that did not fit in a queue and are fetched again.
    OverflowFrames,
    /// Frames of endpoints that are not in the pool.
    UnknownPods,
    /// Frames whose sender's address is not the endpoint's.
    WrongSenders,
    /// Connections that were opened.
    Connections,
    /// Connections that failed or were interrupted.
    ConnectionErrors,
    /// Holders whose state stopped being exact.
    TrustLost,
}

impl Count {
    /// All counters with their metric names and help texts.
    pub const ALL: [(Count, &'static str, &'static str); 24] = [
        (Count::Frames, "kv_event_frames", "live frames of KV events"),
        (Count::Bytes, "kv_event_bytes", "bytes of live KV events"),
        (Count::Events, "kv_events", "KV events applied"),
        (Count::BlocksStored, "kv_event_blocks_stored", "blocks that KV events added to the index"),
        (Count::BlocksRemoved, "kv_event_blocks_removed", "blocks that KV events removed from the index"),
        (Count::UnknownEvents, "kv_event_unknown", "KV events of an unknown type"),
        (Count::RefusedEvents, "kv_event_refused", "KV events that were not usable"),
        (Count::DecodeErrors, "kv_event_decode_errors", "frames of KV events that could not be decoded"),
        (Count::Duplicates, "kv_event_duplicates", "frames of KV events received twice"),
        (Count::Gaps, "kv_event_gaps", "gaps in the sequence of KV events"),
        (Count::Replays, "kv_event_replays", "requested replays of KV events"),
        (Count::ReplaysFailed, "kv_event_replays_failed", "replays that did not complete"),
        (Count::ReplayedFrames, "kv_event_replayed_frames", "frames of KV events from replays"),
        (
            Count::ReplaysTruncated,
            "kv_event_replays_truncated",
            "replays whose server no longer had all missing frames",
        ),
        (Count::Restarts, "kv_event_restarts", "servers whose sequence of KV events restarted"),
        (
            Count::OrphansParked,
            "kv_event_orphans_parked",
            "stored blocks held back because their parent block is unknown",
        ),
        (Count::OrphansAdopted, "kv_event_orphans_adopted", "held blocks whose parent block arrived"),
        (Count::OrphansDropped, "kv_event_orphans_dropped", "held blocks that were dropped"),
        (Count::OverflowFrames, "kv_event_overflow_frames", "frames of KV events that did not fit into a queue"),
        (Count::UnknownPods, "kv_event_unknown_pods", "frames of KV events from endpoints not in the pool"),
        (
            Count::WrongSenders,
            "kv_event_wrong_senders",
            "frames of KV events dropped because their sender's address is not the endpoint's",
        ),
        (Count::Connections, "kv_event_connections", "opened connections for KV events"),
        (Count::ConnectionErrors, "kv_event_connection_errors", "connections for KV events that failed"),
        (Count::TrustLost, "kv_event_trust_lost", "endpoints whose KV cache stopped being known exactly"),
    ];
}

/// Counters of one pool's feed since the process started.
#[derive(Debug, Default)]
pub struct KvEventStats {
    counts: [AtomicU64; Count::ALL.len()],
    lag_micros: AtomicU64,
}

impl KvEventStats {
    /// Returns the value of a counter.
    #[must_use]
    pub fn get(&self, count: Count) -> u64 {
        self.counts.get(count as usize).map_or(0, |n| n.load(Relaxed))
    }

    /// Returns the time from the creation of the last applied batch, by the engine's clock, until it was applied.
    #[must_use]
    pub fn lag(&self) -> Duration {
        Duration::from_micros(self.lag_micros.load(Relaxed))
    }

    pub(super) fn add(&self, count: Count, n: u64) {
        if let Some(counter) = self.counts.get(count as usize) {
            counter.fetch_add(n, Relaxed);
        }
    }

    pub(super) fn set_lag(&self, lag: Duration) {
        self.lag_micros.store(u64::try_from(lag.as_micros()).unwrap_or(u64::MAX), Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_count_has_its_own_counter_and_name() {
        let stats = KvEventStats::default();
        for (i, (count, _, _)) in Count::ALL.into_iter().enumerate() {
            assert_eq!(count as usize, i);
            stats.add(count, 2);
            assert_eq!(stats.get(count), 2);
        }
        let names: BTreeSet<_> = Count::ALL.map(|c| c.1).into();
        assert_eq!(names.len(), Count::ALL.len());
    }
}
