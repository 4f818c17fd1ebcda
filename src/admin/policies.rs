//! Policies of single models in the format of LocalAI's `/api/nodes/scheduling`. The response lists
//! fields without effect under `without_effect`. Pickers that share state get every change.

use super::{AdminState, body, json};
use attache_scheduling::policy::{Document, MAX_MODEL_NAME, ModelPolicy, PolicyError};
use axum::Router;
use axum::body::Body;
use axum::extract::{ConnectInfo, Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use serde_json::{Value, json};
use std::net::SocketAddr;

/// 16 KiB: a policy has five fields.
const MAX_CHANGE_BYTES: usize = 16 << 10;

/// Routes for model names, which may contain slashes.
const ONE_MODEL: &str = "/api/nodes/scheduling/{*model}";
const ALL_MODELS: &str = "/api/nodes/scheduling";

/// Routes that show policies.
pub(super) fn pages() -> Router<AdminState> {
    Router::new().route(ALL_MODELS, get(list)).route(ONE_MODEL, get(show))
}

/// Routes that change policies.
pub(super) fn changes() -> Router<AdminState> {
    Router::new().route(ALL_MODELS, post(change).put(change)).route(ONE_MODEL, delete(forget))
}

fn row(model: &str, policy: &ModelPolicy) -> Value {
    // As LocalAI shows it: an unset policy is an empty string.
    json!({
        "model_name": model,
        "route_policy": policy.route_policy.map_or(json!(""), |p| json!(p)),
        "balance_abs_threshold": policy.balance_abs_threshold,
        "balance_rel_threshold": policy.balance_rel_threshold,
        "min_prefix_match": policy.min_prefix_match,
    })
}

fn refusal(status: StatusCode, field: &str, message: &str) -> Response {
    let param = (!field.is_empty()).then_some(field);
    let error = json!({"message": message, "type": "invalid_request_error", "param": param, "code": status.as_u16()});
    (status, json(&json!({"error": error}))).into_response()
}

async fn list(State(state): State<AdminState>) -> Response {
    let rows: Vec<Value> = state.policies.all().iter().map(|(model, policy)| row(model, policy)).collect();
    json(&Value::Array(rows))
}

async fn show(State(state): State<AdminState>, Path(model): Path<String>) -> Response {
    match state.policies.get(&model) {
        Some(policy) => json(&row(&model, &policy)),
        None => nothing_about(&model),
    }
}

fn nothing_about(model: &str) -> Response {
    let shown: String = model.chars().filter(|c| !c.is_control()).take(MAX_MODEL_NAME).collect();
    refusal(StatusCode::NOT_FOUND, "model_name", &format!("nothing is said about the model `{shown}`"))
}

/// Only JSON is accepted: a browser sends a preflight request before a cross-site request with
/// it, which is not answered.
async fn change(
    State(state): State<AdminState>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    if !kind.split(';').next().is_some_and(|k| k.trim().eq_ignore_ascii_case("application/json")) {
        let message = "the content type must be `application/json`";
        return refusal(StatusCode::UNSUPPORTED_MEDIA_TYPE, "", message);
    }
    let body = match body::read(body, MAX_CHANGE_BYTES).await {
        Ok(body) => body,
        Err(refusal) => return refusal,
    };
    let document = match serde_json::from_slice::<Value>(&body) {
        Ok(document) => document,
        Err(error) => return refusal(StatusCode::BAD_REQUEST, "", &format!("the body is no JSON: {error}")),
    };
    let changed =
        Document::read(&document).and_then(|d| state.policies.change(&d, unix_ms(&state)).map(|policy| (d, policy)));
    match changed {
        Ok((Document { model, without_effect, .. }, policy)) => {
            announce(&state, &model);
            let ignored = without_effect.join(", ");
            tracing::info!(%peer, model, policy = ?policy, without_effect = ignored, "policy of a model changed");
            let mut answer = row(&model, &policy);
            if !without_effect.is_empty() {
                answer["without_effect"] = json!(without_effect);
            }
            json(&answer)
        }
        Err(PolicyError { field, message }) => refusal(StatusCode::BAD_REQUEST, &field, &message),
    }
}

/// The Unix time in milliseconds where the policies are shared; else 0.
fn unix_ms(state: &AdminState) -> u64 {
    state.replica.as_ref().map_or(0, |replica| replica.unix_ms(state.clock.now()))
}

/// Sends the change of a model's policy to the other pickers.
fn announce(state: &AdminState, model: &str) {
    if let Some(replica) = &state.replica {
        replica.policy_changed(model, state.clock.now());
    }
}

async fn forget(
    State(state): State<AdminState>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    Path(model): Path<String>,
) -> Response {
    if !state.policies.remove(&model, unix_ms(&state)) {
        return nothing_about(&model);
    }
    announce(&state, &model);
    tracing::info!(%peer, model, "policy of a model removed");
    StatusCode::NO_CONTENT.into_response()
}
