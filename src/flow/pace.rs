//! How fast a queue moves, and so how long what stands in it will take.

use attache_types::clock::Timestamp;
use std::time::Duration;

/// 30 s: long enough to smooth a batch that ends at once, short enough to follow a pool that grows.
const HALF_LIFE: f64 = 30.0;
/// 1 s: the shortest `Retry-After` that can be said.
pub const SHORTEST_RETRY: Duration = Duration::from_secs(1);
/// 60 s: a queue that does not move says nothing about when it will.
pub const LONGEST_RETRY: Duration = Duration::from_secs(60);

/// 10 s: how fast the queues of other pools go is not known here, and whoever comes again each second finds their room as full as before.
pub(super) const ELSEWHERE_RETRY: Duration = Duration::from_secs(10);

/// Departures, the longer ago the less.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
    count: f64,
    at: Timestamp,
    began: Option<Timestamp>,
}

impl Pace {
    fn left(&self, now: Timestamp) -> f64 {
        self.count * (-now.since(self.at).as_secs_f64() / HALF_LIFE).exp2()
    }

    /// One has left.
    pub(super) fn departed(&mut self, now: Timestamp) {
        *self = Self { count: self.left(now) + 1.0, at: now, began: self.began.or(Some(now)) };
    }

    /// Departures a second, of late.
    pub(super) fn rate(&self, now: Timestamp) -> f64 {
        let Some(began) = self.began else { return 0.0 };
        let elapsed = now.since(began).as_secs_f64().max(1.0);
        // The integral of what counts, from the first departure until now.
        let weight = HALF_LIFE / std::f64::consts::LN_2 * (1.0 - (-elapsed / HALF_LIFE).exp2());
        self.left(now) / weight
    }
}

/// When `queued` will have left at so many a second, whole seconds.
pub(super) fn clears(queued: u64, rate: f64) -> Duration {
    let seconds = (queued as f64 / rate).ceil();
    // Nothing has left: NaN for an empty queue, which is as good as the shortest.
    if seconds.is_nan() {
        return SHORTEST_RETRY;
    }
    Duration::from_secs_f64(seconds.clamp(SHORTEST_RETRY.as_secs_f64(), LONGEST_RETRY.as_secs_f64()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_clears_at_the_rate_at_which_it_has_moved() {
        let mut pace = Pace::default();
        let at = |seconds: f64| Timestamp((seconds * 1e9) as u64);
        assert_eq!(clears(10, pace.rate(at(1.0))), LONGEST_RETRY, "nothing has moved");
        assert_eq!(clears(0, pace.rate(at(1.0))), SHORTEST_RETRY);
        for i in 0..600 {
            pace.departed(at(1.0 + f64::from(i) * 0.1));
        }
        let now = at(61.0);
        assert!((pace.rate(now) - 10.0).abs() < 0.2, "{}", pace.rate(now));
        assert_eq!(clears(95, pace.rate(now)), Duration::from_secs(10));
        assert_eq!(clears(5, pace.rate(now)), SHORTEST_RETRY);
        assert!(pace.rate(at(91.0)) < 7.0, "it has stood still for half a minute");
    }
}
