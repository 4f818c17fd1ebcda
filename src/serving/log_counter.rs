//! A counter of events that a stranger can cause at any rate, of which few are logged.

use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::time::Instant;

/// Shortest time between two events that are logged at WARN.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Number of events of one kind, and when one was last logged.
#[derive(Debug, Default)]
pub(crate) struct LogCounter {
    count: AtomicU64,
    /// Time of the last log at WARN, and the count then.
    logged: Mutex<Option<(Instant, u64)>>,
}

impl LogCounter {
    /// Returns the number of events.
    pub(crate) fn get(&self) -> u64 {
        self.count.load(Relaxed)
    }

    /// Counts an event. If it should be logged, returns the number of events before it that were not logged.
    pub(crate) fn count(&self, now: Instant) -> Option<u64> {
        let count = self.count.fetch_add(1, Relaxed) + 1;
        let mut logged = self.logged.lock();
        if logged.is_some_and(|(at, _)| now < at + LOG_INTERVAL) {
            return None;
        }
        let before = logged.replace((now, count)).map_or(0, |(_, count)| count);
        Some(count.saturating_sub(before + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_logged_once_an_interval_and_all_counted() {
        let (events, now) = (LogCounter::default(), Instant::now());
        assert_eq!(events.count(now), Some(0));
        for second in 0..100 {
            assert_eq!(events.count(now + LOG_INTERVAL * second / 100), None);
        }
        assert_eq!(events.count(now + LOG_INTERVAL), Some(100));
        assert_eq!(events.count(now + LOG_INTERVAL * 3), Some(0));
        assert_eq!(events.get(), 103);
    }
}
