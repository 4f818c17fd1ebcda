//! How much there is to do: what is sent to a pool's servers each second, as a mean over a minute or so.

use attache_types::clock::Timestamp;

/// 60 s: longer than a burst and shorter than a rush hour.
const HALF_LIFE: f64 = 60.0;
/// Less than 5 s of requests say nothing of how much there is to do.
const LEAST_SECONDS: f64 = 5.0;

/// What is sent each second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// Seconds of prefill: as many servers are busy with it all the time.
    pub seconds: f64,
    /// Requests.
    pub requests: f64,
}

/// What was sent, the longer ago the less.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Demand {
    sent: Rates,
    at: Timestamp,
    began: Option<Timestamp>,
}

impl Demand {
    /// What counts of it `now`, times a factor.
    fn left(&self, now: Timestamp, factor: f64) -> Rates {
        let counts = (-now.since(self.at).as_secs_f64() / HALF_LIFE).exp2() * factor;
        Rates { seconds: self.sent.seconds * counts, requests: self.sent.requests * counts }
    }

    /// A request has been sent whose prompt takes so many seconds.
    pub(super) fn add(&mut self, seconds: f64, now: Timestamp) {
        let left = self.left(now, 1.0);
        let sent = Rates { seconds: left.seconds + seconds, requests: left.requests + 1.0 };
        *self = Self { sent, at: now, began: self.began.or(Some(now)) };
    }

    pub(super) fn rates(&self, now: Timestamp) -> Rates {
        let Some(began) = self.began else { return Rates::default() };
        let elapsed = now.since(began).as_secs_f64().max(LEAST_SECONDS);
        // The integral of what counts, from the beginning until now.
        let weight = HALF_LIFE / std::f64::consts::LN_2 * (1.0 - (-elapsed / HALF_LIFE).exp2());
        self.left(now, 1.0 / weight)
    }
}
