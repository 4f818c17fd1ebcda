//! Questions over real connections: what is told, and what becomes of answers that nobody waits for.

#![expect(clippy::unwrap_used, reason = "a test that can't go on fails")]

use super::*;
use attache_disagg::connector;
use attache_picker::split::Release;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::Instant;

fn ask(url: String) -> LegCall {
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

/// A server that has read one request's head and body of two bytes.
async fn asked(listener: &TcpListener) -> (TcpStream, String) {
    let (mut stream, _) = listener.accept().await.unwrap();
    let mut seen = Vec::new();
    while !seen.ends_with(b"{}") {
        assert_ne!(stream.read_buf(&mut seen).await.unwrap(), 0, "{}", String::from_utf8_lossy(&seen));
    }
    (stream, String::from_utf8(seen).unwrap())
}

/// What frees an answer of the first of servers that listen here, by this connector.
fn released(connector: &str, servers: [&TcpListener; 2], body: &'static [u8]) -> Release {
    let connector = connector::named(connector).unwrap().connector;
    Release::for_test(connector, servers.map(|server| server.local_addr().unwrap()), body)
}

async fn listening() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1/completions", listener.local_addr().unwrap());
    (listener, url)
}

#[tokio::test]
async fn an_answer_is_told_with_its_status() {
    let (listener, url) = listening().await;
    let prefiller = Prefiller::default();
    let asking = prefiller.start(ask(url));
    let (mut stream, seen) = asked(&listener).await;
    assert!(seen.starts_with("POST /v1/completions HTTP/1.1\r\n") && seen.contains("x-request-id: r-1"), "{seen}");
    stream.write_all(b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\nno").await.unwrap();
    assert_eq!(asking.await, LegResult::Reply { status: 503, body: Bytes::from_static(b"no") });
}

#[tokio::test]
async fn connections_that_fail_are_told_apart() {
    let (listener, url) = listening().await;
    drop(listener);
    assert_eq!(Prefiller::default().start(ask(url)).await, LegResult::Failed(Failure::Refused));

    let (listener, url) = listening().await;
    let prefiller = Prefiller::default();
    let asking = prefiller.start(ask(url));
    let (mut stream, _) = asked(&listener).await;
    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhal").await.unwrap();
    drop(stream);
    assert_eq!(asking.await, LegResult::Failed(Failure::Broken));

    let (listener, url) = listening().await;
    let prefiller = Prefiller::default();
    let asking = prefiller.start(LegCall { timeout: Duration::from_millis(50), ..ask(url) });
    let _held = asked(&listener).await;
    assert_eq!(asking.await, LegResult::Failed(Failure::Late));
}

/// Whoever does not take part in a connection, as a node that is gone: the queue of a listener that accepts nobody is
/// full, so that the kernel drops what comes.
#[tokio::test]
async fn a_node_that_drops_packets_counts_as_refusing_long_before_the_prefills_time_is_over() {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let address = listener.local_addr().unwrap();
    let mut queued = Vec::new();
    while let Ok(stream) = timeout(Duration::from_millis(300), TcpStream::connect(address)).await {
        queued.push(stream.unwrap());
    }
    let began = Instant::now();
    let told = Prefiller::default().start(ask(format!("http://{address}/v1/completions"))).await;
    assert_eq!(told, LegResult::Failed(Failure::Refused));
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_question_that_is_given_up_closes_its_connection() {
    let (listener, url) = listening().await;
    let prefiller = Prefiller::default();
    let asking = prefiller.start(ask(url));
    let (mut stream, _) = asked(&listener).await;
    drop(asking);
    // The server sees the end, and nothing before it.
    assert_eq!(stream.read(&mut [0; 16]).await.unwrap_or(0), 0);
}

#[tokio::test]
async fn what_an_answer_pins_is_fetched_when_nobody_waits_for_it_any_longer() {
    let (prefill, url) = listening().await;
    let (decode, _) = listening().await;
    let release = released("nixl", [&prefill, &decode], br#"{"model":"m","prompt":"p","max_tokens":1}"#);
    let prefiller = Prefiller::default();
    let asking = prefiller.start(LegCall { release: Some(Arc::new(release)), ..ask(url) });
    let (mut stream, _) = asked(&prefill).await;
    let reply = br#"{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"remote_block_ids":[[7]]}}"#;
    // Its head has come when the client leaves, the rest comes after.
    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", reply.len());
    stream.write_all(head.as_bytes()).await.unwrap();
    drop(asking);
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
async fn an_answer_that_has_come_and_that_nobody_has_looked_at_is_fetched_as_well() {
    let (prefill, url) = listening().await;
    let (decode, _) = listening().await;
    let release = released("nixl", [&prefill, &decode], br#"{"model":"m","prompt":"p","max_tokens":1}"#);
    let prefiller = Prefiller::default();
    let mut asking = prefiller.start(LegCall { release: Some(Arc::new(release)), ..ask(url) });
    let (mut stream, _) = asked(&prefill).await;
    let reply = br#"{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"remote_block_ids":[[7]]}}"#;
    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", reply.len());
    stream.write_all(&[head.as_bytes(), reply].concat()).await.unwrap();
    // It lies there, and its client has left.
    while asking.told.is_empty() {
        tokio::task::yield_now().await;
    }
    assert!(asking.waits.as_mut().is_some_and(|waits| !waits.is_closed()));
    drop(asking);
    let (_released, _) = decode.accept().await.unwrap();
}

#[tokio::test]
async fn an_answer_that_pins_nothing_is_not_fetched() {
    let (prefill, _) = listening().await;
    let body = br#"{"model":"m","prompt":"p","max_tokens":1}"#;
    let of = |connector, reply: &str| released(connector, [&prefill; 2], body).of(reply.as_bytes());
    let bare = r#"{"choices":[{"finish_reason":"length"}]}"#;
    let told = r#"{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"remote_block_ids":[[7]]}}"#;
    for (connector, reply, frees) in [
        ("nixl", bare, false),
        ("nixl", told, true),
        ("shfs", bare, false),
        ("shfs", told, true),
        ("shared-storage", bare, false),
        ("shared-storage", told, false),
    ] {
        assert_eq!(of(connector, reply).is_some(), frees, "{connector}: {reply}");
    }
}

#[tokio::test]
async fn a_question_outlives_the_thread_that_asked_it() {
    let (listener, url) = listening().await;
    let prefiller = Arc::new(Prefiller::default());
    let (end, ends) = oneshot::channel::<()>();
    let serving = std::thread::spawn({
        let prefiller = prefiller.clone();
        move || {
            let runtime = runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let _serving = runtime.enter();
            let asking = prefiller.start(ask(url));
            runtime.block_on(ends).unwrap();
            asking
        }
    });
    let (mut stream, _) = asked(&listener).await;
    end.send(()).unwrap();
    let asking = serving.join().unwrap();
    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await.unwrap();
    assert_eq!(asking.await, LegResult::Reply { status: 200, body: Bytes::from_static(b"{}") });
}
