//! What a server did lately: rates and means over about a minute, from the counters of its pages.
//!
//! A server counts since its process started, so the means of its histograms stand still after some hours, whatever happens now.
//! [`RateWindow`] keeps what the counters said some time ago and makes [`Rates`] of what has been added since. One window an endpoint,
//! kept by `scrape::feed`; strategies read the result in [`super::EndpointMetrics::rates`].

use attache_types::clock::Timestamp;
use std::collections::VecDeque;
use std::time::Duration;

/// A minute: long enough that a few requests make a mean, short enough to follow the load. AIBrix's drain rate has the same.
pub const WINDOW: Duration = Duration::from_secs(60);
/// A window shorter than this says nothing: a single request would decide.
pub const MIN_WINDOW: Duration = Duration::from_secs(10);
/// A window longer than this (after an outage) says nothing of the present.
pub const MAX_WINDOW: Duration = Duration::from_secs(180);
/// Counters are kept at most this often: 14 times a window at most.
pub const SPACING: Duration = Duration::from_secs(5);

/// Histograms of which the sum and the count are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Histogram {
    /// Seconds a request waited.
    Queue,
    /// Seconds from its first scheduling to its first token.
    Prefill,
    /// Seconds from its first token to its last.
    Decode,
    /// Seconds from arrival to the first token.
    FirstToken,
    /// Seconds from arrival to the end.
    Latency,
    /// Prompt tokens a request.
    PromptTokens,
    /// Generated tokens a request.
    GenerationTokens,
}

const HISTOGRAMS: usize = 7;
const COUNTERS: usize = 3 + 2 * HISTOGRAMS;

/// What grows as long as a server's process lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counter {
    /// Tokens computed or found in the cache for prompts.
    PromptTokens,
    /// Tokens generated.
    GenerationTokens,
    /// Requests that ended well.
    Finished,
    /// The sum of a histogram.
    Sum(Histogram),
    /// How many values a histogram has taken.
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

/// Counters of one page, or what was added to them between two; `None` where the server has no such counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Deserialize, serde::Serialize)]
pub struct Counters([Option<f64>; COUNTERS]);

impl Counters {
    /// One counter.
    #[must_use]
    pub fn get(&self, counter: Counter) -> Option<f64> {
        self.0.get(counter.index()).copied().flatten()
    }

    /// Says what a counter stands at.
    pub fn set(&mut self, counter: Counter, value: f64) {
        if let Some(slot) = self.0.get_mut(counter.index()) {
            *slot = Some(value);
        }
    }

    /// What was added since `earlier`; `None` when a counter fell, so that the two don't belong together.
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

    /// The mean of the values that `histogram` holds.
    fn mean(&self, histogram: Histogram) -> Option<f64> {
        self.ratio(Counter::Sum(histogram), Counter::Count(histogram))
    }

    fn ratio(&self, sum: Counter, count: Counter) -> Option<f64> {
        let ratio = self.get(sum)? / self.get(count).filter(|n| *n > 0.0)?;
        ratio.is_finite().then_some(ratio)
    }
}

/// Means over requests; `None` without a request, or when the server does not report what is needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Deserialize, serde::Serialize)]
pub struct Means {
    /// Waiting, seconds.
    pub queue_seconds: Option<f64>,
    /// From the first scheduling to the first token, seconds.
    pub prefill_seconds: Option<f64>,
    /// From the first token to the last, seconds.
    pub decode_seconds: Option<f64>,
    /// Prompt length, tokens.
    pub prompt_tokens: Option<f64>,
    /// Answer length, tokens.
    pub generation_tokens: Option<f64>,
}

impl Means {
    /// The means of the requests that `counters` count: all since the process started, or those of a window.
    ///
    /// Servers without histograms of the phases (SGLang) report the time to the first token and to the end; the phases follow from
    /// these. Lengths without histograms follow from the token counters.
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

/// What a server did in the last minute or so; all `None` in the first [`MIN_WINDOW`] after its start or ours.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Deserialize, serde::Serialize)]
pub struct Rates {
    /// Prompt tokens a second.
    pub prompt_tokens: Option<f64>,
    /// Generated tokens a second.
    pub generation_tokens: Option<f64>,
    /// Requests that ended well a second: the drain rate.
    pub finished: Option<f64>,
    /// Means of the requests that ended.
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

/// The counters of one endpoint over about a minute.
#[derive(Debug, Default)]
pub struct RateWindow {
    /// Oldest first, at least [`SPACING`] apart, all but the first younger than [`WINDOW`].
    kept: VecDeque<(Timestamp, Counters)>,
}

impl RateWindow {
    /// Takes in a page that was read at `at`; the rates up to it. When a counter fell the window starts anew: another process counts. So
    /// several processes that answer in turn behind one port have no rates.
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

    /// Forgets everything: the server is another one.
    pub fn reset(&mut self) {
        self.kept.clear();
    }
}

#[cfg(test)]
mod tests;
