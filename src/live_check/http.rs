//! Requests to admin ports: limited in time and size.

use attache_http_client::{FetchError, client, fetch, page};
use attache_types::clock::wall_now;
use reqwest::header::{DATE, HeaderValue};
use reqwest::{Client, Url};
use serde_json::Value;
use std::fmt::{self, Display};
use std::str::FromStr;
use std::time::{Duration, SystemTime};

/// Limit of one request, 5 s.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(5);
/// Largest page, 64 MiB: the configuration of a gateway with thousands of routes has some.
const MAX_BYTES: u64 = 64 << 20;

/// The URL of an admin port, without a slash at its end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AdminUrl(String);

impl FromStr for AdminUrl {
    type Err = String;

    /// Parses `host:port` or a URL with the scheme `http` or `https`.
    fn from_str(text: &str) -> Result<Self, String> {
        let whole = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
        let usable = Url::parse(&whole).is_ok_and(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
        let allowed = "allowed is `host:port`, `http://host:port` or `https://host:port`";
        if usable { Ok(Self(whole.trim_end_matches('/').to_owned())) } else { Err(allowed.to_owned()) }
    }
}

impl Display for AdminUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

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

/// A client for admin ports and model servers. Certificates are not verified: nothing secret is sent.
#[derive(Clone, Debug)]
pub(crate) struct Http(Client);

impl Http {
    /// Creates a client.
    ///
    /// # Errors
    /// TLS can't be set up.
    pub(crate) fn new() -> Result<Self, String> {
        client(false, 2).build().map(Self).map_err(|error| error.to_string())
    }

    /// The page at `path`, which begins with a slash.
    ///
    /// # Errors
    /// See [`FetchError`].
    pub(crate) async fn page(&self, base: &AdminUrl, path: &str) -> Result<Vec<u8>, FetchError> {
        let url = Url::parse(&format!("{base}{path}")).map_err(|error| FetchError::Url(error.to_string()))?;
        let mut page = Vec::new();
        fetch(&self.0, url, None, (TIMEOUT, MAX_BYTES), &mut page).await?;
        Ok(page)
    }

    /// The response of any status at `url`, with a header `authorization` if there is one.
    ///
    /// # Errors
    /// See [`FetchError`].
    pub(crate) async fn reply(&self, url: &str, authorization: Option<HeaderValue>) -> Result<Reply, FetchError> {
        let url = Url::parse(url).map_err(|error| FetchError::Url(error.to_string()))?;
        let sent = wall_now();
        let page = page(&self.0, url, authorization, (TIMEOUT, MAX_BYTES)).await?;
        let date = page.headers.get(DATE).and_then(|date| httpdate::parse_http_date(date.to_str().ok()?).ok());
        Ok(Reply { status: page.status, date, sent, received: wall_now(), body: page.body })
    }

    /// The JSON page at `path`.
    ///
    /// # Errors
    /// In words: the page can't be had, or is not JSON.
    pub(crate) async fn json(&self, base: &AdminUrl, path: &str) -> Result<Value, String> {
        let page = self.page(base, path).await.map_err(|error| error.to_string())?;
        serde_json::from_slice(&page).map_err(|error| format!("{base}{path} is not JSON: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use super::AdminUrl;

    #[test]
    fn admin_urls_are_completed_or_refused() {
        let parsed = |text: &str| text.parse::<AdminUrl>().map(|url| url.to_string());
        assert_eq!(parsed("127.0.0.1:9901").as_deref(), Ok("http://127.0.0.1:9901"));
        assert_eq!(parsed("http://[::1]:9901/").as_deref(), Ok("http://[::1]:9901"));
        for wrong in ["", "ftp://host", "http://", "host name:1"] {
            assert!(parsed(wrong).unwrap_err().contains("host:port"), "{wrong}");
        }
    }
}
