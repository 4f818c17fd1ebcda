//! Changes of policies as pickers exchange them: the last one of each model, by a number that orders all changes.

use super::{MAX_MODEL_NAME, MAX_MODELS, ModelPolicy, PolicyMap, RoutePolicy};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Most models whose last change is known, with those whose change was removed.
const MAX_CHANGES: usize = 2 * MAX_MODELS;
/// 1 hour, in milliseconds: how far the clock of another picker may be ahead. No picker can make its change the last one
/// for longer.
const MAX_AHEAD: u64 = 3_600_000;

/// The last change of a model's policy by the admin API of any picker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PolicyChange {
    /// Number of the change: its Unix time in milliseconds, but above all numbers that its picker knew. Of two changes
    /// the one with the greater number counts.
    pub number: u64,
    /// The policy, over the configured one; `None` if it was removed.
    pub policy: Option<ModelPolicy>,
}

/// What became of the change of another picker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merged {
    /// It is the model's last change now.
    Applied,
    /// A later change is known, or this one.
    Known,
    /// It is invalid, too far ahead, or one too many.
    Refused,
}

impl PolicyChange {
    /// The order of changes. Two pickers may give one number to different changes; then the content decides, on every
    /// picker in the same way.
    #[must_use]
    pub fn order(&self) -> (u64, [u64; 5]) {
        let Some(policy) = self.policy else { return (self.number, [0; 5]) };
        let route = match policy.route_policy {
            None => 0,
            Some(RoutePolicy::RoundRobin) => 1,
            Some(RoutePolicy::PrefixCache) => 2,
        };
        // Numbers of 0 or more are in the order of their bits.
        let bits = |number: Option<f64>| number.map_or(0, |number| (number + 0.0).to_bits() + 1);
        let abs = policy.balance_abs_threshold.map_or(0, |abs| u64::from(abs) + 1);
        (self.number, [1, route, abs, bits(policy.balance_rel_threshold), bits(policy.min_prefix_match)])
    }

    fn is_valid(&self, model: &str) -> bool {
        let name = !model.is_empty() && model.len() <= MAX_MODEL_NAME && !model.chars().any(char::is_control);
        let values = self.policy.is_none_or(|policy| {
            policy.balance_rel_threshold.is_none_or(|ratio| ratio.is_finite() && ratio >= 1.0)
                && policy.min_prefix_match.is_none_or(|share| (0.0..=1.0).contains(&share))
        });
        name && values && self.number > 0
    }
}

/// The last change of each model.
#[derive(Debug, Default)]
pub(super) struct Changes {
    by_model: BTreeMap<Arc<str>, PolicyChange>,
    /// Greatest number of a change.
    last: u64,
}

impl Changes {
    /// Adds a change by this picker, at this Unix time in milliseconds.
    pub(super) fn add(&mut self, model: &str, policy: Option<ModelPolicy>, at: u64) {
        let number = at.max(self.last.saturating_add(1));
        self.insert(model, PolicyChange { number, policy });
    }

    /// Adds the change of another picker, which arrives `at` this Unix time. `live` are the policies in effect.
    pub(super) fn merge(&mut self, model: &str, change: PolicyChange, live: &PolicyMap, at: u64) -> Merged {
        if !change.is_valid(model) || change.number > at.saturating_add(MAX_AHEAD) {
            return Merged::Refused;
        }
        if self.by_model.get(model).is_some_and(|known| known.order() >= change.order()) {
            return Merged::Known;
        }
        if change.policy.is_some() && live.len() >= MAX_MODELS && !live.contains_key(model) {
            return Merged::Refused;
        }
        self.insert(model, change);
        Merged::Applied
    }

    fn insert(&mut self, model: &str, change: PolicyChange) {
        self.last = self.last.max(change.number);
        self.by_model.insert(model.into(), change);
        if self.by_model.len() > MAX_CHANGES {
            let removed = self.by_model.iter().filter(|(_, change)| change.policy.is_none());
            let oldest = removed.min_by_key(|(_, change)| change.number).map(|(model, _)| model.clone());
            oldest.and_then(|model| self.by_model.remove(&model));
        }
    }

    pub(super) fn all(&self) -> &BTreeMap<Arc<str>, PolicyChange> {
        &self.by_model
    }
}
