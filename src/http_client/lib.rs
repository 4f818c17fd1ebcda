//! HTTP requests to model servers: bounded in time and size, no redirects, no proxies, nothing compressed.
//!
//! **Owns** the HTTP clients and the reasons why a page did not come.
//! **Called by** `scrape`, `tokenize`, `ext_proc` (prefill requests) and `replay` (load generator).
//! **Must not** interpret a page, choose an endpoint or retry.
//!
//! This file is all there is.

use reqwest::header::{ACCEPT, ACCEPT_ENCODING, AUTHORIZATION, CONTENT_ENCODING, HeaderValue};
use reqwest::{Client, ClientBuilder, Url, redirect};
use std::time::Duration;

/// Idle connections are closed by us after 4 s, before uvicorn (vLLM, SGLang) closes them after 5 s: a request that meets a closing
/// connection would count as a failure of the server.
pub const DEFAULT_POOL_IDLE: Duration = Duration::from_secs(4);

/// A page that did not come.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FetchError {
    /// No connection.
    #[error("can't connect: {0}")]
    Connect(String),
    /// Not done in time.
    #[error("no page within {0:?}")]
    Timeout(Duration),
    /// Not 200.
    #[error("got status {0}, want 200{hint}", hint = hint(*.0))]
    Status(u16),
    /// A redirect.
    #[error("got redirect {0}, which is not followed; set the metrics path itself")]
    Redirect(u16),
    /// Larger than the cap.
    #[error("the page is larger than {0} bytes")]
    TooLarge(u64),
    /// Compressed though it was asked for as it is.
    #[error("the page is compressed though identity was asked for")]
    Encoded,
    /// The connection broke, or what came was not HTTP.
    #[error("the answer broke off: {0}")]
    Broken(String),
    /// A URL that can't be asked.
    #[error("can't ask this URL: {0}")]
    Url(String),
}

fn hint(status: u16) -> &'static str {
    if matches!(status, 401 | 403) {
        "; `scrape.bearerTokenFile` names a file with the token that servers ask for"
    } else {
        ""
    }
}

/// The HTTP clients: certificates are checked by one of them only, which is made when it is first needed, because it wants the system's
/// certificate store, which an image that scrapes plain HTTP may not have.
#[derive(Debug)]
pub struct Clients {
    unverified: Client,
    verified: Option<Client>,
}

impl Clients {
    /// Makes the client for plain HTTP and unverified HTTPS.
    ///
    /// # Errors
    /// When TLS can't be set up.
    pub fn new() -> Result<Self, FetchError> {
        Ok(Self { unverified: build(false)?, verified: None })
    }

    /// The client for plain HTTP.
    #[must_use]
    pub fn plain(&self) -> Client {
        self.unverified.clone()
    }

    /// The client for `url`.
    ///
    /// # Errors
    /// When certificates have to be verified and the system's certificate store can't be read.
    pub fn client(&mut self, url: &Url, insecure_skip_verify: bool) -> Result<Client, FetchError> {
        if url.scheme() != "https" || insecure_skip_verify {
            return Ok(self.unverified.clone());
        }
        match &self.verified {
            Some(client) => Ok(client.clone()),
            None => {
                let client = build(true)?;
                self.verified = Some(client.clone());
                Ok(client)
            }
        }
    }
}

fn build(verify: bool) -> Result<Client, FetchError> {
    client(verify, 1).build().map_err(|e| FetchError::Url(cause(&e)))
}

/// A client that asks servers as this program does: HTTP/1.1, no redirects, no proxies, and `idle_connections` kept open for each server.
/// Certificates are checked with the system's store, which is needed only then.
pub fn client(verify: bool, idle_connections: usize) -> ClientBuilder {
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // Another thread may have installed one in between: then that one stays, which is as good.
        drop(rustls::crypto::ring::default_provider().install_default());
    }
    Client::builder()
        .user_agent(concat!("attache/", env!("CARGO_PKG_VERSION")))
        .redirect(redirect::Policy::none())
        .no_proxy()
        .http1_only()
        .referer(false)
        .pool_idle_timeout(DEFAULT_POOL_IDLE)
        .pool_max_idle_per_host(idle_connections)
        .tls_danger_accept_invalid_certs(!verify)
}

/// Fetches `url` into `page`, which is emptied first; at most `max_bytes` within `timeout`. `authorization` is shown to the server.
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

async fn fetch_untimed(
    client: &Client,
    url: Url,
    authorization: Option<HeaderValue>,
    max_bytes: u64,
    page: &mut Vec<u8>,
) -> Result<(), FetchError> {
    let mut request =
        client.get(url).header(ACCEPT, "text/plain, application/json").header(ACCEPT_ENCODING, "identity");
    if let Some(authorization) = authorization {
        request = request.header(AUTHORIZATION, authorization);
    }
    let mut response = request.send().await.map_err(|e| match () {
        () if e.is_builder() => FetchError::Url(cause(&e)),
        () if e.is_connect() => FetchError::Connect(cause(&e)),
        () => FetchError::Broken(cause(&e)),
    })?;
    let status = response.status();
    if status.is_redirection() {
        return Err(FetchError::Redirect(status.as_u16()));
    }
    if status != reqwest::StatusCode::OK {
        return Err(FetchError::Status(status.as_u16()));
    }
    if response.headers().get(CONTENT_ENCODING).is_some_and(|e| !e.as_bytes().eq_ignore_ascii_case(b"identity")) {
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

/// The innermost cause of a reqwest error: what people need ("connection refused"), without the URL around it.
#[must_use]
pub fn cause(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}
