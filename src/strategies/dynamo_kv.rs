//! `dynamo-kv`: the least cost in KV blocks: blocks to prefill before the first token plus blocks in use for
//! decoding.
//!
//! ```text
//! prefill  = (prompt tokens queued there + prompt) / blockSize
//! credit   = overlapScoreCredit / (1 + decay · ahead / prompt blocks) · blocks in GPU memory
//!            + hostCacheHitWeight · blocks in lower tiers
//!            ahead: prompt blocks queued there beyond those of the endpoint with the fewest
//! cost     = prefillLoadScale · max(0, prefill − credit) + blocks in use + decodeActiveRequestWeight · requests
//! pick     the least cost, ties at random; with routerTemperature > 0, a random draw by
//!          softmax(−cost scaled to 0..1 / temperature)
//! ```
//!
//! Queued tokens come from Attaché's ledger: the uncached prompt tokens of requests without a first byte. Blocks in
//! use come from the server's metrics: usage × number of blocks. Dynamo keeps books of its own for both.
//! The blocks that the request itself will take are the same on every endpoint and are left out. Memory tiers below
//! the GPU's count with one weight, host memory and disk alike.
//! An endpoint that does not report its blocks has no cost; if no endpoint reports them, the fewest requests win.
//!
//! When not: endpoints differ in speed or size, since a block costs the same everywhere. Source: NVIDIA Dynamo's KV
//! router, default policy of 1.6.

use attache_scheduling::plugin::{Better, Inert, params, rank_by_scores, section};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::{Candidate, PickContext, Ranking, Reads, Signal, Strategy};
use attache_types::parameters;
use attache_types::rng::PickRng;
use rand::RngExt;
use serde_json::Value;
use smallvec::{SmallVec, smallvec};

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "dynamo-kv",
    summary: "Picks the least cost in KV blocks: uncached prompt blocks to compute there plus blocks in use.",
    source: "NVIDIA Dynamo KV router",
    parameters: section::<Params>,
    build: |value, _| params(value).map(|params| Box::new(DynamoKv(params)) as Box<dyn Strategy>),
};

parameters! {
    struct Params {
        /// Blocks of prefill that a block cached in GPU memory saves.
        "overlapScoreCredit" => overlap_score_credit: f64 { default: 1.0; range: 0.0..; unit: "blocks"; },
        /// How much `overlapScoreCredit` shrinks on endpoints with more queued prompt tokens than the least loaded one.
        /// 0: not at all.
        "overlapScoreCreditDecay" => overlap_score_credit_decay: f64 { default: 0.0; range: 0.0..; unit: "factor"; },
        /// Cost of a block of prefill, relative to a block in use.
        "prefillLoadScale" => prefill_load_scale: f64 { default: 1.0; range: 0.0..; unit: "factor"; },
        /// Cost of each request on the endpoint, in addition to the blocks in use.
        "decodeActiveRequestWeight" => decode_active_request_weight: f64 {
            default: 0.0; range: 0.0..; unit: "blocks";
        },
        /// Blocks of prefill that a block cached in host memory or on disk saves. 0.75 is Dynamo's value for host
        /// memory.
        "hostCacheHitWeight" => host_cache_hit_weight: f64 { default: 0.75; range: 0.0..; unit: "blocks"; },
        /// Temperature of a softmax draw over costs, which are scaled to the range from 0 to 1. 0: the least cost wins.
        "routerTemperature" => router_temperature: f64 { default: 0.0; range: 0.0..; unit: "temperature"; },
        /// Size of a block in the cost. 16 is vLLM's default.
        "blockSize" => block_size: u32 { default: 16; range: 1..; unit: "tokens"; },
    }
}

fn is_zero(parameters: &Value, key: &str) -> bool {
    parameters.get(key).and_then(Value::as_f64) == Some(0.0)
}

/// Parameters that change nothing.
pub(crate) const INERT: &[Inert] = &[
    Inert {
        plugins: &[PLUGIN.name],
        keys: &["overlapScoreCredit", "overlapScoreCreditDecay", "hostCacheHitWeight"],
        when: |all| is_zero(all, "prefillLoadScale"),
        why: "with `prefillLoadScale: 0` prompts cost nothing, cached or not",
    },
    Inert {
        plugins: &[PLUGIN.name],
        keys: &["overlapScoreCreditDecay"],
        when: |all| is_zero(all, "overlapScoreCredit") && !is_zero(all, "prefillLoadScale"),
        why: "with `overlapScoreCredit: 0` there is no credit to decay",
    },
];

