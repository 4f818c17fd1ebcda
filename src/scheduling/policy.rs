//! What operators say about single models while the picker runs: how `prefix-affinity` routes them, in place of its
//! parameters. Models go by the servers' names for them, after rewriting.
//!
//! Two layers: the configuration's, which every start and reload sets, and over it what the admin API says, field by
//! field. The API's layer outlives reloads, not the process, and other pickers do not hear of it. The names and bounds
//! of the API are those of LocalAI's `/api/nodes/scheduling`: the whole body is taken, and what has no effect here is
//! named. A field that is left out of a change stays. `null` takes the configured value again, else the strategy's
//! parameter; so do `""` for the policy and 0 for the ratio. Any other 0 is a 0.

use arc_swap::ArcSwap;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Models that may have a policy: enough for any fleet, and a bound on what an admin's script can pile up.
pub const MAX_MODELS: usize = 1_024;
/// Longest name of a model, bytes.
pub const MAX_MODEL_NAME: usize = 256;

/// How a model's requests are routed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RoutePolicy {
    /// In turn; nothing is remembered of them.
    RoundRobin,
    /// To where their beginnings went before.
    #[default]
    PrefixCache,
}

/// What is said about a model; `None` is the strategy's parameter.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Deserialize, Serialize)]
pub struct ModelPolicy {
    /// How its requests are routed.
    pub route_policy: Option<RoutePolicy>,
    /// Requests that an endpoint may have more than the least loaded one.
    pub balance_abs_threshold: Option<u32>,
    /// Times as many requests as the least loaded one that an endpoint may have, 1 or more.
    pub balance_rel_threshold: Option<f64>,
    /// Share of the prompt that must be known for it to count, 0 to 1.
    pub min_prefix_match: Option<f64>,
}

/// A change that is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct PolicyError {
    /// The field that is wrong; empty when the document is.
    pub field: String,
    /// What was got and what is allowed.
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

/// A document about one model, in the words of LocalAI, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Document {
    /// The model.
    pub model: String,
    /// The fields that ask for something that is not done here, in their order.
    pub without_effect: Vec<String>,
    fields: serde_json::Map<String, Value>,
}

impl Document {
    /// Checks all of `document`.
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

    /// `policy`, changed by it.
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
    changed: ArcSwap<PolicyMap>,
}

impl ModelPolicies {
    /// What is said about `model`, which may be nothing.
    #[must_use]
    pub fn of(&self, model: &str) -> ModelPolicy {
        self.get(model).unwrap_or_default()
    }

    /// What is said about `model`, if anything was.
    #[must_use]
    pub fn get(&self, model: &str) -> Option<ModelPolicy> {
        let (configured, changed) = (self.configured.load(), self.changed.load());
        match (changed.get(model), configured.get(model)) {
            (Some(changed), Some(configured)) => Some(changed.over(configured)),
            (one, other) => one.or(other).copied(),
        }
    }

    /// All of them, by model.
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

    /// What the configuration says from now on. What the admin API said stays above it.
    pub fn configure(&self, policies: PolicyMap) {
        self.configured.store(Arc::new(policies));
    }

    /// Makes the change that `document` describes. Gives the model's new policy.
    ///
    /// # Errors
    /// When too many models have a policy.
    pub fn change(&self, document: &Document) -> Result<ModelPolicy, PolicyError> {
        let model = document.model.as_str();
        let mut full = false;
        self.changed.rcu(|all| {
            full = all.len() >= MAX_MODELS && !all.contains_key(model);
            let mut all = PolicyMap::clone(all);
            if !full {
                let policy = all.get(model).copied().unwrap_or_default();
                all.insert(model.into(), document.change(policy));
            }
            all
        });
        if full {
            let allowed =
                format!("{MAX_MODELS} models have a policy, which is as many as there may be: delete one first");
            return Err(PolicyError::new("model_name", &model.into(), &allowed));
        }
        Ok(self.of(model))
    }

    /// Forgets what the admin API said about `model`; false when that was nothing. What the configuration says of it
    /// holds again.
    pub fn remove(&self, model: &str) -> bool {
        let before = self.changed.rcu(|all| {
            let mut all = PolicyMap::clone(all);
            all.remove(model);
            all
        });
        before.contains_key(model)
    }
}

fn model_name(value: &Value) -> Result<&str, PolicyError> {
    let good = |name: &&str| !name.is_empty() && name.len() <= MAX_MODEL_NAME && !name.chars().any(char::is_control);
    let allowed = format!("the name of a model is needed, at most {MAX_MODEL_NAME} bytes without control characters");
    value.as_str().filter(good).ok_or_else(|| PolicyError::new("model_name", value, &allowed))
}

impl ModelPolicy {
    /// This policy, and where it says nothing, `other`.
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
const FIELDS: &str = "no such field; there are `model_name`, `route_policy`, `balance_abs_threshold`, `balance_rel_threshold`, \
                      `min_prefix_match`, and without effect `node_selector`, `min_replicas`, `max_replicas` and `spread_all`";

/// `null` is nothing; anything else must be readable.
fn optional<T>(value: &Value, read: impl Fn(&Value) -> Option<T>) -> Option<Option<T>> {
    if value.is_null() { Some(None) } else { read(value).map(Some) }
}

mod replicas;
#[cfg(test)]
mod tests;
