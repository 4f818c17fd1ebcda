//! Fields of protobuf messages as JSON: of a config dump, which has their own names, or of a file, where `camelCase` is
//! allowed too. Fields with the default value are missing in a config dump.

use serde_json::Value;
use std::time::Duration;

/// The field at `path`, with dots between the names of fields; null if there is none.
pub(crate) fn at<'a>(message: &'a Value, path: &str) -> &'a Value {
    path.split('.').fold(message, |message, name| {
        message.get(name).or_else(|| message.get(camel_case(name))).unwrap_or(&Value::Null)
    })
}

fn camel_case(name: &str) -> String {
    let mut words = name.split('_');
    let first = words.next().unwrap_or_default().to_owned();
    words.fold(first, |out, word| {
        let (head, tail) = word.split_at(word.len().min(1));
        out + &head.to_ascii_uppercase() + tail
    })
}

/// The text at `path`; empty if there is none.
pub(crate) fn text<'a>(message: &'a Value, path: &str) -> &'a str {
    at(message, path).as_str().unwrap_or_default()
}

/// The list at `path`; empty if there is none.
pub(crate) fn list<'a>(message: &'a Value, path: &str) -> &'a [Value] {
    at(message, path).as_array().map_or(&[], Vec::as_slice)
}

/// The texts of the list at `path`.
pub(crate) fn texts<'a>(message: &'a Value, path: &str) -> Vec<&'a str> {
    list(message, path).iter().filter_map(Value::as_str).collect()
}

/// Whether there is a field at `path`.
pub(crate) fn has(message: &Value, path: &str) -> bool {
    !at(message, path).is_null()
}

/// The truth value at `path`; false if there is none.
pub(crate) fn flag(message: &Value, path: &str) -> bool {
    at(message, path).as_bool().unwrap_or(false)
}

/// The number at `path`. Numbers of 64 bits are texts in JSON.
pub(crate) fn number(message: &Value, path: &str) -> Option<u64> {
    let value = at(message, path);
    value.as_u64().or_else(|| value.as_str()?.parse().ok())
}

/// The duration at `path`, such as `0.200s`.
pub(crate) fn duration(message: &Value, path: &str) -> Option<Duration> {
    let seconds: f64 = text(message, path).strip_suffix('s')?.parse().ok()?;
    Duration::try_from_secs_f64(seconds).ok()
}

/// The name of the message in an `Any`, such as `HttpConnectionManager`.
pub(crate) fn message_name(any: &Value) -> &str {
    text(any, "@type").rsplit(['.', '/']).next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn fields_are_found_in_both_spellings() {
        let message =
            json!({"route": {"numRetries": 3, "retry_on": "5xx", "timeout": "0.250s", "big": "18446744073709551615"}});
        assert_eq!(number(&message, "route.num_retries"), Some(3));
        assert_eq!(text(&message, "route.retry_on"), "5xx");
        assert_eq!(duration(&message, "route.timeout"), Some(Duration::from_millis(250)));
        assert_eq!(number(&message, "route.big"), Some(u64::MAX));
        assert_eq!(
            (has(&message, "route.x.y"), number(&message, "x"), duration(&message, "route.retry_on")),
            (false, None, None)
        );
        assert_eq!(message_name(&json!({"@type": "type.googleapis.com/envoy.config.cluster.v3.Cluster"})), "Cluster");
    }
}
