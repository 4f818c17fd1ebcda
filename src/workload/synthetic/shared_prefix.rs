//! `shared-prefix-ladder` and `shared-prefix`: groups of prompts with a system prompt in common, asked again
//! and again at rising rates.
//!
//! Each group has one system prompt and several questions. All pairs are put into one random order, which repeats until
//! the time is over, as the generator `shared_prefix` of inference-perf does. The ladder is what llm-d publishes its
//! precise prefix routing with: 150 × 5 prompts of 6,000 + 1,200 tokens fill 73 % of the caches of eight servers, so
//! who scatters the groups recomputes them.

use super::arrivals::{Arrivals, CV, OpenLoop, QPS, RequestContent, SECONDS, STAGES, system, user};
use super::parameters::{Parameter, Values};
use super::{Built, Descriptor};
use crate::names::{TextKind, name, name_of_pair};
use attache_types::rng::for_request;
use rand::seq::SliceRandom;

/// Registry entry of the ladder.
pub(super) const LADDER: Descriptor = Descriptor {
    name: "shared-prefix-ladder",
    summary: "150 groups of 5 prompts with 6,000 shared tokens each, from 3 to 60 requests a second.",
    source: "llm-d-benchmark `guide_precise_1` (its blog on precise prefix routing)",
    is_closed: false,
    parameters: &[
        Parameter { name: "groups", default: "150", meaning: "system prompts" },
        Parameter { name: "prompts", default: "5", meaning: "questions to each" },
        Parameter { name: "system", default: "6000", meaning: "tokens of a system prompt" },
        Parameter { name: "question", default: "1200", meaning: "tokens of a question" },
        Parameter { name: "output", default: "1000", meaning: "tokens of an answer" },
        Parameter {
            name: "stages",
            default: "15x50/3x20/10x20/15x20/20x38/22x34/25x30/30x25/35x21/40x38/43x36/46x33/49x30/52x29/55x27/57x26/60x25",
            meaning: "QPSxSECONDS with / between them; the first warms the caches up",
        },
        Parameter { name: "pause", default: "30", meaning: "seconds of silence between stages" },
        QPS,
        SECONDS,
        CV,
    ],
    build,
};

/// Registry entry of the small one.
pub(super) const SYNTHETIC: Descriptor = Descriptor {
    name: "shared-prefix",
    summary: "32 groups of 32 prompts with 2,048 shared tokens each, from 2 to 20 requests a second.",
    source: "llm-d-benchmark `shared_prefix_synthetic`",
    is_closed: false,
    parameters: &[
        Parameter { name: "groups", default: "32", meaning: "system prompts" },
        Parameter { name: "prompts", default: "32", meaning: "questions to each" },
        Parameter { name: "system", default: "2048", meaning: "tokens of a system prompt" },
        Parameter { name: "question", default: "256", meaning: "tokens of a question" },
        Parameter { name: "output", default: "256", meaning: "tokens of an answer" },
        Parameter { default: "2x50/5x50/8x50/10x50/12x50/15x50/20x50", ..STAGES },
        Parameter { name: "pause", default: "0", meaning: "seconds of silence between stages" },
        QPS,
        SECONDS,
        CV,
    ],
    build,
};

fn build(values: &Values<'_>, seed: u64) -> Built {
    // A million prompts are 8 MB of order.
    let groups = values.whole("groups", 1..=1_000_000)?;
    let prompts = values.whole("prompts", 1..=1_000_000 / groups)?;
    let system_tokens = values.tokens("system", 0)?;
    let question_tokens = values.tokens("question", 1)?;
    let output = values.tokens("output", 1)?;
    let arrivals = Arrivals::read(values, values.number("pause", 0.0..=86_400.0)?, seed)?;
    let mut order: Vec<(u32, u32)> = (0..groups).flat_map(|group| (0..prompts).map(move |p| (group, p))).collect();
    order.shuffle(&mut for_request(seed, u64::MAX));
    let mut turns = order.into_iter().cycle();
    Ok(Box::new(OpenLoop::new(arrivals, seed, move |_, _| {
        let (group, prompt) = turns.next().map_or((0, 0), |(group, prompt)| (u64::from(group), u64::from(prompt)));
        let system = system(name(seed, TextKind::System, group), system_tokens);
        RequestContent::new(
            [system, user(name_of_pair(seed, TextKind::Question, group, prompt), question_tokens)],
            output,
        )
    })))
}
