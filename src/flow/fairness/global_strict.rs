//! `global-strict-fairness-policy`: no turns; the first of all requests by the band's ordering goes first.
//!
//! When not: one tenant can flood the pool; all others then wait behind its requests. Source: GIE and llm-d.

use super::{Fairness, QueueHead};
use crate::registry::PolicyDescriptor;
use ahash::AHashMap;
use attache_scheduling::plugin::{NoParams, params, section};
use attache_types::clock::Timestamp;
use serde_json::Value;
use std::collections::BTreeSet;

/// Entry of this policy in the registry.
pub const PLUGIN: PolicyDescriptor<dyn Fairness> = PolicyDescriptor {
    name: "global-strict-fairness-policy",
    aliases: &["global-strict"],
    summary: "The first request of all flows by the band's ordering.",
    source: "GIE and llm-d `global-strict-fairness-policy`",
    parameters: section::<NoParams>,
    build: |value: &Value| {
        params::<NoParams>(value).map(|NoParams {}| Box::new(GlobalStrict::default()) as Box<dyn Fairness>)
    },
};

/// No turns between flows.
#[derive(Debug, Default)]
pub struct GlobalStrict {
    order: BTreeSet<(QueueHead, u32)>,
    heads: AHashMap<u32, QueueHead>,
}

impl Fairness for GlobalStrict {
    fn fresh(&self) -> Box<dyn Fairness> {
        Box::new(Self::default())
    }

    fn wakes(&mut self, flow: u32, _: f64, head: QueueHead, _: Timestamp) {
        self.head(flow, head);
    }

    fn head(&mut self, flow: u32, head: QueueHead) {
        if let Some(before) = self.heads.insert(flow, head) {
            self.order.remove(&(before, flow));
        }
        self.order.insert((head, flow));
    }

    fn sleeps(&mut self, flow: u32) {
        if let Some(head) = self.heads.remove(&flow) {
            self.order.remove(&(head, flow));
        }
    }

    fn next(&mut self) -> Option<u32> {
        self.order.first().map(|(_, flow)| *flow)
    }

    fn last(&mut self) -> Option<u32> {
        self.order.last().map(|(_, flow)| *flow)
    }

    fn before(&self, head: &QueueHead, most: usize) -> Option<Vec<u32>> {
        Some(self.order.range(..(*head, 0)).map(|(_, flow)| *flow).take(most).collect())
    }

    fn forget(&mut self, flow: u32) {
        self.sleeps(flow);
    }
}
