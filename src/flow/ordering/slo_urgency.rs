//! `slo-urgency`: the request that can wait least goes first.
//!
//! ```text
//! due = arrival + spare      spare: time the request may wait and still meet its objective, as predicted on arrival
//! ```
//!
//! The pool's strategy predicts `spare` from a measured profile (the `slo` family), or `deadlineAdmission` predicts
//! it from the learned speed and the request's deadline. Requests that already miss their objective go first, those
//! that miss it most before the others. A request without an objective is due at the end of its time to live, so that
//! it is served at last.
//!
//! The order equals the ranks of AIBrix's queue. A rank, time waited + expected - target, grows at one rate for all
//! queued requests. The greatest rank is therefore the earliest `due`, which need not be computed again. When not: no
//! request has an objective; then it is `edf-ordering-policy`. Source: AIBrix `slo`.

use super::{Facts, Ordering};
use crate::registry::PolicyDescriptor;
use attache_scheduling::plugin::{NoParams, params, section};
use serde_json::Value;
use std::time::Duration;

/// Entry of this policy in the registry.
pub const PLUGIN: PolicyDescriptor<dyn Ordering> = PolicyDescriptor {
    name: "slo-urgency",
    aliases: &[],
    summary: "The request that can wait least and still meet its objective goes first.",
    source: "AIBrix's SLO queue",
    parameters: section::<NoParams>,
    build: |value: &Value| params::<NoParams>(value).map(|NoParams {}| Box::new(SloUrgency) as Box<dyn Ordering>),
};

#[derive(Debug)]
struct SloUrgency;

impl Ordering for SloUrgency {
    fn key(&self, facts: &Facts) -> u64 {
        let Some(spare) = facts.spare.filter(|spare| !spare.is_nan()) else { return facts.deadline.0 };
        let by = |seconds: f64| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
        if spare >= 0.0 {
            return facts.arrived.after(by(spare)).0;
        }
        facts.arrived.0.saturating_sub(u64::try_from(by(-spare).as_nanos()).unwrap_or(u64::MAX))
    }
}
