//! A closed loop of HTTP/1.1 clients and the server that they end at. Both do as little as they can: Envoy and the picker are measured.

use crate::support::Error;
use bytes::Bytes;
use hdrhistogram::Histogram;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;

/// A short completion with usage, as an unstreamed answer of few tokens.
pub(crate) const ANSWER: &[u8] = br#"{"id":"chatcmpl-1","object":"chat.completion","model":"sim-8b","choices":[{"index":0,"message":{"role":"assistant","content":"Yes."},"finish_reason":"stop"}],"usage":{"prompt_tokens":512,"completion_tokens":2,"total_tokens":514}}"#;

/// Serves `answer` for everything.
pub(crate) async fn upstream(listener: TcpListener, answer: &'static [u8]) {
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        let _ = stream.set_nodelay(true);
        let service = hyper::service::service_fn(move |request: http::Request<hyper::body::Incoming>| async move {
            let mut body = request.into_body();
            while let Some(Ok(_)) = body.frame().await {}
            let mut response = http::Response::new(Full::new(Bytes::from_static(answer)));
            response.headers_mut().insert("content-type", http::HeaderValue::from_static("application/json"));
            Ok::<_, std::convert::Infallible>(response)
        });
        tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    }
}

/// Sends chat requests with `body` over `connections` for `time`, one at a time on each, whose answers must hold `answer`; round-trip times in
/// microseconds.
pub(crate) async fn closed_loop(
    to: SocketAddr,
    body: &[u8],
    connections: usize,
    time: Duration,
    answer: &'static [u8],
) -> Result<Histogram<u64>, Error> {
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: inference\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let request = Bytes::from([head.as_bytes(), body].concat());
    let end = Instant::now() + time;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..connections {
        tasks.spawn(client(to, request.clone(), end, answer));
    }
    let mut total = Histogram::new(3)?;
    while let Some(result) = tasks.join_next().await {
        total.add(result??)?;
    }
    Ok(total)
}

async fn client(to: SocketAddr, request: Bytes, end: Instant, expected: &[u8]) -> Result<Histogram<u64>, Error> {
    let mut stream = TcpStream::connect(to).await?;
    stream.set_nodelay(true)?;
    let mut times = Histogram::new(3)?;
    let mut answer = Vec::with_capacity(4096);
    while Instant::now() < end {
        let started = Instant::now();
        stream.write_all(&request).await?;
        answer.clear();
        while !is_complete(&answer) {
            if stream.read_buf(&mut answer).await? == 0 {
                return Err(format!("cut after {}", String::from_utf8_lossy(&answer)).into());
            }
        }
        times.record(u64::try_from(started.elapsed().as_micros())?)?;
        if !answer.starts_with(b"HTTP/1.1 200") || memchr::memmem::find(&answer, expected).is_none() {
            return Err(format!("a wrong answer: {}", String::from_utf8_lossy(&answer)).into());
        }
    }
    Ok(times)
}

/// Whether a response with a length, or a chunked one, is all here.
fn is_complete(answer: &[u8]) -> bool {
    let Some(head_end) = memchr::memmem::find(answer, b"\r\n\r\n") else { return false };
    let head = String::from_utf8_lossy(&answer[..head_end]).to_ascii_lowercase();
    match head.split("content-length: ").nth(1).and_then(|rest| rest.lines().next()?.parse::<usize>().ok()) {
        Some(length) => answer.len() >= head_end + 4 + length,
        None => answer.ends_with(b"0\r\n\r\n"),
    }
}
