//! How fast a queue that is not empty empties, and so how long a newcomer would stand in it.
//!
//! Not [`Pace`](super::pace::Pace): that counts all who have left by the time that has passed, so that a pool with little to do looks like one
//! that is slow. Here only the time counts in which somebody waited.

use attache_types::clock::Timestamp;
use std::time::Duration;

/// 30 s of waiting: long enough to smooth a batch that ends at once, short enough to follow a pool that grows.
const HALF_LIFE: f64 = 30.0;
/// Fewer than 3 turns, the longer ago the less, say nothing about the next one.
const LEAST_TURNS: f64 = 2.5;

/// Turns that were given, and the time in which somebody waited for one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Drain {
    turns: f64,
    seconds: f64,
    /// Until when that is counted; `None` while nobody waits.
    since: Option<Timestamp>,
}

impl Drain {
    /// So many have had their turn, and so many wait now.
    pub fn moved(&mut self, turns: u32, waiting: u64, now: Timestamp) {
        if let Some(since) = self.since {
            let passed = now.since(since).as_secs_f64();
            let keep = (-passed / HALF_LIFE).exp2();
            self.turns = self.turns * keep + f64::from(turns);
            self.seconds = self.seconds * keep + passed;
        }
        self.since = (waiting > 0).then_some(self.since.map_or(now, |since| since.max(now)));
    }

    /// How long a newcomer would wait with so many before it; `None` while too few have had their turn to tell.
    #[must_use]
    pub fn wait(&self, ahead: u64, now: Timestamp) -> Option<Duration> {
        let rate = self.rate(now)?;
        Some(Duration::try_from_secs_f64((ahead as f64 + 1.0) / rate).unwrap_or(Duration::MAX))
    }

    /// Turns a second while somebody waits; `None` while there were too few to tell.
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
    fn only_the_time_in_which_somebody_waits_counts() {
        let mut drain = Drain::default();
        assert_eq!(drain.wait(0, at(1.0)), None, "nobody has had a turn");
        // A busy second with ten turns, a minute of nothing, another such second.
        for begin in [1.0, 61.0] {
            drain.moved(0, 10, at(begin));
            for i in 1..=10u32 {
                drain.moved(1, 10 - u64::from(i), at(begin + f64::from(i) * 0.1));
            }
        }
        let wait = |ahead, seconds| drain.wait(ahead, at(seconds)).unwrap().as_secs_f64();
        assert!((wait(9, 62.0) - 1.0).abs() < 0.05, "{}", wait(9, 62.0));
        assert!((wait(0, 500.0) - 0.1).abs() < 0.01, "the time in which nobody waits says nothing");
    }

    #[test]
    fn a_queue_that_stands_still_is_slow() {
        let mut drain = Drain::default();
        drain.moved(0, 10, at(1.0));
        drain.moved(2, 8, at(1.2));
        assert_eq!(drain.wait(8, at(1.2)), None, "two turns say little");
        drain.moved(2, 6, at(1.4));
        assert!(drain.wait(0, at(1.4)).unwrap() < Duration::from_millis(150));
        assert!(drain.wait(0, at(9.4)).unwrap() > Duration::from_secs(2), "nobody has had a turn for 8 s");
    }
}
