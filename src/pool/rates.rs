//! Rates and means of a server over about a minute, from the counters in its scraped metrics.
//!
//! Counters run since the process started, so means of whole histograms hardly change after some hours. [`RateWindow`]
//! keeps earlier counter values, and computes [`Rates`] from the increments since. `scrape::feed` keeps a window for
//! each endpoint; strategies read the result in [`super::EndpointMetrics::rates`].

use attache_types::clock::Timestamp;
use std::collections::VecDeque;
use std::time::Duration;

/// Length of the window, one minute: long enough for a mean of a few requests, short enough to follow the load.
/// AIBrix's drain rate has the same.
pub const WINDOW: Duration = Duration::from_secs(60);
/// Shortest window with a result, 10 s; in a shorter one, a single request would dominate.
pub(crate) const MIN_WINDOW: Duration = Duration::from_secs(10);
/// Longest window with a result, 3 min. A longer one, as after an outage, does not describe the present.
pub(crate) const MAX_WINDOW: Duration = Duration::from_secs(180);
/// Shortest time between two stored scrapes, 5 s: a window has at most 14 of them.
pub(crate) const SPACING: Duration = Duration::from_secs(5);

/// Histograms whose sum and count are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Histogram {
    /// Time that a request waited in the queue, in seconds.
    Queue,
    /// Time from the first scheduling of a request to its first token, in seconds.
    Prefill,
    /// Time from the first token of a request to its last, in seconds.
    Decode,
    /// Time from the arrival of a request to its first token, in seconds.
    FirstToken,
    /// Time from the arrival of a request to its end, in seconds.
    Latency,
    /// Length of a request's prompt, in tokens.
    PromptTokens,
    /// Length of a request's response, in tokens.
    GenerationTokens,
}

const HISTOGRAMS: usize = 7;
const COUNTERS: usize = 3 + 2 * HISTOGRAMS;

/// Counters that grow as long as a server's process runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counter {
    /// Prompt tokens that were computed or found in the cache.
    PromptTokens,
    /// Tokens that were generated.
    GenerationTokens,
    /// Requests that ended without an error.
    Finished,
    /// Sum of the values in a histogram.
    Sum(Histogram),
    /// Number of values in a histogram.
    Count(Histogram),
}

impl Counter {
    const fn index(self) -> usize {
        match self {
            Counter::PromptTokens => 0,
            Counter::GenerationTokens => 1,
            Counter::Finished => 2,
            Counter::Sum(histogram) => 3 + histogram as usize,
            Counter::Count(histogram) => 3 + HISTOGRAMS + histogram as usize,
        }
    }
}

/// Counters of one scrape, or their increments between two; `None` where the server lacks a counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Deserialize, serde::Serialize)]
pub struct Counters([Option<f64>; COUNTERS]);

impl Counters {
    /// Returns the value of a counter.
    #[must_use]
    pub fn get(&self, counter: Counter) -> Option<f64> {
        self.0.get(counter.index()).copied().flatten()
    }

    /// Sets the value of a counter.
    pub fn set(&mut self, counter: Counter, value: f64) {
        if let Some(slot) = self.0.get_mut(counter.index()) {
            *slot = Some(value);
        }
    }

    /// Returns the increments since `earlier`; `None` when a counter decreased, as after a restart.
    fn since(&self, earlier: &Self) -> Option<Self> {
        let mut added = Self::default();
        for (slot, (now, before)) in added.0.iter_mut().zip(self.0.iter().zip(&earlier.0)) {
            *slot = now.zip(*before).map(|(now, before)| now - before);
            if slot.is_some_and(|added| added < 0.0) {
                return None;
            }
        }
        Some(added)
    }

    /// Returns the mean of the values in `histogram`.
    fn mean(&self, histogram: Histogram) -> Option<f64> {
        self.ratio(Counter::Sum(histogram), Counter::Count(histogram))
    }

    fn ratio(&self, sum: Counter, count: Counter) -> Option<f64> {
        let ratio = self.get(sum)? / self.get(count).filter(|n| *n > 0.0)?;
        ratio.is_finite().then_some(ratio)
    }
}

