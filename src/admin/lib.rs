//! Metrics and admin pages on one plain HTTP port.
//!
//! | path | content |
//! |---|---|
//! | `/`, `/page/{file}` | a page for people: trouble, history, endpoints and recent decisions |
//! | `/metrics` | Prometheus text |
//! | `/live`, `/ready` | 200, or 503 with the names of missing conditions |
//! | `/endpoints`, `/decisions`, `/config_dump` | JSON |
//! | `/api/status`, `/api/history` | JSON: the process beside its pools; rates and percentiles of pools over time |
//! | `/explain` | `POST` a body (`?path=/v1/chat/completions&pool=llama`): its blocks and their holders, JSON |
//! | `/explain?request_id=ID` | `GET`: a past decision that was kept or recorded, JSON |
//! | `/kv_blocks` | `?endpoint=ip:port`: the blocks that its KV events have announced, JSON |
//! | `/api/nodes/scheduling` | `GET` lists the policies of models, `POST` or `PUT` changes one, JSON |
//! | `/api/nodes/scheduling/{model}` | `GET` shows the policy of one model, `DELETE` removes it |
//! | `/api/peers` | `GET`: the other pickers that share state with this one, JSON |
//! | `/api/pressure` | `GET`: requests that load kept from their cached prefix in the last minute, by pool and model, JSON |
//! | `/api/pressure/{model}` | `GET` those of one model; `DELETE ?count=N` forgets what was read |
//! | `/reservations`, `/reservations/{id}` | `POST` a body: the endpoint of a request that follows, booked; `GET`, `DELETE` |
//! | `/finish_session` | `POST ?session_id=…&tenant=…`: ends the session of an agent, JSON |
//! | `/log-level` | `GET` shows, `PUT ?filter=…` changes the log filter |
//!
//! **Owns** the port, its connections and its limits on bodies, the access to it ([`guard`]), and the metrics that are
//! read from the stores of pools at each scrape ([`pools`]).
//! **Called by** `app`, which starts it and hands it the stores.
//! **Must not** change what requests depend on, except for the policies of models, reservations, and what
//! is remembered of sessions. Probes are answered while other
//! bodies are read, and while pages are rendered: handlers of pages run on a thread of their own.
//!
//! Read first: `lib.rs`, `guard.rs`, `pools.rs`, `metrics_page.rs`.

mod body;
mod endpoints;
pub mod guard;
pub mod history;
mod metrics_page;
mod page;
mod peers;
mod policies;
pub mod pools;
mod pressure;
mod query;
mod rates;
mod refusal;
pub mod reservations;
pub mod sessions;
pub mod status;
#[cfg(test)]
mod tests;
pub mod warnings;

pub use metrics_page::MetricsPage;
pub use refusal::Refusals;

