//! Reservations: an endpoint that is chosen and booked for a request that follows.
//!
//! | request | response |
//! |---|---|
//! | `POST /reservations?path=…&pool=…&header=…&timeout=30` with the body of the request | the id and the endpoints, JSON |
//! | `GET /reservations` | the open reservations without their ids, JSON |
//! | `DELETE /reservations/{id}` | 204, or 404 if it is not open |

use super::sessions::refused;
use super::{AdminState, ExplainRequest, body, explain_request, json};
use attache_types::error::RequestError;
use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use futures_util::future::BoxFuture;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

/// Most requests that wait for their reservations at once: each holds a body, and may be queued.
const MAX_RESERVED_AT_ONCE: usize = 16;

/// A request to reserve for.
#[derive(Clone, Debug)]
pub struct ReserveRequest {
    /// The request that will be sent.
    pub request: ExplainRequest,
    /// How long the reservation is held.
    pub timeout: Duration,
}

/// Makes a reservation, and returns it as JSON; the error is a rejection.
pub type Reserve =
    Arc<dyn Fn(ReserveRequest) -> BoxFuture<'static, Result<serde_json::Value, RequestError>> + Send + Sync>;

/// The reservations of the process.
#[derive(Clone)]
pub struct ReservationAccess {
    /// Makes a reservation.
    pub reserve: Reserve,
    /// The open reservations, as JSON.
    pub list: Arc<dyn Fn() -> serde_json::Value + Send + Sync>,
    /// Releases the reservation of this id; false if there is none.
    pub release: Arc<dyn Fn(&str) -> bool + Send + Sync>,
    /// The time for which a reservation is held, unless the call says otherwise.
    pub default_timeout: Duration,
    /// Longest time for which a reservation is held.
    pub max_timeout: Duration,
}

/// The route that shows reservations.
pub(super) fn pages() -> Router<AdminState> {
    Router::new().route("/reservations", get(list))
}

/// The route that makes a reservation. Its query keys are those of a request to explain and `timeout`.
pub(super) fn making() -> Router<AdminState> {
    let permits = Arc::new(Semaphore::new(MAX_RESERVED_AT_ONCE));
    Router::new().route("/reservations", post(reserve).layer(from_fn_with_state(permits, body::few)))
}

/// The route that releases a reservation.
pub(super) fn releasing() -> Router<AdminState> {
    Router::new().route("/reservations/{id}", delete(release))
}

/// The time-out in this query.
///
/// # Errors
/// It is no number of seconds, or out of range.
fn timeout(query: &[(String, String)], access: &ReservationAccess) -> Result<Duration, String> {
    let Some((_, text)) = query.iter().find(|(key, _)| key == "timeout") else { return Ok(access.default_timeout) };
    let seconds = text.parse::<f64>().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let most = access.max_timeout;
    seconds.filter(|timeout| !timeout.is_zero() && *timeout <= most).ok_or_else(|| {
        let shown: String = text.chars().filter(|c| !c.is_control()).take(60).collect();
        format!("`timeout` is `{shown}`; allowed are more than 0 and at most {} seconds\n", most.as_secs())
    })
}

async fn reserve(
    State(state): State<AdminState>,
    Query(query): Query<Vec<(String, String)>>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let access = &state.reservations;
    let timeout = match timeout(&query, access) {
        Ok(timeout) => timeout,
        Err(wrong) => return (StatusCode::BAD_REQUEST, wrong).into_response(),
    };
    let body = match body::read(body, (state.max_explained_bytes)()).await {
        Ok(body) => body,
        Err(refusal) => return refusal,
    };
    let request = match explain_request(query, &headers, body) {
        Ok(request) => request,
        Err(wrong) => return (StatusCode::BAD_REQUEST, wrong).into_response(),
    };
    match (access.reserve)(ReserveRequest { request, timeout }).await {
        Ok(reserved) => json(&reserved),
        Err(error) => refused(&error),
    }
}

async fn list(State(state): State<AdminState>) -> Response {
    json(&(state.reservations.list)())
}

async fn release(State(state): State<AdminState>, Path(id): Path<String>) -> Response {
    if (state.reservations.release)(&id) {
        return StatusCode::NO_CONTENT.into_response();
    }
    (StatusCode::NOT_FOUND, "no reservation with this id is open\n").into_response()
}
