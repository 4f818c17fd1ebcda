//! Calls over real connections: their results, and the cleanup of abandoned calls.

#![expect(clippy::unwrap_used, reason = "a test that can't go on fails")]

use super::*;
use attache_disagg::connector;
use attache_picker::split::Release;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

fn call(url: String) -> LegCall {
    LegCall {
        attempt: Some(0),
        url,
        headers: vec![("x-request-id", "r-1".to_owned())],
        body: Bytes::from_static(b"{}"),
        timeout: Duration::from_secs(20),
        insecure_skip_verify: false,
        release: None,
    }
}

/// Accepts a connection, and reads one request with a body of two bytes.
async fn accept_call(listener: &TcpListener) -> (TcpStream, String) {
    let (mut stream, _) = listener.accept().await.unwrap();
    let mut seen = Vec::new();
    while !seen.ends_with(b"{}") {
        assert_ne!(stream.read_buf(&mut seen).await.unwrap(), 0, "{}", String::from_utf8_lossy(&seen));
    }
    (stream, String::from_utf8(seen).unwrap())
}

/// The release for a prefill on the first of these workers, with this connector.
fn release_for(connector: &str, servers: [&TcpListener; 2], body: &'static [u8]) -> Release {
    let connector = connector::named(connector).unwrap().connector;
    Release::for_test(connector, servers.map(|server| server.local_addr().unwrap()), body)
}

async fn listening() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1/completions", listener.local_addr().unwrap());
    (listener, url)
}

