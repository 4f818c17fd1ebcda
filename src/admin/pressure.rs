//! The pressure of models, for reconcilers that start replicas: `/api/pressure`. When a replica has started, a
//! reconciler reads the count and deletes what it read. Diversions that were counted in between stay. Pickers that
//! share state show the count of all of them, and forget together.

use super::{AdminState, json};
use attache_sync::PRESSURE_WINDOW;
use attache_telemetry::pressure::ModelPressure;
use axum::Router;
use axum::extract::{ConnectInfo, Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde::Deserialize;
use serde_json::json;
use std::net::SocketAddr;

/// The pressure of all models.
const ALL_MODELS: &str = "/api/pressure";
/// The pressure of one model, whose name may contain slashes.
const ONE_MODEL: &str = "/api/pressure/{*model}";

/// Routes that show the pressure of all models.
pub(super) fn pages() -> Router<AdminState> {
    Router::new().route(ALL_MODELS, get(list))
}

/// Routes of one model. Their query keys are `pool` and `count`.
pub(super) fn of_model() -> Router<AdminState> {
    Router::new().route(ONE_MODEL, get(show).delete(consume))
}

#[derive(Deserialize)]
struct PressureQuery {
    pool: Option<String>,
    count: Option<String>,
}

fn total(rows: &[ModelPressure]) -> u64 {
    rows.iter().map(|row| row.count).sum()
}

/// The rows of one model, in all pools or in one.
fn rows_of(state: &AdminState, model: &str, pool: Option<&str>) -> Vec<ModelPressure> {
    let mut rows = state.pressure.list(state.clock.now());
    rows.retain(|row| row.model == model && pool.is_none_or(|pool| row.pool == pool));
    rows
}

async fn list(State(state): State<AdminState>) -> Response {
    let rows = state.pressure.list(state.clock.now());
    json(&json!({"window_seconds": PRESSURE_WINDOW.as_secs(), "models": rows}))
}

async fn show(State(state): State<AdminState>, Path(model): Path<String>, Query(q): Query<PressureQuery>) -> Response {
    let rows = rows_of(&state, &model, q.pool.as_deref());
    json(&json!({"window_seconds": PRESSURE_WINDOW.as_secs(), "model": model, "count": total(&rows), "pools": rows}))
}

/// Deletes at most `count` diversions of the model, the oldest first.
async fn consume(
    State(state): State<AdminState>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    Path(model): Path<String>,
    Query(q): Query<PressureQuery>,
) -> Response {
    let Some(count) = q.count.as_ref().and_then(|count| count.parse::<u64>().ok()).filter(|count| *count > 0) else {
        let got = q.count.map_or_else(|| "is missing".to_owned(), |count| format!("is `{count}`"));
        let text = format!("the query key `count` {got}; it is the count that was read, a whole number from 1\n");
        return (StatusCode::BAD_REQUEST, text).into_response();
    };
    let now = state.clock.now();
    let consumed = state.pressure.shared().consume(&model, q.pool.as_deref(), count, now);
    tracing::info!(%peer, model, pool = q.pool, consumed, "pressure of a model consumed");
    let left = total(&rows_of(&state, &model, q.pool.as_deref()));
    json(&json!({"model": model, "consumed": consumed, "count": left}))
}
