//! `retrieval`: questions behind documents that a search has found. Popular documents come back in many prompts, but in
//! different orders, so that prompts with the same documents share only what stands before the first difference.
//!
//! Source: retrieval-augmented generation as RAGCache (arXiv 2404.12457) describes it: a few documents a question, most
//! requests to a few of them. The figures are ours.

use super::arrivals::{Arrivals, CV, OpenLoop, QPS, RequestContent, SECONDS, STAGES, system, user};
use super::parameters::{MAX_TOKENS, Parameter, Values};
use super::{Built, Descriptor};
use crate::draw::Zipf;
use crate::names::{TextKind, name};
use attache_types::params::ParamError;

pub(super) const WORKLOAD: Descriptor = Descriptor {
    name: "retrieval",
    summary: "Questions behind 5 of 400 documents of 800 tokens, in the order in which a search ranks them.",
    source: "retrieval-augmented generation as in RAGCache; figures ours",
    is_closed: false,
    parameters: &[
        Parameter { name: "documents", default: "400", meaning: "documents that there are" },
        Parameter { name: "zipf", default: "0.9", meaning: "how much more popular the first are; 0: all alike" },
        Parameter { name: "found", default: "5", meaning: "documents of a prompt, no two of them the same" },
        Parameter {
            name: "sorted",
            default: "false",
            meaning: "put them in one order for all, so that equal sets are equal prefixes",
        },
        Parameter { name: "document", default: "800", meaning: "tokens of a document" },
        Parameter { name: "system", default: "500", meaning: "tokens that all prompts begin with" },
        Parameter { name: "question", default: "10..300~60~40", meaning: "tokens of a question, never the same" },
        Parameter { name: "output", default: "20..1000~250~150", meaning: "tokens of an answer" },
        Parameter { default: "10x60/20x120/10x60", ..STAGES },
        QPS,
        SECONDS,
        CV,
    ],
    build,
};

fn build(values: &Values<'_>, seed: u64) -> Built {
    let documents = values.whole("documents", 1..=1_000_000)?;
    let popularity = Zipf::new(documents, values.number("zipf", 0.0..=2.0)?);
    let found = values.whole("found", 1..=100)? as usize;
    // With more, popular ones would be drawn again and again until a rare one comes.
    if found * 2 > documents as usize {
        return Err(ParamError::value("found", found, "at most half of `documents` is allowed"));
    }
    let sorted = values.flag("sorted")?;
    let document = values.tokens("document", 1)?;
    let system_tokens = values.tokens("system", 0)?;
    let question = values.spread("question", 1.0..=MAX_TOKENS)?;
    let output = values.spread("output", 1.0..=MAX_TOKENS)?;
    let arrivals = Arrivals::read(values, 0.0, seed)?;
    Ok(Box::new(OpenLoop::new(arrivals, seed, move |moment, rng| {
        let mut ranks: Vec<usize> = Vec::with_capacity(found);
        while ranks.len() < found {
            let rank = popularity.draw(rng);
            if !ranks.contains(&rank) {
                ranks.push(rank);
            }
        }
        if sorted {
            ranks.sort_unstable();
        }
        let head = system(name(seed, TextKind::System, 0), system_tokens);
        let quoted = ranks.into_iter().map(|rank| user(name(seed, TextKind::Document, rank as u64), document));
        let asked = user(name(seed, TextKind::Prompt, moment.number), question.draw_whole(rng, 1));
        let parts: Vec<_> = std::iter::once(head).chain(quoted).chain([asked]).collect();
        RequestContent::new(parts, output.draw_whole(rng, 1))
    })))
}
