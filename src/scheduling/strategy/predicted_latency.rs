//! `predicted-latency`: the endpoint where the request costs least time, its own and that of the requests which are there already.
//!
//! ```text
//! cost = first token + price · own prefill + weight · answer          price = busy / (1 - busy)
//! ```
//!
//! `first token` is the predicted time to the request's first token there: what others still have to compute, what of this prompt is not
//! cached, what the batch and the queue cost. `own prefill` is the part of it in which the endpoint computes this prompt: the others wait for it,
//! those who come behind and those who decode beside, and it is what a cached prefix saves. Both are seconds, learned by
//! [`crate::pool::speed`], per endpoint, from what the picker sees.
//!
//! `answer` is how long a usual answer takes there, from its first token to its last: longer in a fuller batch. Its small weight keeps a prefix
//! that everybody asks for from gathering everybody on the server that holds it, where one more copy of it would serve all better.
//!
//! The price is what a second of work costs others: nothing in an idle pool, where only the request's own time counts, and more than the request's own
//! time where there is hardly room for the work, so that the fuller the pool is the more a cached prefix is worth waiting for. It is that of
//! a queue (M/M/1: a second of work is followed by `busy / (1 - busy)` seconds of waiting), with the part of the pool that is busy learned from what
//! was sent. Nothing is calibrated. What a decision sends counts at once, so a burst spreads as it comes.
//!
//! When not: a pool whose answers nobody sees (response mode NONE): nothing can be learned, and the pool's first guess decides.
//! Source: ours; the same question is asked by llm-d's `predicted-latency-producer` (a sidecar with gradient-boosted trees) and Mooncake's
//! KVCache-centric scheduling (Qin et al., FAST'25).

use crate::pool::speed::Prediction;
use crate::rng::PickRng;
use crate::scheduling::plugin::{Better, Descriptor, ParamError, params, rank_by_scores};
use crate::scheduling::{Candidate, PickContext, Ranking, Reads, Strategy};
use serde::Deserialize;

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "predicted-latency",
    summary: "Picks the endpoint where the request is predicted to cost least time, its own and that of those already there.",
    source: "ours; llm-d `predicted-latency-producer`, Mooncake (FAST'25)",
    build: |value| params::<Params>(value)?.build().map(|p| Box::new(p) as Box<dyn Strategy>),
};

/// 0.02: a second in which tokens come weighs a fiftieth of one without any. From 0.02 to 0.1 every workload of `attache replay` fares alike; without it
/// those with a hot prefix wait up to 30 % longer.
const DEFAULT_TOKEN_WEIGHT: f64 = 0.02;
/// A pool is thought to be nine tenths busy at most: what was sent to it is an estimate, and a price beyond all measure would send every
/// request to whoever holds most of it.
const FULLEST: f64 = 0.9;

#[derive(Debug, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
struct Params {
    /// What a second of work costs others, seconds; learned when `None`.
    work_price: Option<f64>,
    /// What a second of a usual answer weighs beside one until the first token.
    token_weight: f64,
}

impl Default for Params {
    fn default() -> Self {
        Self { work_price: None, token_weight: DEFAULT_TOKEN_WEIGHT }
    }
}

impl Params {
    fn build(self) -> Result<PredictedLatency, ParamError> {
        let Self { work_price, token_weight } = self;
        if let Some(price) = work_price.filter(|price| !(0.0..=1_000.0).contains(price)) {
            return Err(ParamError::value("workPrice", price, "0 to 1000 is allowed, or none to have it learned"));
        }
        if !(0.0..=10.0).contains(&token_weight) {
            return Err(ParamError::value("tokenWeight", token_weight, "0 to 10 is allowed"));
        }
        Ok(PredictedLatency { work_price, token_weight })
    }
}

#[derive(Debug)]
struct PredictedLatency {
    work_price: Option<f64>,
    token_weight: f64,
}

impl PredictedLatency {
    fn price(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>]) -> f64 {
        let learned = || {
            let pool = candidates.first().map(|c| c.state.endpoint.speed.pool());
            let busy = pool.map_or(0.0, |pool| pool.busy(cx.now)) / candidates.len().max(1) as f64;
            let busy = busy.clamp(0.0, FULLEST);
            busy / (1.0 - busy)
        };
        self.work_price.unwrap_or_else(learned)
    }
}

/// What the request can expect of a candidate, and how many requests decode there.
fn predict(cx: &PickContext<'_>, candidate: &Candidate<'_>) -> (Prediction, f64) {
    let endpoint = &candidate.state.endpoint;
    let (load, predicted) = endpoint.speed.forecast(endpoint, candidate.metrics, candidate.work(cx), cx.now);
    (predicted, load.decoding)
}

impl Strategy for PredictedLatency {
    fn scores(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f64]) -> Option<Better> {
        let price = self.price(cx, candidates);
        for (cost, candidate) in out.iter_mut().zip(candidates) {
            let (predicted, _) = predict(cx, candidate);
            let answer = predicted.per_token * candidate.state.endpoint.speed.pool().answer_tokens();
            *cost = predicted.first_token + predicted.own_prefill * price + answer * self.token_weight;
        }
        Some(Better::Lower)
    }

    fn rank(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        rank_by_scores(self, cx, candidates, rng, ranking);
        ranking.because("least predicted cost");
        if ranking.is_explained() {
            let about: Vec<(Prediction, f64)> = candidates.iter().map(|c| predict(cx, c)).collect();
            let figure = |of: fn(&Prediction) -> f64| {
                let about = &about;
                move |i: usize| about.get(i).map_or(f64::NAN, |(p, _)| of(p))
            };
            ranking.note("first token, s", 0.0, candidates, figure(|p| p.first_token));
            let price = self.price(cx, candidates);
            ranking.note("price of work", 0.0, candidates, |_| price);
            ranking.note("own prefill, s", 0.0, candidates, figure(|p| p.own_prefill));
            ranking.note("a token, s", 0.0, candidates, figure(|p| p.per_token));
            ranking.note("decoding", 0.0, candidates, |i| about.get(i).map_or(f64::NAN, |(_, d)| *d));
        }
    }

    fn reads(&self) -> Reads {
        Reads::PREFIX
    }
}
