//! `throughput`: the endpoint that computes the fewest tokens per second; a prompt token counts twice.
//!
//! ```text
//! score = 2 x prompt tokens/s + generated tokens/s, over the last minute; the lowest wins, ties at random
//! ```
//!
//! Despite its name it balances tokens over endpoints; it does not prefer the fast one. An endpoint that does not
//! report both counters, or has been known for less than ten seconds, comes last.
//! When not: servers differ in speed, since a fast server gets no more tokens than a slow one.
//! Source: AIBrix `throughput`. Release 0.4 has this formula over gauges that vLLM no longer exports. Later releases
//! use tokens per request, from a query that reads as 0, and so pick at random; use `random` for that.

use attache_scheduling::plugin::{Better, FigureFallback, FigureParams, params, section};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::{Candidate, PickContext, Strategy};

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "throughput",
    summary: "Picks the endpoint that computes the fewest tokens a second, prompt tokens counting twice.",
    source: "AIBrix `throughput`",
    parameters: section::<FigureParams>,
    build: |value, _| params(value).map(|params| Box::new(Throughput(params)) as Box<dyn Strategy>),
};

/// Weight of a prompt token relative to a generated one.
const PROMPT_WEIGHT: f64 = 2.0;

#[derive(Debug)]
struct Throughput(FigureParams);

impl Strategy for Throughput {
    fn scores(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f64]) -> Option<Better> {
        for (score, candidate) in out.iter_mut().zip(candidates) {
            let rates = candidate.metrics().map(|m| m.rates).unwrap_or_default();
            if let Some((prompt, generation)) = rates.prompt_tokens.zip(rates.generation_tokens) {
                *score = PROMPT_WEIGHT * prompt + generation;
            }
        }
        Some(Better::Lower)
    }

    fn fallback(&self) -> FigureFallback {
        self.0.fallback
    }
}
