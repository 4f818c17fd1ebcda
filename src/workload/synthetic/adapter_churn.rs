//! `adapter-churn`: LoRA adapters that come and go. At any time most requests are to a few of them, and every few
//! seconds others take their places. Who learned where an adapter is loaded has to learn again, and who spreads all
//! adapters over all servers makes them swap.
//!
//! Source: ours, after fleets with an adapter for each customer, who work at different hours.
//! `lora-mix` has popularities that stay.

use super::arrivals::{Arrivals, CV, OpenLoop, QPS, RequestContent, SECONDS, STAGES, system, user};
use super::parameters::{MAX_TOKENS, Parameter, Values};
use super::{Built, Descriptor};
use crate::draw;
use crate::names::{TextKind, name};
use attache_types::params::ParamError;
use rand::RngExt;
use std::sync::Arc;

pub(super) const WORKLOAD: Descriptor = Descriptor {
    name: "adapter-churn",
    summary: "Short prompts to 64 LoRA adapters, of which 12 have nine tenths of the requests; every 10 seconds three \
     of them change.",
    source: "ours",
    is_closed: false,
    parameters: &[
        Parameter { name: "adapters", default: "64", meaning: "LoRA adapters, called lora-0, lora-1, …" },
        Parameter { name: "active", default: "12", meaning: "adapters that most requests are to at a time" },
        Parameter { name: "share", default: "0.9", meaning: "share of requests to those; the rest goes to all alike" },
        Parameter { name: "every", default: "10", meaning: "seconds after which some of them change" },
        Parameter { name: "change", default: "3", meaning: "how many change: the oldest" },
        Parameter { name: "system", default: "300", meaning: "tokens of each adapter's system prompt" },
        Parameter { name: "input", default: "20..1000~200~150", meaning: "tokens of a question" },
        Parameter { name: "output", default: "10..500~100~80", meaning: "tokens of an answer" },
        Parameter { default: "30x150", ..STAGES },
        QPS,
        SECONDS,
        CV,
    ],
    build,
};

fn build(values: &Values<'_>, seed: u64) -> Built {
    let adapters = values.whole("adapters", 1..=100_000)?;
    let active = values.whole("active", 1..=100_000)?;
    if active > adapters {
        return Err(ParamError::value("active", active, "at most as many as `adapters` are allowed"));
    }
    let share = values.number("share", 0.0..=1.0)?;
    let every = values.number("every", 0.001..=1e6)?;
    let change = values.whole("change", 0..=100_000)?;
    let system_tokens = values.tokens("system", 0)?;
    let input = values.spread("input", 1.0..=MAX_TOKENS)?;
    let output = values.spread("output", 1.0..=MAX_TOKENS)?;
    let arrivals = Arrivals::read(values, 0.0, seed)?;
    let duration = arrivals.duration();
    let names: Vec<Arc<str>> = (0..adapters).map(|i| format!("lora-{i}").into()).collect();
    Ok(Box::new(OpenLoop::new(arrivals, seed, move |moment, rng| {
        let changes = (moment.progress * duration / every).floor() as u64;
        let oldest = changes * u64::from(change);
        let is_active = draw::unit(rng) < share;
        let adapter = if is_active { oldest + rng.random_range(0..u64::from(active)) } else { rng.random() };
        let adapter = adapter % u64::from(adapters);
        let system = system(name(seed, TextKind::System, adapter), system_tokens);
        let question = user(name(seed, TextKind::Prompt, moment.number), input.draw_whole(rng, 1));
        let asked = RequestContent::new([system, question], output.draw_whole(rng, 1));
        RequestContent { adapter: names.get(adapter as usize).cloned(), ..asked }
    })))
}
