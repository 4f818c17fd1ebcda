//! Counters of the feed. Written by its tasks, read by telemetry.

use attache_types::labels::Counts;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

attache_types::labels! {
    /// The counters, in the order of their metrics. Their labels are the names of the metrics.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Count {
        /// Frames received on the live stream.
        Frames => "kv_event_frames",
        /// Bytes of the payloads of live frames.
        Bytes => "kv_event_bytes",
        /// Events in all batches that were applied.
        Events => "kv_events",
        /// Blocks that events added to the index.
        BlocksStored => "kv_event_blocks_stored",
        /// Blocks that events removed from the index.
        BlocksRemoved => "kv_event_blocks_removed",
        /// Events of an unknown type.
        UnknownEvents => "kv_event_unknown",
        /// Events of a known type that were invalid.
        RefusedEvents => "kv_event_refused",
        /// Batches that could not be decoded, and messages that are not frames.
        DecodeErrors => "kv_event_decode_errors",
        /// Frames that were received before.
        Duplicates => "kv_event_duplicates",
        /// Gaps in the sequence of frames.
        Gaps => "kv_event_gaps",
        /// Replays that were requested.
        Replays => "kv_event_replays",
        /// Replays that did not complete.
        ReplaysFailed => "kv_event_replays_failed",
        /// Frames that replays returned.
        ReplayedFrames => "kv_event_replayed_frames",
        /// Replays that no longer had all missing frames.
        ReplaysTruncated => "kv_event_replays_truncated",
        /// Restarts of engines that were detected.
        Restarts => "kv_event_restarts",
        /// Store events that were queued because their parent is unknown.
        OrphansParked => "kv_event_orphans_parked",
        /// Queued store events whose parent arrived.
        OrphansAdopted => "kv_event_orphans_adopted",
        /// Queued store events that were dropped over the limit, or because their blocks were removed.
        OrphansDropped => "kv_event_orphans_dropped",
        /// Frames that did not fit in a queue and are fetched again.
        OverflowFrames => "kv_event_overflow_frames",
        /// Frames of endpoints that are not in the pool.
        UnknownPods => "kv_event_unknown_pods",
        /// Frames whose sender's address is not the endpoint's.
        WrongSenders => "kv_event_wrong_senders",
        /// Connections that were opened.
        Connections => "kv_event_connections",
        /// Connections that failed or were interrupted.
        ConnectionErrors => "kv_event_connection_errors",
        /// Holders whose state stopped being exact.
        TrustLost => "kv_event_trust_lost",
    }
}

impl Count {
    /// Help text of the metric.
    #[must_use]
    pub fn help(self) -> &'static str {
        match self {
            Self::Frames => "live frames of KV events",
            Self::Bytes => "bytes of live KV events",
            Self::Events => "KV events applied",
            Self::BlocksStored => "blocks that KV events added to the index",
            Self::BlocksRemoved => "blocks that KV events removed from the index",
            Self::UnknownEvents => "KV events of an unknown type",
            Self::RefusedEvents => "KV events that were not usable",
            Self::DecodeErrors => "frames of KV events that could not be decoded",
            Self::Duplicates => "frames of KV events received twice",
            Self::Gaps => "gaps in the sequence of KV events",
            Self::Replays => "requested replays of KV events",
            Self::ReplaysFailed => "replays that did not complete",
            Self::ReplayedFrames => "frames of KV events from replays",
            Self::ReplaysTruncated => "replays whose server no longer had all missing frames",
            Self::Restarts => "servers whose sequence of KV events restarted",
            Self::OrphansParked => "stored blocks held back because their parent block is unknown",
            Self::OrphansAdopted => "held blocks whose parent block arrived",
            Self::OrphansDropped => "held blocks that were dropped",
            Self::OverflowFrames => "frames of KV events that did not fit into a queue",
            Self::UnknownPods => "frames of KV events from endpoints not in the pool",
            Self::WrongSenders => "frames of KV events dropped because their sender's address is not the endpoint's",
            Self::Connections => "opened connections for KV events",
            Self::ConnectionErrors => "connections for KV events that failed",
            Self::TrustLost => "endpoints whose KV cache stopped being known exactly",
        }
    }
}

/// Counters of one pool's feed since the process started.
#[derive(Debug, Default)]
pub struct KvEventStats {
    counts: Counts<Count>,
    lag_micros: AtomicU64,
}

impl KvEventStats {
    /// Returns the value of a counter.
    #[must_use]
    pub fn get(&self, count: Count) -> u64 {
        self.counts.get(count)
    }

    /// Returns the time from the creation of the last applied batch, by the engine's clock, until it was applied.
    #[must_use]
    pub fn lag(&self) -> Duration {
        Duration::from_micros(self.lag_micros.load(Relaxed))
    }

    pub(super) fn add(&self, count: Count, n: u64) {
        self.counts.add(count, n);
    }

    pub(super) fn set_lag(&self, lag: Duration) {
        self.lag_micros.store(u64::try_from(lag.as_micros()).unwrap_or(u64::MAX), Relaxed);
    }
}
