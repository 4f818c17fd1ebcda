//! What AstrAI refuses and other servers take: parameters out of range, and messages without a content.
//!
//! A value of the wrong type is a 422, one out of range and a missing field a 400. What is no JSON at all is
//! left to who reads it.

use super::error::ApiError;
use http::StatusCode;
use serde_json::Value;

/// A parameter, what is wrong with a number, and what is allowed.
type Rule = (&'static str, bool, fn(f64) -> bool, &'static str);

/// Parameters of either dialect: the name, whether it is a whole number, its range, and that in words.
const RULES: [Rule; 4] = [
    ("temperature", false, |t| t > 0.0 && t <= 2.0, "> 0 and <= 2"),
    ("top_p", false, |p| (0.0..=1.0).contains(&p), ">= 0 and <= 1"),
    ("top_k", true, |k| k >= 1.0, ">= 1"),
    ("max_tokens", true, |n| n > 0.0, "> 0"),
];

/// Checks a body against AstrAI's schema.
///
/// # Errors
/// The first field that is not as it must be.
pub(super) fn check(body: &[u8]) -> Result<(), ApiError> {
    let Ok(Value::Object(body)) = serde_json::from_slice::<Value>(body) else { return Ok(()) };
    for (name, whole, allows, words) in RULES {
        let value = match body.get(name) {
            None | Some(Value::Null) => continue,
            Some(Value::Number(n)) if !whole || n.is_i64() || n.is_u64() => n.as_f64().unwrap_or_default(),
            Some(_) => return Err(wrong_type(name, if whole { "an integer" } else { "a number" })),
        };
        if !allows(value) {
            return Err(ApiError::bad_request(format!("Invalid request: {name} must be {words}")).param(name));
        }
    }
    match body.get("stream") {
        None | Some(Value::Null | Value::Bool(_)) => {}
        Some(_) => return Err(wrong_type("stream", "a boolean")),
    }
    for message in body.get("messages").and_then(Value::as_array).into_iter().flatten() {
        let missing = ["role", "content"].into_iter().find(|field| message.get(field).is_none_or(Value::is_null));
        if let Some(field) = missing {
            let message = format!("Invalid request: messages: {field} is required");
            return Err(ApiError::bad_request(message).param("messages"));
        }
    }
    Ok(())
}

fn wrong_type(name: &'static str, wanted: &str) -> ApiError {
    let message = format!("Invalid request: {name} must be {wanted}");
    ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, message).param(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn parameters_have_ranges_and_types() {
        for (field, value, want) in [
            ("temperature", json!(0), Some(400)),
            ("temperature", json!(2), None),
            ("temperature", json!(2.1), Some(400)),
            ("temperature", json!("1"), Some(422)),
            ("top_p", json!(0), None),
            ("top_p", json!(1.01), Some(400)),
            ("top_k", json!(0), Some(400)),
            ("top_k", json!(1), None),
            ("top_k", json!(1.5), Some(422)),
            ("max_tokens", json!(null), None),
            ("max_tokens", json!(0), Some(400)),
            ("stream", json!("yes"), Some(422)),
            ("messages", json!([{"role": "user"}]), Some(400)),
            ("messages", json!([{"role": "user", "content": ""}]), None),
        ] {
            let got = check(json!({field: value}).to_string().as_bytes());
            assert_eq!(got.err().map(|error| error.status.as_u16()), want, "{field}: {value}");
        }
        assert_eq!(check(b"{"), Ok(()));
    }
}
