//! `fcfs-ordering-policy`: first come, first served.
//!
//! When not: prompts differ in length a hundredfold; then `least-work` lets short ones overtake. Source: GIE and llm-d.

use super::{Facts, Ordering};
use crate::registry::PolicyDescriptor;
use attache_scheduling::plugin::{NoParams, params, section};
use serde_json::Value;

/// Entry of this policy in the registry.
pub const PLUGIN: PolicyDescriptor<dyn Ordering> = PolicyDescriptor {
    name: "fcfs-ordering-policy",
    aliases: &["fcfs"],
    summary: "First come, first served.",
    source: "GIE and llm-d `fcfs-ordering-policy`",
    parameters: section::<NoParams>,
    build: |value: &Value| params::<NoParams>(value).map(|NoParams {}| Box::new(Fcfs) as Box<dyn Ordering>),
};

/// Orders requests by arrival.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fcfs;

impl Ordering for Fcfs {
    fn key(&self, facts: &Facts) -> u64 {
        facts.arrived.0
    }
}
