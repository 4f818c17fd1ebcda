//! `round-robin-fairness-policy`: one request of each flow in turn.
//!
//! A new flow goes behind all that wait. When not: requests differ in size; a turn counts the same for 10 tokens and
//! 100,000. Source: GIE and llm-d.

use super::{Fairness, Meter, QueueHead};
use crate::registry::PolicyDescriptor;
use ahash::AHashMap;
use attache_scheduling::plugin::{NoParams, params, section};
use attache_types::clock::Timestamp;
use attache_types::rng::PickRng;
use serde_json::Value;
use std::collections::BTreeMap;

/// Entry of this policy in the registry.
pub const PLUGIN: PolicyDescriptor<dyn Fairness> = PolicyDescriptor {
    name: "round-robin-fairness-policy",
    aliases: &["round-robin"],
    summary: "One request of each flow in turn.",
    source: "GIE and llm-d `round-robin-fairness-policy`",
    parameters: section::<NoParams>,
    build: |value: &Value| {
        params::<NoParams>(value).map(|NoParams {}| Box::new(RoundRobin::default()) as Box<dyn Fairness>)
    },
};

#[derive(Debug, Default)]
struct RoundRobin {
    turns: BTreeMap<u64, u32>,
    turn_of: AHashMap<u32, u64>,
    next: u64,
}

impl RoundRobin {
    fn goes_last(&mut self, flow: u32) {
        self.sleeps(flow);
        self.turns.insert(self.next, flow);
        self.turn_of.insert(flow, self.next);
        self.next += 1;
    }
}

impl Fairness for RoundRobin {
    fn fresh(&self) -> Box<dyn Fairness> {
        Box::new(Self::default())
    }

    fn wakes(&mut self, flow: u32, _: f64, _: QueueHead, _: Timestamp) {
        self.goes_last(flow);
    }

    fn head(&mut self, _: u32, _: QueueHead) {}

    fn sleeps(&mut self, flow: u32) {
        if let Some(turn) = self.turn_of.remove(&flow) {
            self.turns.remove(&turn);
        }
    }

    fn next(&mut self) -> Option<u32> {
        self.turns.first_key_value().map(|(_, flow)| *flow)
    }

    fn last(&mut self) -> Option<u32> {
        self.turns.last_key_value().map(|(_, flow)| *flow)
    }

    fn dispatched(&mut self, flow: u32, _: &mut Meter, _: Timestamp, _: &mut PickRng) {
        self.goes_last(flow);
    }

    fn forget(&mut self, flow: u32) {
        self.sleeps(flow);
    }
}
