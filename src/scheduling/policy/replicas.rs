//! Fields of LocalAI's document for the number and location of a model's replicas. Attaché starts no model servers:
//! the fields are checked as in LocalAI and have no effect.

use super::PolicyError;
use serde_json::{Map, Value};

/// Names of the fields.
pub(super) const FIELDS: [&str; 4] = ["node_selector", "min_replicas", "max_replicas", "spread_all"];

/// Whether `field` is one of them; an error if LocalAI would reject its value beside the fields in `all`.
pub(super) fn check(field: &str, value: &Value, all: &Map<String, Value>) -> Result<bool, PolicyError> {
    let count = |name: &str| all.get(name).and_then(Value::as_u64).unwrap_or(0);
    let (least, most) = (count("min_replicas"), count("max_replicas"));
    let wrong = |allowed| Err(PolicyError::new(field, value, allowed));
    match field {
        "node_selector" if value.is_object() || value.is_string() || value.is_null() => Ok(true),
        "node_selector" => wrong("labels of nodes are allowed, as an object or a string"),
        "min_replicas" | "max_replicas" if !value.is_u64() && !value.is_null() => {
            wrong("a whole number of 0 or more is allowed")
        }
        "min_replicas" if most > 0 && least > most => wrong("no more than `max_replicas` is allowed"),
        "spread_all" if !value.is_boolean() && !value.is_null() => wrong("true or false is allowed"),
        "spread_all" if value == &Value::Bool(true) && least.max(most) > 0 => {
            wrong("neither `min_replicas` nor `max_replicas` is allowed beside it")
        }
        _ => Ok(FIELDS.contains(&field)),
    }
}

/// Whether the value of such a field requests something; forms also send empty fields.
pub(super) fn asks(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Bool(true) | Value::Array(_) => true,
        Value::Number(count) => count.as_u64() != Some(0),
        Value::String(text) => !text.is_empty(),
        Value::Object(labels) => !labels.is_empty(),
    }
}
