//! One call to a tokenizer: limited in time and size, without redirects, proxies or compression.

use super::list::TokenListError;
use attache_http_client::{self as http, cause};
use bytes::Bytes;
use reqwest::header::{ACCEPT, CONTENT_TYPE};
use reqwest::{Client, StatusCode};
use std::time::Duration;

/// Idle connections that are kept for each server.
const MAX_IDLE_CONNECTIONS: usize = 8;

/// A failed call that is the server's fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The connection could not be established.
    #[error("can't connect: {0}")]
    Connect(String),
    /// The response was not complete in time.
    #[error("no response within {0:?}")]
    Timeout(Duration),
    /// The server returned an error status.
    #[error("got status {0}, want 200")]
    Status(u16),
    /// The response is a redirect.
    #[error("got redirect {0}, which is not followed; set the URL itself")]
    Redirect(u16),
    /// The response exceeds the size limit.
    #[error("the response is larger than {0} bytes")]
    TooLarge(u64),
    /// The connection was interrupted, or the response is not HTTP.
    #[error("the response ended early: {0}")]
    Broken(String),
    /// The response has no valid list of tokens.
    #[error(transparent)]
    Garbled(#[from] TokenListError),
    /// The response is compressed, although the request does not allow it.
    #[error("the response is compressed though identity was asked for")]
    Encoded,
}

/// The response of a server.
#[derive(Debug)]
pub(super) enum CallResponse {
    /// The body of a response with status 200.
    Body(Vec<u8>),
    /// An error status that is the fault of the client's request.
    Refused(u16),
}

/// Creates the HTTP client for all tokenizers; `verify` enables certificate checks.
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
) -> Result<CallResponse, CallError> {
    match tokio::time::timeout(timeout, post_untimed(client, url, body, max_bytes)).await {
        Ok(outcome) => outcome,
        Err(_) => Err(CallError::Timeout(timeout)),
    }
}

async fn post_untimed(client: &Client, url: &str, body: Bytes, max_bytes: u64) -> Result<CallResponse, CallError> {
    let request =
        (client.post(url)).header(CONTENT_TYPE, "application/json").header(ACCEPT, "application/json").body(body);
    let mut response = http::send_pure(request).await.map_err(|e| match () {
        () if e.is_connect() || e.is_builder() => CallError::Connect(cause(&e)),
        () => CallError::Broken(cause(&e)),
    })?;
    let status = response.status();
    match status {
        StatusCode::OK => {}
        // vLLM returns 403 if an API is disabled; 405 and 401 come from a proxy before it.
        // No other request would succeed.
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::METHOD_NOT_ALLOWED => {
            return Err(CallError::Status(status.as_u16()));
        }
        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => return Err(CallError::Status(status.as_u16())),
        _ if status.is_client_error() => return Ok(CallResponse::Refused(status.as_u16())),
        _ if status.is_redirection() => return Err(CallError::Redirect(status.as_u16())),
        _ => return Err(CallError::Status(status.as_u16())),
    }
    if http::is_encoded(&response) {
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
    Ok(CallResponse::Body(answer))
}
