//! Flow control: queues of a saturated pool.

use super::Strategy;
use super::declare::{self, Catalogue};
use crate::defaults::MIN_INTERVAL;
use attache_config_schema::decode::Bytes;
use attache_config_schema::diagnostic::At;
use attache_flow::{EvictRunning, Overflow};
use std::time::Duration;

sections! {
    /// Queues while the pool is saturated.
    FlowControl {
        /// Whether flow control is on.
        "enabled" => enabled: bool { default: false; },
        /// `false`: no request waits, and sheddable requests are rejected while the pool is saturated.
        "queue" => queue: bool { default: true; },
        /// Decides whether the pool is saturated. The default keeps the queues of the servers short, so that most requests wait
        /// in Attaché.
        "detector" => detector: Strategy { absent: "`backlog-detector`"; plugins: Catalogue::Detectors; },
        /// How much of the pool the requests of one priority may use.
        "ceiling" => ceiling: Strategy {
            absent: "`static-usage-limit-policy`, all of it"; plugins: Catalogue::Ceilings;
        },
        /// What rejects requests before they wait.
        "admitters" => admitters: Vec<At<Strategy>> { absent: "none"; plugins: Catalogue::Admitters; },
        /// Longest wait of a request.
        "ttl" => ttl: Duration { absent: "as long as its client waits"; range: MIN_INTERVAL..; },
        /// Longest wait in a pool without endpoints.
        "emptyTtl" => empty_ttl: Duration { absent: "`ttl` if given, else 60s"; range: MIN_INTERVAL..; },
        /// Requests that wait.
        "maxRequests" => max_requests: u64 { absent: "the limits of the bands"; range: 1..; unit: "requests"; },
        /// Bodies of the requests that wait.
        "maxBytes" => max_bytes: Bytes {
            absent: "half of `limits.maxBufferedBytes`, shared by all pools with queues"; range: Bytes(1)..; unit: "bytes";
        },
        /// Whether waiting requests with a priority below 0 leave a full queue for more important ones.
        "evictSheddable" => evict_sheddable: bool { default: true; },
        /// Which sheddable requests in flight are ended for more important ones that wait: none, those whose client has received nothing,
        /// or any. By default none, so that no work is lost.
        "evictRunning" => evict_running: EvictRunning { default: EvictRunning::Never; },
        /// Weights of flows. One that is not named has 1.
        "shares" => shares: Vec<(At<String>, At<f64>)> { absent: "none"; unit: "weight"; },
        /// The queue of a priority without a band of its own.
        "defaultBand" => default_band: Band,
        /// The queue of a priority below 0 without a band of its own.
        "sheddableBand" => sheddable_band: Band { absent: "`defaultBand`"; },
        /// The queues of single priorities. Keys that are absent have the value of `defaultBand`.
        "bands" => bands: Vec<At<Band>> { absent: "none"; },
    }
    /// The queue of one priority.
    Band {
        /// The priority, in `bands`.
        "priority" => priority: i32 { absent: "required in `bands`"; unit: "priority"; },
        /// Which flow is next. By default tenants compete for tokens.
        "fairness" => fairness: Strategy { absent: "`vtc-fair`"; plugins: Catalogue::Fairness; },
        /// Which request of a flow is next. By default a long prompt does not delay short ones, and waits 10 s at most.
        "ordering" => ordering: Strategy { absent: "`least-work`"; plugins: Catalogue::Orderings; },
        /// Requests that wait.
        "maxRequests" => max_requests: u64 { absent: "5000"; range: 1..; unit: "requests"; },
        /// Bodies of the requests that wait.
        "maxBytes" => max_bytes: Bytes { absent: "1 GB"; range: Bytes(1)..; unit: "bytes"; },
        /// Which request a full queue rejects. By default one of the longest flow, so that one flow cannot lock others out.
        "overflow" => overflow: Overflow { absent: "`longest-flow`"; },
        /// Longest wait of a request.
        "ttl" => ttl: Duration { absent: "that of all bands"; range: MIN_INTERVAL..; },
    }
}
