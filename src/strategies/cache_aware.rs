//! `cache-aware`: the endpoint that holds most of the prompt, until load is out of balance; then the fewest requests.
//!
//! ```text
//! imbalanced  most − fewest > balanceAbsThreshold  and  most > balanceRelThreshold · fewest    -> fewest requests
//! held        greatest held share of the prompt > cacheThreshold                              -> its holder
//! else        fewest requests
//! ```
//!
//! Cached tokens are read from the pool's prefix index, which is exact where servers publish KV events. SGLang's
//! router estimates them from a tree of texts that each router keeps.
//! A prompt that no endpoint holds goes to the endpoint with the fewest requests; in SGLang's router it goes to the
//! smallest tree. Among equal holders, the fewest requests decide.
//!
//! When not: hot prefixes. Below the thresholds a hot prefix stays on one endpoint however long its queue; the limit
//! of `prefix-cache` adapts to the load.
//! Source: SGLang router 0.3 `cache_aware`.

use attache_scheduling::least_request::LeastRequest;
use attache_scheduling::plugin::{params, section};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::{Candidate, PickContext, Ranking, Reads, Signal, Strategy};
use attache_types::parameters;
use attache_types::rng::PickRng;
use rand::RngExt;

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "cache-aware",
    summary: "Picks the endpoint that holds most of the prompt while load is in balance; else the fewest requests.",
    source: "SGLang router `cache_aware`",
    parameters: section::<Params>,
    build: |value, _| params(value).map(|params| Box::new(CacheAware(params)) as Box<dyn Strategy>),
};

parameters! {
    // The defaults are SGLang's.
    struct Params {
        /// Cached share of the prompt above which the endpoint that holds it is picked.
        "cacheThreshold" => cache_threshold: f64 { default: 0.3; range: 0.0..=1.0; unit: "share"; },
        /// Load is in balance while the most and the fewest requests of an endpoint differ by at most this.
        "balanceAbsThreshold" => balance_abs_threshold: u32 { default: 64; unit: "requests"; },
        /// Load is also in balance while the most requests are at most this multiple of the fewest.
        "balanceRelThreshold" => balance_rel_threshold: f64 { default: 1.5; range: 1.0..; unit: "factor"; },
    }
}

#[derive(Debug)]
struct CacheAware(Params);

impl CacheAware {
    fn is_imbalanced(&self, candidates: &[Candidate<'_>]) -> bool {
        let fewest = candidates.iter().map(|c| c.requests).min().unwrap_or(0);
        let most = candidates.iter().map(|c| c.requests).max().unwrap_or(0);
        most - fewest > self.0.balance_abs_threshold
            && f64::from(most) > f64::from(fewest) * self.0.balance_rel_threshold
    }
}

impl Strategy for CacheAware {
    fn rank(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        if cx.prefix.is_none() {
            ranking.lacks(Signal::Prefix);
        }
        let total = f64::from(cx.request.prompt_tokens.max(1));
        let share = |c: &Candidate<'_>| f64::from(c.cached.any) / total;
        ranking.note("held", 1.0, candidates, |i| candidates.get(i).map_or(f64::NAN, share));
        let holders = candidates.iter().filter(|c| share(c) > self.0.cache_threshold);
        let imbalanced = self.is_imbalanced(candidates);
        if imbalanced || holders.clone().next().is_none() {
            let held = holders.map(|c| c.requests).min();
            LeastRequest.rank(cx, candidates, rng, ranking);
            let fewest = candidates.iter().map(|c| c.requests).min();
            if held.is_some() && held != fewest {
                ranking.divert();
            }
            return;
        }
        // Most cached tokens first, then fewest requests, then a random draw. Each of the first two has 24 bits: 16
        // million.
        let mut key = |c: &Candidate<'_>| {
            let (held, requests) = (c.cached.any.min(0xFF_FFFF), c.requests.min(0xFF_FFFF));
            u64::from(0xFF_FFFF - held) << 40 | u64::from(requests) << 16 | u64::from(rng.random::<u16>())
        };
        ranking.push_lowest(holders.map(|c| (key(c), &c.state.endpoint)));
        if !ranking.is_full() {
            LeastRequest.rank(cx, candidates, rng, ranking);
        }
        ranking.because("holds most of the prompt");
    }

    fn reads(&self) -> Reads {
        Reads::PREFIX
    }
}

#[cfg(test)]
pub(super) mod tests;
