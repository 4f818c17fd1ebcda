//! The URL of an admin port, as the flags `--admin` and `--envoy-admin` name it.

use http::Uri;
use std::fmt::{self, Display};
use std::str::FromStr;

/// The URL of an admin port of Attaché or Envoy, without a slash at its end. Neither port has TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AdminUrl(String);

impl FromStr for AdminUrl {
    type Err = &'static str;

    /// Parses `host:port` or a URL with the scheme `http`. The error says what is allowed; clap adds the flag and the
    /// value that it received.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let whole = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
        let base = whole.trim_end_matches('/');
        let uri = base.parse::<Uri>().ok();
        let is_usable =
            uri.is_some_and(|uri| uri.scheme_str() == Some("http") && uri.host().is_some_and(|h| !h.is_empty()));
        if is_usable { Ok(Self(base.to_owned())) } else { Err("allowed is `host:port` or `http://host:port`") }
    }
}

impl Display for AdminUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
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
        assert_eq!(parsed("gateway/attache/").as_deref(), Ok("http://gateway/attache"));
        for wrong in ["", "ftp://host", "https://host:1", "http://", "host name:1"] {
            assert!(parsed(wrong).unwrap_err().contains("host:port"), "{wrong}");
        }
    }
}
