//! Keys of query strings. An unknown key is an error, since a misspelt one would otherwise be ignored silently.

use axum::extract::{Query, Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

/// Most characters of an unknown key that the response quotes.
const SHOWN_CHARS: usize = 60;

/// The keys that a page accepts.
pub(super) type Keys = &'static [&'static str];

/// Passes requests on whose query has only keys in `known`; others get status 400.
pub(super) async fn known(State(known): State<Keys>, request: Request, next: Next) -> Response {
    let Ok(Query(pairs)) = Query::<Vec<(String, String)>>::try_from_uri(request.uri()) else {
        return (StatusCode::BAD_REQUEST, "the query string can't be read\n").into_response();
    };
    match pairs.iter().find(|(key, _)| !known.contains(&key.as_str())) {
        Some((key, _)) => (StatusCode::BAD_REQUEST, unknown(key, known)).into_response(),
        None => next.run(request).await,
    }
}

fn unknown(key: &str, known: Keys) -> String {
    let shown: String = key.chars().filter(|c| !c.is_control()).take(SHOWN_CHARS).collect();
    let allowed: Vec<String> = known.iter().map(|key| format!("`{key}`")).collect();
    let allowed = if allowed.is_empty() { "none".to_owned() } else { allowed.join(", ") };
    format!("unknown query key `{shown}`; allowed on this page: {allowed}\n")
}
