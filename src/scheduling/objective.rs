//! Latency objectives of a pool: weights of the two parts of a response, or targets that a share of the requests
//! should meet.
//!
//! ```text
//! risk(target)  P(time > target) · target / (1 - share)
//! P(time > t)   1 / (1 + (t / predicted)^(1 / s)),  s = error / (2 · ln 2)
//! ```
//!
//! A share `1 - share` of the requests may miss a target. One miss uses up the allowance of `1 / (1 - share)`
//! requests, each of which may take `target` seconds; that product is its price.
//!
//! Times follow a log-logistic distribution around the prediction. It has a closed form, and `s` follows from the
//! learned mean error of the endpoint's predictions: the mean of |ln(time / predicted)| is `2 · s · ln 2`.
//! A request that misses its target on every endpoint costs the same everywhere, so the rest of the cost decides.
//!
//! Read by [`super::facts::cost`]. Pure.

use std::time::Duration;

/// 0.95: one request in twenty may miss a target.
pub const DEFAULT_SHARE: f64 = 0.95;
/// 0.999: with a greater share, one miss would outweigh all other costs.
pub const MAX_SHARE: f64 = 0.999;
/// Lower bound of the error, 5 %: the next request may arrive at any moment.
const LEAST_ERROR: f64 = 0.05;

/// Latency objectives of a pool. The default has equal weights and no targets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Objective {
    /// Weight of the time to the first token; 1 by default.
    pub ttft: f64,
    /// Weight of the time of all further tokens; 1 by default.
    pub tpot: f64,
    /// Latency targets.
    pub slo: Option<Slo>,
}

impl Default for Objective {
    fn default() -> Self {
        Self { ttft: 1.0, tpot: 1.0, slo: None }
    }
}

impl Objective {
    /// The same objectives with weights of mean 1, since only their ratio matters.
    #[must_use]
    pub fn normalised(self) -> Self {
        let mean = f64::midpoint(self.ttft, self.tpot);
        if mean > 0.0 { Self { ttft: self.ttft / mean, tpot: self.tpot / mean, ..self } } else { self }
    }
}

/// Targets that `share` of the requests should meet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slo {
    /// The longest time to the first token.
    pub ttft: Option<Duration>,
    /// The longest time between two tokens, in the mean of a response.
    pub tpot: Option<Duration>,
    /// Share of the requests that should meet both, above 0 and below 1.
    pub share: f64,
}

impl Slo {
    /// Cost of missing a target of `seconds`, in seconds.
    #[must_use]
    pub fn price(&self, seconds: f64) -> f64 {
        seconds / (1.0 - self.share)
    }
}

/// Probability, 0..=1, that a time predicted as `predicted` seconds exceeds `target`. `error` is the mean relative
/// error of predictions.
#[must_use]
pub fn miss(target: f64, predicted: f64, error: f64) -> f64 {
    if target <= 0.0 {
        return 1.0;
    }
    let scale = error.max(LEAST_ERROR) / (2.0 * std::f64::consts::LN_2);
    // The power is infinite if the time is sure to be shorter.
    1.0 / (1.0 + (target / predicted).powf(1.0 / scale))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probability_of_a_miss_grows_with_prediction_and_error() {
        assert!((miss(0.5, 0.5, 0.3) - 0.5).abs() < 1e-9, "predicted for the target itself");
        assert!(miss(0.5, 0.4, 0.3) < 0.5 && miss(0.5, 0.6, 0.3) > 0.5);
        // What is sure is surer where predictions are better.
        assert!(miss(0.5, 0.4, 0.1) < miss(0.5, 0.4, 0.3) && miss(0.5, 0.6, 0.1) > miss(0.5, 0.6, 0.3));
        assert_eq!((miss(0.5, 0.4, 0.0), miss(-0.1, 0.4, 0.3)), (miss(0.5, 0.4, LEAST_ERROR), 1.0));
        assert_eq!(miss(0.5, 0.0, 0.3), 0.0);
    }

    #[test]
    fn mean_error_of_the_distribution_is_the_learned_error() {
        // Quantiles of the distribution at the middles of equal parts.
        let (error, parts) = (0.3, 20_000);
        let quantile = |p: f64| {
            let (mut low, mut high) = (1e-9, 1e9);
            for _ in 0..100 {
                let middle = f64::sqrt(low * high);
                if miss(middle, 1.0, error) > p { low = middle } else { high = middle }
            }
            low
        };
        let sum: f64 = (0..parts).map(|i| quantile((f64::from(i) + 0.5) / f64::from(parts)).ln().abs()).sum();
        assert!((sum / f64::from(parts) - error).abs() < 1e-3, "{}", sum / f64::from(parts));
    }

    #[test]
    fn only_the_ratio_of_the_weights_matters() {
        let of = |ttft, tpot| Objective { ttft, tpot, slo: None }.normalised();
        assert_eq!(of(1.0, 1.0), Objective::default());
        assert_eq!(of(7.0, 7.0), Objective::default());
        assert_eq!(of(0.25, 0.75), of(1.0, 3.0));
        assert_eq!(of(0.0, 3.0), Objective { ttft: 0.0, tpot: 2.0, slo: None });
    }

    #[test]
    fn certain_miss_costs_the_allowance_of_the_share() {
        let slo = Slo { ttft: None, tpot: None, share: 0.95 };
        assert!((slo.price(0.5) - 10.0).abs() < 1e-9, "twenty requests may take half a second each");
    }
}
