//! Which clients may connect to the ext-proc port.

use std::fmt;
use std::path::PathBuf;

/// Settings under which clients must present a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientAuthSettings {
    /// PEM file with the certificates of the authorities that sign clients' certificates.
    pub ca_file: PathBuf,
    /// Names of which a client's certificate must have one as a subject alternative name. Empty: every certificate of
    /// the authorities is accepted. Reloaded.
    pub names: Vec<ClientName>,
}

/// A pattern of subject alternative names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientName(Pattern);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Pattern {
    /// A DNS name in lower case.
    Dns(String),
    /// `*.` and this name: DNS names with one more label.
    DnsBelow(String),
    /// An exact URI.
    Uri(String),
    /// This prefix, which ends with `/`, and `*`: longer URIs with this prefix.
    UriBelow(String),
}

/// Whether the path is one or more segments of which none is empty, `.` or `..`, without escapes, query and fragment, as
/// SPIFFE requires. Others could leave the path of a pattern: `gateways/../default`.
fn is_plain_path(path: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~:@+=,".contains(&byte);
    path.split('/').all(|segment| !matches!(segment, "" | "." | "..") && segment.bytes().all(plain))
}

impl ClientName {
    /// Parses `gateway.example.com`, `*.example.com`, `spiffe://example.com/gateway` or
    /// `spiffe://example.com/ns/gateways/*`.
    ///
    /// # Errors
    /// The mistake in the text, in lower case, without a full stop.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        let pattern = match text.split_once("://") {
            Some((scheme, rest)) => {
                let (fixed, below) = text.strip_suffix('*').map_or((text, false), |fixed| (fixed, true));
                if scheme.is_empty() || rest.is_empty() {
                    return Err("a URI has a scheme and an authority");
                }
                if fixed.contains('*') || below && !(fixed.ends_with('/') && rest.trim_end_matches('*').len() > 1) {
                    return Err("`*` may stand only at the end of a URI, behind a `/`");
                }
                if text.contains(|c: char| !c.is_ascii_graphic()) {
                    return Err("a URI has printable ASCII characters only");
                }
                let path = rest.split_once('/').map_or("", |(_, path)| path);
                if below && path != "*" && !path.strip_suffix("/*").is_some_and(is_plain_path) {
                    return Err("a URI with `*` has a path of plain segments: none is empty, `.`, `..` or has `%`");
                }
                if below { Pattern::UriBelow(fixed.to_owned()) } else { Pattern::Uri(text.to_owned()) }
            }
            None => {
                let name = text.to_ascii_lowercase();
                let fixed = name.strip_prefix("*.");
                let labels = fixed.unwrap_or(&name).split('.');
                let right = |label: &str| {
                    !label.is_empty() && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
                };
                if !labels.clone().all(right) {
                    return Err("it is neither a DNS name, which may begin with `*.`, nor a URI");
                }
                fixed.map(str::to_owned).map_or(Pattern::Dns(name.clone()), Pattern::DnsBelow)
            }
        };
        Ok(Self(pattern))
    }

    /// Whether a DNS name of a certificate matches.
    #[must_use]
    pub(crate) fn matches_dns(&self, name: &str) -> bool {
        match &self.0 {
            Pattern::Dns(wanted) => wanted.eq_ignore_ascii_case(name),
            // One label: `*.example.com` does not match `a.b.example.com`. A wildcard in a certificate matches no name.
            Pattern::DnsBelow(wanted) => name
                .split_once('.')
                .is_some_and(|(first, rest)| !first.is_empty() && first != "*" && wanted.eq_ignore_ascii_case(rest)),
            Pattern::Uri(_) | Pattern::UriBelow(_) => false,
        }
    }

    /// Whether a URI of a certificate matches.
    #[must_use]
    pub(crate) fn matches_uri(&self, uri: &str) -> bool {
        match &self.0 {
            Pattern::Uri(wanted) => wanted == uri,
            Pattern::UriBelow(wanted) => uri.strip_prefix(wanted.as_str()).is_some_and(is_plain_path),
            Pattern::Dns(_) | Pattern::DnsBelow(_) => false,
        }
    }
}

impl fmt::Display for ClientName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Pattern::Dns(name) | Pattern::Uri(name) => f.write_str(name),
            Pattern::DnsBelow(name) => write!(f, "*.{name}"),
            Pattern::UriBelow(name) => write!(f, "{name}*"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_name_exact_or_one_wildcard_matches_its_kind_only() {
        let cases = [
            (
                "gateway.example.com",
                &["gateway.example.com", "GATEWAY.example.com"][..],
                &["a.gateway.example.com", "gateway.example.com.evil"][..],
            ),
            (
                "*.example.com",
                &["a.example.com"],
                &["example.com", "a.b.example.com", ".example.com", "*.example.com", "aexample.com"],
            ),
            (
                "spiffe://td/gateway",
                &["spiffe://td/gateway"],
                &["spiffe://td/gateway/x", "spiffe://TD/gateway", "spiffe://td/gatewa"],
            ),
            (
                "spiffe://td/ns/gw/*",
                &["spiffe://td/ns/gw/sa/a"],
                &[
                    "spiffe://td/ns/gw/",
                    "spiffe://td/ns/gw",
                    "spiffe://td/ns/gw2/sa/a",
                    "spiffe://other/ns/gw/a",
                    "spiffe://td/ns/gw/../default/sa/x",
                    "spiffe://td/ns/gw/./sa/x",
                    "spiffe://td/ns/gw//sa",
                    "spiffe://td/ns/gw/sa/",
                    "spiffe://td/ns/gw/%2e%2e/default/sa/x",
                    "spiffe://td/ns/gw/..%2fdefault",
                    "spiffe://td/ns/gw/a?b",
                    "spiffe://td/ns/gw/a#b",
                    r"spiffe://td/ns/gw/..\default",
                ],
            ),
            ("spiffe://td/*", &["spiffe://td/a", "spiffe://td/a..b/c"], &["spiffe://td/", "spiffe://td/../x"]),
        ];
        for (pattern, good, bad) in cases {
            let name = ClientName::parse(pattern).unwrap();
            assert_eq!(name.to_string(), pattern);
            for presented in good {
                let uri = presented.contains("://");
                assert_eq!(
                    (name.matches_uri(presented), name.matches_dns(presented)),
                    (uri, !uri),
                    "{pattern}: {presented}"
                );
            }
            for presented in bad {
                assert!(!name.matches_uri(presented) && !name.matches_dns(presented), "{pattern}: {presented}");
            }
        }
    }

    #[test]
    fn client_name_with_other_wildcard_is_refused() {
        for wrong in [
            "",
            "*",
            "a.*.com",
            "*a.com",
            "a b",
            "a..b",
            "*.",
            "://x",
            "spiffe://",
            "spiffe://*",
            "spiffe://td/gw*",
            "spiffe://*/a",
            "spiffe://td/é",
            "spiffe://td/a/../b/*",
            "spiffe://td//*",
            "spiffe://td/%61/*",
        ] {
            assert!(ClientName::parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
