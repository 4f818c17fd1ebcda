//! How long a prompt's KV cache takes from the server that computed it to the one that goes on from it.
//!
//! ```text
//! seconds of a transfer = t · [1, kilotokens that the decode server lacks]
//! ```
//!
//! Learned by [`Fit`] from what a decode server's first token took longer than its queue, as the decision saw it, would have it: what others
//! were given there while the prompt was computed elsewhere is part of what a transfer costs. How far observations
//! are off says how well the mean is known, and that much a request's two ways must differ before a pool changes from one to the
//! other: below it, the difference is chance. A pool that sends nothing from server to server learns nothing of it either, so what was learned
//! is believed less the longer that is ago, and a network that was slow for a while is tried again. Called by the exchange (what came of it) and by `scheduling` (predictions).

use super::fit::Fit;
use super::{Published, dot};
use crate::clock::Timestamp;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

/// What a pool is thought of before anything was transferred: 2 ms to ask for it and 4 ms for each thousand tokens (128 KiB a token, an
/// 8B model, at 32 GB/s). Rather too fast than too slow: a transfer that is never tried is never learned.
const DEFAULT_TRANSFER: [f64; 2] = [0.002, 0.004];
/// The size of each feature that makes it count.
const SCALE_TRANSFER: [f64; 2] = [1.0, 2.0];
/// The usual error is the mean of some 20 transfers.
const ERROR_RATE: f64 = 0.05;
/// No transfer is faster than this, seconds; what was measured as less is the error of a prediction.
const LEAST: f64 = 1e-4;
/// 60 s: one transfer in some minutes is what it costs to see whether a network has become faster.
const HALF_LIFE: f64 = 60.0;

/// What a pool's transfers have shown.
#[derive(Debug)]
pub struct TransferSpeed {
    fit: Mutex<(Fit<2>, f64)>,
    published: Published<2>,
    /// Seconds by which the mean of the last transfers may be off; f32 bits.
    uncertainty: AtomicU32,
    /// When the last one was observed.
    latest: AtomicU64,
    /// The last request that could go either way was split.
    splits: AtomicBool,
}

