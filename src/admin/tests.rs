use super::*;
use crate::clock::Timestamp;
use crate::ids::EndpointId;
use crate::pool::health::{HealthPolicy, Outcome};
use crate::pool::ledger::Ticket;
use crate::pool::{Endpoint, EndpointMetrics, EndpointSpec, EndpointState, PoolSnapshot, SnapshotStore};
use crate::prefix::cache::{BlockUnit, CacheConfig, PrefixCache};
use crate::telemetry::decisions::{DecisionRecord, Decisions};
use crate::telemetry::pools::PoolView;
use http_body_util::{BodyExt, Empty};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use prometheus_client::metrics::counter::Counter;
use std::time::Duration;

fn log_handle() -> LogHandle {
    crate::telemetry::logs::detached("info")
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
        unit: BlockUnit::Tokens(16),
        max_bytes: 1 << 20,
        tenant_share: 1.0,
        claim_life: Duration::from_secs(1),
        seed: 7,
    });
    let view = PoolView {
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
    let decisions = Decisions::new(8);
    decisions.push(record(Timestamp(clock.now().0.saturating_sub(500_000_000))));
    let refuse = |_: Asked| -> Pin<Box<dyn Future<Output = Result<serde_json::Value, RequestError>> + Send>> {
        Box::pin(async { Err(RequestError::new(crate::error::Reason::InvalidJson, "nothing to explain")) })
    };
    let state = AdminState {
        explain: Arc::new(refuse),
        registry: Arc::new(registry),
        readiness: Readiness::default(),
        pools: Arc::new(move || vec![view.clone()]),
        decisions: Arc::new(move || decisions.to_json(clock.now())),
        config: Arc::new(|| serde_json::json!({"kind": "Attache"})),
        policies: Arc::default(),
        guard: None,
        logs: log_handle(),
        clock,
    };
    (state, endpoints)
}

