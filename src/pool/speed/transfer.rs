//! How long a prompt's KV cache takes from the server that computed it to the one that goes on from it.
//!
//! ```text
//! seconds of a transfer = t · [1, kilotokens that the decode server lacks]
//! ```
//!
//! Learned by [`Fit`] from what a decode server's first token took longer than its queue, as the decision saw it, would have it: what others
//! were given there while the prompt was computed elsewhere is part of what a transfer costs. How far observations
//! are off says how well the mean is known, and that much a request's two ways must differ before a pool changes from one to the
//! other: below it, the difference is chance. Called by the exchange (what came of it) and by `scheduling` (predictions).

use super::fit::Fit;
use super::{Published, dot};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

/// What a pool is thought of before anything was transferred: 2 ms to ask for it and 4 ms for each thousand tokens (128 KiB a token, an
/// 8B model, at 32 GB/s). Rather too fast than too slow: a transfer that is never tried is never learned.
const DEFAULT_TRANSFER: [f64; 2] = [0.002, 0.004];
/// The size of each feature that makes it count.
const SCALE_TRANSFER: [f64; 2] = [1.0, 2.0];
/// The usual error is the mean of some 20 transfers.
const ERROR_RATE: f64 = 0.05;
/// No transfer is faster than this, seconds; what was measured as less is the error of a prediction.
const LEAST: f64 = 1e-4;

/// What a pool's transfers have shown.
#[derive(Debug)]
pub struct TransferSpeed {
    fit: Mutex<(Fit<2>, f64)>,
    published: Published<2>,
    /// Seconds by which the mean of the last transfers may be off; f32 bits.
    uncertainty: AtomicU32,
    /// The last request that could go either way was split.
    splits: AtomicBool,
}

impl Default for TransferSpeed {
    fn default() -> Self {
        let speed = Self {
            fit: Mutex::new((Fit::new(DEFAULT_TRANSFER), 0.0)),
            published: Published::default(),
            uncertainty: AtomicU32::new(0),
            splits: AtomicBool::new(false),
        };
        speed.published.set(&DEFAULT_TRANSFER);
        speed
    }
}

fn features(tokens: u32) -> [f64; 2] {
    [1.0, f64::from(tokens) / 1e3]
}

impl TransferSpeed {
    /// Seconds that `tokens` tokens are expected to take; 0 for none, which nobody asks for.
    #[must_use]
    pub fn seconds(&self, tokens: u32) -> f64 {
        if tokens == 0 { 0.0 } else { dot(&self.published.get(), &features(tokens)) }
    }

    /// `tokens` tokens took `seconds`, or less than nothing when the decode server was faster than expected.
    #[expect(clippy::cast_possible_truncation, reason = "seconds; f32 is precise enough")]
    pub fn observe(&self, tokens: u32, seconds: f64) {
        if tokens == 0 || !seconds.is_finite() {
            return;
        }
        let mut guard = self.fit.lock();
        let (fit, error) = &mut *guard;
        let features = features(tokens);
        let off = (seconds - fit.predict(&features)).abs();
        *error += (off - *error) * ERROR_RATE;
        fit.observe(&features, seconds.max(LEAST), &DEFAULT_TRANSFER, &SCALE_TRANSFER);
        self.published.set(fit.coefficients());
        // The standard error of a mean that forgets at this rate.
        let uncertainty = *error * (ERROR_RATE / (2.0 - ERROR_RATE)).sqrt();
        self.uncertainty.store((uncertainty as f32).to_bits(), Relaxed);
    }

    /// Whether a request is split that costs `whole` seconds in one place and `split` in two.
    pub fn decides(&self, whole: f64, split: f64) -> bool {
        let margin = f64::from(f32::from_bits(self.uncertainty.load(Relaxed)));
        let gain = whole - split;
        let splits = if self.splits.load(Relaxed) { gain > -margin } else { gain > margin };
        self.splits.store(splits, Relaxed);
        splits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_network_is_learned() {
        let speed = TransferSpeed::default();
        assert!((speed.seconds(1_000) - 0.006).abs() < 1e-6);
        assert_eq!(speed.seconds(0), 0.0);
        for i in 0..400u32 {
            let tokens = 500 + (i * 379) % 8_000;
            speed.observe(tokens, 0.01 + f64::from(tokens) * 50e-6);
        }
        let seconds = speed.seconds(4_000);
        assert!((0.19..0.23).contains(&seconds), "{seconds}");
    }

    #[test]
    fn a_difference_within_the_uncertainty_changes_nothing() {
        let speed = TransferSpeed::default();
        // Transfers that take 10 or 50 ms by chance: the mean of the last of them is known to some 3 ms.
        for i in 0..200 {
            speed.observe(1_000, if i % 2 == 0 { 0.010 } else { 0.050 });
        }
        assert!(!speed.decides(0.100, 0.099));
        assert!(speed.decides(0.100, 0.080));
        assert!(speed.decides(0.100, 0.101));
        assert!(!speed.decides(0.100, 0.120));
        assert!(!speed.decides(0.100, 0.099));
    }

    #[test]
    fn what_is_no_number_teaches_nothing() {
        let speed = TransferSpeed::default();
        speed.observe(1_000, f64::NAN);
        speed.observe(0, 7.0);
        assert!((speed.seconds(1_000) - 0.006).abs() < 1e-6);
        // Faster than nothing is the prediction's error.
        speed.observe(1_000, -3.0);
        assert!(speed.seconds(1_000) >= 0.0);
    }
}