#[derive(Debug)]
struct DynamoKv(Params);

/// The blocks in use on an endpoint, in blocks of `size` tokens.
fn in_use(candidate: &Candidate<'_>, size: f64) -> Option<f64> {
    let metrics = candidate.metrics()?;
    let its_size = metrics.block_size.map_or(size, f64::from);
    Some(f64::from(metrics.kv_usage) * f64::from(metrics.num_blocks?) * its_size / size)
}

impl Strategy for DynamoKv {
    fn scores(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f64]) -> Option<Better> {
        let p = &self.0;
        let size = f64::from(p.block_size);
        let queued = |c: &Candidate<'_>| c.state.live().ledger.prefill_tokens() as f64 / size;
        let least_queued = candidates.iter().map(queued).fold(f64::INFINITY, f64::min);
        let prompt = f64::from(cx.request.prompt_tokens) / size;
        for (cost, c) in out.iter_mut().zip(candidates) {
            let (queued, gpu) = (queued(c), f64::from(c.cached.gpu) / size);
            let below = f64::from(c.cached.any.saturating_sub(c.cached.gpu)) / size;
            let ahead = (queued - least_queued) / prompt.max(1.0);
            let faith = p.overlap_score_credit / (1.0 + p.overlap_score_credit_decay * ahead);
            let credit = faith * gpu + p.host_cache_hit_weight * below;
            let prefill = p.prefill_load_scale * (queued + prompt - credit).max(0.0);
            let requests = p.decode_active_request_weight * f64::from(c.requests);
            *cost = in_use(c, size).map_or(f64::NAN, |decode| prefill + decode + requests);
        }
        Some(Better::Lower)
    }

    fn rank(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        let drawn = self.0.router_temperature > 0.0 && self.draw(cx, candidates, rng, ranking);
        // Fills the remaining ranks: endpoints without a cost, or all of them.
        if !ranking.is_full() {
            rank_by_scores(self, cx, candidates, rng, ranking);
        }
        if drawn {
            ranking.because("drawn by cost");
        }
        if cx.prefix.is_none() {
            ranking.lacks(Signal::Prefix);
        }
    }

    fn reads(&self) -> Reads {
        Reads::PREFIX
    }
}

impl DynamoKv {
    /// Draws by softmax over the costs, scaled so that the least is 0 and the greatest 1, without replacement.
    /// Returns false if no cost is known.
    fn draw(
        &self,
        cx: &PickContext<'_>,
        candidates: &[Candidate<'_>],
        rng: &mut PickRng,
        ranking: &mut Ranking,
    ) -> bool {
        let mut costs: SmallVec<[f64; 16]> = smallvec![f64::NAN; candidates.len()];
        self.scores(cx, candidates, &mut costs);
        let known = || costs.iter().copied().filter(|c| !c.is_nan());
        let (least, most) = (known().fold(f64::INFINITY, f64::min), known().fold(f64::NEG_INFINITY, f64::max));
        let range = if most > least { most - least } else { 1.0 };
        // Gumbel trick: the greatest logit + Gumbel noise is a draw by softmax, and the order by it is one without
        // replacement.
        let mut drawn: SmallVec<[(f64, usize); 16]> = SmallVec::new();
        for (i, cost) in costs.iter().enumerate().filter(|(_, c)| !c.is_nan()) {
            let gumbel = -(-rng.random::<f64>().max(f64::MIN_POSITIVE).ln()).max(f64::MIN_POSITIVE).ln();
            drawn.push(((cost - least) / range / self.0.router_temperature - gumbel, i));
        }
        drawn.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        ranking.note("cost", 1.0, candidates, |i| costs.get(i).copied().unwrap_or(f64::NAN));
        for candidate in drawn.iter().filter_map(|(_, i)| candidates.get(*i)).take(ranking.wanted()) {
            ranking.push(&candidate.state.endpoint);
        }
        !drawn.is_empty()
    }
}

#[cfg(test)]
mod tests;
