//! `compat: true`: AIBrix's own decision, over its own prefix tree.

use super::tree::{BLOCK_BYTES, Costs, MAX_DEPTH, PrefixMatch, Tree};
use super::{Params, moment, spread};
use crate::prefix_affinity::chain::{self, Chain};
use attache_pool::Endpoint;
use attache_protocol::Prompt;
use attache_scheduling::{Candidate, PickContext, Ranking, Signal};
use attache_types::ids::EndpointId;
use attache_types::rng::PickRng;
use parking_lot::Mutex;
use rand::RngExt;
use smallvec::SmallVec;
use std::time::Duration;

/// Sort key: excluded by the gate, not a holder, work or requests, random draw, position.
type SortKey = (bool, bool, f64, u32, usize);

/// AIBrix's decision.
#[derive(Debug)]
pub(super) struct Exact {
    match_threshold: f64,
    /// See [`moment`].
    interval: u32,
    tree: Mutex<Tree>,
}

impl Exact {
    pub(super) fn new(params: &Params, window: Duration) -> Self {
        let costs = Costs { gpu: params.target_gpu, decoding_length: params.decoding_length, window };
        let tree = Mutex::new(Tree::new(costs));
        Self { match_threshold: params.match_threshold, interval: params.eviction_loop_interval, tree }
    }

    fn chain(cx: &PickContext<'_>) -> Option<Chain> {
        let of = |prompt: &Prompt<'_>| chain::of_prompt(cx.request.model, prompt, BLOCK_BYTES, MAX_DEPTH);
        cx.request.digest(|| format!("prefix-cache-preble {BLOCK_BYTES} {MAX_DEPTH}"), of)
    }

    /// Seconds of work on each candidate.
    pub(super) fn costs(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f64]) {
        let mut tree = self.tree.lock();
        tree.expire(moment(self.interval, cx.now));
        for (cost, candidate) in out.iter_mut().zip(candidates) {
            *cost = tree.load(candidate.id).0;
        }
    }

    /// Ranks all candidates. `gate` is the largest allowed difference in requests; beyond it, candidates with more
    /// than the fewest requests come last.
    pub(super) fn rank(
        &self,
        cx: &PickContext<'_>,
        candidates: &[Candidate<'_>],
        gate: Option<u32>,
        rng: &mut PickRng,
        ranking: &mut Ranking,
    ) {
        let chain = Self::chain(cx);
        if chain.is_none() {
            ranking.lacks(Signal::Prompt);
        }
        let chain = chain.unwrap_or_default();
        let requests = |c: &Candidate<'_>| c.own_requests();
        let (fewest, gated) = spread(candidates, requests, gate);
        let is_outside = |c: &Candidate<'_>| gated && requests(c) != fewest;
        let mut tree = self.tree.lock();
        tree.expire(moment(self.interval, cx.now));
        let is_ready = |id| candidates.iter().any(|c| c.id == id && !is_outside(c));
        let PrefixMatch { blocks, endpoints } = tree.known(&chain, is_ready);
        let exploits = blocks as f64 > self.match_threshold * chain.len() as f64;
        let loads: SmallVec<[(f64, u64); 16]> = candidates.iter().map(|c| tree.load(c.id)).collect();
        drop(tree);
        ranking.note("work, seconds", 1.0, candidates, |i| loads.get(i).map_or(f64::NAN, |(work, _)| *work));
        let mut order: SmallVec<[SortKey; 16]> = SmallVec::with_capacity(candidates.len());
        for (at, (candidate, (work, requests))) in candidates.iter().zip(&loads).enumerate() {
            let holds = exploits && endpoints.contains(&candidate.id);
            let key = if holds { *requests as f64 } else { *work };
            order.push((is_outside(candidate), !holds, key, rng.random(), at));
        }
        order.sort_unstable_by(|a, b| (a.0, a.1).cmp(&(b.0, b.1)).then(a.2.total_cmp(&b.2)).then(a.3.cmp(&b.3)));
        ranking.because(match order.first() {
            Some((_, false, ..)) => "computed most of the prompt, with the fewest requests of those",
            _ if gated => "least work among those with the fewest requests",
            _ => "least work",
        });
        for candidate in order.iter().filter_map(|(.., at)| candidates.get(*at)).take(ranking.wanted()) {
            ranking.push(&candidate.state.endpoint);
        }
    }

    pub(super) fn forget(&self, lost: &[EndpointId]) {
        self.tree.lock().forget(lost);
    }

    pub(super) fn picked(&self, cx: &PickContext<'_>, endpoint: &Endpoint) {
        if let Some(chain) = Self::chain(cx) {
            let mut tree = self.tree.lock();
            tree.expire(moment(self.interval, cx.now));
            tree.record(&chain, endpoint.id, cx.now);
        }
    }
}
