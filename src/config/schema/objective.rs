//! Latency objectives of a pool.

use super::declare;
use crate::defaults::MIN_INTERVAL;
use attache_scheduling::objective;
use std::ops::Bound;
use std::time::Duration;

sections! {
    /// What counts in a response: weights of its parts, and targets.
    Objective {
        /// Weight of the time to the first token. Above 100 the other part would have no influence; a weight of 0 there says
        /// that directly.
        "ttft" => ttft: f64 { default: objective::Objective::default().ttft; range: 0.0..=100.0; unit: "weight"; },
        /// Weight of the time of all further tokens.
        "tpot" => tpot: f64 { default: objective::Objective::default().tpot; range: 0.0..=100.0; unit: "weight"; },
        /// Targets that a share of the requests should meet.
        "slo" => slo: Slo { absent: "no targets"; },
    }
    /// Latency targets; at least one is needed.
    Slo {
        /// Longest time to the first token.
        "ttft" => ttft: Duration { absent: "none"; range: MIN_INTERVAL..; },
        /// Longest time between tokens, in the mean of a response.
        "tpot" => tpot: Duration { absent: "none"; range: MIN_INTERVAL..; },
        /// Share of the requests that should meet all targets.
        "share" => share: f64 {
            default: objective::DEFAULT_SHARE;
            range: (Bound::Excluded(0.0), Bound::Included(objective::MAX_SHARE));
            unit: "share";
        },
    }
}
