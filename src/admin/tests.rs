mod access;
mod bodies;
mod history;
mod pages;
mod status;
mod status_page;
mod threads;

use super::refusal::RefusalReason;
use super::reservations::{ReservationAccess, ReserveRequest};
use super::status::CertificateStatus;
use super::*;
use crate::pools::{EndpointStanding, PoolView};
use attache_pool::health::{HealthOutcome, HealthPolicy};
use attache_pool::ledger::Ticket;
use attache_pool::{Endpoint, EndpointMetrics, EndpointSpec, EndpointState, Engine, PoolSnapshot, SnapshotStore};
use attache_prefix::cache::{BlockUnit, CacheConfig, PrefixCache};
use attache_request::agent::{AgentIdentity, AgentKind, IdentitySource};
use attache_request::event::{DecisionRecord, RunnerUp};
use attache_serving::connections::{ConnectionLimits, Connections};
use attache_telemetry::decisions::Decisions;
use attache_telemetry::metrics::Metrics;
use attache_telemetry::queues::{BandDepths, QueueDepth};
use attache_telemetry::sync::LinkStatus;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use http_body_util::{BodyExt, Empty};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;
use std::time::Duration;

fn log_handle() -> LogHandle {
    attache_telemetry::logs::detached("info")
}

fn state() -> (AdminState, Vec<Arc<Endpoint>>) {
    let clock = Clock::start();
    let mut registry = Registry::default();
    let counter = Counter::<u64>::default();
    counter.inc();
    registry.register("attache_things", "Things", counter);
    let endpoints: Vec<_> = (0u16..2)
        .map(|i| Arc::new(Endpoint::new(EndpointId(u32::from(i)), EndpointSpec::at(([127, 0, 0, 1], 8000 + i).into()))))
        .collect();
    let metrics =
        EndpointMetrics { scraped_at: clock.now(), waiting: 2, running: 3, kv_usage: 0.5, ..Default::default() };
    let states = endpoints
        .iter()
        .zip([Some(Arc::new(metrics)), None])
        .map(|(endpoint, metrics)| EndpointState::new(endpoint.clone(), metrics))
        .collect();
    let store = Arc::new(SnapshotStore::default());
    store.publish(PoolSnapshot::new(4, true, states));
    let prefix = PrefixCache::new(&CacheConfig {
        claim_every_block: false,
        unit: BlockUnit::Tokens(16),
        max_bytes: 1 << 20,
        tenant_share: 1.0,
        claim_life: Duration::from_secs(1),
        seed: 7,
    });
    prefix.unread().record("m", "the chat template failed", clock.now());
    let requests = Metrics::register(&mut Registry::default());
    let queue = QueueDepth::default();
    queue.requests.set(4);
    let view = PoolView {
        metrics: Arc::new(requests.pool("default")),
        queue,
        bands: BandDepths::new(|| vec![(10, 3), (-1, 1)]),
        tokenizer: "characters",
        prefix: Arc::new(prefix),
        kv_events: None,
        remote: None,
        name: "default".into(),
        strategy: "least-request".into(),
        store,
        health: HealthPolicy::default(),
        stale_after: Duration::from_secs(2),
        scrape: Arc::default(),
        dns: Arc::default(),
        file: Arc::default(),
        kube: None,
    };
    let decisions = Decisions::new(8, Clock::start());
    decisions.push(record(Timestamp(clock.now().0.saturating_sub(500_000_000))));
    let refuse = |_: ExplainRequest| -> BoxFuture<'static, Result<serde_json::Value, RequestError>> {
        Box::pin(async { Err(RequestError::new(attache_types::error::Reason::InvalidJson, "nothing to explain")) })
    };
    let state = AdminState {
        rejections: Arc::new(|| vec![("shed", 3)]),
        explain: Arc::new(refuse),
        explain_recorded: Arc::new(|id: String| {
            Box::pin(async move {
                match id.as_str() {
                    "a b" => Ok(serde_json::json!({"request_id": id})),
                    _ => Err((StatusCode::NOT_FOUND, format!("no request {id}"))),
                }
            })
        }),
        reservations: ReservationAccess {
            reserve: Arc::new(|asked: ReserveRequest| {
                Box::pin(async move {
                    let (request, timeout) = (asked.request, asked.timeout.as_secs_f64());
                    let body = String::from_utf8_lossy(&request.body).into_owned();
                    Ok(serde_json::json!({"path": request.path, "timeout": timeout, "body": body}))
                })
            }),
            list: Arc::new(|| serde_json::json!([])),
            release: Arc::new(|id| id == "open"),
            default_timeout: Duration::from_secs(30),
            max_timeout: Duration::from_secs(300),
        },
        ending: Arc::new(|session| match session.session_id.as_deref() {
            Some(id) => Ok(serde_json::json!({"session_id": id, "tenant": session.tenant})),
            None => Err(RequestError::new(attache_types::error::Reason::InvalidSessionId, "`session_id` is missing")),
        }),
        max_explained_bytes: Arc::new(|| 1_000),
        pages: Handle::current(),
        metrics: Arc::new(MetricsPage::new(registry)),
        readiness: Readiness::default(),
        pools: Arc::new(move || vec![view.clone()]),
        decisions: Arc::new(move |limit| decisions.to_json(0, clock.now(), limit)),
        history: Arc::default(),
        warnings: Arc::default(),
        parts: parts(requests),
        config: Arc::new(|| serde_json::json!({"kind": "Attache"})),
        policies: Arc::default(),
        pressure: Arc::default(),
        degraded: Arc::new(|| vec![("encoded_response", 3)]),
        replica: None,
        guard: None,
        hosts: Arc::new([]),
        refusals: Refusals::default(),
        logs: log_handle(),
        clock,
    };
    (state, endpoints)
}

