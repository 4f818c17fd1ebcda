//! HTTP requests to model servers: limited in time and size, without redirects, proxies or compression.
//!
//! **Owns** the HTTP clients and the error reasons of failed requests.
//! **Called by** `scrape`, `tokenize`, `ext_proc` (prefill requests), `loadgen` and `live_check`.
//! **Must not** interpret a response or choose an endpoint.
//!
//! This file is the whole crate.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

use bytes::Bytes;
use reqwest::header::{ACCEPT, ACCEPT_ENCODING, AUTHORIZATION, CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderValue};
use reqwest::{Client, ClientBuilder, RequestBuilder, Response, StatusCode, Url, redirect};
use std::sync::OnceLock;
use std::time::Duration;

/// Shortest time after which a supported engine closes a connection without requests, 5 s: the default of uvicorn,
/// which vLLM, SGLang and TensorRT-LLM keep.
pub const SHORTEST_KEEP_ALIVE: Duration = Duration::from_secs(5);
/// Time after which we close idle connections, 4 s: before the server does. A request on a connection that is being
/// closed would count as a failure of the server.
pub(crate) const DEFAULT_POOL_IDLE: Duration = Duration::from_secs(4);
const _: () = assert!(DEFAULT_POOL_IDLE.as_millis() < SHORTEST_KEEP_ALIVE.as_millis(), "servers would close first");

/// The reason for which a request failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FetchError {
    /// The connection could not be established.
    #[error("can't connect: {0}")]
    Connect(String),
    /// The server's certificate is not valid, or its issuer is not in the system's certificate store.
    #[error("the certificate is not verified: {0}")]
    Certificate(String),
    /// The response was not complete in time.
    #[error("no response within {0:?}")]
    Timeout(Duration),
    /// The status is not 200.
    #[error("got status {0}, want 200")]
    Status(u16),
    /// The response is a redirect.
    #[error("got redirect {0}, which is not followed; set the URL that it leads to")]
    Redirect(u16),
    /// The response exceeds the size limit.
    #[error("the response is larger than {0} bytes")]
    TooLarge(u64),
    /// The response is compressed, although the request does not allow it.
    #[error("the response is compressed though identity was asked for")]
    Encoded,
    /// The connection was interrupted, or the response is not HTTP.
    #[error("the response ended early: {0}")]
    Broken(String),
    /// The URL cannot be requested.
    #[error("can't ask this URL: {0}")]
    Url(String),
}

/// The HTTP clients. The client that verifies certificates is created when it is first needed, because it requires the
/// system's certificate store, which an image that scrapes plain HTTP may lack.
#[derive(Debug)]
pub struct Clients {
    unverified: Client,
    verified: OnceLock<Client>,
}

impl Clients {
    /// Creates the client for plain HTTP and unverified HTTPS.
    ///
    /// # Errors
    /// When TLS cannot be set up.
    pub fn new() -> Result<Self, FetchError> {
        Ok(Self { unverified: build(false)?, verified: OnceLock::new() })
    }

    /// Returns the client for plain HTTP.
    #[must_use]
    pub fn plain(&self) -> Client {
        self.unverified.clone()
    }

    /// Returns the client for `url`.
    ///
    /// # Errors
    /// When certificates must be verified and the system's certificate store cannot be read.
    pub fn client(&self, url: &Url, insecure_skip_verify: bool) -> Result<Client, FetchError> {
        if url.scheme() != "https" || insecure_skip_verify {
            return Ok(self.unverified.clone());
        }
        if let Some(client) = self.verified.get() {
            return Ok(client.clone());
        }
        let client = build(true)?;
        Ok(self.verified.get_or_init(|| client).clone())
    }
}

fn build(verify: bool) -> Result<Client, FetchError> {
    client(verify, 1).build().map_err(|e| FetchError::Url(cause(&e)))
}

/// Returns a builder of clients with this program's settings: HTTP/1.1, no redirects, no proxies, and up to
/// `idle_connections` open for each server. If `verify`, certificates are checked with the system's store.
pub fn client(verify: bool, idle_connections: usize) -> ClientBuilder {
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // If another thread has installed a provider meanwhile, that one is used.
        drop(rustls::crypto::ring::default_provider().install_default());
    }
    // Without the header, a server may choose any encoding.
    let headers = HeaderMap::from_iter([(ACCEPT_ENCODING, HeaderValue::from_static("identity"))]);
    Client::builder()
        .default_headers(headers)
        .user_agent(concat!("attache/", env!("CARGO_PKG_VERSION")))
        .redirect(redirect::Policy::none())
        .no_proxy()
        .http1_only()
        .referer(false)
        .pool_idle_timeout(DEFAULT_POOL_IDLE)
        .pool_max_idle_per_host(idle_connections)
        .tls_danger_accept_invalid_certs(!verify)
}

/// Fetches `url` into `page`, which is cleared first; at most `max_bytes` within `timeout`. `authorization`
/// is sent to the server.
///
/// # Errors
/// See [`FetchError`].
pub async fn fetch(
    client: &Client,
    url: Url,
    authorization: Option<HeaderValue>,
    (timeout, max_bytes): (Duration, u64),
    page: &mut Vec<u8>,
) -> Result<(), FetchError> {
    page.clear();
    match tokio::time::timeout(timeout, fetch_untimed(client, url, authorization, max_bytes, page)).await {
        Ok(outcome) => outcome,
        Err(_) => Err(FetchError::Timeout(timeout)),
    }
}

