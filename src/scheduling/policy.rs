//! What operators say about single models while the picker runs: how `prefix-affinity` routes them, in place of its parameters. Models go by
//! the servers' names for them, after rewriting.
//!
//! The admin API writes, decisions read. The names and bounds are those of LocalAI's `/api/nodes/scheduling`. A change names
//! what it changes: what is left out stays, `null` (for the policy `""`, for the ratio `0` too) takes the strategy's parameter again, and a
//! 0 is a 0. It outlives reloads of the configuration, not the process. May import: nothing of the crate.

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

/// The policies of all models.
#[derive(Debug, Default)]
pub struct ModelPolicies(ArcSwap<BTreeMap<Arc<str>, ModelPolicy>>);

impl ModelPolicies {
    /// What is said about `model`, which may be nothing.
    #[must_use]
    pub fn of(&self, model: &str) -> ModelPolicy {
        self.0.load().get(model).copied().unwrap_or_default()
    }

    /// What is said about `model`, if anything was.
    #[must_use]
    pub fn get(&self, model: &str) -> Option<ModelPolicy> {
        self.0.load().get(model).copied()
    }

    /// All of them, by model.
    #[must_use]
    pub fn all(&self) -> Arc<BTreeMap<Arc<str>, ModelPolicy>> {
        self.0.load_full()
    }

    /// Makes the change that `document` describes, all of it or nothing. Gives the model and its new policy.
    ///
    /// # Errors
    /// The first field that is unknown, of the wrong type or out of bounds.
    pub fn change(&self, document: &Value) -> Result<(String, ModelPolicy), PolicyError> {
        let Value::Object(fields) = document else {
            return Err(PolicyError { field: String::new(), message: "the body is not a JSON object".to_owned() });
        };
        let model = model_name(fields.get("model_name").unwrap_or(&Value::Null))?;
        // Checked before anything is touched; what one attempt of the update below makes of it, every attempt makes of it.
        let mut checked = ModelPolicy::default();
        fields.iter().try_for_each(|(field, value)| checked.set(field, value))?;
        let (mut full, mut policy) = (false, checked);
        self.0.rcu(|all| {
            full = all.len() >= MAX_MODELS && !all.contains_key(model);
            policy = all.get(model).copied().unwrap_or_default();
            let mut all = BTreeMap::clone(all);
            if !full && fields.iter().try_for_each(|(field, value)| policy.set(field, value)).is_ok() {
                all.insert(model.into(), policy);
            }
            all
        });
        if full {
            let allowed =
                format!("{MAX_MODELS} models have a policy, which is as many as there may be: delete one first");
            return Err(PolicyError::new("model_name", &model.into(), &allowed));
        }
        Ok((model.to_owned(), policy))
    }

    /// Forgets what was said about `model`; false when there was nothing.
    pub fn remove(&self, model: &str) -> bool {
        let before = self.0.rcu(|all| {
            let mut all = BTreeMap::clone(all);
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
const FIELDS: &str = "no such field; there are `model_name`, `route_policy`, `balance_abs_threshold`, `balance_rel_threshold` and \
                      `min_prefix_match`";

/// `null` is nothing; anything else must be readable.
fn optional<T>(value: &Value, read: impl Fn(&Value) -> Option<T>) -> Option<Option<T>> {
    if value.is_null() { Some(None) } else { read(value).map(Some) }
}

#[cfg(test)]
mod tests;
