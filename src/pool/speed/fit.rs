//! A line through what was measured: weighted least squares that forgets, holds on to a prior, takes no outlier at its word and knows no
//! negative coefficient. Called by [`super`] alone.

/// An observation weighs half when 100 others have come after it: a minute or two of traffic on a busy server, so that a change of load or
/// hardware is learned and noise is not.
const DEFAULT_FORGETTING: f64 = 0.993_1;
/// What an endpoint has shown counts as much as what the whole pool has shown once it rests on 12 observations.
const PRIOR_OBSERVATIONS: f64 = 12.0;
/// Beyond 1.5 times the usual error an observation pulls no harder than at it (Huber).
const HUBER: f64 = 1.5;
/// The usual error is never thought smaller than a tenth of what is predicted: with less, noise of the clock would look like an outlier.
const SMALLEST_ERROR: f64 = 0.1;
/// The usual error is the mean of some 20 observations: one that is wild counts as one, a change that stays is soon usual.
const ERROR_RATE: f64 = 0.05;
/// Sweeps of coordinate descent for one observation. The coefficients start where the last observation left them, so a few are enough.
const SWEEPS: usize = 4;

/// The coefficients and the sums that they follow from.
#[derive(Clone, Debug)]
pub(super) struct Fit<const N: usize> {
    coefficients: [f64; N],
    /// Weighted sums of products of features, and of features with what was measured.
    products: [[f64; N]; N],
    measured: [f64; N],
    /// Observations, the forgotten ones counted less.
    count: f64,
    /// The usual relative error.
    error: f64,
    /// The usual weight of an observation.
    weight: f64,
}

impl<const N: usize> Fit<N> {
    pub(super) fn new(prior: [f64; N]) -> Self {
        Self { coefficients: prior, products: [[0.0; N]; N], measured: [0.0; N], count: 0.0, error: 0.5, weight: 0.0 }
    }

    pub(super) fn coefficients(&self) -> &[f64; N] {
        &self.coefficients
    }

    pub(super) fn is_learned(&self) -> bool {
        self.count > 0.0
    }

    /// What `features` should take, by what is known.
    pub(super) fn predict(&self, features: &[f64; N]) -> f64 {
        self.coefficients.iter().zip(features).map(|(c, x)| c * x).sum()
    }

    /// What was observed counts this much less, 0 to 1.
    pub(super) fn fade(&mut self, keep: f64) {
        self.products.iter_mut().flatten().chain(&mut self.measured).for_each(|sum| *sum *= keep);
        self.count *= keep;
    }

    /// Takes in that `features` took `seconds`. Coefficients that the observations leave open stay near `prior`, of which each is held as if
    /// [`PRIOR_OBSERVATIONS`] had been made with features of the size `scale`.
    pub(super) fn observe(&mut self, features: &[f64; N], seconds: f64, prior: &[f64; N], scale: &[f64; N]) {
        if !seconds.is_finite() || seconds <= 0.0 || features.iter().any(|x| !x.is_finite()) {
            return;
        }
        let predicted = self.predict(features).max(1e-6);
        // Errors grow with what is predicted, so they are compared in parts of it.
        let unit = predicted.max(seconds * 0.1);
        let off = ((seconds - predicted) / unit).abs();
        let bound = HUBER * self.error.max(SMALLEST_ERROR);
        let weight = if off > bound { bound / off } else { 1.0 } / (unit * unit);
        // What is far out moves the usual error by no more than the bound either.
        self.error += (off.min(2.0 * bound) - self.error) * ERROR_RATE.max(1.0 / (self.count + 2.0));
        for (row, (products, measured)) in self.products.iter_mut().zip(&mut self.measured).enumerate() {
            let x = features.get(row).copied().unwrap_or_default() * weight;
            *measured = *measured * DEFAULT_FORGETTING + x * seconds;
            for (product, y) in products.iter_mut().zip(features) {
                *product = *product * DEFAULT_FORGETTING + x * y;
            }
        }
        self.count = self.count * DEFAULT_FORGETTING + 1.0;
        self.weight += (weight - self.weight) / self.count;
        self.solve(prior, scale);
    }

    /// Minimises the weighted squares plus the distance from the prior, over coefficients that are not negative.
    fn solve(&mut self, prior: &[f64; N], scale: &[f64; N]) {
        for _ in 0..SWEEPS {
            for row in 0..N {
                let (Some(products), Some(measured)) = (self.products.get(row), self.measured.get(row)) else {
                    continue;
                };
                let (Some(own), Some(prior), Some(scale)) = (products.get(row), prior.get(row), scale.get(row)) else {
                    continue;
                };
                let hold = PRIOR_OBSERVATIONS * self.weight * scale * scale;
                let all: f64 = products.iter().zip(&self.coefficients).map(|(p, c)| p * c).sum();
                let Some(coefficient) = self.coefficients.get_mut(row) else { continue };
                let rest = measured - (all - own * *coefficient);
                *coefficient = ((rest + hold * prior) / (own + hold)).max(0.0);
            }
        }
    }
}
