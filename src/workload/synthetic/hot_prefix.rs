//! `hot-prefix`: one of many prefixes becomes hot. At first all are asked for alike; then the share of one rises
//! until it is most of the traffic. Who sends a prefix to one server only, overloads that server; who spreads it
//! too soon, copies it everywhere.
//!
//! Source: the hot key of Neutree's bounded-load hashing, whose bound fails on an idle fleet, and KubeAI
//! #519 (a quarter of all requests with one prefix went to one of hundreds of servers). They name no
//! figures; the figures here are ours.

use super::arrivals::{Arrivals, CV, OpenLoop, QPS, RequestContent, SECONDS, system, user};
use super::parameters::{Parameter, Values};
use super::{Built, Descriptor};
use crate::draw;
use crate::names::{TextKind, name};
use rand::RngExt;

pub(super) const WORKLOAD: Descriptor = Descriptor {
    name: "hot-prefix",
    summary: "One of 200 prefixes rises from nothing to 80 % of all requests.",
    source: "Neutree's hot key, KubeAI #519; figures ours",
    is_closed: false,
    parameters: &[
        Parameter {
            name: "keys",
            default: "200",
            meaning: "prefixes; so many that they fill a good part of the caches",
        },
        Parameter { name: "peak", default: "0.8", meaning: "share of all requests that the hot one has in the end" },
        Parameter { name: "prefix", default: "4000", meaning: "tokens of a prefix" },
        Parameter { name: "question", default: "200", meaning: "tokens behind it, unique unless `repeat` is set" },
        Parameter {
            name: "repeat",
            default: "false",
            meaning: "ask each prefix one question again and again: whole prompts come back, as keys that are made of \
             all of one see it",
        },
        Parameter { name: "output", default: "200", meaning: "tokens of an answer" },
        Parameter {
            name: "stages",
            default: "20x300",
            meaning: "QPSxSECONDS with / between them; the share rises evenly over all of them",
        },
        QPS,
        SECONDS,
        CV,
    ],
    build,
};

fn build(values: &Values<'_>, seed: u64) -> Built {
    let keys = values.whole("keys", 1..=10_000_000)?;
    let peak = values.number("peak", 0.0..=1.0)?;
    let prefix = values.tokens("prefix", 1)?;
    let question = values.tokens("question", 1)?;
    let repeat = values.flag("repeat")?;
    let output = values.tokens("output", 1)?;
    let arrivals = Arrivals::read(values, 0.0, seed)?;
    Ok(Box::new(OpenLoop::new(arrivals, seed, move |moment, rng| {
        let is_hot = draw::unit(rng) < peak * moment.progress;
        // Key 0 is the hot one and nothing else.
        let key = if is_hot { 0 } else { rng.random_range(1..=u64::from(keys)) };
        let system = system(name(seed, TextKind::System, key), prefix);
        let asked = if repeat { key } else { moment.number };
        RequestContent::new([system, user(name(seed, TextKind::Prompt, asked), question)], output)
    })))
}
