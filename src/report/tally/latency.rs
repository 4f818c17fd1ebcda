//! The distribution of one duration. Called by [`super::Tally`]. Pure.

use hdrhistogram::Histogram;
use std::time::Duration;

/// Largest duration that is recorded, microseconds: ten hours, longer than any request waits.
/// Longer ones count as this.
pub const MAX_MICROS: u64 = 36_000_000_000;
/// Significant decimal digits that are kept: a quantile is then right to a thousandth, finer
/// than any two policies differ.
pub const DIGITS: u8 = 3;

/// Durations from 1 us to 10 h, to three digits, with an exact mean. About 200 KiB, whatever their number.
#[derive(Clone, Debug)]
pub struct Latency {
    micros: Histogram<u64>,
    /// Exact, as a mean out of the histogram would be rounded.
    nanos: u128,
}

impl Default for Latency {
    fn default() -> Self {
        let micros =
            Histogram::new_with_bounds(1, MAX_MICROS, DIGITS).expect("the bounds and the digits are constants");
        Self { micros, nanos: 0 }
    }
}

impl Latency {
    /// Counts one duration. A longer one than [`MAX_MICROS`] counts as that, except in the mean.
    pub fn add(&mut self, time: Duration) {
        self.add_times(time, 1);
    }

    /// Counts a duration `times` times.
    pub fn add_times(&mut self, time: Duration, times: u32) {
        // Rounded up, so that what took any time at all is not shown as none.
        let micros = u64::try_from(time.as_nanos().div_ceil(1_000)).unwrap_or(u64::MAX);
        self.micros.saturating_record_n(micros.min(MAX_MICROS), times.into());
        self.nanos += time.as_nanos() * u128::from(times);
    }

    /// Number of durations that were recorded.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.micros.len()
    }

    /// The mean, seconds; `None` if there are no durations.
    #[must_use]
    pub fn mean(&self) -> Option<f64> {
        (self.count() > 0).then(|| self.nanos as f64 / 1e9 / self.count() as f64)
    }

    /// The quantile `q` (0..=1), seconds; `None` if there are no durations.
    #[must_use]
    pub fn quantile(&self, q: f64) -> Option<f64> {
        (self.count() > 0).then(|| self.micros.value_at_quantile(q) as f64 / 1e6)
    }
}
