//! Load of a pool: what is sent to its servers per second, as a mean over about a minute.

use attache_types::clock::Timestamp;

/// Half-life of the mean, 60 s: longer than a burst and shorter than a rush hour.
const HALF_LIFE: f64 = 60.0;
/// Shortest time with a result; requests of less than 5 s do not describe the load.
const LEAST_SECONDS: f64 = 5.0;

/// Load per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// Seconds of prefill per second: the number of servers that it keeps busy.
    pub seconds: f64,
    /// Requests per second.
    pub requests: f64,
}

/// Exponentially weighted sums of what was sent.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Demand {
    sent: Rates,
    at: Timestamp,
    began: Option<Timestamp>,
}

impl Demand {
    /// Returns the weighted sums at `now`, multiplied by a factor.
    fn left(&self, now: Timestamp, factor: f64) -> Rates {
        let counts = (-now.since(self.at).as_secs_f64() / HALF_LIFE).exp2() * factor;
        Rates { seconds: self.sent.seconds * counts, requests: self.sent.requests * counts }
    }

    /// Adds a request whose prompt takes this many seconds.
    pub(super) fn add(&mut self, seconds: f64, now: Timestamp) {
        let left = self.left(now, 1.0);
        let sent = Rates { seconds: left.seconds + seconds, requests: left.requests + 1.0 };
        *self = Self { sent, at: now, began: self.began.or(Some(now)) };
    }

    pub(super) fn rates(&self, now: Timestamp) -> Rates {
        let Some(began) = self.began else { return Rates::default() };
        let elapsed = now.since(began).as_secs_f64().max(LEAST_SECONDS);
        // The integral of the weights from the first request until now.
        let weight = HALF_LIFE / std::f64::consts::LN_2 * (1.0 - (-elapsed / HALF_LIFE).exp2());
        self.left(now, 1.0 / weight)
    }
}
