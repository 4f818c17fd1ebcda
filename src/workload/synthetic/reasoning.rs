//! `reasoning`: short questions to a model that thinks for long. Prompts cost next to nothing; answers hold their
//! places in the batch for a minute and more, and their lengths differ by a factor of ten. Who counts requests only, or
//! prompts only, fills some servers with long ones.
//!
//! Lengths are those of published reasoning traffic in their order of magnitude (means of 2,000 to 8,000 tokens); how
//! they are spread is ours.

use super::arrivals::{Arrivals, CV, OpenLoop, QPS, RequestContent, SECONDS, STAGES, system, user};
use super::parameters::{MAX_TOKENS, Parameter, Values};
use super::{Built, Descriptor};
use crate::names::{TextKind, name};

pub(super) const WORKLOAD: Descriptor = Descriptor {
    name: "reasoning",
    summary: "Questions of 300 tokens, answers of 3,000 in the mean and 16,000 at most.",
    source: "reasoning models' answers in their order of magnitude; figures ours",
    is_closed: false,
    parameters: &[
        Parameter { name: "system", default: "500", meaning: "tokens that all prompts begin with" },
        Parameter { name: "input", default: "30..3000~300~300", meaning: "tokens of a question" },
        Parameter {
            name: "output",
            default: "200..16000~3000~2500",
            meaning: "tokens of an answer, thoughts included",
        },
        Parameter { default: "4x60/7x180/4x60", ..STAGES },
        QPS,
        SECONDS,
        CV,
    ],
    build,
};

fn build(values: &Values<'_>, seed: u64) -> Built {
    let system_tokens = values.tokens("system", 0)?;
    let input = values.spread("input", 1.0..=MAX_TOKENS)?;
    let output = values.spread("output", 1.0..=MAX_TOKENS)?;
    let arrivals = Arrivals::read(values, 0.0, seed)?;
    Ok(Box::new(OpenLoop::new(arrivals, seed, move |moment, rng| {
        let head = system(name(seed, TextKind::System, 0), system_tokens);
        let question = user(name(seed, TextKind::Prompt, moment.number), input.draw_whole(rng, 1));
        RequestContent::new([head, question], output.draw_whole(rng, 1))
    })))
}