/// A process with a certificate, Redis, and no connection to NATS.
fn parts(metrics: Arc<Metrics>) -> ProcessParts {
    let certificate = CertificateStatus { name: "server certificate", expires_at: u64::MAX, refused: 0 };
    ProcessParts {
        metrics,
        certificates: Arc::new(move || vec![certificate.clone()]),
        uses_redis: Arc::new(|| true),
        nats: Some(Arc::new(LinkStatus::default)),
    }
}

fn record(ended: Timestamp) -> DecisionRecord {
    DecisionRecord {
        sequence: 0,
        ended,
        request_id: "r-1".into(),
        agent: Some(Box::new(AgentIdentity {
            tenant: None,
            program: "task".into(),
            chain: "research".into(),
            parent: Some("task".into()),
            kind: AgentKind::SubAgent,
            source: IdentitySource::Header,
            field: "x-claude-code-session-id",
        })),
        api: "chat_completions",
        pool: "default".into(),
        model: "m".into(),
        endpoint: "127.0.0.1:8000".into(),
        served: None,
        prefill: None,
        prefill_failure: None,
        prefill_ms: None,
        queued_ms: None,
        strategy: "least-request".into(),
        reason: "fewest requests",
        runner_up: Some(RunnerUp { endpoint: "127.0.0.1:8001".into(), margin_ms: Some(3.5), margin_score: Some(1.0) }),
        predicted_ttft_ms: Some(11.0),
        estimated_prompt_tokens: 7,
        estimated_cached_tokens: 0,
        status: 200,
        ttft_ms: Some(12.5),
        duration_ms: 40.0,
        prompt_tokens: Some(8),
        cached_tokens: None,
        completion_tokens: Some(16),
        end: "complete",
    }
}

async fn start(state: AdminState) -> SocketAddr {
    within(Connections::new(ConnectionLimits::of(64)), state).await
}

async fn within(connections: Arc<Connections>, state: AdminState) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(serve(listener, connections, state, std::future::pending()));
    address
}

/// A machine that is not the picker's.
const REMOTE: [u8; 4] = [10, 0, 0, 9];
const LOCAL: [u8; 4] = [127, 0, 0, 1];

/// The response to a request of this peer, whose headers are `headers`.
async fn ask(
    state: &AdminState,
    peer: [u8; 4],
    (method, target): (&str, &str),
    headers: &[(&str, &str)],
    body: axum::body::Body,
) -> (u16, String) {
    let app = router(state.clone()).layer(Extension(ConnectInfo(SocketAddr::from((peer, 4000)))));
    let mut request = hyper::Request::builder().method(method).uri(target);
    if headers.iter().all(|(name, _)| *name != "host") {
        request = request.header("host", "10.0.0.1:9090");
    }
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let service = TowerToHyperService::new(app);
    let response = hyper::service::Service::call(&service, request.body(body).unwrap()).await.unwrap();
    let status = response.status().as_u16();
    let body = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

/// A body of which nothing ever comes.
fn endless() -> axum::body::Body {
    axum::body::Body::from_stream(futures_util::stream::pending::<Result<Bytes, std::io::Error>>())
}

/// Every page that is not open to all.
const GUARDED: [(&str, &str); 23] = [
    ("GET", "/"),
    ("GET", "/page/main.js"),
    ("GET", "/endpoints"),
    ("GET", "/api/status"),
    ("GET", "/api/history"),
    ("GET", "/decisions"),
    ("GET", "/config_dump"),
    ("GET", "/log-level"),
    ("PUT", "/log-level?filter=trace"),
    ("GET", "/kv_blocks?endpoint=127.0.0.1:8000"),
    ("POST", "/explain"),
    ("POST", "/finish_session?session_id=a"),
    ("POST", "/reservations"),
    ("GET", "/reservations"),
    ("DELETE", "/reservations/open"),
    ("GET", "/api/nodes/scheduling"),
    ("POST", "/api/nodes/scheduling"),
    ("PUT", "/api/nodes/scheduling"),
    ("GET", "/api/nodes/scheduling/m"),
    ("DELETE", "/api/nodes/scheduling/m"),
    ("GET", "/api/pressure"),
    ("GET", "/api/pressure/m"),
    ("DELETE", "/api/pressure/m?count=1"),
];

async fn call(address: SocketAddr, method: &str, path: &str) -> (u16, String, String) {
    let client = Client::builder(TokioExecutor::new()).build_http::<Empty<axum::body::Bytes>>();
    let request =
        hyper::Request::builder().method(method).uri(format!("http://{address}{path}")).body(Empty::new()).unwrap();
    let response = client.request(request).await.unwrap();
    let status = response.status().as_u16();
    let kind = response.headers().get("content-type").map(|v| v.to_str().unwrap().to_owned()).unwrap_or_default();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, kind, String::from_utf8(body.to_vec()).unwrap())
}

async fn get_json(address: SocketAddr, path: &str) -> serde_json::Value {
    let (status, kind, body) = call(address, "GET", path).await;
    assert_eq!((status, kind.as_str()), (200, "application/json"), "{path}");
    serde_json::from_str(&body).unwrap()
}

/// The keys at any depth.
fn keys(value: &serde_json::Value) -> Vec<String> {
    match value {
        serde_json::Value::Object(map) => map.iter().flat_map(|(k, v)| [vec![k.clone()], keys(v)].concat()).collect(),
        serde_json::Value::Array(list) => list.iter().flat_map(keys).collect(),
        _ => Vec::new(),
    }
}
