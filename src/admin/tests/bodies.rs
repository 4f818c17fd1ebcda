use super::*;

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
