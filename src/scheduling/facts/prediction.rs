//! Predicted response times on an endpoint, compared with the request's targets.
//!
//! Headroom is target minus prediction, in milliseconds: negative if the endpoint is too slow. A request without a
//! target has a target of 0. Then every headroom is negative, and the smallest deficit is the fastest endpoint.
//! [`scores`] is the formula of llm-d's `latency-scorer`:
//!
//! ```text
//! an endpoint meets both targets:    those that do, by headroom: `least` smallest first (packs), `most` largest first
//! none does, some are idle:          the idle ones, smallest deficit first
//! else the first class with members: late tokens only < late first token only < both, smallest deficit first
//! score = (1 + floor(100 * (w . normalised headroom))) / 100, clamped to 1; all others 0
//! ```

use crate::{Candidate, PickContext, RequestFacts};
use attache_pool::speed::Bounds;
use attache_types::keywords;

/// Headers with the client's target for the time to the first token, in milliseconds: llm-d's older and newer name.
/// The first one present counts.
pub const TTFT_HEADERS: [&str; 2] = ["x-slo-ttft-ms", "x-llm-d-slo-ttft-ms"];
/// Headers with the client's target for the time per token after the first, in milliseconds.
pub const TPOT_HEADERS: [&str; 2] = ["x-slo-tpot-ms", "x-llm-d-slo-tpot-ms"];

/// Predicted response times, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// Time to the first token.
    pub ttft_ms: f64,
    /// Time per token after the first.
    pub tpot_ms: f64,
}

/// The request's targets, in milliseconds; 0 if it has none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Targets {
    /// Time to the first token.
    pub ttft_ms: f64,
    /// Time per token after the first.
    pub tpot_ms: f64,
}

impl Targets {
    /// Reads the request's headers; an invalid or negative number counts as none.
    #[must_use]
    pub fn of(request: &RequestFacts<'_>) -> Self {
        let target = |names: [&str; 2]| {
            let said = names.into_iter().find_map(|name| request.headers.get(name));
            let ms = said.and_then(|v| v.trim().parse::<f64>().ok());
            ms.filter(|ms| ms.is_finite() && *ms >= 0.0).unwrap_or(0.0)
        };
        Self { ttft_ms: target(TTFT_HEADERS), tpot_ms: target(TPOT_HEADERS) }
    }

    /// The targets as bounds, in seconds; a missing target is infinite. `None` if there is no target.
    #[must_use]
    pub fn bounds(self) -> Option<Bounds> {
        let bound = |ms: f64| if ms > 0.0 { ms / 1e3 } else { f64::INFINITY };
        let bounds = Bounds { first_token: bound(self.ttft_ms), per_token: bound(self.tpot_ms) };
        (self.ttft_ms > 0.0 || self.tpot_ms > 0.0).then_some(bounds)
    }

    /// Targets minus `prediction`.
    #[must_use]
    pub fn headroom(self, prediction: Prediction) -> Headroom {
        Headroom { ttft_ms: self.ttft_ms - prediction.ttft_ms, tpot_ms: self.tpot_ms - prediction.tpot_ms }
    }
}

/// Targets minus predictions, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Headroom {
    /// Time to the first token.
    pub ttft_ms: f64,
    /// Time per token after the first.
    pub tpot_ms: f64,
}

impl Headroom {
    /// Whether both targets are met.
    #[must_use]
    pub fn is_met(self) -> bool {
        self.ttft_ms >= 0.0 && self.tpot_ms >= 0.0
    }
}

/// Predicted times of the request on `candidate`; `None` if nothing is known of its pool's speed.
#[must_use]
pub fn predict(cx: &PickContext<'_>, candidate: &Candidate<'_>) -> Option<Prediction> {
    let live = candidate.state.live();
    let speed = Some(&live.speed).filter(|s| s.is_learned())?;
    let (_, predicted) = speed.forecast(&live.ledger, candidate.reported(), candidate.work(cx), cx.now);
    Some(Prediction { ttft_ms: predicted.first_token * 1e3, tpot_ms: predicted.per_token * 1e3 })
}

