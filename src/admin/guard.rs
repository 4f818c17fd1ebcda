//! Access control of admin pages. It depends on a request's head and is checked before the body is read.
//!
//! | pages | who may request them |
//! |---|---|
//! | `/live`, `/ready` | everyone |
//! | `/metrics` | everyone; with a [`Guard`], callers that it allows |
//! | all others | processes on this machine; with a [`Guard`], callers that it allows |
//! | pages that change, show prompts or cost much, except `/api/pressure` | processes on this machine; a [`Guard`] must allow them too |
//!
//! Pages of the last two rows are shown under names of the picker only, and never to pages of other origins. This
//! stops web sites that reach the port through a browser beside it (cross-site requests, DNS rebinding).
//!
//! The responses of a [`Guard`] are those of controller-runtime, which guards the reference pickers' metrics, except
//! that an unknown token gets 401, as a missing one does.

use super::refusal::{RefusalReason, refuse};
use axum::extract::{ConnectInfo, Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::future::Future;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;

/// A request for a page, as a guard sees it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Caller {
    /// Bearer token of the request.
    pub token: String,
    /// HTTP method in lower case, as RBAC rules name it: `get`.
    pub verb: String,
    /// Path of the page, such as `/metrics`.
    pub path: String,
}

/// Result of the check of a caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AccessDecision {
    /// The caller may see the page.
    Allowed,
    /// The token is not valid.
    Unknown,
    /// This user may not see the page.
    Denied(String),
    /// The check failed, because the API server did not respond.
    Unclear,
}

/// Decides who may see which page.
pub type Guard = Arc<dyn Fn(Caller) -> Pin<Box<dyn Future<Output = AccessDecision> + Send>> + Send + Sync>;

/// Passes a request on if the guard allows it.
pub(super) async fn by_token(State(guard): State<Guard>, request: Request, next: Next) -> Response {
    let Some(token) = bearer(request.headers()) else { return unauthorized() };
    let (verb, path) = (verb(request.method()), request.uri().path().to_owned());
    match guard(Caller { token, verb, path }).await {
        AccessDecision::Allowed => next.run(request).await,
        AccessDecision::Unknown => unauthorized(),
        AccessDecision::Denied(user) => {
            let text = format!("Authorization denied for user {user}\n");
            refuse(RefusalReason::Token, StatusCode::FORBIDDEN, text)
        }
        AccessDecision::Unclear => (StatusCode::INTERNAL_SERVER_ERROR, "Authentication failed\n").into_response(),
    }
}

/// Passes a request on if it comes from a process on this machine.
pub(super) async fn by_peer(ConnectInfo(peer): ConnectInfo<SocketAddr>, request: Request, next: Next) -> Response {
    if is_local(peer.ip()) {
        return next.run(request).await;
    }
    refuse(RefusalReason::Peer, StatusCode::FORBIDDEN, "only from loopback; try `kubectl port-forward`\n")
}

/// Passes a request on if its host is a name of the picker and it has no other origin. `names` are in lower case.
pub(super) async fn by_origin(State(names): State<Arc<[String]>>, request: Request, next: Next) -> Response {
    let headers = request.headers();
    if !names_the_picker(request.uri().authority(), headers, &names) {
        let text = "this host name is not the picker's; use an IP address or localhost, or see `--admin-hosts`\n";
        return refuse(RefusalReason::Host, StatusCode::MISDIRECTED_REQUEST, text);
    }
    if is_cross_origin(request.method(), headers) {
        return refuse(RefusalReason::Origin, StatusCode::FORBIDDEN, "requests of other origins are not allowed\n");
    }
    next.run(request).await
}

/// Whether the address is that of a process on this machine. Istio's sidecar forwards requests of other machines from
/// 127.0.0.6, so no other address of 127.0.0.0/8 counts.
fn is_local(ip: IpAddr) -> bool {
    [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)].contains(&ip.to_canonical())
}

/// Whether all host names in the request are IP addresses, `localhost` or in `names`.
fn names_the_picker(target: Option<&Authority>, headers: &HeaderMap, names: &[String]) -> bool {
    let hosts = headers.get_all(header::HOST).iter().map(|host| Authority::try_from(host.as_bytes()).ok());
    let mut all = target.cloned().map(Some).into_iter().chain(hosts).peekable();
    all.peek().is_some() && all.all(|host| host.is_some_and(|host| is_allowed(host.host(), names)))
}

fn is_allowed(host: &str, names: &[String]) -> bool {
    let literal = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    let name = host.strip_suffix('.').unwrap_or(host);
    literal.parse::<IpAddr>().is_ok()
        || name.eq_ignore_ascii_case("localhost")
        || names.iter().any(|allowed| name.eq_ignore_ascii_case(allowed))
}

