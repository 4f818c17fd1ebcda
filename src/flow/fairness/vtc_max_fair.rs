//! `vtc-max-fair`: as `vtc-fair`, but each dispatch raises all counters to that of the last request's flow.
//!
//! ```text
//! floor = counter of the last request's flow, minus the cost of that request so far;
//!         the greatest counter when nothing is in flight
//! all counters are at least the floor
//! ```
//!
//! A flow with little service gets nothing back for it, though it was queued, so the bounds of `vtc-fair` do not hold.
//! When not: nearly always; it exists for comparison. Source: the artifact of Sheng et al. (OSDI 2024).

use super::counters::{Counters, TokenWeights};
use super::{Fairness, Meter, QueueHead};
use crate::registry::PolicyDescriptor;
use attache_scheduling::plugin::{params, section};
use attache_types::clock::Timestamp;
use attache_types::rng::PickRng;
use serde_json::Value;

/// Entry of this policy in the registry.
pub const PLUGIN: PolicyDescriptor<dyn Fairness> = PolicyDescriptor {
    name: "vtc-max-fair",
    aliases: &[],
    summary: "As vtc-fair, with all counters at least that of the flow that was served last.",
    source: "artifact of Sheng et al. 2024",
    parameters: section::<TokenWeights>,
    build: |value: &Value| {
        let counters = Counters::of(params::<TokenWeights>(value)?);
        Ok(Box::new(VtcMaxFair { counters, floor: 0, in_flight: 0, dispatched: 0, last: None }) as Box<dyn Fairness>)
    },
};

#[derive(Debug)]
struct VtcMaxFair {
    counters: Counters,
    floor: u64,
    in_flight: u32,
    dispatched: u64,
    last: Option<Last>,
}

/// The request that was dispatched last.
#[derive(Clone, Copy, Debug)]
struct Last {
    flow: u32,
    meter: Meter,
}

impl VtcMaxFair {
    fn raise(&mut self) {
        let reference = match self.last.filter(|_| self.in_flight > 0) {
            None => self.counters.greatest(),
            Some(Last { flow, meter }) => {
                let cost = self.counters.worth(flow, i64::from(meter.input), i64::from(meter.output));
                self.counters.served(flow).saturating_add_signed(-cost)
            }
        };
        self.floor = self.floor.max(reference);
    }
}

impl Fairness for VtcMaxFair {
    fn fresh(&self) -> Box<dyn Fairness> {
        Box::new(Self { counters: self.counters.fresh(), floor: 0, in_flight: 0, dispatched: 0, last: None })
    }

    fn wakes(&mut self, flow: u32, weight: f64, _: QueueHead, _: Timestamp) {
        self.counters.queue(flow, weight);
    }

    fn head(&mut self, _: u32, _: QueueHead) {}

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
        self.raise();
        self.counters.lift(flow, self.floor);
        self.counters.charge(flow, i64::from(meter.input), 0);
        self.dispatched += 1;
        meter.number = self.dispatched;
        self.in_flight += 1;
        self.last = Some(Last { flow, meter: *meter });
    }

    fn counts_output(&self) -> bool {
        true
    }

    fn answered(&mut self, flow: u32, meter: &mut Meter, output: u32, _: Timestamp) {
        self.counters.lift(flow, self.floor);
        self.counters.answered(flow, meter, output);
        if let Some(last) = self.last.as_mut().filter(|last| last.meter.number == meter.number) {
            last.meter = *meter;
        }
    }

    fn ended(&mut self, flow: u32, meter: &Meter, input: Option<u32>, _: Timestamp) {
        self.counters.lift(flow, self.floor);
        self.counters.ended(flow, meter, input);
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    fn counts_service(&self) -> bool {
        true
    }

    fn served(&mut self, flow: u32, input: u32, output: u32) {
        self.counters.charge(flow, i64::from(input), i64::from(output));
    }

    fn forget(&mut self, flow: u32) {
        self.counters.forget(flow);
    }
}
