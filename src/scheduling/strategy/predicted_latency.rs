//! `predicted-latency`: the endpoint where the request costs least time, its own and that of the requests which are there already.
//!
//! ```text
//! cost = first token + stall · own prefill · requests that decode there + replica · own prefill
//! ```
//!
//! `first token` is the predicted time to the request's first token there: what others still have to compute, what of this prompt is not
//! cached, what the batch and the queue cost. `own prefill` is the part of it in which the endpoint computes this prompt; nobody who decodes
//! there gets a token meanwhile, which the second part charges. The third is the price of one more copy of a prefix: it pushes out
//! something that another request would have found. All are seconds, learned by [`crate::pool::speed`], per endpoint, from what the picker
//! sees; nothing is calibrated. What a decision sends counts at once, so a burst spreads as it comes.
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

/// 0.1: a second in which ten others get no token weighs as much as a second that this one waits.
const DEFAULT_STALL: f64 = 0.1;
/// 0.5: what is pushed out would have been found again about every second time.
const DEFAULT_REPLICA: f64 = 0.5;

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Params {
    stall: f64,
    replica: f64,
}

impl Default for Params {
    fn default() -> Self {
        Self { stall: DEFAULT_STALL, replica: DEFAULT_REPLICA }
    }
}

impl Params {
    fn build(self) -> Result<PredictedLatency, ParamError> {
        for (name, value) in [("stall", self.stall), ("replica", self.replica)] {
            if !(0.0..=1_000.0).contains(&value) {
                return Err(ParamError(format!("`{name}` is {value}; 0 to 1000 is allowed")));
            }
        }
        Ok(PredictedLatency { stall: self.stall, replica: self.replica })
    }
}

#[derive(Debug)]
struct PredictedLatency {
    stall: f64,
    replica: f64,
}

/// What the request can expect of a candidate, and how many requests decode there.
fn predict(cx: &PickContext<'_>, candidate: &Candidate<'_>) -> (Prediction, f64) {
    let endpoint = &candidate.state.endpoint;
    let (load, predicted) = endpoint.speed.forecast(endpoint, candidate.metrics, candidate.work(cx), cx.now);
    (predicted, load.decoding)
}

impl Strategy for PredictedLatency {
    fn scores(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f64]) -> Option<Better> {
        for (cost, candidate) in out.iter_mut().zip(candidates) {
            let (predicted, decoding) = predict(cx, candidate);
            *cost = predicted.first_token + predicted.own_prefill * (self.stall * decoding + self.replica);
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
            ranking.note("own prefill, s", 0.0, candidates, figure(|p| p.own_prefill));
            ranking.note("a token, s", 0.0, candidates, figure(|p| p.per_token));
            ranking.note("decoding", 0.0, candidates, |i| about.get(i).map_or(f64::NAN, |(_, d)| *d));
        }
    }

    fn reads(&self) -> Reads {
        Reads::PREFIX
    }
}