impl Default for TransferSpeed {
    fn default() -> Self {
        let speed = Self {
            fit: Mutex::new((Fit::new(DEFAULT_TRANSFER), 0.0)),
            published: Published::default(),
            uncertainty: AtomicU32::new(0),
            latest: AtomicU64::new(0),
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
    pub fn seconds(&self, tokens: u32, now: Timestamp) -> f64 {
        if tokens == 0 {
            return 0.0;
        }
        let (features, believed) = (features(tokens), self.believed(now));
        dot(&self.published.get(), &features) * believed + dot(&DEFAULT_TRANSFER, &features) * (1.0 - believed)
    }

    /// How much of what was learned is believed still, 0 to 1.
    fn believed(&self, now: Timestamp) -> f64 {
        (-now.since(Timestamp(self.latest.load(Relaxed))).as_secs_f64() / HALF_LIFE).exp2()
    }

    /// `tokens` tokens took `seconds`, or less than nothing when the decode server was faster than expected.
    #[expect(clippy::cast_possible_truncation, reason = "seconds; f32 is precise enough")]
    pub fn observe(&self, tokens: u32, seconds: f64, now: Timestamp) {
        if tokens == 0 || !seconds.is_finite() {
            return;
        }
        let mut guard = self.fit.lock();
        let (fit, error) = &mut *guard;
        let believed = self.believed(now);
        fit.fade(believed);
        *error *= believed;
        let features = features(tokens);
        let off = (seconds - fit.predict(&features)).abs();
        *error += (off - *error) * ERROR_RATE;
        fit.observe(&features, seconds.max(LEAST), &DEFAULT_TRANSFER, &SCALE_TRANSFER);
        self.published.set(fit.coefficients());
        // The standard error of a mean that forgets at this rate.
        let uncertainty = *error * (ERROR_RATE / (2.0 - ERROR_RATE)).sqrt();
        self.uncertainty.store((uncertainty as f32).to_bits(), Relaxed);
        self.latest.fetch_max(now.0, Relaxed);
    }

    /// Whether a request is split that costs `whole` seconds in one place and `split` in two. Nothing is remembered of a `preview`.
    pub fn decides(&self, whole: f64, split: f64, now: Timestamp, preview: bool) -> bool {
        let margin = f64::from(f32::from_bits(self.uncertainty.load(Relaxed))) * self.believed(now);
        let gain = whole - split;
        let splits = if self.splits.load(Relaxed) { gain > -margin } else { gain > margin };
        if !preview {
            self.splits.store(splits, Relaxed);
        }
        splits
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const NOW: Timestamp = Timestamp(7_000_000_000);

    #[test]
    fn a_slow_network_is_learned() {
        let speed = TransferSpeed::default();
        assert!((speed.seconds(1_000, NOW) - 0.006).abs() < 1e-6);
        assert_eq!(speed.seconds(0, NOW), 0.0);
        for i in 0..400u32 {
            let tokens = 500 + (i * 379) % 8_000;
            speed.observe(tokens, 0.01 + f64::from(tokens) * 50e-6, NOW);
        }
        let seconds = speed.seconds(4_000, NOW);
        assert!((0.19..0.23).contains(&seconds), "{seconds}");
    }

    #[test]
    fn a_difference_within_the_uncertainty_changes_nothing() {
        let speed = TransferSpeed::default();
        // Transfers that take 10 or 50 ms by chance: the mean of the last of them is known to some 3 ms.
        for i in 0..200 {
            speed.observe(1_000, if i % 2 == 0 { 0.010 } else { 0.050 }, NOW);
        }
        assert!(!speed.decides(0.100, 0.099, NOW, false));
        assert!(speed.decides(0.100, 0.080, NOW, false));
        assert!(speed.decides(0.100, 0.101, NOW, false));
        assert!(!speed.decides(0.100, 0.120, NOW, false));
        assert!(!speed.decides(0.100, 0.099, NOW, false));
    }

    #[test]
    fn a_network_that_was_slow_is_tried_again_now_and_then() {
        let speed = TransferSpeed::default();
        // One request in ten seconds, which takes 100 ms in one place, and 20 ms and the transfer in two.
        let split = |hours: std::ops::Range<u64>, takes: f64| {
            let splits = (hours.start * 360..hours.end * 360).filter(|i| {
                let now = NOW.after(Duration::from_secs(10 * i));
                let splits = speed.decides(0.100, 0.020 + speed.seconds(4_000, now), now, false);
                if splits {
                    speed.observe(4_000, takes, now);
                }
                splits
            });
            splits.count()
        };
        assert_eq!(split(0..1, 0.018), 360);
        // A link that hangs: seconds for what takes milliseconds. That is first taken for chance.
        let hangs = (split(1..2, 8.0), split(2..3, 8.0));
        assert!(hangs.0 < 60 && (2..25).contains(&hangs.1), "{hangs:?}");
        let heals = (split(3..4, 0.018), split(4..5, 0.018));
        assert!(heals.0 > 100 && heals.1 == 360, "{heals:?}");
    }

    #[test]
    fn a_preview_changes_nothing() {
        let speed = TransferSpeed::default();
        for i in 0..200 {
            speed.observe(1_000, if i % 2 == 0 { 0.010 } else { 0.050 }, NOW);
        }
        assert!(speed.decides(0.100, 0.080, NOW, true));
        assert!(!speed.decides(0.100, 0.101, NOW, false), "as if nobody had asked");
    }

    #[test]
    fn what_is_no_number_teaches_nothing() {
        let speed = TransferSpeed::default();
        speed.observe(1_000, f64::NAN, NOW);
        speed.observe(0, 7.0, NOW);
        assert!((speed.seconds(1_000, NOW) - 0.006).abs() < 1e-6);
        // Faster than nothing is the prediction's error.
        speed.observe(1_000, -3.0, NOW);
        assert!(speed.seconds(1_000, NOW) >= 0.0);
    }
}
