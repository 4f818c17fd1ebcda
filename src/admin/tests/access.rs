use super::*;

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
async fn unknown_query_key_is_refused_with_the_known_keys_on_every_admin_page() {
    let (state, _) = state();
    for (method, target) in GUARDED {
        let mark = if target.contains('?') { '&' } else { '?' };
        let target = format!("{target}{mark}endpont=1");
        let (status, text) = ask(&state, LOCAL, (method, &target), &[], endless()).await;
        let allowed = match target.split('?').next().unwrap() {
            "/explain" => "`path`, `pool`, `header`, `request_id`",
            "/decisions" => "`request_id`, `limit`",
            "/api/history" => "`step`, `after`",
            "/kv_blocks" => "`endpoint`",
            "/reservations" if method == "POST" => "`path`, `pool`, `header`, `timeout`",
            "/finish_session" => "`session_id`, `tenant`",
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
