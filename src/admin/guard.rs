//! Who may see the pages, where somebody else has the word on that: a token names the caller, and the caller's rights say what it may see.
//!
//! `/live` and `/ready` are for everybody: probes have no token. The answers are those of controller-runtime, which guards the reference pickers'
//! metrics, except that a token nobody knows is answered with 401, as one that is missing.

use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

/// Somebody who wants to see a page.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Caller {
    /// The bearer token.
    pub token: String,
    /// The method, as rights name it: `get`.
    pub verb: String,
    /// The page: `/metrics`.
    pub path: String,
}

/// What is said of a caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It may see the page.
    Allowed,
    /// Nobody knows the token.
    Unknown,
    /// This user may not see the page.
    Denied(String),
    /// Nobody could be asked.
    Unclear,
}

/// Says who may see what.
pub type Guard = Arc<dyn Fn(Caller) -> Pin<Box<dyn Future<Output = Verdict> + Send>> + Send + Sync>;

/// Lets a request through to its page if the guard lets it.
pub(super) async fn check(State(guard): State<Guard>, request: Request, next: Next) -> Response {
    let Some(token) = bearer(request.headers()) else { return unauthorized() };
    let (verb, path) = (verb(request.method()), request.uri().path().to_owned());
    match guard(Caller { token, verb, path }).await {
        Verdict::Allowed => next.run(request).await,
        Verdict::Unknown => unauthorized(),
        Verdict::Denied(user) => {
            (StatusCode::FORBIDDEN, format!("Authorization denied for user {user}\n")).into_response()
        }
        Verdict::Unclear => (StatusCode::INTERNAL_SERVER_ERROR, "Authentication failed\n").into_response(),
    }
}

fn unauthorized() -> Response {
    (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Bearer")], "Unauthorized\n").into_response()
}

/// Rights name methods in small letters.
fn verb(method: &Method) -> String {
    method.as_str().to_ascii_lowercase()
}

/// The token that the request bears, if it bears one.
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
}
