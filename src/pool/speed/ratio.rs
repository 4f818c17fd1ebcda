//! How many times slower than its pool an endpoint is, believed only as far as it is significant. Called by [`super`] alone.
//!
//! Predictions are compared between endpoints, so a ratio that is nothing but noise sends everybody to whoever was lucky of late. The mean
//! of the logarithms is therefore shrunk by what chance alone would make of it (positive-part James-Stein): a pool of equal servers
//! stays equal, and one that is a third slower is found out within a few dozen answers.

/// A ratio is the mean of the last 40 answers or so: half a minute of a busy server.
const ANSWERS: f64 = 40.0;
/// Chance is taken for eight times the variance of a mean of independent answers: errors of neighbours are alike, since they waited in one
/// queue.
const DOUBT: f64 = 8.0;
/// Before anything was measured answers are thought to be off by a half.
const FIRST_NOISE: f64 = 0.25;
/// No answer counts for more than a factor of e² ≈ 7.4 from what was expected.
const FARTHEST: f64 = 2.0;

/// The mean of the logarithm of measured over expected.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ratio {
    mean: f64,
    count: f64,
    /// The variance of a single answer.
    noise: f64,
}

impl Default for Ratio {
    fn default() -> Self {
        Self { mean: 0.0, count: 0.0, noise: FIRST_NOISE }
    }
}

impl Ratio {
    /// What took `measured` seconds would have taken the pool `expected`.
    pub(super) fn observe(&mut self, measured: f64, expected: f64) {
        let ratio = measured / expected.max(1e-6);
        if !ratio.is_finite() {
            return;
        }
        self.count = (self.count + 1.0).min(ANSWERS);
        let off = (ratio.max(1e-6).ln() - self.mean).clamp(-FARTHEST, FARTHEST);
        self.mean += off / self.count;
        // The first answer says nothing about how far answers lie apart.
        if self.count > 1.0 {
            self.noise += (off * off - self.noise) / (self.count + 2.0);
        }
    }

    /// The logarithm of the ratio as far as it is more than chance.
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

    /// The ratio after 200 answers of a server that is `slower` by a factor, each off by up to 80 %.
    fn learned(slower: f64, seed: u64) -> f64 {
        let mut ratio = Ratio::default();
        for i in 0..200 {
            let noise = for_request(seed, i).random::<f64>() - 0.5;
            ratio.observe(slower * (noise * 1.2).exp(), 1.0);
        }
        ratio.ln().exp()
    }

    #[test]
    fn chance_is_not_believed_and_a_difference_is() {
        let equal = (0..50).filter(|seed| (learned(1.0, seed * 7) - 1.0).abs() < 0.03).count();
        assert!(equal >= 45, "{equal} of 50 equal servers stay equal");
        for (slower, least, most) in [(2.0, 1.6, 2.1), (0.5, 0.45, 0.65), (8.0, 6.0, 9.0)] {
            let learned = learned(slower, 3);
            assert!((least..most).contains(&learned), "{slower}: {learned}");
        }
    }

    #[test]
    fn one_wild_answer_and_no_number_change_little() {
        let mut ratio = Ratio::default();
        (0..40).for_each(|_| ratio.observe(1.0, 1.0));
        ratio.observe(1e9, 1.0);
        ratio.observe(f64::NAN, 1.0);
        ratio.observe(1.0, 0.0);
        assert!(ratio.ln().abs() < 0.1, "{}", ratio.ln());
    }
}
