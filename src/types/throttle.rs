//! How often an event that repeats is logged.

use super::clock::Timestamp;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// One minute: the least time between two log messages about the same kind of event. A log of one line a minute shows
/// that a state lasts, and costs nothing.
const DEFAULT_PERIOD: Duration = Duration::from_secs(60);

/// Limits the log messages about one kind of event: the first is logged, then one a minute.
#[derive(Debug, Default)]
pub struct Throttle {
    /// The time from which the next event is logged, nanoseconds.
    next: AtomicU64,
    /// Number of events that were not logged since the last that was.
    skipped: AtomicU64,
}

impl Throttle {
    /// Counts an event. Returns the number of events since the last logged one if this event is to be logged.
    pub fn admit(&self, now: Timestamp) -> Option<u64> {
        let next = self.next.load(Relaxed);
        let later = now.after(DEFAULT_PERIOD).0;
        if now.0 < next || self.next.compare_exchange(next, later, Relaxed, Relaxed).is_err() {
            self.skipped.fetch_add(1, Relaxed);
            return None;
        }
        Some(self.skipped.swap(0, Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_event_a_minute_is_logged_and_the_others_are_counted() {
        let (throttle, second) = (Throttle::default(), |n: u64| Timestamp(n * 1_000_000_000));
        let logged = [1, 2, 60, 61, 62, 200].map(|at| throttle.admit(second(at)));
        assert_eq!(logged, [Some(0), None, None, Some(2), None, Some(1)]);
    }
}