/// Which endpoint wins among those that meet the targets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefer {
    /// The endpoint with the least headroom: fast ones stay free for requests that need them.
    #[default]
    Least,
    /// The endpoint with the most headroom.
    Most,
}

keywords! {
    Prefer: "least" => Least, "most" => Most;
}

/// Relative weights of the two headrooms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadroomWeights {
    /// Of the first token.
    pub ttft: f64,
    /// Of the tokens after it.
    pub tpot: f64,
}

/// Input of [`scores`] for one endpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PredictedHeadroom {
    /// Headroom to the request's targets.
    pub headroom: Headroom,
    /// This replica has no request in flight there.
    pub idle: bool,
}

/// Steps of a score, as in llm-d.
const STEPS: f64 = 100.0;
/// Headrooms that differ by less are equal.
const EPSILON: f64 = 1e-9;

/// Scores endpoints by their headrooms, 0..=1; an endpoint without a prediction gets 0. `out` must be as long as
/// `endpoints`. Returns false and leaves `out` unchanged if there is no prediction at all.
pub fn scores(
    endpoints: &[Option<PredictedHeadroom>],
    weights: HeadroomWeights,
    prefer: Prefer,
    out: &mut [f32],
) -> bool {
    let known = || endpoints.iter().flatten();
    if known().next().is_none() {
        return false;
    }
    // Lower classes are better; the best class with members is scored.
    let any_met = known().any(|e| e.headroom.is_met());
    let any_idle = known().any(|e| e.idle);
    let class = |e: &PredictedHeadroom| -> u8 {
        let h = e.headroom;
        match (h.ttft_ms < 0.0, h.tpot_ms < 0.0) {
            (false, false) => 0,
            _ if any_met => 4,
            _ if any_idle => {
                if e.idle {
                    1
                } else {
                    4
                }
            }
            (false, true) => 1,
            (true, false) => 2,
            (true, true) => 3,
        }
    };
    let best = known().map(class).min().unwrap_or(0);
    let prefer = if best == 0 { prefer } else { Prefer::Least };
    let members = || known().filter(|e| class(e) == best).map(|e| e.headroom);
    let ttft = Span::of(members().map(|h| h.ttft_ms));
    let tpot = Span::of(members().map(|h| h.tpot_ms));
    let (a, b) = match (ttft.is_point(), tpot.is_point()) {
        (true, false) => (0.0, 1.0),
        (false, true) => (1.0, 0.0),
        _ if weights.ttft + weights.tpot > 0.0 => {
            let sum = weights.ttft + weights.tpot;
            (weights.ttft / sum, weights.tpot / sum)
        }
        _ => (1.0, 0.0),
    };
    for (score, endpoint) in out.iter_mut().zip(endpoints) {
        *score = match endpoint {
            Some(e) if class(e) == best => {
                let far = a * ttft.normalise(e.headroom.ttft_ms) + b * tpot.normalise(e.headroom.tpot_ms);
                let good = if prefer == Prefer::Most { far } else { 1.0 - far };
                (((good * STEPS).floor() + 1.0) / STEPS).min(1.0) as f32
            }
            _ => 0.0,
        };
    }
    true
}

/// Range of the distances from the target.
#[derive(Clone, Copy)]
struct Span {
    least: f64,
    greatest: f64,
}

impl Span {
    fn of(headrooms: impl Iterator<Item = f64>) -> Self {
        let start = Self { least: f64::INFINITY, greatest: f64::NEG_INFINITY };
        headrooms.map(f64::abs).fold(start, |s, h| Self { least: s.least.min(h), greatest: s.greatest.max(h) })
    }

    fn is_point(self) -> bool {
        self.greatest - self.least <= EPSILON
    }

    fn normalise(self, headroom: f64) -> f64 {
        if self.is_point() { 0.5 } else { (headroom.abs() - self.least) / (self.greatest - self.least) }
    }
}

#[cfg(test)]
mod tests;
