//! `soft-reflective-ceiling-policy`: the higher the saturation, the fewer turns lower bands get; the
//! highest band is always open.
//!
//! ```text
//! open while saturation < 1 − i · saturation / (bands − 1), the highest band is i = 0
//! else, below 1, in one turn of round(saturation / (1 − saturation)); at 1 closed
//! ```
//!
//! A turn is a check for capacity, at least one each 5 ms while requests are queued. All bands with turns have
//! the same one, so no band is open while one above it is closed. When not: there is one band; then it is a
//! ceiling of 1. Source: llm-d.

use super::{Ceiling, Ceilings};
use crate::registry::PolicyDescriptor;
use attache_scheduling::plugin::{NoParams, params, section};
use serde_json::Value;

/// Entry of this policy in the registry.
pub const PLUGIN: PolicyDescriptor<dyn Ceiling> = PolicyDescriptor {
    name: "soft-reflective-ceiling-policy",
    aliases: &["soft-reflective"],
    summary: "The higher the saturation, the fewer turns lower bands get; the highest is always open.",
    source: "llm-d `soft-reflective-ceiling-policy`",
    parameters: section::<NoParams>,
    build: |value: &Value| {
        params::<NoParams>(value).map(|NoParams {}| Box::new(SoftReflective::default()) as Box<dyn Ceiling>)
    },
};

#[derive(Debug, Default)]
struct SoftReflective {
    turn: u64,
    /// Whether lower bands had to skip turns at the last saturation.
    by_turns: bool,
}

/// Whether lower bands skip turns at this saturation.
fn by_turns(saturation: f64) -> bool {
    // The lowest ceiling is 1 − saturation: below it no band skips one.
    saturation >= 1.0 - saturation && saturation < 1.0
}

impl Ceiling for SoftReflective {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 1 to some thousands")]
    fn ceilings(&self, saturation: f64, priorities: &[i32]) -> Ceilings {
        let steps = priorities.len().saturating_sub(1) as f64;
        let open = by_turns(saturation) && {
            let period = (saturation / (1.0 - saturation)).round().clamp(1.0, 1e6) as u64;
            self.turn.is_multiple_of(period)
        };
        let ceiling = |(i, _): (usize, &i32)| {
            let reflected = 1.0 - i as f64 * saturation / steps.max(1.0);
            let is_open = i == 0 || saturation < reflected || open;
            if is_open { 1.0 } else { 0.0 }
        };
        priorities.iter().enumerate().map(ceiling).collect()
    }

    fn turn(&mut self, saturation: f64) {
        self.turn = self.turn.wrapping_add(1);
        self.by_turns = by_turns(saturation);
    }

    fn takes_turns(&self) -> bool {
        self.by_turns
    }
}
