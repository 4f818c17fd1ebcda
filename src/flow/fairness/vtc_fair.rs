//! `vtc-fair`: the flow that has been served least, in tokens (Virtual Token Counter).
//!
//! A flow's counter grows by what its requests cost: the prompt when it is let through, the answer as its tokens come. A flow that comes anew is
//! lifted to the least counter of those who wait, or, when nobody does, to that of the last who did: who was away has saved nothing up.
//!
//! ```text
//! U = max(inputTokenWeight · longest prompt, outputTokenWeight · tokens under way) / least share
//! counters of flows that wait differ by U at most; what two of them have had while both waited, by 2U
//! ```
//!
//! Work-conserving: with room, somebody who waits goes. When not: there is one tenant; then its order is all that matters. Source: Sheng et
//! al., "Fairness in serving large language models" (OSDI 2024), with real token counts and shares.

use super::counters::{Counters, Weights};
use super::{Fairness, Head, Meter};
use crate::clock::Timestamp;
use crate::flow::registry::Descriptor;
use crate::rng::PickRng;
use serde_json::Value;
use std::fmt::Debug;

/// Registry entry.
pub const PLUGIN: Descriptor<dyn Fairness> = Descriptor {
    name: "vtc-fair",
    aliases: &[],
    summary: "The flow that has been served the fewest tokens.",
    source: "Sheng et al. 2024, VTC",
    build: |value: &Value| Ok(Vtc::boxed(Counters::of(Weights::new(value)?), Unknown)),
};

/// How long an answer will be, for those who charge it beforehand.
pub(super) trait Foretells: Debug + Send + Sync + 'static {
    /// The same, of which nothing has been seen.
    fn fresh(&self) -> Self;

    /// Tokens that the answer to a request of `flow` will have; 0 charges it as it comes.
    fn foretell(&mut self, flow: u32, meter: &Meter, rng: &mut PickRng) -> u32;

    /// An answer has ended.
    fn ended(&mut self, _flow: u32, _meter: &Meter) {}

    /// `flow` is no more.
    fn forget(&mut self, _flow: u32) {}
}

/// The Virtual Token Counter, with answers charged as they come beyond what was foretold of them.
#[derive(Debug)]
pub(super) struct Vtc<F> {
    counters: Counters,
    answers: F,
}

impl<F: Foretells> Vtc<F> {
    pub(super) fn boxed(counters: Counters, answers: F) -> Box<dyn Fairness> {
        Box::new(Self { counters, answers })
    }
}

impl<F: Foretells> Fairness for Vtc<F> {
    fn fresh(&self) -> Box<dyn Fairness> {
        Self::boxed(self.counters.fresh(), self.answers.fresh())
    }

    fn wakes(&mut self, flow: u32, weight: f64, _: Head, _: Timestamp) {
        self.counters.lift(flow, self.counters.floor());
        self.counters.queue(flow, weight);
    }

    fn head(&mut self, _: u32, _: Head) {}

    fn sleeps(&mut self, flow: u32) {
        self.counters.unqueue(flow);
    }

    fn next(&mut self) -> Option<u32> {
        self.counters.first()
    }

    fn last(&mut self) -> Option<u32> {
        self.counters.last()
    }

    fn dispatched(&mut self, flow: u32, meter: &mut Meter, _: Timestamp, rng: &mut PickRng) {
        meter.charged = self.answers.foretell(flow, meter, rng);
        self.counters.charge(flow, i64::from(meter.input), i64::from(meter.charged));
    }

    fn answered(&mut self, flow: u32, meter: &mut Meter, output: u32, _: Timestamp) {
        self.counters.answered(flow, meter, output);
    }

    fn ended(&mut self, flow: u32, meter: &Meter, input: Option<u32>, _: Timestamp) {
        self.counters.ended(flow, meter, input);
        self.answers.ended(flow, meter);
    }

    fn forget(&mut self, flow: u32) {
        self.counters.forget(flow);
        self.answers.forget(flow);
    }
}

/// Nobody says.
#[derive(Debug)]
struct Unknown;

impl Foretells for Unknown {
    fn fresh(&self) -> Self {
        Self
    }

    fn foretell(&mut self, _: u32, _: &Meter, _: &mut PickRng) -> u32 {
        0
    }
}
