//! Error responses in the format of the client's API.

use super::api::Dialect;
use attache_types::error::{Fault, Reason, RequestError};
use serde::Serialize;

/// A response from Attaché itself, ready to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ErrorResponse {
    /// The HTTP status code.
    pub status: u16,
    /// The value of the header `content-type`.
    pub content_type: &'static str,
    /// The bytes of the body.
    pub body: Vec<u8>,
}

#[derive(Serialize)]
struct OpenAi<'a> {
    error: OpenAiError<'a>,
}

#[derive(Serialize)]
struct OpenAiError<'a> {
    message: &'a str,
    r#type: &'static str,
    param: Option<&'static str>,
    code: &'static str,
}

#[derive(Serialize)]
struct Anthropic<'a> {
    r#type: &'static str,
    error: AnthropicError<'a>,
}

#[derive(Serialize)]
struct AnthropicError<'a> {
    r#type: &'static str,
    message: &'a str,
}

/// Renders an error: `{"error":{"message","type","param","code"}}` for OpenAI's clients,
/// `{"type":"error","error":{"type","message"}}` for Anthropic's.
#[must_use]
pub fn render(error: &RequestError, dialect: Dialect) -> ErrorResponse {
    let body = match dialect {
        Dialect::OpenAi => serde_json::to_vec(&OpenAi {
            error: OpenAiError {
                message: &error.message,
                r#type: openai_type(error.reason),
                param: error.param,
                code: error.reason.code(),
            },
        }),
        Dialect::Anthropic => serde_json::to_vec(&Anthropic {
            r#type: "error",
            error: AnthropicError { r#type: anthropic_type(error.reason), message: &error.message },
        }),
    };
    // Serialising strings into memory cannot fail. If it did, the body would be empty and the status right.
    ErrorResponse { status: error.reason.status(), content_type: "application/json", body: body.unwrap_or_default() }
}

/// Returns OpenAI's `error.type`, as its API and vLLM's clients use it.
fn openai_type(reason: Reason) -> &'static str {
    match reason.fault() {
        Fault::Client => "invalid_request_error",
        Fault::Tenant => "rate_limit_error",
        Fault::Upstream | Fault::Internal => "server_error",
        Fault::Overload => "overloaded_error",
    }
}

/// Returns Anthropic's `error.type` by status, as its documentation lists them.
fn anthropic_type(reason: Reason) -> &'static str {
    match reason.status() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        408 | 504 => "timeout_error",
        413 | 431 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        400..=499 => "invalid_request_error",
        _ => "api_error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(error: &RequestError, dialect: Dialect) -> String {
        String::from_utf8_lossy(&render(error, dialect).body).into_owned()
    }

    #[test]
    fn openai_errors_have_the_four_members() {
        let error = RequestError::new(Reason::InvalidModel, "got \"a\"\n").param("model");
        assert_eq!(
            text(&error, Dialect::OpenAi),
            r#"{"error":{"message":"got \"a\"\n","type":"invalid_request_error","param":"model","code":"invalid_model"}}"#
        );
        let error = RequestError::new(Reason::NoReadyEndpoint, "none");
        assert_eq!(
            text(&error, Dialect::OpenAi),
            r#"{"error":{"message":"none","type":"server_error","param":null,"code":"no_ready_endpoint"}}"#
        );
        assert_eq!(render(&error, Dialect::OpenAi).status, 503);
    }

    #[test]
    fn anthropic_errors_have_a_documented_type() {
        let cases = [
            (Reason::InvalidJson, "invalid_request_error"),
            (Reason::UnsupportedMediaType, "invalid_request_error"),
            (Reason::ModelNotFound, "not_found_error"),
            (Reason::RequestTimeout, "timeout_error"),
            (Reason::BodyTooLarge, "request_too_large"),
            (Reason::HeadersTooLarge, "request_too_large"),
            (Reason::Overloaded, "overloaded_error"),
            (Reason::NoReadyEndpoint, "overloaded_error"),
            (Reason::Internal, "api_error"),
        ];
        for (reason, expected) in cases {
            assert_eq!(
                text(&RequestError::new(reason, "why"), Dialect::Anthropic),
                format!(r#"{{"type":"error","error":{{"type":"{expected}","message":"why"}}}}"#),
            );
        }
    }

    #[test]
    fn every_reason_renders_in_every_dialect() {
        for reason in Reason::ALL {
            for dialect in [Dialect::OpenAi, Dialect::Anthropic] {
                let answer = render(&RequestError::new(reason, "why"), dialect);
                assert_eq!(answer.status, reason.status());
                assert!(serde_json::from_slice::<serde::de::IgnoredAny>(&answer.body).is_ok());
            }
        }
    }
}
