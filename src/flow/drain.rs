//! How fast a queue empties while it is not empty, and from that how long a newcomer would wait.
//!
//! [`DepartureRate`](super::pace::DepartureRate) divides departures by all the time that has passed, so a pool with few
//! requests looks slow. Here only the time counts in which a request was queued.

use attache_types::clock::Timestamp;
use std::time::Duration;

/// 30 s of queueing: long enough to smooth a batch that ends at once, short enough to follow a pool that grows.
const HALF_LIFE: f64 = 30.0;
/// Fewer than 3 recent dequeued requests do not allow a prediction (2.5, since their weight decays).
const LEAST_TURNS: f64 = 2.5;

/// Decaying count of dequeued requests, and of the time in which a request was queued.
#[derive(Clone, Copy, Debug, Default)]
pub struct Drain {
    turns: f64,
    seconds: f64,
    /// Up to which moment the time is counted; `None` while the queue is empty.
    since: Option<Timestamp>,
}

impl Drain {
    /// Records that `turns` requests were dequeued and `waiting` are queued now.
    pub fn moved(&mut self, turns: u32, waiting: u64, now: Timestamp) {
        if let Some(since) = self.since {
            let passed = now.since(since).as_secs_f64();
            let keep = (-passed / HALF_LIFE).exp2();
            self.turns = self.turns * keep + f64::from(turns);
            self.seconds = self.seconds * keep + passed;
        }
        self.since = (waiting > 0).then_some(self.since.map_or(now, |since| since.max(now)));
    }

    /// Expected wait of a newcomer behind `ahead` requests; `None` if too few were dequeued recently.
    #[must_use]
    pub fn wait(&self, ahead: u64, now: Timestamp) -> Option<Duration> {
        let rate = self.rate(now)?;
        Some(Duration::try_from_secs_f64((ahead as f64 + 1.0) / rate).unwrap_or(Duration::MAX))
    }

    /// Dequeued requests a second while the queue is not empty; `None` if there were too few recently.
    #[must_use]
    pub fn rate(&self, now: Timestamp) -> Option<f64> {
        let standing = self.since.map_or(0.0, |since| now.since(since).as_secs_f64());
        (self.turns >= LEAST_TURNS).then(|| self.turns / (self.seconds + standing))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: f64) -> Timestamp {
        Timestamp((seconds * 1e9) as u64)
    }

    #[test]
    fn only_time_with_queued_requests_counts() {
        let mut drain = Drain::default();
        assert_eq!(drain.wait(0, at(1.0)), None, "no request was dequeued yet");
        // A busy second with ten dequeued requests, an idle minute, another busy second.
        for begin in [1.0, 61.0] {
            drain.moved(0, 10, at(begin));
            for i in 1..=10u32 {
                drain.moved(1, 10 - u64::from(i), at(begin + f64::from(i) * 0.1));
            }
        }
        let wait = |ahead, seconds| drain.wait(ahead, at(seconds)).unwrap().as_secs_f64();
        assert!((wait(9, 62.0) - 1.0).abs() < 0.05, "{}", wait(9, 62.0));
        assert!((wait(0, 500.0) - 0.1).abs() < 0.01, "idle time does not slow the rate");
    }

    #[test]
    fn queue_without_departures_is_slow() {
        let mut drain = Drain::default();
        drain.moved(0, 10, at(1.0));
        drain.moved(2, 8, at(1.2));
        assert_eq!(drain.wait(8, at(1.2)), None, "two departures are too few to predict");
        drain.moved(2, 6, at(1.4));
        assert!(drain.wait(0, at(1.4)).unwrap() < Duration::from_millis(150));
        assert!(drain.wait(0, at(9.4)).unwrap() > Duration::from_secs(2), "no request was dequeued for 8 s");
    }
}
