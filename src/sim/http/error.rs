//! Refusals in the words of the model servers.

use super::body::{SimBody, json_response};
use crate::config::Quirks;
use crate::engine::Refused;
use http::{Response, StatusCode};
use http_body_util::LengthLimitError;
use serde_json::json;

/// What vLLM says when its queue is full.
const BUSY: &str =
    "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance.";

/// Status and body of a rejected request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ApiError {
    pub(super) status: StatusCode,
    pub(super) kind: &'static str,
    pub(super) message: String,
    pub(super) param: Option<&'static str>,
}

impl ApiError {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        let kind = match status.as_u16() {
            404 => "NotFoundError",
            429 => "rate_limit_exceeded",
            400..=499 => "invalid_request_error",
            503 => "Service Unavailable",
            _ => "InternalServerError",
        };
        Self { status, kind, message: message.into(), param: None }
    }

    pub(super) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// A body that is longer than `max_bytes`, or whose client disconnected.
    pub(super) fn unreadable(error: &(dyn std::error::Error + Send + Sync + 'static), max_bytes: usize) -> Self {
        if error.is::<LengthLimitError>() {
            return Self::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the body has more than {max_bytes} bytes"));
        }
        Self::bad_request(format!("the body can't be read: {error}"))
    }

    pub(super) fn param(mut self, param: &'static str) -> Self {
        self.param = Some(param);
        self
    }

    pub(super) fn kind(mut self, kind: &'static str) -> Self {
        self.kind = kind;
        self
    }

    pub(super) fn unknown_model(model: &str, base: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, format!("The model `{model}` does not exist. Valid aliases: {base}."))
            .param("model")
    }

    /// A body that serde_json could not read: no JSON or a missing field is 400, a field of the wrong type 422.
    pub(super) fn json(error: &serde_json::Error) -> Self {
        let message = error.to_string();
        let wrong_type = error.classify() == serde_json::error::Category::Data && !message.starts_with("missing field");
        let status = if wrong_type { StatusCode::UNPROCESSABLE_ENTITY } else { StatusCode::BAD_REQUEST };
        Self::new(status, format!("Invalid request: {message}"))
    }

    pub(super) fn refused(refused: &Refused) -> Self {
        match refused {
            Refused::QueueFull { .. } => Self::new(StatusCode::SERVICE_UNAVAILABLE, BUSY),
            Refused::Empty => Self::bad_request("Invalid request: the prompt has no tokens, at least 1 is needed"),
            Refused::TooLong { tokens, limit } => Self::bad_request(format!(
                "This model's maximum context length is {limit} tokens. However, your prompt contains {tokens} input \
                 tokens, which \
                 leaves no room for output tokens. Please reduce the length of the input prompt. \
                 (parameter=input_tokens, value={tokens})"
            ))
            .param("input_tokens"),
        }
    }

    /// The object that an OpenAI client reads, and with `type: error` beside it an Anthropic client too.
    pub(super) fn body(&self, anthropic: bool) -> serde_json::Value {
        let error = json!({
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.status.as_u16(),
        });
        if anthropic { json!({"type": "error", "error": error}) } else { json!({"error": error}) }
    }

    pub(super) fn response(&self, anthropic: bool, quirks: Quirks) -> Response<SimBody> {
        // FastAPI has one status for all that pydantic refuses, and a list of what is wrong.
        let invalid = matches!(self.status, StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY);
        match quirks {
            Quirks::None => json_response(self.status, &self.body(anthropic)),
            Quirks::AstraiDocumented => {
                let mut body = self.body(anthropic);
                body["error"].as_object_mut().map(|error| error.remove("param"));
                json_response(self.status, &body)
            }
            Quirks::Astrai if invalid => {
                let place: Vec<&str> = std::iter::once("body").chain(self.param).collect();
                let detail = json!([{"type": "value_error", "loc": place, "msg": self.message}]);
                json_response(StatusCode::UNPROCESSABLE_ENTITY, &json!({"detail": detail}))
            }
            Quirks::Astrai => json_response(self.status, &json!({"detail": self.message})),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_type_is_422_and_everything_else_about_the_body_400() {
        #[derive(Debug, serde::Deserialize)]
        struct ErrorBody {
            #[expect(dead_code, reason = "only read by serde")]
            n: u32,
        }
        let status = |body: &str| ApiError::json(&serde_json::from_str::<ErrorBody>(body).unwrap_err()).status.as_u16();
        assert_eq!(status("{"), 400);
        assert_eq!(status("{}"), 400);
        assert_eq!(status(r#"{"n":"1"}"#), 422);
    }
}
