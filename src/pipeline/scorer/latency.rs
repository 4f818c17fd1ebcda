//! `latency-scorer`: how well the endpoint is predicted to meet the request's latency targets, see
//! [`prediction::scores`].
//!
//! [`attache_pool::speed`] learns the predictions in process; a request's targets are its headers `x-slo-ttft-ms` and
//! `x-slo-tpot-ms`. Before the first response, the score is a mean of three parts with the weights `kv`, `queue` and
//! `prefix`:
//!
//! ```text
//! kv: 1 − usage    queue: (max − waiting) / (max − min)    prefix: cached tokens / prompt tokens
//! ```
//!
//! When not: one pool, one kind of request, no targets; then `predicted-latency` does the same directly. Source: llm-d
//! and GIE `latency-scorer`; GIE v1.5's `predicted-latency-scorer` was this with its producer in one.

use super::fewer_is_better;
use attache_scheduling::decision::Signal;
use attache_scheduling::facts::prediction::{self, HeadroomWeights, PredictedHeadroom, Prefer, Targets};
use attache_scheduling::plugin::{Plugin, Scorer, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext, Reads};
use attache_types::parameters;
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "latency-scorer",
    aliases: &["predicted-latency-scorer"],
    kind: "scorer",
    summary: "Prefers endpoints that are predicted to meet the request's latency targets.",
    source: "llm-d and GIE `latency-scorer`",
    parameters: section::<Params>,
    build: |value| params(value).map(|params| Plugin::Scorer(Arc::new(Latency(params)))),
};

parameters! {
    // The defaults are those of GIE and llm-d: users notice the first token most.
    struct Params {
        /// Weight of the headroom between the predicted time to first token and its target.
        "ttftWeight" | "headroomTTFTWeight" => ttft_weight: f64 { default: 0.8; range: 0.0..; unit: "weight"; },
        /// Weight of the headroom between the predicted time per output token and its target.
        "tpotWeight" | "headroomTPOTWeight" => tpot_weight: f64 { default: 0.2; range: 0.0..; unit: "weight"; },
        /// Whether the least or the most headroom scores highest among the endpoints that meet the targets.
        "headroomSelectionStrategy" => headroom_selection_strategy: Prefer { default: Prefer::default(); },
        /// While no prediction is known: weight of free KV cache.
        "compositeKVWeight" => kv: f32 { default: 1.0; range: 0.0..; unit: "weight"; },
        /// While no prediction is known: weight of short queues.
        "compositeQueueWeight" => queue: f32 { default: 1.0; range: 0.0..; unit: "weight"; },
        /// While no prediction is known: weight of the cached share of the prompt.
        "compositePrefixWeight" => prefix: f32 { default: 1.0; range: 0.0..; unit: "weight"; },
    }
}

#[derive(Debug)]
struct Latency(Params);

impl Latency {
    /// The fallback score, before anything is learned.
    fn composite(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f32]) {
        let Params { kv, queue, prefix, .. } = &self.0;
        fewer_is_better(candidates, |c| c.waiting, out);
        let total = cx.request.prompt_tokens.max(1) as f32;
        let sum = (kv + queue + prefix).max(f32::MIN_POSITIVE);
        for (score, candidate) in out.iter_mut().zip(candidates) {
            let free = if candidate.kv_usage.is_nan() { 0.0 } else { 1.0 - candidate.kv_usage };
            let held = (candidate.cached.any as f32 / total).min(1.0);
            *score = ((kv * free + queue * *score + prefix * held) / sum).clamp(0.0, 1.0);
        }
    }

    fn predicted(cx: &PickContext<'_>, candidates: &[Candidate<'_>]) -> SmallVec<[Option<PredictedHeadroom>; 16]> {
        let targets = Targets::of(&cx.request);
        let predict_headroom = |c: &Candidate<'_>| {
            let headroom = targets.headroom(prediction::predict(cx, c)?);
            Some(PredictedHeadroom { headroom, idle: c.state.live().ledger.in_flight() == 0 })
        };
        candidates.iter().map(predict_headroom).collect()
    }
}