/// A response of any status.
#[derive(Clone, Debug)]
pub struct Page {
    /// The status.
    pub status: u16,
    /// The headers.
    pub headers: HeaderMap,
    /// The body.
    pub body: Vec<u8>,
}

/// As [`fetch`], for pages whose status and headers matter too: no status is an error.
///
/// # Errors
/// See [`FetchError`].
pub async fn page(
    client: &Client,
    url: Url,
    authorization: Option<HeaderValue>,
    (timeout, max_bytes): (Duration, u64),
) -> Result<Page, FetchError> {
    let all = async {
        let response = ask(client, url, authorization).await?;
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        let mut body = Vec::new();
        read(response, max_bytes, &mut body).await?;
        Ok(Page { status, headers, body })
    };
    tokio::time::timeout(timeout, all).await.unwrap_or(Err(FetchError::Timeout(timeout)))
}

/// Posts the JSON `body` to `url`, and reads the response into `page`, which is cleared first; at most `max_bytes`
/// within `timeout`. The request must change nothing on the server, as it may be sent twice. Returns the status. The body
/// is read with status 200 only, and redirects are errors.
///
/// # Errors
/// See [`FetchError`].
pub async fn post(
    client: &Client,
    url: &str,
    body: Bytes,
    (timeout, max_bytes): (Duration, u64),
    page: &mut Vec<u8>,
) -> Result<StatusCode, FetchError> {
    page.clear();
    let json = "application/json";
    let request = client.post(url).header(CONTENT_TYPE, json).header(ACCEPT, json).body(body);
    let all = async {
        let response = send(request).await?;
        let status = response.status();
        if status.is_redirection() {
            return Err(FetchError::Redirect(status.as_u16()));
        }
        if status == StatusCode::OK {
            read(response, max_bytes, page).await?;
        }
        Ok(status)
    };
    tokio::time::timeout(timeout, all).await.unwrap_or(Err(FetchError::Timeout(timeout)))
}

async fn fetch_untimed(
    client: &Client,
    url: Url,
    authorization: Option<HeaderValue>,
    max_bytes: u64,
    page: &mut Vec<u8>,
) -> Result<(), FetchError> {
    let response = ask(client, url, authorization).await?;
    let status = response.status();
    if status.is_redirection() {
        return Err(FetchError::Redirect(status.as_u16()));
    }
    if status != StatusCode::OK {
        return Err(FetchError::Status(status.as_u16()));
    }
    read(response, max_bytes, page).await
}

async fn ask(client: &Client, url: Url, authorization: Option<HeaderValue>) -> Result<Response, FetchError> {
    let mut request = client.get(url).header(ACCEPT, "text/plain, application/json");
    if let Some(authorization) = authorization {
        request = request.header(AUTHORIZATION, authorization);
    }
    send(request).await
}

async fn send(request: RequestBuilder) -> Result<Response, FetchError> {
    send_pure(request).await.map_err(|e| match () {
        () if e.is_builder() => FetchError::Url(cause(&e)),
        () if is_certificate_refused(&e) => FetchError::Certificate(cause(&e)),
        () if e.is_connect() => FetchError::Connect(cause(&e)),
        () => FetchError::Broken(cause(&e)),
    })
}

/// Whether the connection failed because the server's certificate was not verified.
fn is_certificate_refused(error: &(dyn std::error::Error + 'static)) -> bool {
    if matches!(error.downcast_ref(), Some(rustls::Error::InvalidCertificate(_))) {
        return true;
    }
    // The source of an `io::Error` is not the error in it, but that error's source.
    let inner = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
    let inner = inner.map(|inner| inner as &(dyn std::error::Error + 'static));
    inner.or_else(|| error.source()).is_some_and(is_certificate_refused)
}

/// Appends the body of `response` to `page`, at most `max_bytes`.
async fn read(mut response: Response, max_bytes: u64, page: &mut Vec<u8>) -> Result<(), FetchError> {
    if is_encoded(&response) {
        return Err(FetchError::Encoded);
    }
    if response.content_length().is_some_and(|length| length > max_bytes) {
        return Err(FetchError::TooLarge(max_bytes));
    }
    while let Some(chunk) = response.chunk().await.map_err(|e| FetchError::Broken(cause(&e)))? {
        if (page.len() + chunk.len()) as u64 > max_bytes {
            return Err(FetchError::TooLarge(max_bytes));
        }
        page.extend_from_slice(&chunk);
    }
    Ok(())
}

/// Sends a request that changes nothing on the server. If the connection ends before the response, the request is sent
/// once more: the server may have closed a connection that it took for idle.
///
/// # Errors
/// The error of the last attempt.
pub async fn send_pure(request: RequestBuilder) -> reqwest::Result<Response> {
    let again = request.try_clone();
    match (request.send().await, again) {
        (Err(error), Some(again)) if error.is_request() && !error.is_connect() && !error.is_timeout() => {
            again.send().await
        }
        (outcome, _) => outcome,
    }
}

/// Whether the body of `response` is compressed, although no client of this program allows it.
#[must_use]
pub fn is_encoded(response: &Response) -> bool {
    let encoding = response.headers().get(CONTENT_ENCODING);
    encoding.is_some_and(|coding| !coding.is_empty() && !coding.as_bytes().eq_ignore_ascii_case(b"identity"))
}

/// Returns the innermost cause of a reqwest error, such as "connection refused", without the URL.
#[must_use]
pub fn cause(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests;
