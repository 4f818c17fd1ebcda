//! Requests to admin ports: limited in time and size.

use attache_http_client::{Clients, FetchError, fetch, page};
use attache_types::clock::wall_now;
use reqwest::Url;
use reqwest::header::{DATE, HeaderValue};
use serde_json::Value;
use std::time::{Duration, SystemTime};

/// Limit of one request, 5 s.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(5);
/// Largest page, 64 MiB: the configuration of a gateway with thousands of routes has some.
const MAX_BYTES: u64 = 64 << 20;

/// A response of any status.
#[derive(Clone, Debug)]
pub(crate) struct Reply {
    /// The status.
    pub(crate) status: u16,
    /// The time of the server, from the header `date`.
    pub(crate) date: Option<SystemTime>,
    /// When the request was sent, by the clock of this machine.
    pub(crate) sent: SystemTime,
    /// When the response had arrived.
    pub(crate) received: SystemTime,
    /// The body.
    pub(crate) body: Vec<u8>,
}

/// Clients for admin ports, which have no TLS, and for model servers.
#[derive(Debug)]
pub(crate) struct Http(Clients);

impl Http {
    /// Creates the clients.
    ///
    /// # Errors
    /// TLS can't be set up.
    pub(crate) fn new() -> Result<Self, String> {
        Clients::new().map(Self).map_err(|error| error.to_string())
    }

    /// The page at `path` of the admin port at `base`.
    ///
    /// # Errors
    /// See [`FetchError`].
    pub(crate) async fn page(&self, base: &str, path: &str) -> Result<Vec<u8>, FetchError> {
        let url = Url::parse(&format!("{base}{path}")).map_err(|error| FetchError::Url(error.to_string()))?;
        let mut page = Vec::new();
        fetch(&self.0.plain(), url, None, (TIMEOUT, MAX_BYTES), &mut page).await?;
        Ok(page)
    }

    /// The response of any status at `url`, with a header `authorization` if there is one. As in the picker's scrapes,
    /// the certificate of an `https` server is verified before anything is sent, unless `insecure_skip_verify`.
    ///
    /// # Errors
    /// See [`FetchError`].
    pub(crate) async fn reply(
        &self,
        url: &str,
        authorization: Option<HeaderValue>,
        insecure_skip_verify: bool,
    ) -> Result<Reply, FetchError> {
        let url = Url::parse(url).map_err(|error| FetchError::Url(error.to_string()))?;
        let client = self.0.client(&url, insecure_skip_verify)?;
        let sent = wall_now();
        let page = page(&client, url, authorization, (TIMEOUT, MAX_BYTES)).await?;
        let date = page.headers.get(DATE).and_then(|date| httpdate::parse_http_date(date.to_str().ok()?).ok());
        Ok(Reply { status: page.status, date, sent, received: wall_now(), body: page.body })
    }

    /// The JSON page at `path`.
    ///
    /// # Errors
    /// In words: the page can't be had, or is not JSON.
    pub(crate) async fn json(&self, base: &str, path: &str) -> Result<Value, String> {
        let page = self.page(base, path).await.map_err(|error| error.to_string())?;
        serde_json::from_slice(&page).map_err(|error| format!("{base}{path} is not JSON: {error}"))
    }
}
