//! The rate at which requests leave a queue, and from that the value of `Retry-After`.

use attache_types::clock::Timestamp;
use std::time::Duration;

/// 30 s: long enough to smooth a batch that ends at once, short enough to follow a pool that grows.
const HALF_LIFE: f64 = 30.0;
/// 1 s, the shortest `Retry-After`: the header has whole seconds.
pub(crate) const SHORTEST_RETRY: Duration = Duration::from_secs(1);
/// 60 s, the longest `Retry-After`: a queue that does not move allows no prediction.
pub(crate) const LONGEST_RETRY: Duration = Duration::from_secs(60);

/// 10 s, the shortest `Retry-After` when other pools hold the shared capacity. Their dequeue rates are unknown here,
/// and a retry each second would find it full again.
pub(super) const ELSEWHERE_RETRY: Duration = Duration::from_secs(10);

/// Departures from a queue, weighted by recency.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DepartureRate {
    count: f64,
    at: Timestamp,
    began: Option<Timestamp>,
}

impl DepartureRate {
    fn left(&self, now: Timestamp) -> f64 {
        self.count * (-now.since(self.at).as_secs_f64() / HALF_LIFE).exp2()
    }

    /// Records that one request has left.
    pub(super) fn departed(&mut self, now: Timestamp) {
        *self = Self { count: self.left(now) + 1.0, at: now, began: self.began.or(Some(now)) };
    }

    /// Recent departures a second.
    pub(super) fn rate(&self, now: Timestamp) -> f64 {
        let Some(began) = self.began else { return 0.0 };
        let elapsed = now.since(began).as_secs_f64().max(1.0);
        // The integral of the weights, from the first departure until now.
        let weight = HALF_LIFE / std::f64::consts::LN_2 * (1.0 - (-elapsed / HALF_LIFE).exp2());
        self.left(now) / weight
    }
}

/// Expected time until `queued` requests have left at `rate` a second, in whole seconds.
pub(super) fn clears(queued: u64, rate: f64) -> Duration {
    let seconds = (queued as f64 / rate).ceil();
    // An empty queue without departures gives NaN; it gets the shortest value.
    if seconds.is_nan() {
        return SHORTEST_RETRY;
    }
    Duration::from_secs_f64(seconds.clamp(SHORTEST_RETRY.as_secs_f64(), LONGEST_RETRY.as_secs_f64()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_clears_at_recent_departure_rate() {
        let mut pace = DepartureRate::default();
        let at = |seconds: f64| Timestamp((seconds * 1e9) as u64);
        assert_eq!(clears(10, pace.rate(at(1.0))), LONGEST_RETRY, "no request has left");
        assert_eq!(clears(0, pace.rate(at(1.0))), SHORTEST_RETRY);
        for i in 0..600 {
            pace.departed(at(1.0 + f64::from(i) * 0.1));
        }
        let now = at(61.0);
        assert!((pace.rate(now) - 10.0).abs() < 0.2, "{}", pace.rate(now));
        assert_eq!(clears(95, pace.rate(now)), Duration::from_secs(10));
        assert_eq!(clears(5, pace.rate(now)), SHORTEST_RETRY);
        assert!(pace.rate(at(91.0)) < 7.0, "no request has left for half a minute");
    }
}
