//! Routing policies of single models, which operators change at run time: they override the parameters of
//! `prefix-affinity`. Models are named as on the servers, after rewriting.
//!
//! There are two layers: the configuration's, which every start and reload sets, and over it the admin API's, field
//! by field. The API's layer survives reloads but not restarts. Pickers that share state have one layer: the last
//! change of a model counts ([`PolicyChange`]), and a picker that starts learns all changes from its peers.
//! Field names and bounds are those of LocalAI's `/api/nodes/scheduling`: the whole body is accepted, and fields
//! without effect are reported. A field that a change omits keeps its value.
//! `null` restores the configured value, else the strategy's parameter; so do `""` for the policy and 0 for the
//! ratio. Any other 0 is a value.

use arc_swap::ArcSwap;
use attache_types::keywords;
use changes::Changes;
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Most models with a policy: enough for any fleet, and a bound on what an operator's script can add.
pub const MAX_MODELS: usize = 1_024;
/// Longest name of a model, bytes.
pub const MAX_MODEL_NAME: usize = 256;

/// How a model's requests are routed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RoutePolicy {
    /// Round robin; nothing is recorded.
    RoundRobin,
    /// Prefix affinity.
    #[default]
    PrefixCache,
}

keywords! {
    RoutePolicy: "round_robin" => RoundRobin, "prefix_cache" => PrefixCache;
}

/// Policy of a model; `None` means the strategy's parameter.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Deserialize, Serialize)]
pub struct ModelPolicy {
    /// How its requests are routed.
    pub route_policy: Option<RoutePolicy>,
    /// Requests by which an endpoint may exceed the least loaded one.
    pub balance_abs_threshold: Option<u32>,
    /// Ratio by which an endpoint's requests may exceed those of the least loaded one, 1 or more.
    pub balance_rel_threshold: Option<f64>,
    /// Share of the prompt that must match for a prefix to count, 0 to 1.
    pub min_prefix_match: Option<f64>,
}

/// A change that is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct PolicyError {
    /// Name of the invalid field; empty if the whole document is invalid.
    pub field: String,
    /// The value and what is allowed.
    pub message: String,
}

impl PolicyError {
    fn new(field: &str, got: &Value, allowed: &str) -> Self {
        let got: String = got.to_string().chars().take(64).collect();
        Self { field: field.to_owned(), message: format!("`{field}` is {got}; {allowed}") }
    }
}

/// Policies by model.
pub type PolicyMap = BTreeMap<Arc<str>, ModelPolicy>;

/// A checked document with the policy of one model, in LocalAI's format.
#[derive(Clone, Debug, PartialEq)]
pub struct Document {
    /// Name of the model.
    pub model: String,
    /// Fields that request something that Attaché does not do, in order.
    pub without_effect: Vec<String>,
    fields: serde_json::Map<String, Value>,
}

impl Document {
    /// Reads and checks `document`.
    ///
    /// # Errors
    /// The first field that is unknown, of the wrong type or out of bounds.
    pub fn read(document: &Value) -> Result<Self, PolicyError> {
        let Value::Object(fields) = document else {
            return Err(PolicyError { field: String::new(), message: "the body is not a JSON object".to_owned() });
        };
        let model = model_name(fields.get("model_name").unwrap_or(&Value::Null))?.to_owned();
        let mut checked = ModelPolicy::default();
        let mut without_effect = Vec::new();
        for (field, value) in fields {
            if replicas::check(field, value, fields)? {
                if replicas::asks(value) {
                    without_effect.push(field.clone());
                }
            } else {
                checked.set(field, value)?;
            }
        }
        Ok(Self { model, without_effect, fields: fields.clone() })
    }

    /// Applies the document to `policy`.
    #[must_use]
    pub fn change(&self, policy: ModelPolicy) -> ModelPolicy {
        let mut changed = policy;
        for (field, value) in self.fields.iter().filter(|(field, _)| !replicas::FIELDS.contains(&field.as_str())) {
            // Each value was checked when the document was read.
            if changed.set(field, value).is_err() {
                return policy;
            }
        }
        changed
    }
}

/// The policies of all models.
#[derive(Debug, Default)]
pub struct ModelPolicies {
    configured: ArcSwap<PolicyMap>,
    /// Written under the lock of `changes`.
    changed: ArcSwap<PolicyMap>,
    changes: Mutex<Changes>,
}

impl ModelPolicies {
    /// The policy of `model`; empty if it has none.
    #[must_use]
    pub fn of(&self, model: &str) -> ModelPolicy {
        self.get(model).unwrap_or_default()
    }

    /// The policy of `model`, if it has one.
    #[must_use]
    pub fn get(&self, model: &str) -> Option<ModelPolicy> {
        let (configured, changed) = (self.configured.load(), self.changed.load());
        match (changed.get(model), configured.get(model)) {
            (Some(changed), Some(configured)) => Some(changed.over(configured)),
            (one, other) => one.or(other).copied(),
        }
    }

    /// All policies, by model.
    #[must_use]
    pub fn all(&self) -> PolicyMap {
        let (configured, changed) = (self.configured.load(), self.changed.load());
        let mut all = PolicyMap::clone(&configured);
        for (model, policy) in changed.iter() {
            let merged = configured.get(model).map_or(*policy, |configured| policy.over(configured));
            all.insert(model.clone(), merged);
        }
        all
    }

    /// Replaces the configured policies. The admin API's changes stay in effect.
    pub fn configure(&self, policies: PolicyMap) {
        self.configured.store(Arc::new(policies));
    }

