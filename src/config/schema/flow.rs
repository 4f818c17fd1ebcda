//! Flow control: queues of a saturated pool.

use super::{At, Bytes, Fields, Node, Opt, Read, Sink, Strategy, word};
use attache_flow::{EvictRunning, Overflow};
use std::time::Duration;

sections! {
    /// Flow control of a pool.
    FlowControl {
        "enabled" => enabled: bool,
        "queue" => queue: bool,
        "detector" => detector: Strategy,
        "ceiling" => ceiling: Strategy,
        "admitters" => admitters: Vec<At<Strategy>>,
        "ttl" => ttl: Duration,
        "emptyTtl" => empty_ttl: Duration,
        "maxRequests" => max_requests: u64,
        "maxBytes" => max_bytes: Bytes,
        "evictSheddable" => evict_sheddable: bool,
        "evictRunning" => evict_running: EvictRunning = word,
        "shares" => shares: Vec<(At<String>, At<f64>)>,
        "defaultBand" => default_band: Band,
        "sheddableBand" => sheddable_band: Band,
        "bands" => bands: Vec<At<Band>>,
    }
    /// The queue for requests of one priority.
    Band {
        "priority" => priority: i32,
        "fairness" => fairness: Strategy,
        "ordering" => ordering: Strategy,
        "maxRequests" => max_requests: u64,
        "maxBytes" => max_bytes: Bytes,
        "overflow" => overflow: Overflow = word,
        "ttl" => ttl: Duration,
    }
}