use crate::pools::PoolView;
use attache_scheduling::ModelPolicies;
use attache_serving::connections::Connections;
use attache_serving::health::Readiness;
use attache_serving::tls::incoming;
use attache_sync::Replica;
use attache_telemetry::logs::LogHandle;
use attache_telemetry::pressure::Pressure;
use attache_types::clock::Clock;
use attache_types::error::RequestError;
use axum::body::{Body, Bytes};
use axum::extract::{ConnectInfo, Query, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{Next, from_fn, from_fn_with_state, map_response_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Extension, Router};
use futures_util::future::BoxFuture;
use guard::Guard;
use history::History;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use status::ProcessParts;
use std::collections::BTreeMap;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_stream::StreamExt;
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::server::Connected;
use warnings::LatestWarnings;

/// Produces the content of a page at each request.
pub type Source<T> = Arc<dyn Fn() -> T + Send + Sync>;

/// A request to explain.
#[derive(Clone, Debug)]
pub struct ExplainRequest {
    /// Name of the pool; `None` selects it by the model.
    pub pool: Option<String>,
    /// Path that the request would be sent to.
    pub path: String,
    /// Its headers: names and values.
    pub headers: Vec<(String, String)>,
    /// Body of the request.
    pub body: Bytes,
}

/// Explains a request as JSON; the error is a rejection.
pub type Explain =
    Arc<dyn Fn(ExplainRequest) -> BoxFuture<'static, Result<serde_json::Value, RequestError>> + Send + Sync>;

/// Explains the past decision about the request with this `x-request-id`, as JSON; the error is a status and its text.
pub type ExplainRecorded =
    Arc<dyn Fn(String) -> BoxFuture<'static, Result<serde_json::Value, (StatusCode, String)>> + Send + Sync>;

/// The data behind the admin pages.
#[derive(Clone)]
pub struct AdminState {
    /// Runtime that renders pages, apart from the thread that answers probes.
    pub pages: Handle,
    /// All metrics.
    pub metrics: Arc<MetricsPage>,
    /// Conditions of readiness.
    pub readiness: Readiness,
    /// The current pools with their snapshots.
    pub pools: Source<Vec<PoolView>>,
    /// Recent decisions, newest first, at most this many: a JSON list of objects.
    pub decisions: Arc<dyn Fn(usize) -> serde_json::Value + Send + Sync>,
    /// The history of pools.
    pub history: Arc<History>,
    /// The warnings and slowdowns at its last reading.
    pub warnings: Arc<LatestWarnings>,
    /// The parts of the process beside its pools.
    pub parts: ProcessParts,
    /// The settings in effect.
    pub config: Source<serde_json::Value>,
    /// Explains a request.
    pub explain: Explain,
    /// Ends a session.
    pub ending: sessions::Ending,
    /// The reservations.
    pub reservations: reservations::ReservationAccess,
    /// Explains a past decision.
    pub explain_recorded: ExplainRecorded,
    /// Largest body of a request to explain, bytes: that of requests to model servers.
    pub max_explained_bytes: Source<usize>,
    /// The policies of single models.
    pub policies: Arc<ModelPolicies>,
    /// Requests that load kept from their cached prefix.
    pub pressure: Arc<Pressure>,
    /// The reasons of rejections since the start, and how often each occurred.
    pub rejections: Source<Vec<(&'static str, u64)>>,
    /// The degraded modes that have occurred since the start, and how often.
    pub degraded: Source<Vec<(&'static str, u64)>>,
    /// This picker in its cluster, if `sync` is configured.
    pub replica: Option<Arc<Replica>>,
    /// Controls access to the pages; [`guard`] describes the rules without it.
    pub guard: Option<Guard>,
    /// Host names of the picker, in lower case, beside IP addresses and `localhost`.
    pub hosts: Arc<[String]>,
    /// Counters of rejected requests.
    pub refusals: Refusals,
    /// Handle of the log filter.
    pub logs: LogHandle,
    /// Clock, which also measures the age of metrics.
    pub clock: Clock,
}

impl std::fmt::Debug for AdminState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AdminState").field("readiness", &self.readiness).finish_non_exhaustive()
    }
}

/// Timeout for the headers of a request, and for the next request on an open connection.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);
/// Most requests that are explained at once: each holds a body and costs as much as a decision.
const MAX_EXPLAINED_AT_ONCE: usize = 2;
/// Default path of a request to explain.
pub const DEFAULT_EXPLAINED_PATH: &str = "/v1/chat/completions";

/// Serves the pages on `listener`, within the limits of `connections`, until `end` completes. Open connections
/// are then cut; scrapers retry.
pub async fn serve(
    listener: TcpListener,
    connections: Arc<Connections>,
    state: AdminState,
    end: impl Future<Output = ()>,
) {
    let app = router(state);
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
    let mut incoming = incoming(listener, connections, None);
    // Dropping the set cuts open connections.
    let mut open = JoinSet::new();
    tokio::pin!(end);
    loop {
        let stream = tokio::select! {
            next = incoming.next() => match next {
                Some(Ok(stream)) => stream,
                Some(Err(_)) => continue,
                None => return,
            },
            Some(_) = open.join_next() => continue,
            () = &mut end => return,
        };
        let client = stream.connect_info();
        let service = TowerToHyperService::new(app.clone().layer(Extension(ConnectInfo(client.peer()))));
        let connection = http.serve_connection(TokioIo::new(stream), service);
        open.spawn(async move {
            // hyper does not poll the socket while a page is rendered and the client has sent its next request. An
            // evicted connection must close all the same, since new ones wait for its place.
            tokio::select! {
                // A client that disconnects or sends invalid HTTP affects only itself.
                _ = connection => {}
                () = client.closed() => {}
            }
        });
    }
}

fn router(state: AdminState) -> Router {
    // Scrapers and probes may add keys of their own, so `/metrics`, `/live` and `/ready` accept any.
    let keys = |known: query::Keys| from_fn_with_state(known, query::known);
    let explaining = Arc::new(Semaphore::new(MAX_EXPLAINED_AT_ONCE));
    let explain = post(explain)
        .get(explain_recorded)
        .layer(from_fn_with_state(explaining, body::few))
        .layer(keys(&["path", "pool", "header", "request_id"]))
        .fallback(explain_by_post);
    let rendered = || from_fn_with_state(state.pages.clone(), on_pages_thread);
    // Layers run from the last to the first: the cheapest and strictest checks come first.
    let local = Router::new()
        .route("/log-level", put(set_log_level).layer(keys(&["filter"])))
        .route("/kv_blocks", get(kv_blocks).layer(keys(&["endpoint"])))
        .route("/explain", explain)
        .merge(policies::changes().route_layer(keys(&[])))
        .merge(reservations::making().route_layer(keys(&["path", "pool", "header", "timeout"])))
        .merge(reservations::releasing().route_layer(keys(&[])))
        .merge(sessions::changes().route_layer(keys(&["session_id", "tenant"])))
        .route_layer(rendered());
    let pages = Router::new()
        .route("/endpoints", get(endpoints))
        .route("/config_dump", get(|State(s): State<AdminState>| async move { json(&(s.config)()) }))
        .route("/log-level", get(log_level))
        .merge(policies::pages())
        .merge(reservations::pages())
        .merge(peers::pages())
        .merge(pressure::pages())
        .merge(page::pages())
        .merge(status::pages())
        .route_layer(keys(&[]))
        .merge(history::pages().route_layer(keys(&["step", "after"])))
        .merge(pressure::of_model().route_layer(keys(&["pool", "count"])))
        .merge(Router::new().route("/decisions", get(decisions)).route_layer(keys(&["request_id", "limit"])))
        .route_layer(rendered());
    let metrics = Router::new().route("/metrics", get(metrics)).route_layer(rendered());
    let (metrics, guarded) = match &state.guard {
        Some(guard) => {
            let by_token = || from_fn_with_state(guard.clone(), guard::by_token);
            let local = local.route_layer(by_token()).route_layer(from_fn(guard::by_peer));
            (metrics.route_layer(by_token()), pages.route_layer(by_token()).merge(local))
        }
        None => (metrics, pages.merge(local).route_layer(from_fn(guard::by_peer))),
    };
    guarded
        .route_layer(from_fn_with_state(state.hosts.clone(), guard::by_origin))
        .merge(metrics)
        .route("/live", get(|| async { "live\n" }))
        .route("/ready", get(ready))
        .layer(map_response_with_state(state.refusals.clone(), refusal::count))
        .with_state(state)
}

/// Runs a handler on the runtime that renders pages. Its pages wait for each other, and probes don't wait for them.
async fn on_pages_thread(State(pages): State<Handle>, request: Request, next: Next) -> Response {
    let page = AbortOnDropHandle::new(pages.spawn(next.run(request)));
    page.await.unwrap_or_else(|error| {
        tracing::error!(%error, "a page was not rendered");
        (StatusCode::INTERNAL_SERVER_ERROR, "the page can't be rendered; the log has the reason\n").into_response()
    })
}

async fn metrics(State(state): State<AdminState>, headers: HeaderMap) -> Response {
    match state.metrics.text(|| state.clock.now()) {
        Some(text) => {
            let accept: Vec<&str> =
                headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok()).collect();
            let (media_type, text) = metrics_page::for_client(text, &accept);
            ([(header::CONTENT_TYPE, media_type), (header::VARY, "accept")], text).into_response()
        }
        None => (StatusCode::INTERNAL_SERVER_ERROR, "the metrics can't be encoded\n").into_response(),
    }
}