    /// Applies a change from the admin API and returns the model's new policy. `at` is the Unix time in milliseconds; 0
    /// will do where no picker shares the policies.
    ///
    /// # Errors
    /// Too many models have a policy.
    pub fn change(&self, document: &Document, at: u64) -> Result<ModelPolicy, PolicyError> {
        let model = document.model.as_str();
        let mut changes = self.changes.lock();
        let live = self.changed.load();
        if live.len() >= MAX_MODELS && !live.contains_key(model) {
            let allowed =
                format!("{MAX_MODELS} models have a policy, which is as many as there may be: delete one first");
            return Err(PolicyError::new("model_name", &model.into(), &allowed));
        }
        let policy = document.change(live.get(model).copied().unwrap_or_default());
        changes.add(model, Some(policy), at);
        self.put(model, Some(policy));
        Ok(self.of(model))
    }

    /// Drops the admin API's changes for `model`, so the configured policy applies again. Returns false if there were
    /// none. `at` is as in [`Self::change`].
    pub fn remove(&self, model: &str, at: u64) -> bool {
        let mut changes = self.changes.lock();
        let had = self.changed.load().contains_key(model);
        if had {
            changes.add(model, None, at);
            self.put(model, None);
        }
        had
    }

    /// Applies the change of another picker, unless a later one is known. `at` is the Unix time in milliseconds.
    pub fn merge(&self, model: &str, change: PolicyChange, at: u64) -> Merged {
        let mut changes = self.changes.lock();
        let merged = changes.merge(model, change, &self.changed.load(), at);
        if merged == Merged::Applied {
            self.put(model, change.policy);
        }
        merged
    }

    /// The last change of `model` by any picker, if there was one.
    #[must_use]
    pub fn last_change(&self, model: &str) -> Option<PolicyChange> {
        self.changes.lock().all().get(model).copied()
    }

    /// The last change of each model by any picker.
    #[must_use]
    pub fn last_changes(&self) -> Vec<(Arc<str>, PolicyChange)> {
        self.changes.lock().all().iter().map(|(model, change)| (model.clone(), *change)).collect()
    }

    /// Sets or removes the changed policy of a model. The lock of `changes` is held.
    fn put(&self, model: &str, policy: Option<ModelPolicy>) {
        let mut all = PolicyMap::clone(&self.changed.load());
        match policy {
            Some(policy) => all.insert(model.into(), policy),
            None => all.remove(model),
        };
        self.changed.store(Arc::new(all));
    }
}

fn model_name(value: &Value) -> Result<&str, PolicyError> {
    let good = |name: &&str| !name.is_empty() && name.len() <= MAX_MODEL_NAME && !name.chars().any(char::is_control);
    let allowed = format!("the name of a model is needed, at most {MAX_MODEL_NAME} bytes without control characters");
    value.as_str().filter(good).ok_or_else(|| PolicyError::new("model_name", value, &allowed))
}

impl ModelPolicy {
    /// This policy; fields without a value are taken from `other`.
    #[must_use]
    pub fn over(&self, other: &Self) -> Self {
        Self {
            route_policy: self.route_policy.or(other.route_policy),
            balance_abs_threshold: self.balance_abs_threshold.or(other.balance_abs_threshold),
            balance_rel_threshold: self.balance_rel_threshold.or(other.balance_rel_threshold),
            min_prefix_match: self.min_prefix_match.or(other.min_prefix_match),
        }
    }

    fn set(&mut self, field: &str, value: &Value) -> Result<(), PolicyError> {
        let wrong = |allowed| PolicyError::new(field, value, allowed);
        match field {
            "model_name" => {}
            "route_policy" => {
                self.route_policy = match value {
                    Value::Null => None,
                    Value::String(s) => match s.as_str() {
                        "" => None,
                        "round_robin" => Some(RoutePolicy::RoundRobin),
                        "prefix_cache" => Some(RoutePolicy::PrefixCache),
                        _ => return Err(wrong(ROUTE_POLICIES)),
                    },
                    _ => return Err(wrong(ROUTE_POLICIES)),
                }
            }
            "balance_abs_threshold" => {
                let threshold = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
                let allowed = "a whole number of 0 or more is allowed";
                self.balance_abs_threshold = optional(value, threshold).ok_or_else(|| wrong(allowed))?;
            }
            "balance_rel_threshold" => {
                let inherit = value.as_f64() == Some(0.0);
                let ratio = |v: &Value| v.as_f64().filter(|r| r.is_finite() && *r >= 1.0);
                let allowed = "1 or more is allowed, and 0 for the strategy's own";
                let given = if inherit { Some(None) } else { optional(value, ratio) };
                self.balance_rel_threshold = given.ok_or_else(|| wrong(allowed))?;
            }
            "min_prefix_match" => {
                let share = |v: &Value| v.as_f64().filter(|s| (0.0..=1.0).contains(s));
                self.min_prefix_match = optional(value, share).ok_or_else(|| wrong("0 to 1 is allowed"))?;
            }
            _ => return Err(wrong(FIELDS)),
        }
        Ok(())
    }
}

const ROUTE_POLICIES: &str = "`round_robin`, `prefix_cache` or an empty string is allowed";
const FIELDS: &str = "no such field; there are `model_name`, `route_policy`, `balance_abs_threshold`, \
                      `balance_rel_threshold`, `min_prefix_match`, and without effect `node_selector`, \
                      `min_replicas`, `max_replicas` and `spread_all`";

/// `null` is `Some(None)`; a value that cannot be read is `None`.
fn optional<T>(value: &Value, read: impl Fn(&Value) -> Option<T>) -> Option<Option<T>> {
    if value.is_null() { Some(None) } else { read(value).map(Some) }
}

mod changes;
mod replicas;
pub use changes::{Merged, PolicyChange};
#[cfg(test)]
mod tests;
