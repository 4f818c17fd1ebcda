//! AIBrix's record of one tenant: `{"name": "acme", "rpm": 100, "tpm": 100000}`, requests and tokens per minute. A
//! value of 0 or a missing one means AIBrix's default. Source: AIBrix v0.4, `aibrix-users/<name>` in Redis.

use super::Limits;
use serde::Deserialize;
use serde_json::{Map, Value};

/// Requests per minute if a record sets none.
pub(crate) const DEFAULT_RECORD_RPM: u64 = 100;
/// Tokens for each of those requests, if a record sets no tokens per minute.
pub(crate) const DEFAULT_TOKENS_PER_REQUEST: u64 = 1_000;

/// The limits in one tenant's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserRecord {
    /// Most requests in a minute.
    pub requests_per_minute: u64,
    /// Tokens of prompts and responses per minute.
    pub tokens_per_minute: u64,
}

#[derive(Deserialize)]
struct RecordFields {
    #[serde(default)]
    rpm: u64,
    #[serde(default)]
    tpm: u64,
}

impl UserRecord {
    /// Parses a record.
    ///
    /// # Errors
    /// When it is not a JSON object, or a number in it is negative or not whole.
    pub fn parse(bytes: &[u8]) -> Result<Self, serde_json::Error> {
        let object: Map<String, Value> = serde_json::from_slice(bytes)?;
        let RecordFields { rpm, tpm } = serde_json::from_value(Value::Object(object))?;
        let or = |said: u64, default: u64| if said == 0 { default } else { said };
        let requests_per_minute = or(rpm, DEFAULT_RECORD_RPM);
        let tokens_per_minute = or(tpm, requests_per_minute.saturating_mul(DEFAULT_TOKENS_PER_REQUEST));
        Ok(Self { requests_per_minute, tokens_per_minute })
    }

    /// Returns the tenant's limits: those of the record, and those of `like` that a record cannot set.
    #[must_use]
    pub fn limits(&self, like: &Limits) -> Limits {
        Limits {
            requests_per_minute: Some(self.requests_per_minute),
            tokens_per_minute: Some(self.tokens_per_minute),
            ..*like
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_values_are_aibrixs_defaults() {
        for (text, rpm, tpm) in [
            (r#"{"name": "a", "rpm": 5, "tpm": 70}"#, 5, 70),
            (r#"{"name": "a", "rpm": 5, "tpm": 0}"#, 5, 5_000),
            (r#"{"name": "a", "rpm": 0, "tpm": 70}"#, 100, 70),
            (r#"{"name": "a"}"#, 100, 100_000),
            ("{\"rpm\": 18446744073709551615}", u64::MAX, u64::MAX),
        ] {
            let record = UserRecord::parse(text.as_bytes()).unwrap();
            assert_eq!((record.requests_per_minute, record.tokens_per_minute), (rpm, tpm), "{text}");
        }
        let like = Limits { concurrency: Some(3), requests_per_minute: Some(1), ..Limits::default() };
        let limits = UserRecord::parse(br#"{"rpm": 5}"#).unwrap().limits(&like);
        assert_eq!((limits.requests_per_minute, limits.concurrency), (Some(5), Some(3)));
    }

    #[test]
    fn invalid_record_is_refused() {
        for text in ["", "{", "[1]", "7", r#"{"rpm": -1}"#, r#"{"rpm": "many"}"#, r#"{"tpm": 1.5}"#] {
            assert!(UserRecord::parse(text.as_bytes()).is_err(), "{text}");
        }
    }
}
