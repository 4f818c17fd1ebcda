//! Metrics and admin pages on one plain HTTP port.
//!
//! | path | what |
//! |---|---|
//! | `/` | a page for people: endpoints and recent decisions, refreshed every second |
//! | `/metrics` | Prometheus text |
//! | `/live`, `/ready` | 200, or 503 with the names of what is missing |
//! | `/endpoints`, `/decisions`, `/config_dump` | JSON |
//! | `/log-level` | `GET` shows, `PUT ?filter=…` changes the log filter; `PUT` from loopback only |
//!
//! Reads snapshots and never writes anything that a request depends on. May import: `clock`, `health`, `pool`,
//! `telemetry::logs`, `tls` (for its connections).

mod endpoints;
#[cfg(test)]
mod tests;

use crate::clock::Clock;
use crate::health::Readiness;
use crate::telemetry::logs::LogHandle;
use crate::telemetry::pools::PoolView;
use crate::tls::incoming;
use axum::extract::{ConnectInfo, Query, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_stream::StreamExt;
use tonic::transport::server::Connected;

/// What is asked for each time a page is fetched.
pub type Source<T> = Arc<dyn Fn() -> T + Send + Sync>;

/// What the pages show.
#[derive(Clone)]
pub struct AdminState {
    /// All metrics.
    pub registry: Arc<Registry>,
    /// Whether requests can be served.
    pub readiness: Readiness,
    /// The pools at this moment.
    pub pools: Source<Vec<PoolView>>,
    /// Recent decisions, newest first: a JSON list of objects.
    pub decisions: Source<serde_json::Value>,
    /// The settings in force.
    pub config: Source<serde_json::Value>,
    /// The log filter.
    pub logs: LogHandle,
    /// Now, and when the metrics were read.
    pub clock: Clock,
}

impl std::fmt::Debug for AdminState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AdminState").field("readiness", &self.readiness).finish_non_exhaustive()
    }
}

/// A client has this long to send its request's headers, and a kept connection this long for the next.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);
/// Connections at once: a few scrapers and a few people. They must not use up the file descriptors of the ext-proc port.
const MAX_CONNECTIONS: usize = 64;

/// Serves the pages on `listener` until `end` completes. Open connections are then cut: scrapers come again.
pub async fn serve(listener: TcpListener, state: AdminState, end: impl Future<Output = ()>) {
    let app = router(state);
    let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
    let mut incoming = incoming(listener, None);
    // The end of the set cuts what is open.
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
        // One too many is closed at once: waiting would keep its file descriptor.
        let (Ok(permit), Some(peer)) = (connections.clone().try_acquire_owned(), stream.connect_info()) else {
            continue;
        };
        let service = TowerToHyperService::new(app.clone().layer(Extension(ConnectInfo(peer))));
        let connection = http.serve_connection(TokioIo::new(stream), service);
        open.spawn(async move {
            // A client that breaks off or speaks nonsense is its own affair.
            let _ = connection.await;
            drop(permit);
        });
    }
}

fn router(state: AdminState) -> Router {
    Router::new()
        .route("/", get(page))
        .route("/metrics", get(metrics))
        .route("/live", get(|| async { "live\n" }))
        .route("/ready", get(ready))
        .route("/endpoints", get(endpoints))
        .route("/decisions", get(|State(s): State<AdminState>| async move { json(&(s.decisions)()) }))
        .route("/config_dump", get(|State(s): State<AdminState>| async move { json(&(s.config)()) }))
        .route("/log-level", get(log_level).put(set_log_level))
        .with_state(state)
}

/// The page's own script and style are inline; nothing is ever loaded from elsewhere.
const PAGE_POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
);

async fn page() -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8")),
        (header::CONTENT_SECURITY_POLICY, PAGE_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    ];
    (headers, include_str!("page.html")).into_response()
}

async fn metrics(State(state): State<AdminState>) -> Response {
    let mut text = String::with_capacity(16 << 10);
    if encode(&mut text, &state.registry).is_err() {
        return (StatusCode::INTERNAL_SERVER_ERROR, "the metrics can't be encoded\n").into_response();
    }
    let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, content_type)], text).into_response()
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
    let pools: Vec<_> = (state.pools)().iter().map(|pool| endpoints::pool(pool, now)).collect();
    json(&serde_json::json!({
        "version": env!("CARGO_PKG_VERSION"),
        "ready": state.readiness.is_ready(),
        "missing": state.readiness.missing(),
        "pools": pools,
    }))
}

async fn log_level(State(state): State<AdminState>) -> String {
    format!("{}\n", state.logs.current())
}

#[derive(serde::Deserialize)]
struct Filter {
    filter: String,
}

async fn set_log_level(
    State(state): State<AdminState>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    query: Result<Query<Filter>, axum::extract::rejection::QueryRejection>,
) -> Response {
    if !peer.ip().to_canonical().is_loopback() {
        return (StatusCode::FORBIDDEN, "only from loopback; try `kubectl port-forward`\n").into_response();
    }
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