fn record(ended: Timestamp) -> DecisionRecord {
    DecisionRecord {
        sequence: 0,
        ended,
        request_id: "r-1".into(),
        api: "chat_completions",
        pool: "default".into(),
        model: "m".into(),
        endpoint: "127.0.0.1:8000".into(),
        served: None,
        prefill: None,
        prefill_failure: None,
        prefill_ms: None,
        reason: "fewest requests",
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
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(serve(listener, state, std::future::pending()));
    address
}

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

#[tokio::test]
async fn every_page_answers() {
    let (state, endpoints) = state();
    let (clock, readiness) = (state.clock, state.readiness.clone());
    let latch = readiness.latch("pool default synced");
    let _ticket = Ticket::book(endpoints[0].clone(), 100);
    for _ in 0..2 {
        endpoints[1].health.record(Outcome::ConnectFailure, clock.now(), &HealthPolicy::default());
    }
    let address = start(state).await;

    let (status, kind, body) = call(address, "GET", "/metrics").await;
    assert_eq!(status, 200);
    assert!(
        kind.starts_with("application/openmetrics-text") && body.contains("attache_things_total 1"),
        "{kind} {body}"
    );
    assert_eq!(call(address, "GET", "/live").await.0, 200);
    let (status, _, body) = call(address, "GET", "/ready").await;
    assert_eq!((status, body.as_str()), (503, "waiting for: pool default synced\n"));
    latch.release();
    assert_eq!(call(address, "GET", "/ready").await.0, 200);
    readiness.set_draining();
    assert_eq!(call(address, "GET", "/ready").await.2, "waiting for: draining\n");

    let pool = get_json(address, "/endpoints").await["pools"][0].clone();
    assert_eq!((pool["name"].as_str(), pool["generation"].as_u64()), (Some("default"), Some(4)));
    let (first, second) = (&pool["endpoints"][0], &pool["endpoints"][1]);
    assert_eq!((first["status"].as_str(), second["status"].as_str()), (Some("ready"), Some("ejected")));
    assert_eq!((first["in_flight"].as_u64(), first["prefill_tokens"].as_u64()), (Some(1), Some(100)));
    // What the page reports and what was sent since.
    assert_eq!((first["requests"].as_u64(), first["metrics"]["waiting"].as_u64()), (Some(6), Some(2)));
    assert!(second["metrics"].is_null());
    let decision = get_json(address, "/decisions").await[0].clone();
    assert_eq!(decision["model"], "m");
    assert!((500..60_000).contains(&decision["age_ms"].as_u64().unwrap()), "{decision}");
    assert_eq!(get_json(address, "/config_dump").await["kind"], "Attache");
    assert_eq!(call(address, "GET", "/nothing").await.0, 404);
}

/// The keys at any depth.
fn keys(value: &serde_json::Value) -> Vec<String> {
    match value {
        serde_json::Value::Object(map) => map.iter().flat_map(|(k, v)| [vec![k.clone()], keys(v)].concat()).collect(),
        serde_json::Value::Array(list) => list.iter().flat_map(keys).collect(),
        _ => Vec::new(),
    }
}

#[tokio::test]
async fn keys_are_snake_case() {
    let (state, _) = state();
    let address = start(state).await;
    let mut keys = keys(&get_json(address, "/endpoints").await);
    keys.extend(self::keys(&get_json(address, "/decisions").await));
    assert!(keys.iter().any(|k| k == "prefix_hit_ratio"), "the metrics of a server are among {keys:?}");
    for key in keys {
        assert!(key.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_'), "{key}");
    }
}

#[tokio::test]
async fn the_page_for_people_reads_only_keys_that_there_are() {
    let (state, _) = state();
    let address = start(state).await;
    let mut known = keys(&get_json(address, "/endpoints").await);
    known.extend(keys(&get_json(address, "/decisions").await));
    let (_, _, page) = call(address, "GET", "/").await;
    for owner in ["record", "metrics", "metrics?", "e", "p"] {
        let prefix = format!("{owner}.");
        let uses = page.match_indices(&prefix).filter(|(at, _)| {
            let before = page[..*at].chars().next_back().unwrap_or(' ');
            !before.is_alphanumeric() && before != '.' && before != '/'
        });
        let mut found = 0;
        for (at, text) in uses {
            let key: String =
                page[at + text.len()..].chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            assert!(known.contains(&key), "{owner}.{key}");
            found += 1;
        }
        assert!(found > 0, "{owner}");
    }
}

#[tokio::test]
async fn the_page_for_people_loads_nothing_from_elsewhere() {
    let (state, _) = state();
    let address = start(state).await;
    let (status, kind, body) = call(address, "GET", "/").await;
    assert_eq!((status, kind.as_str()), (200, "text/html; charset=utf-8"));
    for outside in ["http://", "https://", "src=", "@import", "innerHTML"] {
        assert!(!body.contains(outside), "{outside}");
    }
}

#[tokio::test]
async fn the_log_filter_is_changed_by_put_alone_and_a_wrong_one_is_refused() {
    let (state, _) = state();
    let logs = state.logs.clone();
    let address = start(state).await;
    assert_eq!(call(address, "POST", "/log-level?filter=debug").await.0, 405);
    assert_eq!(call(address, "PUT", "/log-level").await.0, 400);
    assert_eq!(call(address, "PUT", "/log-level?filter=attache=loud").await.0, 400);
    assert!(logs.current().ends_with("info"));
    let (status, _, body) = call(address, "PUT", "/log-level?filter=attache=debug").await;
    assert_eq!(status, 200);
    assert!(body.contains("attache=debug") && logs.current().contains("attache=debug"));
}

/// A request with a body, and what is answered.
async fn send(address: SocketAddr, method: &str, kind: &str, body: &str) -> (u16, serde_json::Value) {
    let client = Client::builder(TokioExecutor::new()).build_http::<http_body_util::Full<axum::body::Bytes>>();
    let request = hyper::Request::builder()
        .method(method)
        .uri(format!("http://{address}/api/nodes/scheduling"))
        .header("content-type", kind)
        .body(http_body_util::Full::from(body.to_owned()))
        .unwrap();
    let response = client.request(request).await.unwrap();
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&body).unwrap_or_default())
}

