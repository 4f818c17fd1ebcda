//! `slo-deadline-ordering-policy`: whose first token is due first; due = arrival + `x-slo-ttft-ms`.
//!
//! Who asks for nothing goes behind all who do, as they came. When not: some clients ask and others don't; these may wait for ever.
//! Source: GIE and llm-d.

use super::{Facts, Ordering};
use crate::registry::Descriptor;
use attache_scheduling::plugin::{NoParams, params};
use attache_types::clock::Timestamp;
use serde_json::Value;

/// Registry entry.
pub const PLUGIN: Descriptor<dyn Ordering> = Descriptor {
    name: "slo-deadline-ordering-policy",
    aliases: &["slo-deadline"],
    summary: "The earliest first token that a client has asked for goes first.",
    source: "GIE and llm-d `slo-deadline-ordering-policy`",
    build: |value: &Value| params::<NoParams>(value).map(|NoParams {}| Box::new(SloDeadline) as Box<dyn Ordering>),
};

#[derive(Debug)]
struct SloDeadline;

impl Ordering for SloDeadline {
    fn key(&self, facts: &Facts) -> u64 {
        // Equal keys go as they came.
        facts.ttft.map_or(Timestamp(u64::MAX), |ttft| facts.arrived.after(ttft)).0
    }
}
