use super::refusal::RefusalReason;
use super::*;
use crate::pools::{EndpointStanding, PoolView};
use attache_pool::health::{HealthPolicy, Outcome};
use attache_pool::ledger::Ticket;
use attache_pool::{Endpoint, EndpointMetrics, EndpointSpec, EndpointState, Engine, PoolSnapshot, SnapshotStore};
use attache_prefix::cache::{BlockUnit, CacheConfig, PrefixCache};
use attache_request::event::DecisionRecord;
use attache_serving::connections::{ConnectionLimits, Connections};
use attache_telemetry::decisions::Decisions;
use attache_telemetry::queues::{BandDepths, QueueDepth};
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
    let queue = QueueDepth::default();
    queue.requests.set(4);
    let view = PoolView {
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
    let decisions = Decisions::new(8);
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
        max_explained_bytes: Arc::new(|| 1_000),
        pages: Handle::current(),
        metrics: Arc::new(MetricsPage::new(registry)),
        readiness: Readiness::default(),
        pools: Arc::new(move || vec![view.clone()]),
        decisions: Arc::new(move || decisions.to_json(clock.now())),
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
        queued_ms: None,
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
const GUARDED: [(&str, &str); 16] = [
    ("GET", "/"),
    ("GET", "/endpoints"),
    ("GET", "/decisions"),
    ("GET", "/config_dump"),
    ("GET", "/log-level"),
    ("PUT", "/log-level?filter=trace"),
    ("GET", "/kv_blocks?endpoint=127.0.0.1:8000"),
    ("POST", "/explain"),
    ("GET", "/api/nodes/scheduling"),
    ("POST", "/api/nodes/scheduling"),
    ("PUT", "/api/nodes/scheduling"),
    ("GET", "/api/nodes/scheduling/m"),
    ("DELETE", "/api/nodes/scheduling/m"),
    ("GET", "/api/pressure"),
    ("GET", "/api/pressure/m"),
    ("DELETE", "/api/pressure/m?count=1"),
];

#[tokio::test]
async fn remote_peer_is_refused_by_every_guarded_page_before_its_body_is_read() {
    let (state, _) = state();
    for page in GUARDED {
        let (status, _) = ask(&state, REMOTE, page, &[], endless()).await;
        assert_eq!(status, 403, "{page:?}");
    }
    assert_eq!(state.refusals.get(RefusalReason::Peer), GUARDED.len() as u64);
    for page in [("GET", "/metrics"), ("GET", "/live"), ("GET", "/ready")] {
        assert_eq!(ask(&state, REMOTE, page, &[("host", "any.example")], endless()).await.0, 200, "{page:?}");
    }
    assert!(state.policies.all().is_empty());
    assert!(state.logs.current().ends_with("info"));
}

#[tokio::test]
async fn recorded_decision_is_explained_by_request_id() {
    let (state, _) = state();
    let get = async |target: &str| ask(&state, LOCAL, ("GET", target), &[], Body::empty()).await;
    let (status, text) = get("/explain?request_id=a%20b").await;
    assert_eq!((status, text.contains("a b")), (200, true), "{text}");
    assert_eq!(get("/explain?request_id=c").await, (404, "no request c\n".to_owned()));
    assert_eq!(get("/explain").await.0, 405);
    assert_eq!(ask(&state, REMOTE, ("GET", "/explain?request_id=c"), &[], Body::empty()).await.0, 403);
}

#[tokio::test]
async fn pressure_is_shown_and_only_what_was_read_is_consumed() {
    let (state, _) = state();
    let divert = |pool: &str, model: &str| state.pressure.pool(pool).divert(model, state.clock.now());
    for (pool, model) in [("a", "meta/llama"), ("a", "meta/llama"), ("b", "meta/llama"), ("a", "m")] {
        divert(pool, model);
    }
    let send = async |method: &str, target: &str| {
        let (status, text) = ask(&state, LOCAL, (method, target), &[], Body::empty()).await;
        (status, serde_json::from_str::<serde_json::Value>(&text).unwrap_or(text.into()))
    };
    let all = send("GET", "/api/pressure").await.1;
    assert_eq!((all["window_seconds"].as_u64(), all["models"].as_array().map(Vec::len)), (Some(60), Some(3)), "{all}");
    let one = send("GET", "/api/pressure/meta/llama").await.1;
    assert_eq!((one["count"].as_u64(), one["pools"].as_array().map(Vec::len)), (Some(3), Some(2)), "{one}");
    assert_eq!(send("GET", "/api/pressure/meta/llama?pool=b").await.1["count"], 1);
    // Another request is diverted before the replica has started.
    divert("a", "meta/llama");
    let left = send("DELETE", "/api/pressure/meta/llama?count=3").await.1;
    assert_eq!((left["consumed"].as_u64(), left["count"].as_u64()), (Some(3), Some(1)), "{left}");
    let left = send("DELETE", "/api/pressure/meta/llama?count=9").await.1;
    assert_eq!((left["consumed"].as_u64(), left["count"].as_u64()), (Some(1), Some(0)), "{left}");
    assert_eq!(send("GET", "/api/pressure/m").await.1["count"], 1);
    for (query, got) in [("", "is missing"), ("?count=0", "is `0`"), ("?count=some", "is `some`")] {
        let (status, text) = send("DELETE", &format!("/api/pressure/m{query}")).await;
        assert_eq!((status, text.to_string().contains(got)), (400, true), "{text}");
    }
    assert_eq!(
        send("GET", "/api/pressure/unknown").await,
        (200, serde_json::json!({"window_seconds": 60, "model": "unknown", "count": 0, "pools": []}))
    );
}

#[tokio::test]
async fn unknown_query_key_is_refused_with_the_known_keys_on_every_admin_page() {
    let (state, _) = state();
    for (method, target) in GUARDED {
        let mark = if target.contains('?') { '&' } else { '?' };
        let target = format!("{target}{mark}endpont=1");
        let (status, text) = ask(&state, LOCAL, (method, &target), &[], endless()).await;
        let allowed = match target.split('?').next().unwrap() {
            "/explain" => "`path`, `pool`, `header`, `request_id`",
            "/decisions" => "`request_id`",
            "/kv_blocks" => "`endpoint`",
            "/api/pressure/m" => "`pool`, `count`",
            "/log-level" if method == "PUT" => "`filter`",
            _ => "none",
        };
        let wanted = format!("unknown query key `endpont`; allowed on this page: {allowed}\n");
        assert_eq!((status, text), (400, wanted), "{method} {target}");
        assert_eq!(ask(&state, REMOTE, (method, &target), &[], endless()).await.0, 403, "{method} {target}");
    }
    for target in ["/metrics?name[]=up", "/live?probe=1", "/ready?probe=1"] {
        assert_eq!(ask(&state, REMOTE, ("GET", target), &[], endless()).await.0, 200, "{target}");
    }
    assert!(state.logs.current().ends_with("info") && state.policies.all().is_empty());
}

#[tokio::test]
async fn foreign_host_or_origin_rejected_by_every_guarded_page() {
    let (mut state, _) = state();
    state.hosts = Arc::new(["attache.llm".to_owned()]);
    for page in GUARDED {
        assert_eq!(ask(&state, LOCAL, page, &[("host", "evil.example:9090")], endless()).await.0, 421, "{page:?}");
        let foreign = [("origin", "http://evil.example")];
        assert_eq!(ask(&state, LOCAL, page, &foreign, endless()).await.0, 403, "{page:?}");
        let cross = [("sec-fetch-site", "cross-site")];
        assert_eq!(ask(&state, LOCAL, page, &cross, endless()).await.0, 403, "{page:?}");
    }
    let pages = GUARDED.len() as u64;
    assert_eq!(
        (state.refusals.get(RefusalReason::Host), state.refusals.get(RefusalReason::Origin)),
        (pages, 2 * pages)
    );
    assert!(state.logs.current().ends_with("info"));
    // A forwarded port, another machine's name for it, a browser on its page.
    for headers in [
        &[("host", "localhost:19090")][..],
        &[("host", "attache.llm:9090")],
        &[("host", "[::1]:9090")],
        &[("host", "localhost:9090"), ("origin", "http://localhost:9090"), ("sec-fetch-site", "same-origin")],
    ] {
        assert_eq!(ask(&state, LOCAL, ("GET", "/endpoints"), headers, endless()).await.0, 200, "{headers:?}");
    }
}

/// What a browser sends for a form, a script or a link of another site, in old and new versions.
#[tokio::test]
async fn pages_of_other_sites_change_no_policy() {
    let (state, _) = state();
    let site = ("sec-fetch-site", "cross-site");
    let json = ("content-type", "application/json");
    let opened = [site, ("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "document"), json];
    let change = || axum::body::Body::from(r#"{"model_name": "m", "min_prefix_match": 0.4}"#);
    for (method, page) in
        [("POST", "/api/nodes/scheduling"), ("PUT", "/api/nodes/scheduling"), ("DELETE", "/api/pressure/m?count=1")]
    {
        for headers in [&opened[..], &[json, ("referer", "http://evil.example/")], &[json, ("origin", "null")]] {
            assert_eq!(ask(&state, LOCAL, (method, page), headers, change()).await.0, 403, "{method} {headers:?}");
        }
    }
    assert_eq!(ask(&state, LOCAL, ("PUT", "/log-level?filter=trace"), &opened, change()).await.0, 403);
    assert!(state.policies.all().is_empty() && state.logs.current().ends_with("info"));
    // curl, and the picker's own page.
    for headers in [&[json][..], &[json, ("referer", "http://10.0.0.1:9090/"), ("sec-fetch-site", "same-origin")]] {
        assert_eq!(ask(&state, LOCAL, ("POST", "/api/nodes/scheduling"), headers, change()).await.0, 200);
    }
}

#[tokio::test]
async fn remote_caller_with_token_reads_pages_and_changes_only_pressure() {
    let (mut state, _) = state();
    let verdict = |caller: guard::Caller| match caller.token.as_str() {
        "good" => guard::AccessDecision::Allowed,
        _ => guard::AccessDecision::Unknown,
    };
    state.guard = Some(Arc::new(move |caller| Box::pin(async move { verdict(caller) })));
    let good = [("authorization", "Bearer good")];
    for page in GUARDED {
        // A controller that starts replicas is usually another pod.
        let is_allowed = page.0 == "GET" || page.1.starts_with("/api/pressure/");
        let changes = !is_allowed || page.1.starts_with("/kv_blocks");
        let wanted = if changes { 403 } else { 200 };
        let (status, _) = ask(&state, REMOTE, page, &good, endless()).await;
        assert!(status == wanted || page.1.ends_with("/m") && status == 404, "{page:?}: {status}");
        for bad in [&[("authorization", "Bearer bad")][..], &[]] {
            assert_eq!(ask(&state, LOCAL, page, bad, endless()).await.0, 401, "{page:?}");
        }
    }
    assert_eq!(ask(&state, REMOTE, ("GET", "/metrics"), &[], endless()).await.0, 401);
    assert_eq!(ask(&state, REMOTE, ("GET", "/metrics"), &good, endless()).await.0, 200);
    assert_eq!(ask(&state, LOCAL, ("PUT", "/log-level?filter=debug"), &good, endless()).await.0, 200);
}

#[tokio::test(start_paused = true)]
async fn stalled_body_times_out_and_two_are_read_at_once() {
    let (state, _) = state();
    let app = router(state.clone()).layer(Extension(ConnectInfo(SocketAddr::from((LOCAL, 4000)))));
    let explain = || {
        let request = hyper::Request::post("/explain").header("host", "localhost").body(endless()).unwrap();
        let service = TowerToHyperService::new(app.clone());
        async move { hyper::service::Service::call(&service, request).await.unwrap().status().as_u16() }
    };
    let begun = tokio::time::Instant::now();
    let mut statuses = [0; 3];
    (statuses[0], statuses[1], statuses[2]) = tokio::join!(explain(), explain(), explain());
    statuses.sort_unstable();
    assert_eq!(statuses, [408, 408, 503]);
    assert_eq!(begun.elapsed(), Duration::from_secs(10));
    assert_eq!((state.refusals.get(RefusalReason::BodyTimeout), state.refusals.get(RefusalReason::Busy)), (2, 1));
    let body = [("content-type", "application/json")];
    let (status, _) = ask(&state, LOCAL, ("POST", "/api/nodes/scheduling"), &body, endless()).await;
    assert_eq!(status, 408, "a change has the same time");
}

#[tokio::test]
async fn body_above_limit_rejected_with_and_without_length() {
    let (state, _) = state();
    let chunks = || futures_util::stream::iter((0..2).map(|_| Ok::<_, std::io::Error>(Bytes::from(vec![b' '; 600]))));
    let bodies = [
        axum::body::Body::from(vec![b' '; 1_001]),
        axum::body::Body::from_stream(chunks()),
        axum::body::Body::from_stream(chunks().chain(futures_util::stream::pending())),
    ];
    for (refusals, body) in (1..).zip(bodies) {
        assert_eq!(ask(&state, LOCAL, ("POST", "/explain"), &[], body).await.0, 413);
        assert_eq!(state.refusals.get(RefusalReason::BodySize), refusals);
    }
    let (status, text) = ask(&state, LOCAL, ("POST", "/explain"), &[], vec![b' '; 1_000].into()).await;
    assert_eq!((status, text.as_str()), (400, "invalid_json: nothing to explain\n"));
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
    endpoints[0].health.reached();
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

    let page = get_json(address, "/endpoints").await;
    let unread = serde_json::json!([{"model": "m", "reason": "the chat template failed", "prompts": 1}]);
    assert_eq!(page["pools"][0]["unread_prompts"], unread);
    assert_eq!((&page["rejections"]["shed"], &page["pools"][0]["queued_requests"]), (&3.into(), &4.into()));
    assert_eq!(page["degraded"], serde_json::json!({"encoded_response": 3}));
    let pool = page["pools"][0].clone();
    assert_eq!((pool["name"].as_str(), pool["generation"].as_u64()), (Some("default"), Some(4)));
    let (first, second) = (&pool["endpoints"][0], &pool["endpoints"][1]);
    assert_eq!((first["status"].as_str(), second["status"].as_str()), (Some("ready"), Some("ejected")));
    assert_eq!(
        (&first["ejection"], &second["ejection"]["cause"]),
        (&serde_json::Value::Null, &"connect_failure".into())
    );
    assert!((1..=5_000).contains(&second["ejection"]["returns_in_ms"].as_u64().unwrap()), "{second}");
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
async fn overview_page_reads_only_existing_json_keys() {
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
async fn overview_page_loads_nothing_from_elsewhere() {
    let (state, _) = state();
    let address = start(state).await;
    let (status, kind, body) = call(address, "GET", "/").await;
    assert_eq!((status, kind.as_str()), (200, "text/html; charset=utf-8"));
    for outside in ["http://", "https://", "src=", "@import", "innerHTML"] {
        assert!(!body.contains(outside), "{outside}");
    }
}

#[tokio::test]
async fn log_filter_changed_only_by_put_invalid_filter_rejected() {
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
async fn model_policy_is_merged_shown_and_deleted() {
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
async fn full_port_new_requests_take_the_place_of_idle_connections() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let (state, _) = state();
    let connections = Connections::new(ConnectionLimits::of(8));
    let address = within(connections.clone(), state).await;
    let mut idle = Vec::new();
    for bytes in
        [&b""[..], b"GET /live HT", b"POST /explain HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n"].repeat(6)
    {
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        idle.push(stream);
        assert_eq!(call(address, "GET", "/live").await.0, 200);
        assert!(connections.open() <= 8, "{}", connections.open());
    }
    // 14 stay open until then: two bodies are waited for, four are refused and closed.
    assert!(connections.closed(attache_serving::connections::Closed::Evicted) >= 14 - 8);
    assert_eq!(idle[0].read(&mut [0; 1]).await.unwrap_or(0), 0, "the oldest is closed");
}

#[test]
fn headers_of_an_explained_request_are_in_the_query() {
    let query = |header: &str| vec![("pool".to_owned(), "p".to_owned()), ("header".to_owned(), header.to_owned())];
    let mut own = HeaderMap::new();
    own.insert(header::CONTENT_TYPE, "application/json".parse().unwrap());
    let asked = explain_request(query(" X-Tenant :acme"), &own, Bytes::new()).unwrap();
    let expected = [("x-tenant", "acme"), ("content-type", "application/json")];
    assert_eq!(asked.headers, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
    assert_eq!((asked.pool.as_deref(), asked.path.as_str()), (Some("p"), DEFAULT_EXPLAINED_PATH));
    let asked = explain_request(query("content-type: text/plain"), &own, Bytes::new()).unwrap();
    assert_eq!(asked.headers, [("content-type".to_owned(), "text/plain".to_owned())]);
    for wrong in ["x-tenant", ": acme", ""] {
        assert!(explain_request(query(wrong), &own, Bytes::new()).unwrap_err().contains("allowed is `name: value`"));
    }
}

#[tokio::test]
async fn decisions_are_found_by_request_id() {
    let (state, _) = state();
    let found = async |target: &str| {
        let (status, text) = ask(&state, LOCAL, ("GET", target), &[], endless()).await;
        assert_eq!(status, 200, "{target}");
        serde_json::from_str::<serde_json::Value>(&text).unwrap().as_array().unwrap().clone()
    };
    let one = found("/decisions?request_id=r-1").await;
    assert_eq!((one.len(), &one[0]["request_id"]), (1, &serde_json::json!("r-1")));
    assert_eq!(found("/decisions").await.len(), 1);
    assert!(found("/decisions?request_id=none").await.is_empty());
}

#[test]
fn endpoint_that_was_never_reached_is_not_ready() {
    let policy = HealthPolicy::default();
    for (engine, unknown) in [(Engine::Vllm, EndpointStanding::NotReached), (Engine::None, EndpointStanding::Ready)] {
        let spec = EndpointSpec { engine, ..EndpointSpec::at(([127, 0, 0, 1], 8000).into()) };
        let state = EndpointState::new(Arc::new(Endpoint::new(EndpointId(0), spec)), None);
        let (health, at) = (&state.endpoint.health, Timestamp(1));
        let standing = || EndpointStanding::of(&state, &policy, at);
        assert_eq!(standing(), unknown, "{engine:?}");
        health.unreachable();
        assert_eq!(standing(), EndpointStanding::Unreachable);
        health.reached();
        assert_eq!(standing(), EndpointStanding::Ready);
        health.record(Outcome::ConnectFailure, at, &policy);
        assert_eq!(standing(), EndpointStanding::Unreachable, "one failure does not eject");
        health.record(Outcome::ConnectFailure, at, &policy);
        assert_eq!(standing(), EndpointStanding::Ejected);
    }
}

/// A page that is rendered until the returned sender is dropped, and a message when that begins.
fn stuck() -> (std::sync::mpsc::Sender<()>, tokio::sync::mpsc::Receiver<()>, impl Fn() + Send + Sync + 'static) {
    let (release, released) = std::sync::mpsc::channel::<()>();
    let (begun, begins) = tokio::sync::mpsc::channel(1);
    let released = std::sync::Mutex::new(released);
    let render = move || {
        let _ = begun.try_send(());
        let _ = released.lock().unwrap().recv();
    };
    (release, begins, render)
}

/// Metrics that take as long as a [`stuck`] page.
struct StuckCollector<F>(F);

impl<F> std::fmt::Debug for StuckCollector<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StuckCollector")
    }
}

impl<F: Fn() + Send + Sync + 'static> prometheus_client::collector::Collector for StuckCollector<F> {
    fn encode(&self, _: prometheus_client::encoding::DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        (self.0)();
        Ok(())
    }
}

/// Requests one page on half of the connections that the port may have, and probes meanwhile.
async fn probes_are_answered_while(page: &'static str, state: AdminState, mut begins: tokio::sync::mpsc::Receiver<()>) {
    let address = start(state).await;
    let requests: Vec<_> = (0..32).map(|_| tokio::spawn(call(address, "GET", page))).collect();
    begins.recv().await.expect("the page is being rendered");
    for probe in ["/live", "/ready"] {
        assert_eq!(call(address, "GET", probe).await.0, 200, "{probe} while {page} is rendered");
    }
    assert!(requests.iter().all(|request| !request.is_finished()));
    requests.iter().for_each(tokio::task::JoinHandle::abort);
}

/// A runtime on a thread of its own, until the returned token is dropped.
fn pages_thread() -> (Handle, tokio_util::sync::DropGuard) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (handle, end) = (runtime.handle().clone(), tokio_util::sync::CancellationToken::new());
    let until = end.clone();
    std::thread::spawn(move || runtime.block_on(until.cancelled()));
    (handle, end.drop_guard())
}

#[tokio::test]
async fn probes_are_answered_while_metrics_are_rendered() {
    let (handle, _guard) = pages_thread();
    let (release, begins, render) = stuck();
    let mut registry = Registry::default();
    registry.register_collector(Box::new(StuckCollector(render)));
    let state = AdminState { pages: handle, metrics: Arc::new(MetricsPage::new(registry)), ..state().0 };
    probes_are_answered_while("/metrics", state, begins).await;
    drop(release);
}

#[tokio::test]
async fn probes_are_answered_while_a_guarded_page_is_rendered() {
    let (handle, _guard) = pages_thread();
    let (release, begins, render) = stuck();
    let config = Arc::new(move || {
        render();
        serde_json::json!({})
    });
    probes_are_answered_while("/config_dump", AdminState { pages: handle, config, ..state().0 }, begins).await;
    drop(release);
}

#[tokio::test]
async fn page_that_panics_gets_500_and_the_next_request_is_answered() {
    let (handle, _guard) = pages_thread();
    let config = Arc::new(|| panic!("a page"));
    let address = start(AdminState { pages: handle, config, ..state().0 }).await;
    assert_eq!(call(address, "GET", "/config_dump").await.0, 500);
    assert_eq!(call(address, "GET", "/endpoints").await.0, 200);
}

/// hyper reads nothing while a page is rendered and another request waits in its buffer.
#[tokio::test]
async fn connection_with_pipelined_requests_is_evicted_for_a_probe() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let (handle, _guard) = pages_thread();
    let (release, mut begins, render) = stuck();
    let config = Arc::new(move || {
        render();
        serde_json::json!({})
    });
    let connections = Connections::new(ConnectionLimits::of(2));
    let address = within(connections, AdminState { pages: handle, config, ..state().0 }).await;
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let request = b"GET /config_dump HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(4);
        stream.write_all(&request).await.unwrap();
        held.push(stream);
    }
    begins.recv().await.expect("a page is being rendered");
    assert_eq!(call(address, "GET", "/live").await.0, 200);
    assert_eq!(held[0].read(&mut [0; 1]).await.unwrap_or(0), 0, "the oldest is closed");
    drop(release);
}
