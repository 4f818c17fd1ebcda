//! `vtc-pred`: as `vtc-fair`, with the answer charged beforehand by the length that the flow's answers usually have.
//!
//! ```text
//! predicted = (4 · predicted + last) / 5; the first answer's length to begin with, 0 before it
//! ```
//!
//! What comes beyond is charged as it comes, what does not come is given back at the end. A flow with long answers then doesn't get many
//! of them under way before the first is charged. When not: answers vary wildly within a flow. Source: Sheng et al. (OSDI 2024), section 4.4 and
//! artifact (`vtc_len_predict`).

use super::counters::{Counters, Weights};
use super::{Fairness, Head, Meter};
use crate::clock::Timestamp;
use crate::flow::registry::Descriptor;
use crate::rng::PickRng;
use ahash::AHashMap;
use serde_json::Value;

/// Registry entry.
pub const PLUGIN: Descriptor<dyn Fairness> = Descriptor {
    name: "vtc-pred",
    aliases: &[],
    summary: "As vtc-fair, with answers charged beforehand by their usual length.",
    source: "Sheng et al. 2024, VTC with length prediction",
    build: |value: &Value| {
        let counters = Counters::of(Weights::new(value)?);
        Ok(Box::new(VtcPred { counters, usual: AHashMap::new() }) as Box<dyn Fairness>)
    },
};

/// 4, so that the last five answers or so count, as in the artifact.
const MEMORY: f64 = 4.0;

#[derive(Debug)]
struct VtcPred {
    counters: Counters,
    /// Tokens of a flow's usual answer.
    usual: AHashMap<u32, f64>,
}

impl Fairness for VtcPred {
    fn fresh(&self) -> Box<dyn Fairness> {
        Box::new(Self { counters: self.counters.fresh(), usual: AHashMap::new() })
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

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a mean of lengths that are u32")]
    fn dispatched(&mut self, flow: u32, meter: &mut Meter, _: Timestamp, _: &mut PickRng) {
        meter.charged = self.usual.get(&flow).map_or(0, |usual| usual.round() as u32);
        self.counters.charge(flow, i64::from(meter.input), i64::from(meter.charged));
    }

    fn answered(&mut self, flow: u32, meter: &mut Meter, output: u32, _: Timestamp) {
        self.counters.answered(flow, meter, output);
    }

    fn ended(&mut self, flow: u32, meter: &Meter, input: Option<u32>, _: Timestamp) {
        self.counters.ended(flow, meter, input);
        let actual = f64::from(meter.output);
        let usual = self.usual.entry(flow).or_insert(actual);
        *usual = (MEMORY * *usual + actual) / (MEMORY + 1.0);
    }

    fn forget(&mut self, flow: u32) {
        self.counters.forget(flow);
        self.usual.remove(&flow);
    }
}
