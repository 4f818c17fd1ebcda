//! A figure that starts as a guess and becomes the mean of what is measured: all measurements count alike until there are enough, then
//! the recent ones count more, so that it follows traffic that changes.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A measurement moves the mean by at least 2 %: it follows the last hundred or so.
const LEAST_STEP: f64 = 0.02;

/// A mean that any number of threads read and change. Of two measurements at the same moment one may be lost; the next one makes up for it.
#[derive(Debug)]
pub(super) struct Average {
    /// Bits of an `f64`.
    mean: AtomicU64,
    seen: AtomicU64,
}

impl Average {
    /// Nothing was measured; the first measurement takes the place of `guess`.
    pub(super) fn new(guess: f64) -> Self {
        Self { mean: AtomicU64::new(guess.to_bits()), seen: AtomicU64::new(0) }
    }

    pub(super) fn get(&self) -> f64 {
        f64::from_bits(self.mean.load(Relaxed))
    }

    pub(super) fn learn(&self, measured: f64) {
        let before = self.seen.fetch_add(1, Relaxed);
        let step = (1.0 / (before as f64 + 1.0)).max(LEAST_STEP);
        let old = self.get();
        self.mean.store((old + (measured - old) * step).to_bits(), Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_mean_at_first_and_follows_later() {
        let average = Average::new(4.0);
        assert!((average.get() - 4.0).abs() < 1e-9);
        let means = [3.0, 2.0, 4.0].map(|measured| {
            average.learn(measured);
            average.get()
        });
        assert!(means.iter().zip([3.0, 2.5, 3.0]).all(|(got, want)| (got - want).abs() < 1e-9), "{means:?}");
        (0..10_000).for_each(|_| average.learn(1.0));
        (0..200).for_each(|_| average.learn(2.0));
        assert!(average.get() > 1.95, "it has not grown stiff: {}", average.get());
    }
}