async fn ready(State(state): State<AdminState>) -> Response {
    let missing = state.readiness.missing();
    if missing.is_empty() {
        return "ready\n".into_response();
    }
    let lines: String = missing.iter().map(|m| format!("waiting for: {m}\n")).collect();
    (StatusCode::SERVICE_UNAVAILABLE, lines).into_response()
}

async fn endpoints(State(state): State<AdminState>) -> Response {
    let now = state.clock.now();
    let (views, degraded) = ((state.pools)(), (state.degraded)());
    let latest = state.warnings.load();
    let pools: Vec<_> = views.iter().map(|pool| endpoints::pool(pool, &latest, now)).collect();
    json(&serde_json::json!({
        "version": env!("CARGO_PKG_VERSION"),
        "ready": state.readiness.is_ready(),
        "missing": state.readiness.missing(),
        "rejections": (state.rejections)().into_iter().collect::<BTreeMap<_, _>>(),
        "warnings": latest.warnings,
        "degraded": degraded.into_iter().collect::<BTreeMap<_, _>>(),
        "pools": pools,
    }))
}

#[derive(serde::Deserialize)]
struct DecisionsQuery {
    request_id: Option<String>,
    limit: Option<String>,
}

/// The recent decisions, or those about the requests with one `x-request-id`.
async fn decisions(State(state): State<AdminState>, Query(query): Query<DecisionsQuery>) -> Response {
    let limit = match query.limit.as_deref().map(str::parse::<usize>) {
        None => usize::MAX,
        Some(Ok(limit)) => limit,
        Some(Err(_)) => {
            let got = query.limit.unwrap_or_default();
            let text = format!("the query key `limit` is `{got}`; it is a whole number of decisions\n");
            return (StatusCode::BAD_REQUEST, text).into_response();
        }
    };
    // All of them are searched for an id.
    let mut decisions = (state.decisions)(if query.request_id.is_some() { usize::MAX } else { limit });
    if let (Some(id), Some(list)) = (query.request_id, decisions.as_array_mut()) {
        list.retain(|decision| decision["request_id"] == id);
        list.truncate(limit);
    }
    json(&decisions)
}

