//! `prefix-cache`: the endpoint that holds the longest prefix of the prompt, unless it is overloaded.
//!
//! ```text
//! requests differ by more than `imbalance`:  only the endpoints with the fewest requests count
//! order = cached share (percent) descending, requests ascending, ties at random
//! pick  = the first in that order with requests <= mean + `deviations` x (sample) standard deviation of all
//! none  = fewest requests
//! ```
//!
//! Shares are whole percents, so a few more cached blocks never outweigh load. The picked endpoint computes the
//! missing blocks and then holds them too, so a hot prefix spreads by itself.
//! When not: servers differ in speed, since requests are counted and not time.
//!
//! `compat: true` counts only requests that this replica sent. If requests are imbalanced, it ignores prefixes and
//! the fewest requests decide alone.
//! Scraped metrics lag behind the replica's own count, so without `compat` an endpoint can briefly count a request
//! twice.
//! The defaults are those of AIBrix's manifest; the defaults in its code are `imbalance: 8, deviations: 1`.
//! Source: AIBrix `prefix-cache` (development head, August 2026; with `compat` release 0.4), over an exact index
//! instead of its table.

use attache_scheduling::plugin::{Better, params, section};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::{Candidate, PickContext, Ranking, Reads, Signal, Strategy};
use attache_types::parameters;
use attache_types::rng::PickRng;
use rand::RngExt;
use smallvec::SmallVec;

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "prefix-cache",
    summary: "Picks the endpoint that holds most of the prompt, unless its load stands out; else the fewest requests.",
    source: "AIBrix `prefix-cache`",
    parameters: section::<PrefixCache>,
    build: |value, _| params::<PrefixCache>(value).map(|p| Box::new(p) as Box<dyn Strategy>),
};

parameters! {
    /// The strategy and its parameters. The defaults are those of AIBrix's manifest and documentation.
    struct PrefixCache {
        /// Difference between the most and the fewest requests above which only the endpoints with the fewest are
        /// considered.
        "imbalance" => imbalance: u32 { default: 16; unit: "requests"; },
        /// Sample standard deviations by which an endpoint's requests may exceed the mean if it is picked for its
        /// prefix.
        "deviations" => deviations: f64 { default: 2.0; unit: "standard deviations"; },
        /// Whether only this replica's requests count, and prefixes are ignored while requests are imbalanced, as in
        /// AIBrix 0.4.
        "compat" => compat: bool { default: false; },
    }
}

impl PrefixCache {
    /// Number of requests of `candidate` for this strategy.
    fn requests(&self, candidate: &Candidate<'_>) -> u32 {
        if self.compat { candidate.own_requests() } else { candidate.requests }
    }

    /// Most requests that an endpoint may have to be picked for its cached prefix.
    fn bound(&self, candidates: &[Candidate<'_>]) -> f64 {
        let n = candidates.len() as f64;
        let mean = candidates.iter().map(|c| f64::from(self.requests(c))).sum::<f64>() / n;
        let squares: f64 = candidates.iter().map(|c| (f64::from(self.requests(c)) - mean).powi(2)).sum();
        let deviation = if candidates.len() > 1 { (squares / (n - 1.0)).sqrt() } else { 0.0 };
        mean + self.deviations * deviation
    }
}

/// Share of the prompt that `candidate` holds, in whole percent.
fn percent(cx: &PickContext<'_>, candidate: &Candidate<'_>) -> u32 {
    let held = u64::from(candidate.cached.any) * 100 / u64::from(cx.request.prompt_tokens.max(1));
    u32::try_from(held).unwrap_or(100).min(100)
}

impl Strategy for PrefixCache {
    fn rank(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        if cx.prefix.is_none() {
            ranking.lacks(Signal::Prefix);
        }
        let fewest = candidates.iter().map(|c| self.requests(c)).min().unwrap_or(0);
        let most = candidates.iter().map(|c| self.requests(c)).max().unwrap_or(0);
        let imbalanced = most - fewest > self.imbalance;
        let bound = self.bound(candidates);
        let percents = |i: usize| candidates.get(i).map_or(f64::NAN, |c| f64::from(percent(cx, c)));
        ranking.note("percent held", 1.0, candidates, percents);
        let mut holders: SmallVec<[(u32, u32, u32, usize); 16]> = candidates
            .iter()
            .enumerate()
            .filter(|(_, c)| c.cached.any > 0 && (!imbalanced || !self.compat && c.requests == fewest))
            .filter(|(_, c)| f64::from(self.requests(c)) <= bound)
            .map(|(i, c)| (100 - percent(cx, c), self.requests(c), rng.random(), i))
            .collect();
        holders.sort_unstable();
        ranking.because(if holders.is_empty() { "fewest requests" } else { "holds most of the prompt" });
        for candidate in holders.iter().filter_map(|(_, _, _, i)| candidates.get(*i)).take(ranking.wanted()) {
            ranking.push(&candidate.state.endpoint);
        }
        // The other endpoints, for retries and for prompts that no endpoint holds.
        let mut key = |c: &Candidate<'_>| (u64::from(self.requests(c)) << 32) | u64::from(rng.random::<u32>());
        let mut rest = Ranking::new(ranking.wanted() + holders.len());
        rest.push_lowest(candidates.iter().map(|c| (key(c), &c.state.endpoint)));
        for endpoint in rest.decide().iter().flat_map(|d| &d.picks) {
            ranking.push(endpoint);
        }
    }

    fn scores(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f64]) -> Option<Better> {
        for (score, candidate) in out.iter_mut().zip(candidates) {
            *score = if cx.prefix.is_some() { f64::from(percent(cx, candidate)) } else { f64::NAN };
        }
        Some(Better::Higher)
    }

    fn reads(&self) -> Reads {
        Reads::PREFIX
    }
}

#[cfg(test)]
mod tests;