/// Means over requests; `None` without a request, or when the server does not report the values.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Deserialize, serde::Serialize)]
pub struct Means {
    /// Time in the queue, in seconds.
    pub queue_seconds: Option<f64>,
    /// Time from the first scheduling to the first token, in seconds.
    pub prefill_seconds: Option<f64>,
    /// Time from the first token to the last, in seconds.
    pub decode_seconds: Option<f64>,
    /// Length of the prompt, in tokens.
    pub prompt_tokens: Option<f64>,
    /// Length of the response, in tokens.
    pub generation_tokens: Option<f64>,
}

impl Means {
    /// Returns the means of the requests in `counters`: all since the process started, or those of a window.
    ///
    /// For servers without histograms of the phases (SGLang), the phases are derived from the times to the first token
    /// and to the end. For servers without histograms of lengths, the lengths are derived from the token counters.
    #[must_use]
    pub fn of(counters: &Counters) -> Self {
        let queue_seconds = counters.mean(Histogram::Queue);
        let to_first_token = counters.mean(Histogram::FirstToken);
        let in_engine = || to_first_token.map(|t| (t - queue_seconds.unwrap_or(0.0)).max(0.0));
        let after_first_token =
            || counters.mean(Histogram::Latency).zip(to_first_token).map(|(all, first)| (all - first).max(0.0));
        Self {
            queue_seconds,
            prefill_seconds: counters.mean(Histogram::Prefill).or_else(in_engine),
            decode_seconds: counters.mean(Histogram::Decode).or_else(after_first_token),
            prompt_tokens: counters
                .mean(Histogram::PromptTokens)
                .or_else(|| counters.ratio(Counter::PromptTokens, Counter::Finished)),
            generation_tokens: counters
                .mean(Histogram::GenerationTokens)
                .or_else(|| counters.ratio(Counter::GenerationTokens, Counter::Finished)),
        }
    }
}

/// Rates over roughly the last minute. All are `None` in the first `MIN_WINDOW` after the start of
/// the server or of Attaché.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Deserialize, serde::Serialize)]
pub struct Rates {
    /// Prompt tokens per second.
    pub prompt_tokens: Option<f64>,
    /// Generated tokens per second.
    pub generation_tokens: Option<f64>,
    /// Requests per second that ended without an error: the drain rate.
    pub finished: Option<f64>,
    /// Means of the requests that ended in the window.
    pub means: Means,
}

impl Rates {
    fn of(added: &Counters, elapsed: Duration) -> Self {
        let seconds = elapsed.as_secs_f64();
        let rate = |counter| added.get(counter).map(|n| n / seconds).filter(|r| r.is_finite());
        Self {
            prompt_tokens: rate(Counter::PromptTokens),
            generation_tokens: rate(Counter::GenerationTokens),
            finished: rate(Counter::Finished),
            means: Means::of(added),
        }
    }
}

/// Counters of one endpoint over about a minute.
#[derive(Debug, Default)]
pub struct RateWindow {
    /// The oldest first, at least `SPACING` apart, all but the first younger than [`WINDOW`].
    kept: VecDeque<(Timestamp, Counters)>,
}

impl RateWindow {
    /// Adds a scrape at time `at` and returns the rates until then. When a counter has decreased, another process
    /// counts, and the window starts again. Several processes that alternate behind one port therefore have no rates.
    pub fn observe(&mut self, at: Timestamp, counters: &Counters) -> Rates {
        let is_second_old =
            |kept: &VecDeque<(Timestamp, Counters)>| kept.get(1).is_some_and(|s| at.since(s.0) >= WINDOW);
        let is_first_void =
            |kept: &VecDeque<(Timestamp, Counters)>| kept.front().is_some_and(|f| at.since(f.0) > MAX_WINDOW);
        while is_second_old(&self.kept) || is_first_void(&self.kept) {
            self.kept.pop_front();
        }
        if self.kept.back().is_some_and(|(_, last)| counters.since(last).is_none()) {
            self.kept.clear();
        }
        if self.kept.back().is_none_or(|(last, _)| at.since(*last) >= SPACING) {
            self.kept.push_back((at, *counters));
        }
        let baseline = self.kept.front().map(|(from, before)| (at.since(*from), before));
        baseline
            .filter(|(elapsed, _)| *elapsed >= MIN_WINDOW)
            .and_then(|(elapsed, before)| Some(Rates::of(&counters.since(before)?, elapsed)))
            .unwrap_or_default()
    }

    /// Clears the window, when the endpoint has another server process.
    pub fn reset(&mut self) {
        self.kept.clear();
    }
}

#[cfg(test)]
mod tests;
