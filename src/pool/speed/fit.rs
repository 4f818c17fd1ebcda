//! Online linear regression: weighted least squares with forgetting, a prior, bounded influence of outliers, and no
//! negative coefficients. Called by [`super`] alone.

/// Factor by which an observation's weight decreases with each later one; 100 of them halve it. That is a minute or two
/// of traffic on a busy server: a change of load or hardware is learned, noise is not.
const DEFAULT_FORGETTING: f64 = 0.993_1;
/// Weight of the prior: as much as 12 observations.
const PRIOR_OBSERVATIONS: f64 = 12.0;
/// Observations with more than 1.5 times the usual error have no more influence than at that error (Huber).
const HUBER: f64 = 1.5;
/// Lower bound of the usual relative error, a tenth. With less, noise of the clock would look like an outlier.
const SMALLEST_ERROR: f64 = 0.1;
/// Weight of one observation in the usual error, a mean of some 20: a single outlier counts once, a
/// lasting change soon becomes usual.
const ERROR_RATE: f64 = 0.05;
/// Largest value of another picker's fit. Real ones are far smaller.
const MAX_VALUE: f64 = 1e18;
/// Number of observations that another picker's fit can have: forgetting allows no more.
const MAX_COUNT: f64 = 1.0 / (1.0 - DEFAULT_FORGETTING);
/// Sweeps of coordinate descent per observation. A few suffice, since the coefficients start from the previous ones.
const SWEEPS: usize = 4;

/// The coefficients and the sums from which they are computed.
#[derive(Clone, Debug)]
pub(super) struct Fit<const N: usize> {
    coefficients: [f64; N],
    /// Weighted sums of products of features, and of features with measurements.
    products: [[f64; N]; N],
    measured: [f64; N],
    /// Number of observations, with forgotten ones counted less.
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

    /// Returns the number of observations, with forgotten ones counted less.
    pub(super) fn count(&self) -> f64 {
        self.count
    }

    /// Returns the fit of times that are `factor` times as long.
    pub(super) fn scaled(&self, factor: f64) -> Self {
        let mut scaled = self.clone();
        // Weights of observations are inverse squares of times.
        let of_square = factor * factor;
        scaled.coefficients.iter_mut().for_each(|coefficient| *coefficient *= factor);
        scaled.products.iter_mut().flatten().for_each(|sum| *sum /= of_square);
        scaled.measured.iter_mut().for_each(|sum| *sum /= factor);
        scaled.weight /= of_square;
        scaled
    }

    /// Returns all values, for [`Fit::from_values`].
    pub(super) fn values(&self) -> Vec<f64> {
        let sums = self.coefficients.iter().chain(self.products.iter().flatten()).chain(&self.measured);
        sums.chain([&self.count, &self.error, &self.weight]).copied().collect()
    }

    /// Returns the fit with these values; `None` if there are too many or too few, or if one is not possible.
    pub(super) fn from_values(values: &[f64]) -> Option<Self> {
        let mut left = values.iter().copied();
        let mut take = || left.next().filter(|value| (0.0..=MAX_VALUE).contains(value));
        let mut fit = Self::new([0.0; N]);
        for value in fit.coefficients.iter_mut().chain(fit.products.iter_mut().flatten()).chain(&mut fit.measured) {
            *value = take()?;
        }
        (fit.count, fit.error, fit.weight) = (take()?, take()?, take()?);
        (left.next().is_none() && fit.count <= MAX_COUNT).then_some(fit)
    }

    pub(super) fn is_learned(&self) -> bool {
        self.count > 0.0
    }

    /// Returns the prediction for `features`.
    pub(super) fn predict(&self, features: &[f64; N]) -> f64 {
        self.coefficients.iter().zip(features).map(|(c, x)| c * x).sum()
    }

    /// Multiplies the weight of all observations by `keep`, 0 to 1.
    pub(super) fn fade(&mut self, keep: f64) {
        self.products.iter_mut().flatten().chain(&mut self.measured).for_each(|sum| *sum *= keep);
        self.count *= keep;
    }

    /// Adds the observation that `features` took `seconds`. Coefficients that observations do not determine stay near
    /// `prior`; each is held as by [`PRIOR_OBSERVATIONS`] with features of the size `scale`.
    pub(super) fn observe(&mut self, features: &[f64; N], seconds: f64, prior: &[f64; N], scale: &[f64; N]) {
        if !seconds.is_finite() || seconds <= 0.0 || features.iter().any(|x| !x.is_finite()) {
            return;
        }
        let predicted = self.predict(features).max(1e-6);
        // Errors grow with the predicted value, so relative errors are compared.
        let unit = predicted.max(seconds * 0.1);
        let off = ((seconds - predicted) / unit).abs();
        let bound = HUBER * self.error.max(SMALLEST_ERROR);
        let weight = if off > bound { bound / off } else { 1.0 } / (unit * unit);
        // An outlier changes the usual error by a limited amount too.
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

    /// Minimises the weighted squares plus the distance from the prior over non-negative coefficients.
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
