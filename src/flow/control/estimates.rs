//! Predictions from recent dequeue rates: the wait of a newcomer, and `Retry-After` of a refusal.

use super::{FlowControl, head};
use crate::band::Band;
use crate::item::{Arrival, Cause, Need, Refusal};
use crate::pace::{self, SHORTEST_RETRY};
use crate::saturation::Gauge;
use attache_types::clock::Timestamp;
use std::time::Duration;

impl<T> FlowControl<T> {
    /// Expected queue wait of a short request that arrives now. `None` if it would not wait, or if too few requests
    /// were dequeued to predict. The longer of two estimates counts: by the dequeue rate of all bands, and by that of
    /// its own band while requests wait there, which includes the effect of higher bands.
    #[must_use]
    pub fn wait(&mut self, arrival: &Arrival<'_>, gauge: &Gauge, now: Timestamp) -> Option<Duration> {
        let (above, before) = self.ahead(arrival, gauge, now)?;
        let band = self.existing(arrival.priority).and_then(|at| self.bands.get(at)).filter(|band| band.requests > 0);
        let own = band.and_then(|band| band.drain.wait(before, now));
        self.drain.wait(above + before, now).max(own)
    }

    /// Requests in higher bands, and in its own band, that would be dequeued before a short request that
    /// arrives now. `None` if it would not wait. Assumes that flows take turns; a flow that was served much
    /// recently may wait for more.
    pub(crate) fn ahead(&mut self, arrival: &Arrival<'_>, gauge: &Gauge, now: Timestamp) -> Option<(u64, u64)> {
        let at = self.band(arrival.priority);
        let above: u64 = self.bands.iter().take(at).map(|b| b.requests).sum();
        let band = self.bands.get(at)?;
        let head = head(band, arrival, self.settings.ttl(arrival.priority), self.sequence, now);
        let before = band.ahead(arrival.flow, head, self.settings.max_flows);
        let short = Need { work: 0.0, ..arrival.need };
        (above + before > 0 || !self.has_capacity(at, short, gauge)).then_some((above, before))
    }

    /// Expected time until the band of this priority is empty, from recent dequeue rates.
    #[must_use]
    pub fn clears(&self, priority: i32, now: Timestamp) -> Duration {
        self.existing(priority).map_or(SHORTEST_RETRY, |at| self.clears_at(at, now))
    }

    pub(super) fn refusal(&self, at: usize, cause: Cause, now: Timestamp) -> Refusal {
        let clears = self.clears_at(at, now);
        let retry_after = if cause == Cause::SharedFull { clears.max(pace::ELSEWHERE_RETRY) } else { clears };
        Refusal { cause, retry_after }
    }

    /// Expected time until the band at `at` and all above it are empty: the longer of the estimates by the dequeue rate
    /// of all bands and by that of the band itself. Without a recent queue, the rate at which requests passed is used.
    fn clears_at(&self, at: usize, now: Timestamp) -> Duration {
        let before = self.bands.iter().take(at.saturating_add(1));
        let (queued, pace) = before.fold((0, 0.0), |(q, r), b| (q + b.requests, r + b.pace.rate(now)));
        let own = |b: &Band| pace::clears(b.requests, b.drain.rate(now).unwrap_or_else(|| b.pace.rate(now)));
        let own = self.bands.get(at).map_or(SHORTEST_RETRY, own);
        own.max(pace::clears(queued, self.drain.rate(now).unwrap_or(pace)))
    }
}
