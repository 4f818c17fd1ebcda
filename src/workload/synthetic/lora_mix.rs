//! `lora-mix`: many LoRA adapters, few of them popular, short prompts. A server holds only some adapters at a time, so
//! who spreads an adapter over all servers makes them swap.
//!
//! Popularity follows Zipf's law, as S-LoRA and Punica assume in their measurements; the figures are ours.

use super::arrivals::{Arrivals, CV, OpenLoop, QPS, RequestContent, SECONDS, STAGES, system, user};
use super::parameters::{MAX_TOKENS, Parameter, Values};
use super::{Built, Descriptor};
use crate::draw::Zipf;
use crate::names::{TextKind, name};
use std::sync::Arc;

pub(super) const WORKLOAD: Descriptor = Descriptor {
    name: "lora-mix",
    summary: "Short prompts to 32 LoRA adapters, `lora-0` the most popular.",
    source: "Zipf popularity as in S-LoRA and Punica; figures ours",
    is_closed: false,
    parameters: &[
        Parameter { name: "adapters", default: "32", meaning: "LoRA adapters, called lora-0, lora-1, …" },
        Parameter { name: "zipf", default: "1", meaning: "how much more popular the first are; 0: all alike" },
        Parameter { name: "base", default: "0.1", meaning: "share of requests to the base model" },
        Parameter { name: "system", default: "200", meaning: "tokens of each adapter's system prompt" },
        Parameter { name: "input", default: "20..1000~200~150", meaning: "tokens of a question" },
        Parameter { name: "output", default: "10..500~100~80", meaning: "tokens of an answer" },
        Parameter { default: "40x120", ..STAGES },
        QPS,
        SECONDS,
        CV,
    ],
    build,
};

fn build(values: &Values<'_>, seed: u64) -> Built {
    let adapters = values.whole("adapters", 1..=100_000)?;
    let popularity = Zipf::new(adapters, values.number("zipf", 0.0..=10.0)?);
    let base = values.number("base", 0.0..=1.0)?;
    let system_tokens = values.tokens("system", 0)?;
    let input = values.spread("input", 1.0..=MAX_TOKENS)?;
    let output = values.spread("output", 1.0..=MAX_TOKENS)?;
    let arrivals = Arrivals::read(values, 0.0, seed)?;
    let names: Vec<Arc<str>> = (0..adapters).map(|i| format!("lora-{i}").into()).collect();
    Ok(Box::new(OpenLoop::new(arrivals, seed, move |moment, rng| {
        let rank = popularity.draw(rng);
        let is_base = crate::draw::unit(rng) < base;
        // The base model's system prompt is one more.
        let key = if is_base { u64::from(adapters) } else { rank as u64 };
        let system = system(name(seed, TextKind::System, key), system_tokens);
        let question = user(name(seed, TextKind::Prompt, moment.number), input.draw_whole(rng, 1));
        let asked = RequestContent::new([system, question], output.draw_whole(rng, 1));
        RequestContent { adapter: names.get(rank).filter(|_| !is_base).cloned(), ..asked }
    })))
}
