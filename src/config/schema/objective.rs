//! Latency objectives of a pool.

use super::{Fields, Node, Opt, Read, Sink};
use std::time::Duration;

sections! {
    /// Weights of the parts of a response, and targets.
    Objective {
        "ttft" => ttft: f64,
        "tpot" => tpot: f64,
        "slo" => slo: Slo,
    }
    /// Latency targets that a share of the requests should meet.
    Slo {
        "ttft" => ttft: Duration,
        "tpot" => tpot: Duration,
        "share" => share: f64,
    }
}
