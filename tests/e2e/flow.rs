//! A pool that is full, through real Envoy: the important goes first, the rest waits or is told when to come again, and everybody gets an answer.

use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::Payload;
use crate::support::client::{self, Http, Reply};
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::process::eventually;
use bytes::Bytes;
use http::HeaderValue;
use serde_json::json;
use std::net::SocketAddr;

/// Answers that the pool makes at once.
const ROOM: usize = 4;
/// Three times as many clients, of either kind.
const CLIENTS: usize = 12;
/// Requests of each kind.
const REQUESTS: usize = 60;

fn configuration(echo: &Echo, more: &str) -> String {
    format!(
        "apiVersion: attache.dev/v1\nkind: Attache\n\
         exchange: {{trustClientHeaders: true, objectives: {{batch: -1, urgent: 10}}}}\n\
         pools:\n- name: default\n  endpoints: [{{address: \"{}\", engine: none}}]\n  flowControl:\n    enabled: true\n    \
         detector: {{name: concurrency-detector, parameters: {{maxConcurrency: {ROOM}}}}}\n{more}",
        echo.address
    )
}

fn body(number: usize) -> Bytes {
    json!({"model": "m", "messages": [{"role": "user", "content": format!("{number}")}], "stream": true})
        .to_string()
        .into()
}

/// One request of an objective, whose answer pauses a few times for `ms`.
async fn ask(to: SocketAddr, objective: &'static str, number: usize, ms: u64) -> Reply {
    let target = format!("/v1/chat/completions?kind=sse&size=1000&events=4&pace_ms={ms}");
    let mut request = client::request("POST", to, Http::H1, &target, Payload::sized(body(number)));
    request.headers_mut().insert("x-gateway-inference-objective", HeaderValue::from_static(objective));
    client::send(to, Http::H1, request).await.expect("an answer")
}

#[tokio::test(flavor = "multi_thread")]
async fn at_three_times_the_capacity_the_important_go_first_and_everybody_gets_an_answer() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::configured(&configuration(&echo, "    maxRequests: 10\n    ttl: 30s\n")).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let mut clients = tokio::task::JoinSet::new();
    for objective in ["urgent", "batch"] {
        for client in 0..CLIENTS / 2 {
            clients.spawn(async move {
                let mut replies = Vec::new();
                for number in 0..REQUESTS * 2 / CLIENTS {
                    replies.push(ask(to, objective, client * 1_000 + number, 25).await);
                }
                (objective, replies)
            });
        }
    }
    let (mut served, mut lost) = ([0, 0], [0, 0]);
    for (objective, replies) in clients.join_all().await {
        let kind = usize::from(objective == "batch");
        for reply in replies {
            if reply.status == 200 {
                served[kind] += 1;
                continue;
            }
            lost[kind] += 1;
            assert!(["queue_full", "evicted"].contains(&reply.header("x-attache-reason")), "{:?}", reply.headers);
            assert_eq!(reply.status, 429);
            let retry: u64 = reply.header("retry-after").parse().expect("seconds");
            assert!((1..=60).contains(&retry), "{retry}");
        }
    }
    assert_eq!((served[0], lost[0]), (REQUESTS, 0), "nothing important is lost");
    assert_eq!(served[1] + lost[1], REQUESTS);
    assert!(picker.metric("attache_queue_wait_seconds_count").await > 0.0, "some have waited");
    picker.until_metric("attache_queued_requests", 0.0).await;
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_while_it_waits_leaves_nothing_behind() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::configured(&configuration(&echo, "    ttl: 1s\n")).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let mut running = tokio::task::JoinSet::new();
    for number in 0..ROOM {
        running.spawn(ask(to, "", number, 2_000));
    }
    eventually("the pool to be full", || async { (echo.requests() >= ROOM).then_some(()) }).await;
    let waits = tokio::spawn(ask(to, "", 100, 0));
    picker.until_metric("attache_queued_requests", 1.0).await;
    waits.abort();
    picker.until_metric("attache_queued_requests", 0.0).await;
    let late = ask(to, "", 101, 0).await;
    assert_eq!((late.status.as_u16(), late.header("x-attache-reason")), (503, "queue_timeout"));
    let retry: u64 = late.header("retry-after").parse().expect("seconds");
    assert!((1..=60).contains(&retry), "{retry}");
    assert!(running.join_all().await.iter().all(|reply| reply.status == 200));
    assert_eq!(echo.requests(), ROOM, "who left or was too late never reached a server");
    picker.assert_settled().await;
}
