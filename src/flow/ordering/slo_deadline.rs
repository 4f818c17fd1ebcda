//! `slo-deadline-ordering-policy`: the request whose first token is due earliest goes first;
//! due = arrival + `x-slo-ttft-ms`.
//!
//! Requests without the header go behind all that have it, by arrival. When not: only some clients send it; the others
//! may wait forever. Source: GIE and llm-d.

use super::{Facts, Ordering};
use crate::registry::PolicyDescriptor;
use attache_scheduling::plugin::{NoParams, params, section};
use attache_types::clock::Timestamp;
use serde_json::Value;

/// Entry of this policy in the registry.
pub const PLUGIN: PolicyDescriptor<dyn Ordering> = PolicyDescriptor {
    name: "slo-deadline-ordering-policy",
    aliases: &["slo-deadline"],
    summary: "The earliest first token that a client has asked for goes first.",
    source: "GIE and llm-d `slo-deadline-ordering-policy`",
    parameters: section::<NoParams>,
    build: |value: &Value| params::<NoParams>(value).map(|NoParams {}| Box::new(SloDeadline) as Box<dyn Ordering>),
};

#[derive(Debug)]
struct SloDeadline;

impl Ordering for SloDeadline {
    fn key(&self, facts: &Facts) -> u64 {
        // Equal keys go by arrival.
        facts.ttft.map_or(Timestamp(u64::MAX), |ttft| facts.arrived.after(ttft)).0
    }
}
