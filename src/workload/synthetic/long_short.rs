//! `long-short`: a few prompts of 100,000 tokens among many of 500. A short one behind a long one waits for seconds;
//! who counts requests in place of tokens does not see it coming.
//!
//! Source: ours, after the mix that llm-d's token load and context-length plugins are made for.

use super::arrivals::{Arrivals, CV, OpenLoop, QPS, RequestContent, SECONDS, user};
use super::parameters::{MAX_TOKENS, Parameter, Values};
use super::{Built, Descriptor};
use crate::draw;
use crate::names::{TextKind, name};

pub(super) const WORKLOAD: Descriptor = Descriptor {
    name: "long-short",
    summary: "One prompt in twenty has 100,000 tokens, the others 500; none shares anything.",
    source: "ours, after llm-d's `token-load-scorer` and `context-length-aware`",
    is_closed: false,
    parameters: &[
        Parameter { name: "share", default: "0.05", meaning: "share of the long ones" },
        Parameter { name: "long", default: "100000", meaning: "tokens of a long prompt, or how they are spread" },
        Parameter { name: "short", default: "500", meaning: "tokens of a short prompt, or how they are spread" },
        Parameter { name: "output", default: "10..1000~200~150", meaning: "tokens of an answer" },
        Parameter {
            name: "stages",
            default: "6x300",
            meaning: "QPSxSECONDS with / between them; 33,000 prompt tokens a second load 8 servers of 6,000 to two \
             thirds",
        },
        QPS,
        SECONDS,
        CV,
    ],
    build,
};

fn build(values: &Values<'_>, seed: u64) -> Built {
    let share = values.number("share", 0.0..=1.0)?;
    let long = values.spread("long", 1.0..=MAX_TOKENS)?;
    let short = values.spread("short", 1.0..=MAX_TOKENS)?;
    let output = values.spread("output", 1.0..=MAX_TOKENS)?;
    let arrivals = Arrivals::read(values, 0.0, seed)?;
    Ok(Box::new(OpenLoop::new(arrivals, seed, move |moment, rng| {
        let length = if draw::unit(rng) < share { &long } else { &short };
        let prompt = user(name(seed, TextKind::Prompt, moment.number), length.draw_whole(rng, 1));
        RequestContent::new([prompt], output.draw_whole(rng, 1))
    })))
}
