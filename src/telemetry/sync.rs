//! Metrics of the state that is shared with other pickers. Registered by `app` if `sync` is configured.

use attache_sync::{PeerStatus, Replica, SnapshotState, SyncStats};
use attache_types::clock::Clock;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;
use std::fmt::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// State of the connection that carries the messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkStatus {
    /// Whether it is established.
    pub connected: bool,
    /// Messages that were not sent, since the start.
    pub dropped: u64,
}

/// The parts that the collector reads.
pub struct SyncCollector {
    /// This picker in its cluster.
    pub replica: Arc<Replica>,
    /// Reads the state of the connection.
    pub link: Arc<dyn Fn() -> LinkStatus + Send + Sync>,
    /// The clock of the process.
    pub clock: Clock,
}

impl std::fmt::Debug for SyncCollector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SyncCollector").field("replica", &self.replica).finish_non_exhaustive()
    }
}

/// A counter: name, help, value.
type SyncCounter = (&'static str, &'static str, fn(&SyncStats) -> &AtomicU64);

const COUNTERS: &[SyncCounter] = &[
    ("sync_sent_messages", "messages sent to other pickers", |s| &s.sent_messages),
    ("sync_received_messages", "valid messages received from other pickers", |s| &s.received_messages),
    ("sync_invalid_messages", "messages that were dropped unread or are not readable", |s| &s.invalid_messages),
    ("sync_refused_senders", "messages of senders beyond the 64 that are followed", |s| &s.refused_senders),
    (
        "sync_contradictions",
        "batches, full states and heartbeats whose numbers contradict those that their sender had before",
        |s| &s.contradictions,
    ),
    (
        "sync_refused_policies",
        "changes of models' policies by other pickers that are invalid, too many, or an hour ahead",
        |s| &s.refused_policies,
    ),
    ("sync_snapshot_unfinished", "imports of a pool that ended before the peer had sent everything", |s| {
        &s.unfinished_imports
    }),
    ("sync_excess_messages", "messages that were dropped because their sender exceeded 64 MiB per second", |s| {
        &s.excess_messages
    }),
    (
        "sync_excess_requests",
        "requests that were not counted, or whose prompts were not recorded, because their picker has too many in flight",
        |s| &s.excess_requests,
    ),
    ("sync_duplicate_batches", "batches that arrived a second time and were ignored", |s| &s.duplicate_batches),
    ("sync_requested_batches", "batches that did not arrive and were requested again", |s| &s.requested_batches),
    ("sync_digest_mismatches", "heartbeats whose digest differed from this picker's view", |s| &s.digest_mismatches),
    ("sync_unknown_endpoints", "bookings and losses of endpoints that this picker does not have", |s| {
        &s.unknown_endpoints
    }),
    ("sync_unknown_paths", "prompts whose keys were requested because they extend an unknown one", |s| {
        &s.unknown_paths
    }),
    ("sync_silenced_peers", "peers whose requests in flight were dropped because they were silent", |s| {
        &s.dropped_states
    }),
    ("sync_snapshot_sent_chunks", "chunks of the prefix index sent to pickers that join", |s| &s.sent_chunks),
    ("sync_snapshot_received_chunks", "chunks of a peer's prefix index that arrived", |s| &s.received_chunks),
    ("sync_snapshot_imported_blocks", "blocks imported from a peer's prefix index", |s| &s.imported_blocks),
    ("sync_snapshot_invalid_chunks", "chunks of a prefix index that break the protocol and were dropped", |s| {
        &s.invalid_chunks
    }),
    ("sync_snapshot_block_mismatches", "requests and chunks refused because their blocks have another size", |s| {
        &s.block_mismatches
    }),
];

/// As [`COUNTERS`], in bytes.
const BYTE_COUNTERS: &[SyncCounter] = &[
    ("sync_sent", "size of the messages sent to other pickers", |s| &s.sent_bytes),
    ("sync_received", "size of the valid messages received from other pickers", |s| &s.received_bytes),
];

impl Collector for SyncCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let link = (self.link)();
        let help = "1 while connected to the bus between pickers";
        let connected = encoder.encode_descriptor("sync_connected", help, None, MetricType::Gauge)?;
        ConstGauge::new(i64::from(link.connected)).encode(connected)?;
        let help = "1 after the prefix index of a peer was imported, or when no peer has one";
        let done = encoder.encode_descriptor("sync_snapshot_done", help, None, MetricType::Gauge)?;
        ConstGauge::new(i64::from(self.replica.snapshot().state == SnapshotState::Done)).encode(done)?;
        let help = "messages to other pickers that were not sent: no connection, or too many";
        let dropped = encoder.encode_descriptor("sync_dropped_messages", help, None, MetricType::Counter)?;
        ConstCounter::new(link.dropped).encode(dropped)?;
        for (counters, unit) in [(COUNTERS, None), (BYTE_COUNTERS, Some(&Unit::Bytes))] {
            for (name, help, value) in counters {
                let counter = encoder.encode_descriptor(name, help, unit, MetricType::Counter)?;
                ConstCounter::new(value(self.replica.stats()).load(Relaxed)).encode(counter)?;
            }
        }
        self.peers(&mut encoder)
    }
}

/// A gauge of each peer: name, help, unit, value, and the value of two processes with one name.
type PeerGauge = (&'static str, &'static str, Option<Unit>, fn(&PeerStatus) -> f64, fn(f64, f64) -> f64);

const PEER_GAUGES: &[PeerGauge] = &[
    (
        "sync_peer_age",
        "time since a peer's last message",
        Some(Unit::Seconds),
        |peer| peer.silent.as_secs_f64(),
        f64::min,
    ),
    ("sync_peer_requests", "requests in flight of a peer", None, |peer| peer.requests as f64, |a, b| a + b),
    (
        "sync_peer_behind",
        "1 while some changes of a peer are missing",
        None,
        |peer| f64::from(u8::from(peer.behind)),
        f64::max,
    ),
];

impl SyncCollector {
    fn peers(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
        let peers = self.replica.peers(self.clock.now());
        for (name, help, unit, value, both) in PEER_GAUGES {
            let mut family = encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Gauge)?;
            // A restarted picker and its predecessor have one name for a moment. A series must be there once.
            for processes in peers.chunk_by(|one, next| one.name == next.name) {
                let labels = [("peer", processes.first().map_or("", |peer| peer.name.as_str()))];
                let value = processes.iter().map(value).reduce(both).unwrap_or_default();
                ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}
