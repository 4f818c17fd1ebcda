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
use attache_scheduling::plugin::{ParamError, params};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::{Candidate, PickContext, Ranking, Reads, Signal, Strategy};
use attache_types::rng::PickRng;
use rand::RngExt;
use serde::Deserialize;

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "cache-aware",
    summary: "Picks the endpoint that holds most of the prompt while load is in balance; else the fewest requests.",
    source: "SGLang router `cache_aware`",
    build: |value, _| params::<Params>(value)?.build().map(|p| Box::new(p) as Box<dyn Strategy>),
};

/// 30 % of the prompt, SGLang's default.
const DEFAULT_CACHE_THRESHOLD: f64 = 0.3;
/// 64 requests, SGLang's default.
const DEFAULT_BALANCE_ABS_THRESHOLD: u32 = 64;
/// A ratio of 1.5, SGLang's default.
const DEFAULT_BALANCE_REL_THRESHOLD: f64 = 1.5;

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Params {
    cache_threshold: f64,
    balance_abs_threshold: u32,
    balance_rel_threshold: f64,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            cache_threshold: DEFAULT_CACHE_THRESHOLD,
            balance_abs_threshold: DEFAULT_BALANCE_ABS_THRESHOLD,
            balance_rel_threshold: DEFAULT_BALANCE_REL_THRESHOLD,
        }
    }
}

impl Params {
    fn build(self) -> Result<CacheAware, ParamError> {
        if !(0.0..=1.0).contains(&self.cache_threshold) {
            return Err(ParamError::value("cacheThreshold", self.cache_threshold, "0 to 1 is allowed"));
        }
        let rel = self.balance_rel_threshold;
        if !rel.is_finite() || rel < 1.0 {
            return Err(ParamError::value("balanceRelThreshold", rel, "1 or more is allowed"));
        }
        Ok(CacheAware(self))
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
