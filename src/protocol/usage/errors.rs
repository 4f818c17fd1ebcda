//! Errors inside a stream whose HTTP status was 200.

use serde::Deserialize;

/// An error inside a stream whose HTTP status was 200.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamError {
    /// The HTTP status that the error stands for; 500 if unknown.
    pub status: u16,
    /// Its `type`, if it has one.
    pub kind: Option<String>,
}

#[derive(Deserialize)]
struct ErrorObject {
    code: Option<Code>,
    r#type: Option<String>,
    message: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum Code {
    Number(i64),
    Text(String),
}

/// The status of an error that names none.
pub(super) const UNKNOWN_ERROR: u16 = 500;

impl Code {
    pub(super) fn status(&self) -> Option<u16> {
        match self {
            Code::Number(number) => u16::try_from(*number).ok().filter(is_error),
            Code::Text(text) => status_of(text),
        }
    }
}

impl StreamError {
    pub(super) fn read(value: &[u8]) -> Option<Self> {
        if !value.starts_with(b"{") {
            return None;
        }
        let ErrorObject { code, r#type, message } = serde_json::from_slice(value).ok()?;
        if code.is_none() && r#type.is_none() && message.is_none() {
            return None;
        }
        let named = code.and_then(|code| code.status());
        let status = named.or_else(|| r#type.as_deref().and_then(status_of)).unwrap_or(UNKNOWN_ERROR);
        Some(Self { status, kind: r#type })
    }
}

fn is_error(status: &u16) -> bool {
    (400..=599).contains(status)
}

/// Returns the status of an error's name, where an API documents it.
fn status_of(name: &str) -> Option<u16> {
    match name {
        "invalid_request_error" | "BadRequestError" => Some(400),
        "authentication_error" => Some(401),
        "permission_error" => Some(403),
        "not_found_error" | "NotFoundError" => Some(404),
        "request_too_large" => Some(413),
        "rate_limit_error" | "rate_limit_exceeded" => Some(429),
        "overloaded_error" | "Service Unavailable" => Some(503),
        "timeout_error" => Some(504),
        number => number.parse().ok().filter(is_error),
    }
}
