//! `unique`: prompts that share nothing. Caches are of no use, so a policy can only win by balancing, and
//! loses by looking for prefixes.

use super::arrivals::{Arrivals, CV, OpenLoop, QPS, RequestContent, SECONDS, user};
use super::parameters::{Parameter, Values};
use super::{Built, Descriptor};
use crate::names::{TextKind, name};

pub(super) const WORKLOAD: Descriptor = Descriptor {
    name: "unique",
    summary: "Prompts of 5,000 tokens that share nothing, answers of 250.",
    source: "llm-d-benchmark `guide_pd_1` (there 45 requests a second on 10 larger servers)",
    is_closed: false,
    parameters: &[
        Parameter { name: "input", default: "5000", meaning: "tokens of a prompt, or how they are spread" },
        Parameter { name: "output", default: "250", meaning: "tokens of an answer, or how they are spread" },
        Parameter {
            name: "stages",
            default: "8x120",
            meaning: "QPSxSECONDS with / between them; 40,000 prompt tokens a second load 8 servers of 6,000 to five \
             sixths",
        },
        QPS,
        SECONDS,
        CV,
    ],
    build,
};

fn build(values: &Values<'_>, seed: u64) -> Built {
    let input = values.spread("input", 1.0..=super::parameters::MAX_TOKENS)?;
    let output = values.spread("output", 1.0..=super::parameters::MAX_TOKENS)?;
    let arrivals = Arrivals::read(values, 0.0, seed)?;
    Ok(Box::new(OpenLoop::new(arrivals, seed, move |moment, rng| {
        let prompt = user(name(seed, TextKind::Prompt, moment.number), input.draw_whole(rng, 1));
        RequestContent::new([prompt], output.draw_whole(rng, 1))
    })))
}
