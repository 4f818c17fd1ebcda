//! `load-balance`: the endpoint that would finish its requests first.
//!
//! ```text
//! pending = requests / drain rate   (seconds; drain rate = successful requests per second over the last minute)
//! gate    = requests differ by more than `imbalance`: only the endpoints with the fewest requests count
//! pick    = the least pending; ties by the least KV cache usage, then at random
//! ```
//!
//! An endpoint with an unknown drain rate counts with the mean of the others. The rate is unknown if the endpoint is
//! new, does not report it, or finished no request in the last minute.
//! If no rate is known, the fewest requests win. So servers of different speed share the load by speed, without any
//! configuration.
//! When not: load so low that servers idle. Then a drain rate measures what a server was sent, not what it can do.
//! Source: AIBrix `load-balance`.

use super::least_kv_cache;
use attache_scheduling::decision::Signal;
use attache_scheduling::plugin::{Better, params, section};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::{Candidate, PickContext, Ranking, Strategy};
use attache_types::parameters;
use attache_types::rng::PickRng;
use rand::RngExt;
use smallvec::{SmallVec, smallvec};
use std::cmp::Ordering;

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "load-balance",
    summary: "Picks the endpoint that would finish its requests first, by how many it finished in the last minute.",
    source: "AIBrix `load-balance`",
    parameters: section::<LoadBalance>,
    build: |value, _| params::<LoadBalance>(value).map(|s| Box::new(s) as Box<dyn Strategy>),
};

parameters! {
    /// The strategy and its parameters.
    struct LoadBalance {
        /// Difference between the most and the fewest requests above which only the endpoints with the fewest are
        /// considered. 8 is AIBrix's default.
        "imbalance" => imbalance: u32 { default: 8; unit: "requests"; },
    }
}

/// Requests finished per second; `None` if unknown or 0.
fn drain_rate(candidate: &Candidate<'_>) -> Option<f64> {
    candidate.metrics().and_then(|m| m.rates.finished).filter(|rate| *rate > 0.0)
}

/// Mean of the known drain rates, in requests per second.
fn mean_rate(candidates: &[Candidate<'_>]) -> Option<f64> {
    let (sum, n) = candidates.iter().filter_map(drain_rate).fold((0.0, 0u32), |(sum, n), rate| (sum + rate, n + 1));
    (n > 0).then(|| sum / f64::from(n))
}

/// Sort key: excluded by the gate, pending seconds, KV cache usage, random draw, position.
type SortKey = (bool, f64, f64, u32, usize);

/// Order of two keys. An unknown cache usage (NaN) sorts last.
fn before(a: &SortKey, b: &SortKey) -> Ordering {
    a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)).then(a.2.total_cmp(&b.2)).then(a.3.cmp(&b.3))
}

impl LoadBalance {
    /// Requests above which an endpoint comes last.
    fn gate(&self, candidates: &[Candidate<'_>]) -> u32 {
        let fewest = candidates.iter().map(|c| c.requests).min().unwrap_or(0);
        let most = candidates.iter().map(|c| c.requests).max().unwrap_or(0);
        if most - fewest > self.imbalance { fewest } else { u32::MAX }
    }
}

impl Strategy for LoadBalance {
    fn rank(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        let mut pending: SmallVec<[f64; 16]> = smallvec![f64::NAN; candidates.len()];
        self.scores(cx, candidates, &mut pending);
        let cache = |c: &Candidate<'_>| c.metrics().map_or(f64::NAN, least_kv_cache::usage);
        ranking.note("pending", 1.0, candidates, |i| pending.get(i).copied().unwrap_or(f64::NAN));
        ranking.note("kv-cache", 0.0, candidates, |i| candidates.get(i).map_or(f64::NAN, cache));
        let gate = self.gate(candidates);
        if mean_rate(candidates).is_none() {
            ranking.lacks(Signal::Metrics);
            ranking.because("no drain rate is known; fewest requests");
        } else if gate < u32::MAX {
            ranking.because("requests differ much; soonest done of those with the fewest");
        } else {
            ranking.because("soonest done");
        }
        let mut order: SmallVec<[SortKey; 16]> = candidates
            .iter()
            .zip(&pending)
            .enumerate()
            .map(|(i, (c, pending))| (c.requests > gate, *pending, cache(c), rng.random(), i))
            .collect();
        let wanted = ranking.wanted();
        // Selecting the first few avoids sorting a thousand candidates for one pick.
        if wanted < order.len() {
            order.select_nth_unstable_by(wanted, before);
            order.truncate(wanted);
        }
        order.sort_unstable_by(before);
        for candidate in order.iter().filter_map(|(.., i)| candidates.get(*i)) {
            ranking.push(&candidate.state.endpoint);
        }
    }

    fn scores(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f64]) -> Option<Better> {
        let uniform = mean_rate(candidates).unwrap_or(1.0);
        for (score, candidate) in out.iter_mut().zip(candidates) {
            *score = f64::from(candidate.requests) / drain_rate(candidate).unwrap_or(uniform);
        }
        Some(Better::Lower)
    }
}
