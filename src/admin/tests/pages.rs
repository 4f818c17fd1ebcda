use super::*;

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
async fn session_is_ended_by_a_post_that_names_it() {
    let (state, _) = state();
    let send = async |method, target| ask(&state, LOCAL, (method, target), &[], Body::empty()).await;
    let (status, text) = send("POST", "/finish_session?session_id=a%20b&tenant=t").await;
    assert_eq!(
        (status, serde_json::from_str(&text).unwrap()),
        (200, serde_json::json!({"session_id": "a b", "tenant": "t"}))
    );
    let (status, text) = send("POST", "/finish_session").await;
    assert_eq!((status, &*text), (400, "invalid_session_id: `session_id` is missing\n"));
    assert_eq!(send("GET", "/finish_session?session_id=a").await.0, 405);
}

#[tokio::test]
async fn reservation_is_made_listed_and_released() {
    let (state, _) = state();
    let send = async |method, target: &str, body: &str| {
        ask(&state, LOCAL, (method, target), &[], Body::from(body.to_owned())).await
    };
    for (query, path, timeout) in
        [("", DEFAULT_EXPLAINED_PATH, 30.0), ("?path=/v1/messages&timeout=1.5", "/v1/messages", 1.5)]
    {
        let (status, text) = send("POST", &format!("/reservations{query}"), "{}").await;
        let made = serde_json::json!({"path": path, "timeout": timeout, "body": "{}"});
        assert_eq!((status, serde_json::from_str(&text).unwrap()), (200, made), "{query}");
    }
    for wrong in ["0", "-1", "301", "soon", "NaN", "inf"] {
        let (status, text) = send("POST", &format!("/reservations?timeout={wrong}"), "{}").await;
        let said = format!("`timeout` is `{wrong}`; allowed are more than 0 and at most 300 seconds\n");
        assert_eq!((status, text), (400, said));
    }
    let long = "x".repeat(1_001);
    assert_eq!(send("POST", "/reservations", &long).await.0, 413);
    assert_eq!(send("GET", "/reservations", "").await, (200, "[]\n".to_owned()));
    assert_eq!(send("DELETE", "/reservations/open", "").await.0, 204);
    assert_eq!(send("DELETE", "/reservations/closed", "").await.0, 404);
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
async fn every_page_answers() {
    let (state, endpoints) = state();
    let (clock, readiness) = (state.clock, state.readiness.clone());
    let latch = readiness.latch("pool default synced");
    let _ticket = Ticket::book(endpoints[0].clone(), 100);
    endpoints[0].health.reached();
    for _ in 0..2 {
        endpoints[1].health.record(HealthOutcome::ConnectFailure, clock.now(), &HealthPolicy::default());
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

#[tokio::test]
async fn endpoints_page_has_the_warnings_of_the_last_reading() {
    let (state, endpoints) = state();
    let codes = async || {
        let (status, text) = ask(&state, LOCAL, ("GET", "/endpoints"), &[], Body::empty()).await;
        assert_eq!(status, 200);
        let page: serde_json::Value = serde_json::from_str(&text).unwrap();
        let code = |warning: &serde_json::Value| warning["code"].as_str().unwrap().to_owned();
        page["warnings"].as_array().unwrap().iter().map(code).collect::<Vec<_>>()
    };
    let read = || state.warnings.update(&(state.pools)(), &state.parts.metrics, &state.history, state.clock);
    assert!(codes().await.is_empty(), "nothing was read yet");
    read();
    assert_eq!(codes().await, ["no_endpoint_reached"]);
    endpoints[0].health.reached();
    assert_eq!(codes().await, ["no_endpoint_reached"]);
    read();
    assert!(codes().await.is_empty());
}

#[tokio::test]
async fn keys_are_snake_case() {
    let (state, _) = state();
    state.warnings.update(&(state.pools)(), &state.parts.metrics, &state.history, state.clock);
    let address = start(state).await;
    let mut keys = keys(&get_json(address, "/endpoints").await);
    for page in ["/decisions", "/api/status", "/api/history"] {
        keys.extend(self::keys(&get_json(address, page).await));
    }
    assert!(keys.iter().any(|k| k == "prefix_hit_ratio"), "the metrics of a server are among {keys:?}");
    for key in keys {
        assert!(key.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_'), "{key}");
    }
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
    assert!(found("/decisions?limit=0").await.is_empty());
    assert_eq!(found("/decisions?limit=5&request_id=r-1").await.len(), 1);
    let (status, text) = ask(&state, LOCAL, ("GET", "/decisions?limit=some"), &[], endless()).await;
    assert_eq!((status, text.contains("`limit` is `some`")), (400, true), "{text}");
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
        health.record(HealthOutcome::ConnectFailure, at, &policy);
        assert_eq!(standing(), EndpointStanding::Unreachable, "one failure does not eject");
        health.record(HealthOutcome::ConnectFailure, at, &policy);
        assert_eq!(standing(), EndpointStanding::Ejected);
    }
}
