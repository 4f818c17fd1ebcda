//! Ratio of an endpoint's times to its pool's, applied only as far as it is statistically
//! significant. Called by [`super`] alone.
//!
//! Predictions are compared between endpoints, so a ratio that is only noise would send all requests to the
//! endpoint that was lucky. The mean of the logarithms is therefore shrunk by what chance alone would produce
//! (positive-part James-Stein). A pool of equal servers stays equal; a server that is a third slower is detected
//! within a few dozen responses.

/// A ratio is the mean of about the last 40 responses: half a minute of a busy server.
const ANSWERS: f64 = 40.0;
/// Chance is assumed to be eight times the variance of a mean of independent responses, because requests that waited in
/// one queue have similar errors.
const DOUBT: f64 = 8.0;
/// Assumed variance before any measurement: responses are off by a half.
const FIRST_NOISE: f64 = 0.25;
/// Largest logarithm of a single response: a factor of e² ≈ 7.4.
const FARTHEST: f64 = 2.0;

/// Mean of the logarithm of measured over expected time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ratio {
    mean: f64,
    count: f64,
    /// Variance of a single response.
    noise: f64,
}

impl Default for Ratio {
    fn default() -> Self {
        Self { mean: 0.0, count: 0.0, noise: FIRST_NOISE }
    }
}

impl Ratio {
    /// Adds a response that took `measured` seconds and was expected to take `expected` on the pool's average server.
    pub(super) fn observe(&mut self, measured: f64, expected: f64) {
        let ratio = measured / expected.max(1e-6);
        if !ratio.is_finite() {
            return;
        }
        self.count = (self.count + 1.0).min(ANSWERS);
        let off = (ratio.max(1e-6).ln() - self.mean).clamp(-FARTHEST, FARTHEST);
        self.mean += off / self.count;
        // The first response does not show the variance.
        if self.count > 1.0 {
            self.noise += (off * off - self.noise) / (self.count + 2.0);
        }
    }

    /// Returns the number of responses in the ratio, at most 40.
    pub(super) fn count(&self) -> f64 {
        self.count
    }

    /// Returns the significant part of the ratio's logarithm.
    pub(super) fn ln(&self) -> f64 {
        let (sure, chance) = (self.mean * self.mean, DOUBT * self.noise / self.count.max(1.0));
        if sure > chance { self.mean * (1.0 - chance / sure) } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attache_types::rng::for_request;
    use rand::RngExt;

    /// The ratio after 200 responses of a server that is `slower` by a factor, each off by up to 80 %.
    fn learned(slower: f64, seed: u64) -> f64 {
        let mut ratio = Ratio::default();
        for i in 0..200 {
            let noise = for_request(seed, i).random::<f64>() - 0.5;
            ratio.observe(slower * (noise * 1.2).exp(), 1.0);
        }
        ratio.ln().exp()
    }

    #[test]
    fn noise_is_ignored_and_a_difference_is_learned() {
        let equal = (0..50).filter(|seed| (learned(1.0, seed * 7) - 1.0).abs() < 0.03).count();
        assert!(equal >= 45, "{equal} of 50 equal servers stay equal");
        for (slower, least, most) in [(2.0, 1.6, 2.1), (0.5, 0.45, 0.65), (8.0, 6.0, 9.0)] {
            let learned = learned(slower, 3);
            assert!((least..most).contains(&learned), "{slower}: {learned}");
        }
    }

    #[test]
    fn outlier_and_invalid_numbers_change_little() {
        let mut ratio = Ratio::default();
        (0..40).for_each(|_| ratio.observe(1.0, 1.0));
        ratio.observe(1e9, 1.0);
        ratio.observe(f64::NAN, 1.0);
        ratio.observe(1.0, 0.0);
        assert!(ratio.ln().abs() < 0.1, "{}", ratio.ln());
    }
}
