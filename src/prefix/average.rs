//! A running mean that starts from a default value. The first measurements count alike; later ones are weighted
//! exponentially, so that the mean follows traffic that changes.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Smallest weight of one measurement, 2 %: the mean follows roughly the last hundred.
const LEAST_STEP: f64 = 0.02;

/// A mean that any number of threads read and change. When two threads record at the same moment, one measurement may
/// be lost; later ones make up for it.
#[derive(Debug)]
pub(super) struct Average {
    /// The mean as the bits of an `f64`.
    mean: AtomicU64,
    seen: AtomicU64,
}

impl Average {
    /// An average without measurements that returns `guess`; the first measurement replaces it.
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
    fn first_measurements_are_averaged_and_later_ones_followed() {
        let average = Average::new(4.0);
        assert!((average.get() - 4.0).abs() < 1e-9);
        let means = [3.0, 2.0, 4.0].map(|measured| {
            average.learn(measured);
            average.get()
        });
        assert!(means.iter().zip([3.0, 2.5, 3.0]).all(|(got, want)| (got - want).abs() < 1e-9), "{means:?}");
        (0..10_000).for_each(|_| average.learn(1.0));
        (0..200).for_each(|_| average.learn(2.0));
        assert!(average.get() > 1.95, "it still follows new measurements: {}", average.get());
    }
}
