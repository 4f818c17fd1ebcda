//! The schedule of an endpoint's scrapes, and detection of restarts. No clock, no I/O.

use crate::settings::ScrapeSettings;
use attache_pool::EndpointMetrics;
use attache_types::clock::Timestamp;
use std::time::Duration;

/// Shortest interval, whatever is configured: a scrape costs a vLLM server 3 to 4 ms of its Python thread.
pub(crate) const MIN_INTERVAL: Duration = Duration::from_millis(10);
/// Longest interval for a failing server, so that its recovery is detected.
pub(crate) const MAX_BACKOFF: Duration = Duration::from_secs(10);
/// Random part of a delay in both directions, so that endpoints discovered together are not scraped together.
pub(crate) const JITTER: f64 = 0.1;
/// Tolerance of a process's start time in seconds: kernels recompute it when the wall clock is corrected.
pub(crate) const PROCESS_START_TOLERANCE: f64 = 1.0;

/// What a scrape found on the endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// It succeeded, and there are requests in the metrics or in our ledger.
    Busy,
    /// It succeeded, and there are no requests.
    Idle,
    /// The scrape failed, so the load is unknown.
    Failed,
}

/// The schedule of one endpoint.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// Time of the next scrape.
    pub due: Timestamp,
    /// Number of consecutive failed scrapes; 0 after a success.
    pub failures: u32,
    delay: Duration,
}

impl Pace {
    /// Creates a schedule whose first scrape is due at once.
    #[must_use]
    pub(crate) fn new(now: Timestamp) -> Self {
        Self { due: now, failures: 0, delay: Duration::ZERO }
    }

    /// Sets the next scrape after one that ended `now`. `random` is in 0..1.
    ///
    /// A busy endpoint is scraped every `interval`. For an idle one the interval doubles up to `idle_interval`, for a
    /// failing one up to `MAX_BACKOFF`.
    pub(crate) fn done(&mut self, seen: Seen, now: Timestamp, settings: &ScrapeSettings, random: f64) {
        let fast = settings.interval.max(MIN_INTERVAL);
        let doubled = self.delay.max(fast / 2).saturating_mul(2);
        let was_failing = self.failures > 0;
        self.failures = if seen == Seen::Failed { self.failures.saturating_add(1) } else { 0 };
        self.delay = match seen {
            Seen::Busy => fast,
            Seen::Idle if was_failing => fast,
            Seen::Idle => doubled.min(settings.idle_interval).max(fast),
            Seen::Failed if !was_failing => fast,
            Seen::Failed => doubled.min(MAX_BACKOFF).max(fast),
        };
        self.due = now.after(spread(self.delay, random));
    }

    /// Moves the next scrape of an idle endpoint that has received requests to within `interval`. Returns true if the
    /// schedule has changed. A failing endpoint keeps its backoff.
    pub(crate) fn hurry(&mut self, now: Timestamp, settings: &ScrapeSettings, random: f64) -> bool {
        let fast = settings.interval.max(MIN_INTERVAL);
        // Spread over the whole interval: a burst that reaches every endpoint must not cause all
        // scrapes at the same time.
        let soon = now.after(fast.mul_f64(random.clamp(0.0, 1.0)));
        let hurries = self.failures == 0 && self.due > now.after(fast);
        if hurries {
            self.due = soon;
            self.delay = fast;
        }
        hurries
    }
}

fn spread(delay: Duration, random: f64) -> Duration {
    delay.mul_f64(1.0 + JITTER * (2.0 * random.clamp(0.0, 1.0) - 1.0))
}

/// Distinguishes one process of a server from the next.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Process {
    start: Option<f64>,
    queries: Option<f64>,
    hits: Option<f64>,
}

impl Process {
    /// Processes metrics. Returns true when their process differs from the previous one's.
    ///
    /// A later start time means a new process. An earlier one does not: several workers behind one port respond
    /// alternately, and the latest of them counts. Decreased counters are used only if no start time is reported.
    pub(crate) fn observe(&mut self, page: &EndpointMetrics) -> bool {
        let fell = |before: Option<f64>, now: Option<f64>| before.zip(now).is_some_and(|(before, now)| now < before);
        let restarted = match (self.start, page.process_start) {
            (Some(before), Some(now)) => now > before + PROCESS_START_TOLERANCE,
            (None, None) => fell(self.queries, page.prefix_queries) || fell(self.hits, page.prefix_hits),
            _ => false,
        };
        let latest = self.start.into_iter().chain(page.process_start).reduce(f64::max);
        *self =
            Self { start: latest, queries: page.prefix_queries.or(self.queries), hits: page.prefix_hits.or(self.hits) };
        restarted
    }
}

#[cfg(test)]
mod tests;
