//! Failures of clients, servers and the picker while requests are in flight. Requests that can be saved are served, and
//! the picker's counters return to zero.

use crate::shipped::{by_header, by_list, list_pool};
use crate::support::attache::AttacheProcess;
use crate::support::body::{Payload, chat, cut};
use crate::support::client::{self, Http, Open};
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::modes::{Mode, bootstrap};
use crate::support::process::eventually;
use http::HeaderValue;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// A response stream of about two seconds.
const SLOW_SSE: &str = "/v1/chat/completions?kind=sse&size=20000&events=100&pace_ms=20";
const SLOW_SSE_BYTES: usize = 20_000;

async fn open_sse(to: SocketAddr, target: &str) -> Open {
    let request = client::request("POST", to, Http::H1, target, Payload::sized(chat(300, true, 1)));
    let mut open = client::open(to, Http::H1, request).await.expect("an answer");
    assert_eq!(open.response.status(), 200);
    assert!(open.next().await.expect("a first event").is_some());
    open
}

/// Reads the response to its end and returns the number of bytes read.
async fn read_rest(mut open: Open) -> Result<usize, crate::support::Error> {
    let mut length = 0;
    while let Some(piece) = open.next().await? {
        length += piece.len();
    }
    Ok(length)
}

/// An address that refuses connections: its port was free a moment ago.
pub(crate) async fn refusing() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    listener.local_addr().expect("an address")
}

#[tokio::test(flavor = "multi_thread")]
async fn fail_open_serves_requests_without_a_picker() {
    let [a, b, c, d] = [Echo::start().await, Echo::start().await, Echo::start().await, Echo::start().await];
    let servers = [a.address, b.address, c.address, d.address];
    let mut picker = AttacheProcess::configured(&list_pool(&servers, "round-robin")).await;
    let envoy = EnvoyProcess::start(&by_list("fail-open.yaml", &picker, servers)).await;
    let to = envoy.listener("inference");
    let open = open_sse(to, SLOW_SSE).await;
    picker.process.kill();
    for _ in 0..20 {
        let reply = client::post(to, "/v1/chat/completions", chat(300, false, 1)).await.expect("an answer");
        assert_eq!(reply.status, 200, "served without the picker");
    }
    read_rest(open).await.expect("an answer under way survives the picker");
    assert!(envoy.stat("ext_proc.failure_mode_allowed").await >= 20);
    assert!([&a, &b, &c, &d].iter().all(|echo| echo.requests() > 0), "spread over all servers");
}

#[tokio::test(flavor = "multi_thread")]
async fn envoy_retries_past_unreachable_servers_of_the_list() {
    let (a, b) = (Echo::start().await, Echo::start().await);
    let servers = [refusing().await, a.address, refusing().await, b.address];
    let picker = AttacheProcess::configured(&list_pool(&servers, "round-robin")).await;
    let envoy = EnvoyProcess::start(&by_list("override-host.yaml", &picker, servers)).await;
    let to = envoy.listener("inference");
    for round in 0..20 {
        let body = chat(if round % 2 == 0 { 300 } else { 300_000 }, false, 1);
        let reply = client::post(to, "/v1/chat/completions", body).await.expect("an answer");
        assert_eq!(reply.status, 200, "request {round}");
    }
    assert!(envoy.stat("cluster.model-servers.upstream_rq_retry").await > 0, "no dead server was ever picked first");
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn disconnects_in_any_phase_leave_no_request_in_flight() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let modes = [Mode::FullDuplex, Mode::Streamed, Mode::Buffered, Mode::None];
    let envoy = EnvoyProcess::start(&bootstrap(&modes, picker.grpc)).await;
    for mode in modes {
        let to = envoy.listener(&mode.name());
        // While the request body is being sent: its second chunk would be sent an hour later.
        let body = cut(chat(100_000, false, 1), 60_000, 1);
        let endless = Payload::chunked(body).paced(Duration::from_secs(3600));
        let upload = client::open(to, Http::H1, client::request("POST", to, Http::H1, "/v1/chat/completions", endless));
        leave_when(upload, &envoy, &mode.name()).await;
        // While the server computes.
        let target = "/v1/chat/completions?delay_ms=3600000";
        let request = client::request("POST", to, Http::H1, target, Payload::sized(chat(300, false, 1)));
        leave_when(client::open(to, Http::H1, request), &envoy, &mode.name()).await;
        // In the middle of the response.
        drop(open_sse(to, SLOW_SSE).await);
        idle(&envoy, &mode.name()).await;
    }
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn disconnected_client_is_recorded_with_its_waiting_time() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let envoy = EnvoyProcess::start(&bootstrap(&[Mode::FullDuplex], picker.grpc)).await;
    let listener = Mode::FullDuplex.name();
    let to = envoy.listener(&listener);
    let target = "/v1/chat/completions?delay_ms=3600000";
    let waits =
        client::open(to, Http::H1, client::request("POST", to, Http::H1, target, Payload::sized(chat(300, false, 1))));
    let meanwhile = async {
        eventually("a request under way", || async { (active(&envoy, &listener).await > 0).then_some(()) }).await;
        let slow = "/v1/chat/completions?delay_ms=500";
        client::post(to, slow, chat(300, false, 1)).await.expect("the answer to another");
    };
    tokio::select! {
        _ = waits => panic!("an answer to a request that should have none"),
        () = meanwhile => {}
    }
    let left = eventually("a record of the one that left", || async {
        let page = client::get(picker.metrics, "/decisions").await.expect("the picker's decisions").json();
        page.as_array().and_then(|all| all.iter().find(|record| record["end"] == "client_gone").cloned())
    });
    let duration = left.await["duration_ms"].as_f64().expect("a number");
    assert!(duration > 400.0, "{duration} ms");
    picker.assert_settled().await;
}

