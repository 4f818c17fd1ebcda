//! `POST /finish_session`: ends the session of an agent, as `picker/ending.rs` describes it.

use super::{AdminState, json};
use attache_types::error::RequestError;
use axum::Router;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use serde::Deserialize;
use std::sync::Arc;

/// A session to end.
#[derive(Clone, Debug, Deserialize)]
pub struct EndSession {
    /// The id of the program or of the chain.
    pub session_id: Option<String>,
    /// The tenant whose session it is; `None` for requests without a tenant.
    pub tenant: Option<String>,
}

/// Ends a session and returns what was known of it, as JSON; the error names what is wrong with the id.
pub type Ending = Arc<dyn Fn(EndSession) -> Result<serde_json::Value, RequestError> + Send + Sync>;

/// The route, whose query keys are `session_id` and `tenant`.
pub(super) fn changes() -> Router<AdminState> {
    Router::new().route("/finish_session", post(finish))
}

async fn finish(State(state): State<AdminState>, Query(session): Query<EndSession>) -> Response {
    match (state.ending)(session) {
        Ok(ended) => json(&ended),
        Err(error) => refused(&error),
    }
}

/// The response to a call that is rejected for the reason of a request.
pub(super) fn refused(error: &RequestError) -> Response {
    let status = StatusCode::from_u16(error.reason.status()).unwrap_or(StatusCode::BAD_REQUEST);
    (status, format!("{}: {}\n", error.reason.code(), error.message)).into_response()
}