#[tokio::test]
async fn the_policy_of_a_model_is_merged_shown_and_forgotten() {
    let (state, _) = state();
    let policies = state.policies.clone();
    let address = start(state).await;
    let post = async |body| send(address, "POST", "application/json; charset=utf-8", body).await;
    let first = r#"{"model_name": "org/m", "balance_abs_threshold": 3, "min_prefix_match": 0.4}"#;
    assert_eq!(post(first).await.0, 200);
    let (status, merged) =
        send(address, "PUT", "application/json", r#"{"model_name": "org/m", "min_prefix_match": 0}"#).await;
    assert_eq!((status, &merged["balance_abs_threshold"], &merged["min_prefix_match"]), (200, &3.into(), &0.0.into()));
    assert_eq!(policies.of("org/m").min_prefix_match, Some(0.0));
    assert_eq!(get_json(address, "/api/nodes/scheduling/org/m").await, merged);
    assert_eq!(get_json(address, "/api/nodes/scheduling").await, serde_json::json!([merged]));

    let (status, wrong) = post(r#"{"model_name": "org/m", "balance_rel_threshold": 0.5}"#).await;
    assert_eq!((status, wrong["error"]["param"].as_str()), (400, Some("balance_rel_threshold")));
    assert_eq!(post("{").await.0, 400);
    assert_eq!(post(&" ".repeat(20_000)).await.0, 413);
    let (status, _) = send(address, "POST", "text/plain", first).await;
    assert_eq!(status, 415, "what a browser would send across sites without asking");

    assert_eq!(call(address, "DELETE", "/api/nodes/scheduling/org/m").await.0, 204);
    assert_eq!(call(address, "DELETE", "/api/nodes/scheduling/org/m").await.0, 404);
    assert_eq!(call(address, "GET", "/api/nodes/scheduling/org/m").await.0, 404);
    assert!(policies.all().is_empty());
}

#[tokio::test]
async fn policies_are_changed_from_loopback_only() {
    let (state, _) = state();
    let policies = state.policies.clone();
    let app = router(state).layer(Extension(ConnectInfo(SocketAddr::from(([10, 0, 0, 9], 4000)))));
    let request = |method: &str, path: &str| {
        let body = axum::body::Body::from(r#"{"model_name": "m"}"#);
        hyper::Request::builder()
            .method(method)
            .uri(path)
            .header("content-type", "application/json")
            .body(body)
            .unwrap()
    };
    for (method, path, wanted) in [
        ("POST", "/api/nodes/scheduling", 403),
        ("PUT", "/api/nodes/scheduling", 403),
        ("DELETE", "/api/nodes/scheduling/m", 403),
        ("GET", "/api/nodes/scheduling", 200),
    ] {
        let service = TowerToHyperService::new(app.clone());
        let response = hyper::service::Service::call(&service, request(method, path)).await.unwrap();
        assert_eq!(response.status().as_u16(), wanted, "{method}");
    }
    assert!(policies.all().is_empty());
}

#[tokio::test]
async fn silent_connections_do_not_pile_up() {
    let (state, _) = state();
    let address = start(state).await;
    let mut silent = Vec::new();
    for _ in 0..MAX_CONNECTIONS {
        silent.push(tokio::net::TcpStream::connect(address).await.unwrap());
    }
    // One too many is closed by the server.
    let mut extra = tokio::net::TcpStream::connect(address).await.unwrap();
    assert_eq!(tokio::io::AsyncReadExt::read(&mut extra, &mut [0; 1]).await.unwrap(), 0);
    drop(silent);
    // The places come back as soon as the server has seen the others go.
    loop {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let mut answer = String::new();
        let sent = stream.write_all(b"GET /live HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await;
        if sent.is_ok() && stream.read_to_string(&mut answer).await.is_ok() && answer.contains("200 OK") {
            break;
        }
    }
}