/// Starts a request that gets no response, and disconnects once Envoy has it.
async fn leave_when<T>(request: impl Future<Output = T>, envoy: &EnvoyProcess, listener: &str) {
    let seen = eventually("a request under way", || async { (active(envoy, listener).await > 0).then_some(()) });
    // `select!` drops the request, and its connection with it.
    tokio::select! {
        _ = request => panic!("an answer to a request that should have none"),
        () = seen => {}
    }
    idle(envoy, listener).await;
}

async fn idle(envoy: &EnvoyProcess, listener: &str) {
    eventually("no request under way", || async { (active(envoy, listener).await == 0).then_some(()) }).await;
}

async fn active(envoy: &EnvoyProcess, listener: &str) -> u64 {
    envoy.stat(&format!("http.{listener}.downstream_rq_active")).await
}

/// A stall of the picker and a burst of resets look like an attack to an HTTP/2 server. With its default limit, h2
/// closes the connection and all its streams.
#[tokio::test(flavor = "multi_thread")]
async fn stalled_picker_and_burst_of_resets_cut_no_stream() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let mut streams = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let open = open_sse(to, SLOW_SSE).await;
        streams.spawn(read_rest(open));
    }
    picker.process.signal("STOP");
    let mut aborted = tokio::task::JoinSet::new();
    for _ in 0..300 {
        aborted.spawn(async move {
            let request =
                client::request("POST", to, Http::H1, "/v1/chat/completions", Payload::sized(chat(300, false, 1)));
            let _ = client::open(to, Http::H1, request).await;
        });
    }
    eventually("300 requests held by Envoy", || async { (active(&envoy, "inference").await >= 300).then_some(()) })
        .await;
    aborted.shutdown().await;
    eventually("Envoy to see them leave", || async { (active(&envoy, "inference").await <= 8).then_some(()) }).await;
    eventually("Envoy to reset their streams", || async {
        (envoy.stat("cluster.picker.http2.tx_reset").await >= 300).then_some(())
    })
    .await;
    picker.process.signal("CONT");
    let ends = streams.join_all().await;
    let lost: Vec<_> = ends.iter().filter(|end| !end.as_ref().is_ok_and(|length| *length > 0)).collect();
    assert!(lost.is_empty(), "{} of 8 streams cut: {lost:?}", lost.len());
    let reply = client::post(to, "/v1/chat/completions", chat(300, false, 1)).await.expect("an answer");
    assert_eq!(reply.status, 200, "the picker goes on");
    picker.assert_settled().await;
}

