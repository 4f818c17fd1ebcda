//! `slo-urgency`: who can wait least goes first.
//!
//! ```text
//! due = arrival + spare      spare: what the request may wait and still meet its objective, as predicted when it comes
//! ```
//!
//! What a request may wait, the pool's strategy says by a measured profile (the `slo` family), or `deadlineAdmission` by the learned speed and the
//! request's own deadline. One who misses its objective as it is goes before all others, the latest first. Who has no objective is due at the end of
//! its time to live, so that it is served at last.
//!
//! It is the order of the ranks of AIBrix's queue: a rank, time waited + expected - target, grows alike for all that wait, so the greatest rank is
//! the earliest `due`, and needs not be worked out again. When not: nobody has objectives; then it is `edf-ordering-policy`. Source: AIBrix `slo`.

use super::{Facts, Ordering};
use crate::registry::Descriptor;
use attache_scheduling::plugin::{NoParams, params};
use serde_json::Value;
use std::time::Duration;

/// Registry entry.
pub const PLUGIN: Descriptor<dyn Ordering> = Descriptor {
    name: "slo-urgency",
    aliases: &[],
    summary: "The request that can wait least and still meet its objective goes first.",
    source: "AIBrix's SLO queue",
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
