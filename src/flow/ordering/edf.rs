//! `edf-ordering-policy`: the earliest deadline goes first; deadline = arrival + TTL.
//!
//! When not: requests carry no TTL; then it is `fcfs-ordering-policy`. Source: GIE and llm-d.

use super::{Facts, Ordering};
use crate::registry::PolicyDescriptor;
use attache_scheduling::plugin::{NoParams, params, section};
use serde_json::Value;

/// Entry of this policy in the registry.
pub const PLUGIN: PolicyDescriptor<dyn Ordering> = PolicyDescriptor {
    name: "edf-ordering-policy",
    aliases: &["edf"],
    summary: "The earliest end of a request's time to live goes first.",
    source: "GIE and llm-d `edf-ordering-policy`",
    parameters: section::<NoParams>,
    build: |value: &Value| params::<NoParams>(value).map(|NoParams {}| Box::new(Edf) as Box<dyn Ordering>),
};

#[derive(Debug)]
struct Edf;

impl Ordering for Edf {
    fn key(&self, facts: &Facts) -> u64 {
        facts.deadline.0
    }
}