/// The request body does not end before the 101 response, so a picker that waits for its end would hang the client.
#[tokio::test(flavor = "multi_thread")]
async fn websocket_upgrade_is_routed_at_its_headers() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let mut stream = TcpStream::connect(envoy.listener("inference")).await.expect("a connection");
    let head = "GET /v1/realtime HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
                sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
    stream.write_all(head.as_bytes()).await.expect("sending the upgrade");
    let mut got = Vec::new();
    read_until(&mut stream, &mut got, b"\r\n\r\n").await;
    assert!(got.starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&got));
    for message in [&b"first"[..], b"second"] {
        got.clear();
        stream.write_all(message).await.expect("sending a message");
        read_until(&mut stream, &mut got, message).await;
    }
    drop(stream);
    picker.assert_settled().await;
}

async fn read_until(stream: &mut TcpStream, got: &mut Vec<u8>, end: &[u8]) {
    let read = async {
        while !got.ends_with(end) {
            let count = stream.read_buf(got).await.expect("reading");
            assert!(count > 0, "cut after {:?}", String::from_utf8_lossy(got));
        }
    };
    tokio::time::timeout(Duration::from_secs(10), read).await.expect("an answer within 10 s");
}

#[tokio::test(flavor = "multi_thread")]
async fn early_server_response_reaches_the_client() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let modes = [Mode::FullDuplex, Mode::Streamed, Mode::None];
    let envoy = EnvoyProcess::start(&bootstrap(&modes, picker.grpc)).await;
    for mode in modes {
        let to = envoy.listener(&mode.name());
        let target = "/v1/chat/completions?early=1&status=429&size=1000";
        let request = client::request("POST", to, Http::H2, target, Payload::sized(chat(3 << 20, false, 1)));
        let reply = client::send(to, Http::H2, request).await.expect("an answer");
        assert_eq!((reply.status.as_u16(), reply.body.len()), (429, 1000), "{mode:?}");
    }
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn trailers_are_forwarded_in_both_directions() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let envoy = EnvoyProcess::start(&bootstrap(&Mode::ALL, picker.grpc)).await;
    for mode in Mode::ALL {
        let to = envoy.listener(&mode.name());
        for http in [Http::H1, Http::H2] {
            let trailers = http::HeaderMap::from_iter([(
                http::header::HeaderName::from_static("x-end"),
                HeaderValue::from_static("1"),
            )]);
            let payload = Payload::chunked(cut(chat(1000, false, 1), 400, 1)).trailers(trailers);
            let target = "/v1/chat/completions?chunked=1&trailers=1&size=1000";
            let mut request = client::request("POST", to, http, target, payload);
            request.headers_mut().insert("te", HeaderValue::from_static("trailers"));
            let reply = client::send(to, http, request).await.unwrap_or_else(|e| panic!("{mode:?} {http:?}: {e}"));
            assert_eq!((reply.status.as_u16(), reply.body.len()), (200, 1000), "{mode:?} {http:?}");
            assert_eq!(reply.header("x-echo-length"), "1000", "{mode:?} {http:?}");
            if http == Http::H2 {
                assert_eq!(reply.header("x-echo-trailers"), "1", "{mode:?}: the request's");
                assert!(reply.trailers.is_some_and(|t| t.contains_key("x-echo-end")), "{mode:?}: the response's");
            }
        }
    }
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_finishes_requests_in_flight() {
    let echo = Echo::start().await;
    let drain = ["--drain-min-delay", "100ms", "--drain-deadline", "20s"];
    let mut picker = AttacheProcess::start(&[echo.address], &drain).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let mut streams = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let open = open_sse(to, SLOW_SSE).await;
        streams.spawn(read_rest(open));
    }
    picker.process.signal("TERM");
    for end in streams.join_all().await {
        let length = end.expect("a stream that is not cut");
        assert!(length > SLOW_SSE_BYTES / 2 && length < SLOW_SSE_BYTES, "all but the first event: {length}");
    }
    assert_eq!(echo.cut_short(), 0, "every answer was read to its end");
    let status = picker.process.wait().await;
    assert!(status.success(), "the picker ended with {status}");
}