/// Whether a browser sent the request for a page of another origin. A link on another page may open a page, as scripts
/// of that page can't read it. No other page may change anything, and `Referer` counts where `Origin` is missing.
fn is_cross_origin(method: &Method, headers: &HeaderMap) -> bool {
    let host = headers.get(header::HOST).map(HeaderValue::as_bytes).unwrap_or_default();
    let own = |address: &[u8]| {
        let authority = [&b"http://"[..], b"https://"].iter().find_map(|scheme| address.strip_prefix(*scheme));
        let authority = authority.and_then(|authority| authority.split(|byte| *byte == b'/').next());
        authority.is_some_and(|authority| authority.eq_ignore_ascii_case(host))
    };
    let foreign = |name| headers.get_all(name).iter().any(|address: &HeaderValue| !own(address.as_bytes()));
    let is = |name: &str, expected: &str| headers.get(name).is_some_and(|value| value == expected);
    let reads = method.is_safe();
    let is_opened = reads && is("sec-fetch-mode", "navigate") && is("sec-fetch-dest", "document");
    foreign(header::ORIGIN)
        || !reads && foreign(header::REFERER)
        || !is_opened && headers.get_all("sec-fetch-site").iter().any(|site| *site != "same-origin" && *site != "none")
}

fn unauthorized() -> Response {
    let mut response = refuse(RefusalReason::Token, StatusCode::UNAUTHORIZED, "Unauthorized\n");
    response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response
}

/// The method in lower case, as RBAC rules name it.
fn verb(method: &Method) -> String {
    method.as_str().to_ascii_lowercase()
}

/// The bearer token of the request, if it has one.
fn bearer(headers: &HeaderMap) -> Option<String> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.trim().split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then(|| token.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_what_stands_behind_bearer() {
        for (header, token) in [
            ("Bearer abc", Some("abc")),
            ("bearer  abc ", Some("abc")),
            ("Bearer", None),
            ("Bearer ", None),
            ("Basic abc", None),
            ("abc", None),
        ] {
            let headers = HeaderMap::from_iter([(header::AUTHORIZATION, header.parse().unwrap())]);
            assert_eq!(bearer(&headers).as_deref(), token, "{header:?}");
        }
        assert_eq!(bearer(&HeaderMap::new()), None);
    }

    #[test]
    fn host_names_other_than_the_pickers_are_refused() {
        let names = ["attache.default.svc".to_owned()];
        let allowed = |target: Option<&str>, hosts: &[&str]| {
            let mut map = HeaderMap::new();
            for host in hosts {
                map.append(header::HOST, host.parse().unwrap());
            }
            names_the_picker(target.map(|t| t.parse().unwrap()).as_ref(), &map, &names)
        };
        for host in [
            "127.0.0.1",
            "10.0.0.7:9090",
            "[::1]:9090",
            "[::1]",
            "localhost",
            "LocalHost:8080",
            "localhost.",
            "attache.default.svc:9090",
            "Attache.Default.Svc.",
        ] {
            assert!(allowed(None, &[host]), "{host}");
        }
        for host in ["evil.example", "evil.example:9090", "localhost.evil.example", "127.0.0.1.nip.io", "", "a b"] {
            assert!(!allowed(None, &[host]), "{host}");
        }
        assert!(!allowed(None, &[]), "no name at all");
        assert!(!allowed(None, &["localhost", "evil.example"]), "two names");
        assert!(!allowed(Some("evil.example"), &["localhost"]), "an absolute target outranks the header");
        assert!(allowed(Some("localhost:9090"), &["localhost:9090"]));
    }

    #[test]
    fn requests_of_other_origins_are_known_by_what_browsers_send() {
        let sent = |method: Method, headers: &[(&str, &str)]| {
            let mut map = HeaderMap::from_iter([(header::HOST, "localhost:9090".parse().unwrap())]);
            for (name, value) in headers {
                map.insert(header::HeaderName::try_from(*name).unwrap(), value.parse().unwrap());
            }
            is_cross_origin(&method, &map)
        };
        let cross = |headers: &[(&str, &str)]| sent(Method::GET, headers);
        let opened = [("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "document")];
        for own in [
            &[][..],
            &[("origin", "http://localhost:9090")],
            &[("sec-fetch-site", "same-origin")],
            &[("sec-fetch-site", "none")],
            &opened,
            &[("referer", "http://evil.example/page")],
        ] {
            assert!(!cross(own), "{own:?}");
        }
        for other in [
            ("origin", "http://evil.example"),
            ("origin", "null"),
            ("origin", "http://localhost:3000"),
            ("origin", "localhost:9090"),
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-site", "same-site"),
        ] {
            assert!(cross(&[other]), "{other:?}");
        }
        for method in [Method::POST, Method::PUT, Method::DELETE] {
            for own in [&[][..], &[("referer", "http://LOCALHOST:9090/")], &[("sec-fetch-site", "none")]] {
                assert!(!sent(method.clone(), own), "{method} {own:?}");
            }
            for other in [&opened[..], &[("referer", "http://evil.example/")], &[("referer", "about:blank")]] {
                assert!(sent(method.clone(), other), "a form or script of another page: {method} {other:?}");
            }
            let host_as_path = [("referer", "http://evil.example/localhost:9090")];
            assert!(sent(method, &host_as_path));
        }
    }

    #[test]
    fn only_this_machines_processes_are_local() {
        for local in ["127.0.0.1", "::1", "::ffff:127.0.0.1"] {
            assert!(is_local(local.parse().unwrap()), "{local}");
        }
        for remote in ["127.0.0.6", "10.0.0.9", "::ffff:10.0.0.9", "fd00::1", "0.0.0.0", "::"] {
            assert!(!is_local(remote.parse().unwrap()), "{remote}");
        }
    }
}
