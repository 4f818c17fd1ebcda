//! Many response streams at once.

use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::{Payload, chat};
use crate::support::client::{self, Http};
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::process::{eventually, require_open_files};
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::sync::Semaphore;

const STREAMS: usize = 4_000;
/// Requests that may wait for response headers at once: within the listen backlog of the echo server.
const OPENING: usize = 128;
/// Each stream has two connections that end in this process.
const OPEN_FILES: u64 = 10_000;

/// One event a second for 20 s: long enough for all streams to be open together on a busy machine.
const TARGET: &str = "/v1/chat/completions?kind=sse&size=5000&events=20&pace_ms=1000";
const BYTES: usize = 5_000;

#[tokio::test(flavor = "multi_thread")]
async fn four_thousand_concurrent_streams_all_complete() {
    require_open_files(OPEN_FILES);
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let envoy = EnvoyProcess::alone(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let mut streams = tokio::task::JoinSet::new();
    let opening = Arc::new(Semaphore::new(OPENING));
    for _ in 0..STREAMS {
        streams.spawn(read(to, opening.clone()));
    }
    eventually("all streams open at once", || async {
        (envoy.stat("http.inference.downstream_rq_active").await >= STREAMS as u64).then_some(())
    })
    .await;
    let mut lost: Vec<String> = Vec::new();
    for end in streams.join_all().await {
        match end {
            Ok(BYTES) => {}
            Ok(length) => lost.push(format!("{length} bytes of {BYTES}")),
            Err(error) => lost.push(error.to_string()),
        }
    }
    assert!(lost.is_empty(), "{} of {STREAMS} lost, the first: {:?}", lost.len(), lost.first());
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

async fn read(to: SocketAddr, opening: Arc<Semaphore>) -> Result<usize, crate::support::Error> {
    let permit = opening.acquire().await?;
    let request = client::request("POST", to, Http::H1, TARGET, Payload::sized(chat(300, true, 1)));
    let mut open = client::open(to, Http::H1, request).await?;
    drop(permit);
    let mut length = 0;
    let mut first = None;
    while let Some(piece) = open.next().await? {
        length += piece.len();
        first.get_or_insert(piece);
    }
    if length != BYTES {
        return Err(format!("{length} bytes of {BYTES}, beginning with {first:?}").into());
    }
    Ok(length)
}