async fn log_level(State(state): State<AdminState>) -> String {
    format!("{}\n", state.logs.current())
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct EndpointQuery {
    endpoint: SocketAddr,
}

async fn kv_blocks(
    State(state): State<AdminState>,
    query: Result<Query<EndpointQuery>, axum::extract::rejection::QueryRejection>,
) -> Response {
    let Ok(Query(EndpointQuery { endpoint })) = query else {
        return (StatusCode::BAD_REQUEST, "give the endpoint, as in `?endpoint=10.0.0.7:8000`\n").into_response();
    };
    match endpoints::kv_blocks(&(state.pools)(), endpoint) {
        Some(blocks) => json(&blocks),
        None => (StatusCode::NOT_FOUND, format!("no pool has the endpoint {endpoint}\n")).into_response(),
    }
}

/// The request of an `/explain` or of a reservation with this query; its `content-type` is that of the POST, unless a header names one.
///
/// # Errors
/// A header is not `name: value`.
fn explain_request(query: Vec<(String, String)>, headers: &HeaderMap, body: Bytes) -> Result<ExplainRequest, String> {
    let mut asked = ExplainRequest { pool: None, path: DEFAULT_EXPLAINED_PATH.to_owned(), headers: Vec::new(), body };
    for (name, value) in query {
        match name.as_str() {
            "path" => asked.path = value,
            "pool" => asked.pool = Some(value),
            "header" => match value.split_once(':') {
                Some((name, value)) if !name.trim().is_empty() => {
                    asked.headers.push((name.trim().to_ascii_lowercase(), value.trim().to_owned()));
                }
                _ => return Err(format!("`header` is `{value}`; allowed is `name: value`\n")),
            },
            // The page has refused unknown keys before.
            _ => {}
        }
    }
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok());
    if let Some(value) = content_type.filter(|_| !asked.headers.iter().any(|(name, _)| name == "content-type")) {
        asked.headers.push(("content-type".to_owned(), value.to_owned()));
    }
    Ok(asked)
}

/// Explains the past decision about `request_id`.
async fn explain_recorded(State(state): State<AdminState>, Query(query): Query<Vec<(String, String)>>) -> Response {
    let Some((_, id)) = query.into_iter().find(|(name, _)| name == "request_id") else {
        return explain_by_post().await;
    };
    match (state.explain_recorded)(id).await {
        Ok(explanation) => json(&explanation),
        Err((status, text)) => (status, format!("{text}\n")).into_response(),
    }
}

/// The response to methods other than `POST`.
async fn explain_by_post() -> Response {
    let allowed = [(header::ALLOW, "POST")];
    (StatusCode::METHOD_NOT_ALLOWED, allowed, "send the body of a request with POST, or use `attache explain FILE`\n")
        .into_response()
}

/// Access is restricted, since explaining costs as much as deciding and shows what other prompts left in the index.
async fn explain(
    State(state): State<AdminState>,
    Query(query): Query<Vec<(String, String)>>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let body = match body::read(body, (state.max_explained_bytes)()).await {
        Ok(body) => body,
        Err(refusal) => return refusal,
    };
    let asked = match explain_request(query, &headers, body) {
        Ok(asked) => asked,
        Err(wrong) => return (StatusCode::BAD_REQUEST, wrong).into_response(),
    };
    match (state.explain)(asked).await {
        Ok(explanation) => json(&explanation),
        Err(error) => sessions::refused(&error),
    }
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Filter {
    filter: String,
}

async fn set_log_level(
    State(state): State<AdminState>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    query: Result<Query<Filter>, axum::extract::rejection::QueryRejection>,
) -> Response {
    let Ok(Query(Filter { filter })) = query else {
        return (StatusCode::BAD_REQUEST, "give the filter, as in `?filter=debug`\n").into_response();
    };
    match state.logs.set(&filter) {
        Ok(now) => {
            tracing::info!(%peer, filter = now, "log filter changed");
            format!("{now}\n").into_response()
        }
        Err(error) => (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response(),
    }
}

fn json(value: &serde_json::Value) -> Response {
    let headers = [(header::CONTENT_TYPE, "application/json"), (header::CACHE_CONTROL, "no-store")];
    (headers, format!("{value}\n")).into_response()
}
