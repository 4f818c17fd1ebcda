//! When an endpoint is scraped next, and whether its server is still the one it was. Pure: no clock, no I/O.

use crate::settings::ScrapeSettings;
use attache_pool::EndpointMetrics;
use attache_types::clock::Timestamp;
use std::time::Duration;

/// Nothing is scraped more often, whatever is configured: a page costs a vLLM server 3 to 4 ms of its Python thread.
pub const MIN_INTERVAL: Duration = Duration::from_millis(10);
/// A server that fails is asked at least this often, so that its return is noticed.
pub const MAX_BACKOFF: Duration = Duration::from_secs(10);
/// Delays are spread by this part to both sides, so that endpoints discovered together don't stay in step.
pub const JITTER: f64 = 0.1;
/// The start time of one process, read twice, may differ by this much: kernels recompute it when the wall clock is corrected. Seconds.
pub const PROCESS_START_TOLERANCE: f64 = 1.0;

/// What a scrape showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// A page, and requests on it or in our ledger.
    Busy,
    /// A page, and no requests.
    Idle,
    /// No page.
    Failed,
}

/// The timetable of one endpoint.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// When it is asked next.
    pub due: Timestamp,
    /// Failures in a row.
    pub failures: u32,
    delay: Duration,
}

impl Pace {
    /// Asked at once.
    #[must_use]
    pub fn new(now: Timestamp) -> Self {
        Self { due: now, failures: 0, delay: Duration::ZERO }
    }

    /// Sets the next turn after a scrape that ended `now`. `random` is drawn from 0..1.
    ///
    /// A busy endpoint is asked every `interval`; an idle one ever more slowly, doubling up to `idle_interval`; a failing one
    /// likewise up to [`MAX_BACKOFF`].
    pub fn done(&mut self, seen: Seen, now: Timestamp, settings: &ScrapeSettings, random: f64) {
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

    /// Requests were sent to an endpoint that was idle: its next turn comes within `interval`. Returns true when that changed the
    /// timetable. An endpoint that fails keeps its backoff.
    pub fn hurry(&mut self, now: Timestamp, settings: &ScrapeSettings, random: f64) -> bool {
        let fast = settings.interval.max(MIN_INTERVAL);
        // Spread over the whole interval: a burst that wakes every endpoint must not fetch every page in the same moment.
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

/// What tells one process of a server from the next.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Process {
    start: Option<f64>,
    queries: Option<f64>,
    hits: Option<f64>,
}

impl Process {
    /// Takes in a page. Returns true when its process is not the one of the pages before.
    ///
    /// A later start time is a new process. An earlier one is not: several workers behind one port answer in turn, and the
    /// latest of them counts. Counters that went down are asked only where no start time is reported.
    pub fn observe(&mut self, page: &EndpointMetrics) -> bool {
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
