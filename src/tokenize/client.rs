//! One call to a tokenizer: bounded in time and size, no redirects, no proxies, nothing compressed.

use super::list::TokenListError;
use attache_http_client::{self as http, cause};
use bytes::Bytes;
use reqwest::header::{ACCEPT, ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_TYPE};
use reqwest::{Client, StatusCode};
use std::time::Duration;

/// Idle connections that are kept for each server.
const MAX_IDLE_CONNECTIONS: usize = 8;

/// A call that the server is to blame for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// No connection.
    #[error("can't connect: {0}")]
    Connect(String),
    /// Not done in time.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// An error of the server's.
    #[error("got status {0}, want 200")]
    Status(u16),
    /// A redirect.
    #[error("got redirect {0}, which is not followed; set the URL itself")]
    Redirect(u16),
    /// Larger than the cap.
    #[error("the answer is larger than {0} bytes")]
    TooLarge(u64),
    /// The connection broke, or what came was not HTTP.
    #[error("the answer broke off: {0}")]
    Broken(String),
    /// No tokens in it.
    #[error(transparent)]
    Garbled(#[from] TokenListError),
    /// Compressed though it was asked for as it is.
    #[error("the answer is compressed though identity was asked for")]
    Encoded,
}

/// What a server said.
#[derive(Debug)]
pub(super) enum Answer {
    /// The body of a 200.
    Body(Vec<u8>),
    /// The client's request is to blame.
    Refused(u16),
}

/// Makes the client.
pub(super) fn build(verify: bool) -> Result<Client, String> {
    http::client(verify, MAX_IDLE_CONNECTIONS).build().map_err(|e| cause(&e))
}

/// Posts `body` to `url`.
pub(super) async fn post(
    client: &Client,
    url: &str,
    body: Bytes,
    timeout: Duration,
    max_bytes: u64,
) -> Result<Answer, CallError> {
    match tokio::time::timeout(timeout, post_untimed(client, url, body, max_bytes)).await {
        Ok(outcome) => outcome,
        Err(_) => Err(CallError::Timeout(timeout)),
    }
}

async fn post_untimed(client: &Client, url: &str, body: Bytes, max_bytes: u64) -> Result<Answer, CallError> {
    let request = (client.post(url))
        .header(CONTENT_TYPE, "application/json")
        .header(ACCEPT, "application/json")
        .header(ACCEPT_ENCODING, "identity")
        .body(body);
    let mut response = request.send().await.map_err(|e| match () {
        () if e.is_connect() || e.is_builder() => CallError::Connect(cause(&e)),
        () => CallError::Broken(cause(&e)),
    })?;
    let status = response.status();
    match status {
        StatusCode::OK => {}
        // vLLM answers 403 where an API is switched off, 405 and 401 come from what stands before it: no request will do better.
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::METHOD_NOT_ALLOWED => {
            return Err(CallError::Status(status.as_u16()));
        }
        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => return Err(CallError::Status(status.as_u16())),
        _ if status.is_client_error() => return Ok(Answer::Refused(status.as_u16())),
        _ if status.is_redirection() => return Err(CallError::Redirect(status.as_u16())),
        _ => return Err(CallError::Status(status.as_u16())),
    }
    if response.headers().get(CONTENT_ENCODING).is_some_and(|e| !e.as_bytes().eq_ignore_ascii_case(b"identity")) {
        return Err(CallError::Encoded);
    }
    let length = response.content_length().unwrap_or(0);
    if length > max_bytes {
        return Err(CallError::TooLarge(max_bytes));
    }
    let mut answer = Vec::with_capacity(usize::try_from(length).unwrap_or(0));
    while let Some(chunk) = response.chunk().await.map_err(|e| CallError::Broken(cause(&e)))? {
        if (answer.len() + chunk.len()) as u64 > max_bytes {
            return Err(CallError::TooLarge(max_bytes));
        }
        answer.extend_from_slice(&chunk);
    }
    Ok(Answer::Body(answer))
}
