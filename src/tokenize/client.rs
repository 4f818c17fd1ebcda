//! One call to a tokenizer: limited in time and size, without redirects, proxies or compression.

use super::list::TokenListError;
use attache_http_client::{self as http, FetchError, cause};
use bytes::Bytes;
use reqwest::{Client, StatusCode};
use std::time::Duration;

/// Idle connections that are kept for each server.
const MAX_IDLE_CONNECTIONS: usize = 8;

/// A failed call that is the server's fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// There is no response with status 200.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// The response has no valid list of tokens.
    #[error(transparent)]
    Garbled(#[from] TokenListError),
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
) -> Result<CallResponse, FetchError> {
    let mut response = Vec::new();
    let status = http::post(client, url, body, (timeout, max_bytes), &mut response).await?;
    match status {
        StatusCode::OK => Ok(CallResponse::Body(response)),
        // vLLM returns 403 if an API is disabled; 405 and 401 come from a proxy before it.
        // No other request would succeed.
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::METHOD_NOT_ALLOWED => {
            Err(FetchError::Status(status.as_u16()))
        }
        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => Err(FetchError::Status(status.as_u16())),
        _ if status.is_client_error() => Ok(CallResponse::Refused(status.as_u16())),
        _ => Err(FetchError::Status(status.as_u16())),
    }
}
