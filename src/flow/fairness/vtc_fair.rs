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

/// Registry entry.
pub const PLUGIN: Descriptor<dyn Fairness> = Descriptor {
    name: "vtc-fair",
    aliases: &[],
    summary: "The flow that has been served the fewest tokens.",
    source: "Sheng et al. 2024, VTC",
    build: |value: &Value| {
        let counters = Counters::of(Weights::new(value)?);
        Ok(Box::new(VtcFair { counters }) as Box<dyn Fairness>)
    },
};

#[derive(Debug)]
struct VtcFair {
    counters: Counters,
}

impl Fairness for VtcFair {
    fn fresh(&self) -> Box<dyn Fairness> {
        Box::new(Self { counters: self.counters.fresh() })
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

    fn dispatched(&mut self, flow: u32, meter: &mut Meter, _: Timestamp, _: &mut PickRng) {
        self.counters.charge(flow, i64::from(meter.input), 0);
    }

    fn answered(&mut self, flow: u32, meter: &mut Meter, output: u32, _: Timestamp) {
        self.counters.answered(flow, meter, output);
    }

    fn ended(&mut self, flow: u32, meter: &Meter, input: Option<u32>, _: Timestamp) {
        self.counters.ended(flow, meter, input);
    }

    fn forget(&mut self, flow: u32) {
        self.counters.forget(flow);
    }
}