#[tokio::test]
async fn response_is_returned_with_its_status() {
    let (listener, url) = listening().await;
    let prefiller = Prefiller::default();
    let pending = prefiller.start(call(url));
    let (mut stream, seen) = accept_call(&listener).await;
    assert!(seen.starts_with("POST /v1/completions HTTP/1.1\r\n") && seen.contains("x-request-id: r-1"), "{seen}");
    stream.write_all(b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\nno").await.unwrap();
    assert_eq!(pending.await, LegResult::Reply { status: 503, body: Bytes::from_static(b"no") });
}

#[tokio::test]
async fn connection_failures_are_distinguished() {
    let (listener, url) = listening().await;
    drop(listener);
    assert_eq!(Prefiller::default().start(call(url)).await, LegResult::Failed(Failure::Refused));

    let (listener, url) = listening().await;
    let prefiller = Prefiller::default();
    let pending = prefiller.start(call(url));
    let (mut stream, _) = accept_call(&listener).await;
    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhal").await.unwrap();
    drop(stream);
    assert_eq!(pending.await, LegResult::Failed(Failure::Broken));

    let (listener, url) = listening().await;
    let prefiller = Prefiller::default();
    let pending = prefiller.start(LegCall { timeout: Duration::from_millis(50), ..call(url) });
    let _held = accept_call(&listener).await;
    assert_eq!(pending.await, LegResult::Failed(Failure::Late));
}

/// Simulates a lost node: the backlog of a listener that accepts no connection is full, so the kernel drops packets.
#[tokio::test]
async fn node_that_drops_packets_counts_as_refused_after_connect_timeout() {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let address = listener.local_addr().unwrap();
    let mut queued = Vec::new();
    while let Ok(stream) = timeout(Duration::from_millis(300), TcpStream::connect(address)).await {
        queued.push(stream.unwrap());
    }
    let result = Prefiller::default().start(call(format!("http://{address}/v1/completions"))).await;
    assert_eq!(result, LegResult::Failed(Failure::Refused));
}

#[tokio::test]
async fn abandoned_call_closes_its_connection() {
    let (listener, url) = listening().await;
    let prefiller = Prefiller::default();
    let pending = prefiller.start(call(url));
    let (mut stream, _) = accept_call(&listener).await;
    drop(pending);
    // The worker sees the end of the connection, and no bytes before it.
    assert_eq!(stream.read(&mut [0; 16]).await.unwrap_or(0), 0);
}

#[tokio::test]
async fn blocks_of_abandoned_response_are_released() {
    let (prefill, url) = listening().await;
    let (decode, _) = listening().await;
    let release = release_for("nixl", [&prefill, &decode], br#"{"model":"m","prompt":"p","max_tokens":1}"#);
    let prefiller = Prefiller::default();
    let pending = prefiller.start(LegCall { release: Some(Arc::new(release)), ..call(url) });
    let (mut stream, _) = accept_call(&prefill).await;
    let reply = br#"{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"remote_block_ids":[[7]]}}"#;
    // The client disconnects after the response headers; the body arrives later.
    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", reply.len());
    stream.write_all(head.as_bytes()).await.unwrap();
    drop(pending);
    stream.write_all(reply).await.unwrap();
    let (mut released, _) = decode.accept().await.unwrap();
    let mut seen = Vec::new();
    while !seen.ends_with(b"}") {
        assert_ne!(released.read_buf(&mut seen).await.unwrap(), 0);
    }
    let seen = String::from_utf8(seen).unwrap();
    assert!(
        seen.contains(r#""max_tokens":1"#) && seen.contains(r#""kv_transfer_params":{"remote_block_ids":[[7]]}"#),
        "{seen}"
    );
    assert!(seen.starts_with("POST /v1/completions ") && seen.contains("x-request-id: r-1"), "{seen}");
    released.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
}

#[tokio::test]
async fn blocks_of_unread_response_are_released() {
    let (prefill, url) = listening().await;
    let (decode, _) = listening().await;
    let release = release_for("nixl", [&prefill, &decode], br#"{"model":"m","prompt":"p","max_tokens":1}"#);
    let prefiller = Prefiller::default();
    let mut pending = prefiller.start(LegCall { release: Some(Arc::new(release)), ..call(url) });
    let (mut stream, _) = accept_call(&prefill).await;
    let reply = br#"{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"remote_block_ids":[[7]]}}"#;
    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", reply.len());
    stream.write_all(&[head.as_bytes(), reply].concat()).await.unwrap();
    // The result has arrived, but the client disconnects before the stream reads it.
    while pending.result.is_empty() {
        tokio::task::yield_now().await;
    }
    assert!(pending.ack.as_mut().is_some_and(|ack| !ack.is_closed()));
    drop(pending);
    let (_released, _) = decode.accept().await.unwrap();
}

#[tokio::test]
async fn response_without_blocks_needs_no_release() {
    let (prefill, _) = listening().await;
    let body = br#"{"model":"m","prompt":"p","max_tokens":1}"#;
    let of = |connector, reply: &str| release_for(connector, [&prefill; 2], body).of(reply.as_bytes());
    let bare = r#"{"choices":[{"finish_reason":"length"}]}"#;
    let pinned = r#"{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"remote_block_ids":[[7]]}}"#;
    for (connector, reply, frees) in [
        ("nixl", bare, false),
        ("nixl", pinned, true),
        ("shfs", bare, false),
        ("shfs", pinned, true),
        ("shared-storage", bare, false),
        ("shared-storage", pinned, false),
    ] {
        assert_eq!(of(connector, reply).is_some(), frees, "{connector}: {reply}");
    }
}

#[tokio::test]
async fn call_outlives_the_thread_that_started_it() {
    let (listener, url) = listening().await;
    let prefiller = Arc::new(Prefiller::default());
    let (end, ends) = oneshot::channel::<()>();
    let serving = std::thread::spawn({
        let prefiller = prefiller.clone();
        move || {
            let runtime = runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let _serving = runtime.enter();
            let pending = prefiller.start(call(url));
            runtime.block_on(ends).unwrap();
            pending
        }
    });
    let (mut stream, _) = accept_call(&listener).await;
    end.send(()).unwrap();
    let pending = serving.join().unwrap();
    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await.unwrap();
    assert_eq!(pending.await, LegResult::Reply { status: 200, body: Bytes::from_static(b"{}") });
}
