//! The part of a prediction that all endpoints of a pool share. Called by [`super`] and, through it, by decisions.

use super::{FIRST, NEXT, Prediction, Work};
use attache_types::clock::Timestamp;

/// The learned coefficients of a pool at one time. A decision reads them once, and then predicts for each endpoint.
#[derive(Clone, Copy, Debug)]
pub struct SpeedModel {
    /// Coefficients of the time to the first token, of an endpoint with ratio 1.
    pub(super) first: [f64; FIRST],
    /// Coefficients of the time between tokens, of an endpoint with ratio 1.
    pub(super) next: [f64; NEXT],
    /// Mean ratio of the endpoints to the coefficients, for the first token and for further tokens.
    pub(super) centres: [f32; 2],
    /// Actual time of a prompt, divided by the predicted time.
    pub(super) pace: f64,
    /// The time of the predictions.
    pub(super) now: Timestamp,
}

impl SpeedModel {
    /// Returns the coefficients of an endpoint with these ratios.
    #[inline]
    pub(super) fn scaled(&self, [before, after]: [f64; 2]) -> ([f64; FIRST], [f64; NEXT]) {
        (self.first.map(|c| c * before), self.next.map(|c| c * after))
    }

    /// Returns the prediction for `work` on an endpoint without load whose ratios are 1. No prediction for an endpoint
    /// with load is lower, since no coefficient is below 0.
    #[must_use]
    pub fn unloaded(&self, work: Work) -> Prediction {
        let [base, per_kilotoken, per_mega_pair, ..] = self.first;
        let [step, per_request, _] = self.next;
        let own_prefill = f64::from(work.uncached_tokens) / 1e3 * per_kilotoken + work.mega_pairs() * per_mega_pair;
        Prediction { first_token: base + own_prefill, per_token: step + per_request, own_prefill }
    }

    /// Returns the seconds by which each request on an endpoint with ratio 1 delays the first token, at least.
    #[must_use]
    pub fn least_delay(&self) -> f64 {
        let [_, _, _, per_decoding, per_waiting, ..] = self.first;
        per_decoding.min(per_waiting)
    }
}

/// Powers of ln 2 by factorials: the Taylor coefficients of 2^x.
const TAYLOR: [f64; 8] = [
    1.0,
    std::f64::consts::LN_2,
    0.240_226_506_959_100_7,
    0.055_504_108_664_821_58,
    0.009_618_129_107_628_477,
    0.001_333_355_814_642_844_3,
    0.000_154_035_303_933_816_1,
    0.000_015_252_733_804_059_84,
];

/// Returns 2^-`times` for `times` >= 0, with a relative error below 10^-8: the part of a value that is left after so
/// many half-lives. It is several times as fast as [`f64::exp2`], and the same on every platform.
#[inline]
pub(super) fn halved(times: f64) -> f64 {
    // Below 2^-60 nothing is left that could change a prediction.
    let times = times.clamp(0.0, 60.0);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0..=60")]
    let whole = (times + 0.5) as u32;
    // In -0.5..=0.5.
    let rest = f64::from(whole) - times;
    let [c0, c1, c2, c3, c4, c5, c6, c7] = TAYLOR;
    // In pairs, since a processor computes these at the same time.
    let (square, pair) = (rest * rest, |low: f64, high: f64| low + high * rest);
    let fourth = square * square;
    let power = pair(c0, c1) + pair(c2, c3) * square + (pair(c4, c5) + pair(c6, c7) * square) * fourth;
    power * f64::from_bits(u64::from(1_023 - whole) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn halved_is_a_power_of_two(times in 0.0..60.0f64) {
            let exact = (-times).exp2();
            prop_assert!((halved(times) - exact).abs() <= exact * 1e-8, "{} {}", halved(times), exact);
        }
    }

    #[test]
    fn whole_half_lives_are_exact() {
        assert_eq!([0.0, 1.0, 10.0, 60.0, 1e9].map(halved), [1.0, 0.5, 1.0 / 1_024.0, 2f64.powi(-60), 2f64.powi(-60)]);
    }
}
