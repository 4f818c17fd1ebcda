//! `burst`: silence, then many equal prompts at once. The first answers come too late to tell who holds the
//! prefix, and reported metrics are too old to tell who is busy: what a picker has not remembered of its own
//! decisions, it does not know.
//!
//! Source: made for this project.

use super::parameters::{Parameter, Values};
use super::{Built, Descriptor};
use crate::draw;
use crate::names::{TextKind, name};
use crate::pace::seconds;
use crate::{Request, TraceError, Workload};
use attache_sim::content::Piece;
use attache_types::rng::{PickRng, for_request};

pub(super) const WORKLOAD: Descriptor = Descriptor {
    name: "burst",
    summary: "Every 15 seconds 64 equal prompts within half a second, nothing in between.",
    source: "ours",
    is_closed: false,
    parameters: &[
        Parameter { name: "bursts", default: "20", meaning: "how many; each has a prefix of its own" },
        Parameter { name: "size", default: "64", meaning: "requests of a burst: eight for each of eight servers" },
        Parameter { name: "every", default: "15", meaning: "seconds from one to the next; enough to come to rest" },
        Parameter {
            name: "within",
            default: "0.5",
            meaning: "seconds that a burst lasts; less than a scrape interval",
        },
        Parameter { name: "prompt", default: "4000", meaning: "tokens that are equal within a burst" },
        Parameter { name: "question", default: "0", meaning: "tokens behind them, never the same" },
        Parameter { name: "output", default: "200", meaning: "tokens of an answer" },
    ],
    build,
};

struct Burst {
    bursts: u64,
    size: u64,
    every: f64,
    within: f64,
    prompt: u32,
    question: u32,
    output: u32,
    seed: u64,
    number: u64,
    /// The offsets of the current burst's requests that are still to come, the last first.
    offsets: Vec<f64>,
}

fn build(values: &Values<'_>, seed: u64) -> Built {
    let every = values.number("every", 0.001..=1e6)?;
    Ok(Box::new(Burst {
        bursts: values.whole("bursts", 1..=1_000_000)?.into(),
        size: values.whole("size", 1..=1_000_000)?.into(),
        every,
        within: values.number("within", 0.0..=every)?,
        prompt: values.tokens("prompt", 1)?,
        question: values.tokens("question", 0)?,
        output: values.tokens("output", 1)?,
        seed,
        number: 0,
        offsets: Vec::new(),
    }))
}

impl Burst {
    fn offsets(&self, burst: u64) -> Vec<f64> {
        let mut rng: PickRng = for_request(self.seed, burst);
        let mut offsets: Vec<f64> = (0..self.size).map(|_| draw::unit(&mut rng) * self.within).collect();
        offsets.sort_unstable_by(|a, b| b.total_cmp(a));
        offsets
    }
}

impl Workload for Burst {
    fn next(&mut self) -> Result<Option<Request>, TraceError> {
        let burst = self.number / self.size;
        if burst >= self.bursts {
            return Ok(None);
        }
        if self.offsets.is_empty() {
            self.offsets = self.offsets(burst);
        }
        let offset = self.offsets.pop().unwrap_or(self.within);
        let number = self.number;
        self.number += 1;
        let equal = super::arrivals::system(name(self.seed, TextKind::System, burst), self.prompt);
        let own = super::arrivals::user(name(self.seed, TextKind::Prompt, number), self.question);
        let asked = super::arrivals::RequestContent::new([equal, own], self.output);
        Ok(Some(Request {
            number,
            at: seconds(burst as f64 * self.every + offset),
            prompt: asked.prompt,
            answer: Piece::new(name(self.seed, TextKind::Answer, number), asked.answer_tokens),
            adapter: None,
            session: None,
            tenant: None,
            priority: 0,
            headers: Vec::new(),
            turn: None,
        }))
    }

    fn total(&self) -> Option<u64> {
        Some(self.bursts * self.size)
    }
}