impl Scorer for Latency {
    fn score(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f32]) {
        let weights = HeadroomWeights { ttft: self.0.ttft_weight, tpot: self.0.tpot_weight };
        let mut scores: SmallVec<[f32; 16]> = smallvec![0.0; candidates.len()];
        let predicted = Self::predicted(cx, candidates);
        if prediction::scores(&predicted, weights, self.0.headroom_selection_strategy, &mut scores) {
            out.iter_mut().zip(&scores).for_each(|(o, s)| *o = *s);
        } else {
            self.composite(cx, candidates, out);
        }
    }

    fn lacks(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>]) -> Option<Signal> {
        let known = candidates.iter().any(|c| c.state.live().speed.is_learned());
        (!known).then_some(Signal::Latency)
    }

    fn reads(&self) -> Reads {
        Reads::PREFIX
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attache_pool::speed::{Reservation, Work};
    use attache_scheduling::RequestFacts;
    use attache_scheduling::plugin::Headers;
    use attache_scheduling::testing::{NOW, context, snapshot};
    use attache_types::clock::Timestamp;
    use std::collections::BTreeMap;
    use std::time::Duration;

    fn scorer() -> Arc<dyn Scorer> {
        let Plugin::Scorer(scorer) = (PLUGIN.build)(&serde_json::Value::Null).unwrap() else { panic!("no scorer") };
        scorer
    }

    #[test]
    fn before_any_response_load_and_cache_decide() {
        let pool = snapshot(&[(0, 4), (1, 0)]);
        let candidates: Vec<_> =
            pool.endpoints.iter().map(|s| Candidate::new(s, NOW, Duration::from_secs(2), 0)).collect();
        let mut out = [0.0; 2];
        scorer().score(&context(&pool), &candidates, &mut out);
        assert!(out[1] > out[0], "{out:?}");
        assert_eq!(scorer().lacks(&context(&pool), &candidates), Some(Signal::Latency));
    }

    #[test]
    fn endpoint_that_just_meets_the_targets_precedes_faster_and_late_ones() {
        let pool = snapshot(&[(0, 0), (1, 0), (2, 0)]);
        for (state, milliseconds) in pool.endpoints.iter().zip([50, 400, 4_000]) {
            for i in 0..60u64 {
                let work = Work { prompt_tokens: 1_000, uncached_tokens: 1_000, adapter_cold: false };
                let began = Timestamp(i * 10_000_000_000);
                let mut one = Reservation::begin(state.endpoint.clone(), None, work, true, began);
                one.first_token(true, began.after(Duration::from_millis(milliseconds)));
            }
        }
        let headers = BTreeMap::from([
            ("x-slo-ttft-ms".to_owned(), "1000".to_owned()),
            ("x-slo-tpot-ms".to_owned(), "100".to_owned()),
        ]);
        let request = RequestFacts { prompt_tokens: 1_000, headers: Headers::of(&headers), ..RequestFacts::default() };
        let cx = PickContext { request, ..context(&pool) };
        // Without metrics, so only the learned speed counts.
        let candidates: Vec<_> = pool.endpoints.iter().map(|s| Candidate::new(s, NOW, Duration::ZERO, 0)).collect();
        let mut out = [0.0; 3];
        scorer().score(&cx, &candidates, &mut out);
        assert!(out[1] > out[0] && out[0] > out[2] && out[2] == 0.0, "{out:?}");
        assert_eq!(scorer().lacks(&cx, &candidates), None);
    }

    #[test]
    fn weights_are_checked() {
        for (parameters, word) in
            [("{\"ttftWeight\": -1}", "ttftWeight"), ("{\"headroomSelectionStrategy\": \"some\"}", "some")]
        {
            let error = (PLUGIN.build)(&serde_json::from_str(parameters).unwrap()).unwrap_err();
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}
