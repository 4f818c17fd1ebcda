//! Requests with bodies that the picker can't read, in order to bypass the queue of a full pool.

use super::honest::Honest;
use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::Payload;
use crate::support::client::{self, Http};
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::gateway::{Gateway, Way};
use crate::support::process::eventually;
use bytes::Bytes;
use http::HeaderValue;
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Requests of one attack.
const REQUESTS: usize = 40;
/// Concurrent requests that the pool allows.
const CAPACITY: usize = 4;
/// Unreadable requests: HTTP version, path, content type, content encoding.
const UNREAD: [(Http, &str, &str, &str); 5] = [
    (Http::H1, "/v1/chat/completions", "application/json", "gzip"),
    (Http::H2, "/v1/embeddings", "application/json", "br"),
    (Http::H1, "/v1/images/generations", "application/octet-stream", ""),
    (Http::H2, "/anything", "text/plain", ""),
    (Http::H1, "/v1/audio/transcriptions", "multipart/form-data; boundary=b", ""),
];

fn configuration(echo: &Echo, capacity: usize) -> String {
    format!(
        "apiVersion: attache.dev/v1\nkind: Attache\nexchange: {{trustClientHeaders: true}}\npools:\n- name: default\n  \
         endpoints: [{{address: \"{}\", engine: none}}]\n  flowControl:\n    enabled: true\n    \
         detector: {{name: concurrency-detector, parameters: {{maxConcurrency: {capacity}}}}}\n",
        echo.address
    )
}

/// A body that is not JSON. A form names its model first and has a file larger than what the picker reads.
fn body(content_type: &str) -> Bytes {
    if !content_type.starts_with("multipart") {
        return Bytes::from(vec![0x1f; 5_000]);
    }
    let head = "--b\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\nm\r\n--b\r\ncontent-disposition: form-data; name=\"file\"; \
                filename=\"a\"\r\n\r\n";
    [head.as_bytes(), &vec![b's'; 300_000], b"\r\n--b--\r\n"].concat().into()
}

/// Sends one unreadable request whose response is delayed by `ms`.
async fn send(to: SocketAddr, (http, path, content_type, encoding): (Http, &str, &'static str, &'static str), ms: u64) {
    let body = body(content_type);
    let target = format!("{path}?delay_ms={ms}");
    let pieces = [body.slice(..body.len() / 2), body.slice(body.len() / 2..)];
    let mut request = client::request("POST", to, http, &target, Payload::chunked(pieces.into()));
    request.headers_mut().insert("content-type", HeaderValue::from_static(content_type));
    if !encoding.is_empty() {
        request.headers_mut().insert("content-encoding", HeaderValue::from_static(encoding));
    }
    let reply = client::send(to, http, request).await.expect("a response");
    assert_eq!(reply.status, 200, "{path}: {}", String::from_utf8_lossy(&reply.body));
    assert_eq!(reply.header("x-echo-sha256"), crate::support::body::sha256(&body), "{path}: the body arrives whole");
}

#[tokio::test(flavor = "multi_thread")]
async fn unreadable_requests_are_queued_like_others() {
    for what in UNREAD {
        let echo = Echo::start().await;
        let picker = AttacheProcess::configured(&configuration(&echo, CAPACITY)).await;
        let envoy = EnvoyProcess::alone(&by_header("original-dst.yaml", &picker)).await;
        let to = envoy.listener("inference");
        let mut attack = tokio::task::JoinSet::new();
        for _ in 0..REQUESTS {
            attack.spawn(send(to, what, 100));
        }
        attack.join_all().await;
        assert_eq!((echo.requests(), echo.peak()), (REQUESTS, CAPACITY), "{what:?}");
        picker.until_metric("attache_queued_requests", 0.0).await;
        envoy.assert_picker_was_correct().await;
        picker.assert_settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unreadable_requests_do_not_starve_honest_ones() {
    for way in Way::BOTH {
        let echo = Echo::start().await;
        let picker = Gateway::alone(way, &configuration(&echo, 8), &[echo.address]).await;
        let to = picker.clients();
        let honest = Honest::new(to).with("x-gateway-inference-fairness-id", "honest");
        let quiet = honest.quiet().await;
        let (report, ()) = honest
            .during(async {
                let mut attackers = tokio::task::JoinSet::new();
                // More clients than the pool's capacity: requests that bypassed the queue would keep honest ones in it.
                for number in 0..12 {
                    attackers.spawn(async move {
                        for _ in 0..REQUESTS / 2 {
                            send(to, UNREAD[number % 4], 30).await;
                        }
                    });
                }
                attackers.join_all().await;
            })
            .await;
        report.assert_unharmed(&quiet);
        picker.assert_settled().await;
    }
}

/// Opens a websocket, and sends `early` before the response.
async fn websocket(to: SocketAddr, early: &'static [u8]) -> (TcpStream, Vec<u8>) {
    let mut stream = TcpStream::connect(to).await.expect("a connection");
    let head = b"GET /v1/realtime HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
                 sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
    stream.write_all(&[&head[..], early].concat()).await.expect("sending the upgrade");
    let mut got = Vec::new();
    while !got.windows(4).any(|end| end == b"\r\n\r\n") || !got.ends_with(early) {
        let count = stream.read_buf(&mut got).await.expect("reading");
        assert!(count > 0, "cut after {:?}", String::from_utf8_lossy(&got));
    }
    (stream, got)
}

#[tokio::test(flavor = "multi_thread")]
async fn websocket_upgrades_are_queued_and_bodiless_requests_are_not() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::configured(&configuration(&echo, CAPACITY)).await;
    // Envoy's message timeout must not run while an upgrade is queued at its headers.
    let bootstrap = by_header("original-dst.yaml", &picker).replace("message_timeout: 10s", "message_timeout: 0.2s");
    let envoy = EnvoyProcess::alone(&bootstrap).await;
    let to = envoy.listener("inference");
    let mut open = Vec::new();
    for _ in 0..CAPACITY {
        open.push(websocket(to, b"").await);
    }
    let waits = tokio::spawn(websocket(to, b"early"));
    picker.until_metric("attache_queued_requests", 1.0).await;
    let models = client::get(to, "/v1/models").await.expect("a response");
    assert_eq!(models.status, 200, "a request without a body is no work");
    // Three times Envoy's message timeout: if it ran, it would have ended the upgrade. That nothing happens can only be
    // seen by waiting.
    tokio::time::sleep(std::time::Duration::from_millis(600)).await;
    assert!(!waits.is_finished(), "the pool is full");
    assert_eq!(echo.requests(), CAPACITY + 1);
    open.pop();
    let (_stream, got) = waits.await.expect("the upgrade");
    assert!(got.starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&got));
    open.clear();
    drop(_stream);
    eventually("no request under way", || async { (picker.books().await.ok()?.in_flight == 0).then_some(()) }).await;
    picker.assert_settled().await;
}
