//! `least-latency`: the endpoint where a request of average length would take the least time, by the servers' own
//! measurements.
//!
//! ```text
//! a, b     = mean prompt and response length of an endpoint's requests, tokens
//! p, d, q  = mean prefill, decode and queue time of its requests, seconds
//! A, B     = mean of all a and of all b in the pool; 10 and 100 if no endpoint has measured any
//! score    = q + p / a x A + d / b x B; the lowest wins, ties at random
//! ```
//!
//! All means are over the requests of the last minute. For an endpoint that finished none in that time, the speed is
//! unknown. While idle it scores 0, so it is tried. With requests it scores the mean of the others, so no burst
//! follows.
//! An endpoint that does not report its times comes last.
//! When not: many requests per second. A response's time is known only after its end; until then all requests follow
//! the same score.
//!
//! Source: AIBrix `least-latency`. Its means cover a server's whole life and hardly move after some hours. It always
//! reads 0 for the queue, and a server that never served wins. `compat: true` restores that.

use attache_pool::{Counter, EndpointMetrics, Histogram, Means};
use attache_scheduling::plugin::{Better, FigureFallback, params, section};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::{Candidate, PickContext, Strategy};
use attache_types::parameters;
use smallvec::SmallVec;

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "least-latency",
    summary: "Picks the endpoint where queue, prefill and decode took the least time in the last minute, for requests \
              of ordinary length.",
    source: "AIBrix `least-latency`",
    parameters: section::<LeastLatency>,
    build: |value, _| params::<LeastLatency>(value).map(|s| Box::new(s) as Box<dyn Strategy>),
};

/// Prompt length in tokens while no endpoint has measured any; AIBrix's value.
const DEFAULT_PROMPT_TOKENS: f64 = 10.0;
/// Response length in tokens while no endpoint has measured any; AIBrix's value.
const DEFAULT_GENERATION_TOKENS: f64 = 100.0;

parameters! {
    /// The strategy and its parameters.
    struct LeastLatency {
        /// Whether to decide as AIBrix: means since the server's start, a queue time of 0, and servers without
        /// measurements first.
        "compat" => compat: bool { default: false; },
        /// Order of endpoints if none reports its times.
        "fallback" => fallback: FigureFallback { default: FigureFallback::default(); },
    }
}

/// The speed that an endpoint reports.
#[derive(Clone, Copy, Debug)]
enum Speed {
    /// The endpoint does not report its times.
    Unreported,
    /// The endpoint finished no request in the window.
    Unmeasured,
    Measured(Means),
}

/// Average length of a request in the pool, in tokens.
#[derive(Clone, Copy, Debug)]
struct Ordinary {
    prompt: f64,
    generation: f64,
}

impl LeastLatency {
    fn speed(&self, metrics: Option<&EndpointMetrics>) -> Speed {
        let Some(metrics) = metrics else { return Speed::Unreported };
        let reports = |histogram| metrics.counters.get(Counter::Count(histogram)).is_some();
        if !reports(Histogram::Decode) && !reports(Histogram::Latency) {
            return Speed::Unreported;
        }
        let means = if self.compat {
            let lifetime = Means::of(&metrics.counters);
            Means { queue_seconds: None, prompt_tokens: None, generation_tokens: None, ..lifetime }
        } else {
            metrics.rates.means
        };
        if means.prefill_seconds.and(means.decode_seconds).is_some() {
            Speed::Measured(means)
        } else {
            Speed::Unmeasured
        }
    }
}

impl Ordinary {
    fn of(speeds: &[Speed]) -> Self {
        let (mut prompt, mut generation) = (Mean::default(), Mean::default());
        for speed in speeds {
            if let Speed::Measured(means) = speed {
                prompt.add(positive(means.prompt_tokens));
                generation.add(positive(means.generation_tokens));
            }
        }
        Self {
            prompt: prompt.get().unwrap_or(DEFAULT_PROMPT_TOKENS),
            generation: generation.get().unwrap_or(DEFAULT_GENERATION_TOKENS),
        }
    }

    /// Seconds that a request of this length takes. Unknown lengths of a server's requests count as average.
    fn latency(self, means: &Means) -> f64 {
        let part = |seconds: Option<f64>, tokens, ordinary| {
            seconds.unwrap_or(0.0) / positive(tokens).unwrap_or(ordinary) * ordinary
        };
        means.queue_seconds.unwrap_or(0.0)
            + part(means.prefill_seconds, means.prompt_tokens, self.prompt)
            + part(means.decode_seconds, means.generation_tokens, self.generation)
    }
}

impl Strategy for LeastLatency {
    fn fallback(&self) -> FigureFallback {
        self.fallback
    }

    fn scores(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f64]) -> Option<Better> {
        let speeds: SmallVec<[Speed; 16]> = candidates.iter().map(|c| self.speed(c.metrics())).collect();
        let ordinary = Ordinary::of(&speeds);
        let mut all = Mean::default();
        for (score, speed) in out.iter_mut().zip(&speeds) {
            if let Speed::Measured(means) = speed {
                *score = ordinary.latency(means);
                all.add(Some(*score));
            }
        }
        // Without any measurement there is nothing to compare with.
        let Some(mean) = all.get() else { return Some(Better::Lower) };
        for ((score, speed), candidate) in out.iter_mut().zip(&speeds).zip(candidates) {
            if let Speed::Unmeasured = speed {
                *score = if self.compat || candidate.requests == 0 { 0.0 } else { mean };
            }
        }
        Some(Better::Lower)
    }
}

fn positive(tokens: Option<f64>) -> Option<f64> {
    tokens.filter(|t| *t > 0.0)
}

/// Accumulates a mean.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    sum: f64,
    n: u32,
}

impl Mean {
    fn add(&mut self, value: Option<f64>) {
        if let Some(value) = value {
            self.sum += value;
            self.n += 1;
        }
    }

    fn get(self) -> Option<f64> {
        (self.n > 0).then(|| self.sum / f64::from(self.n))
    }
}
