//! The whole request path with simulated model servers: each API of the quickstart, served by the chosen endpoint.

use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::client::{self, Reply};
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::sim::SimProcess;
use bytes::Bytes;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use tokio::net::TcpListener;

async fn ask(to: SocketAddr, path: &str, body: Value) -> Reply {
    let reply = client::post(to, path, Bytes::from(body.to_string())).await.expect("an answer");
    assert_eq!(reply.status, 200, "{path}: {}", String::from_utf8_lossy(&reply.body));
    reply
}

#[tokio::test(flavor = "multi_thread")]
async fn every_api_is_served_and_round_robin_uses_all_servers() {
    let sim = SimProcess::start(4, &["--model", "sim-8b"]).await;
    let picker = AttacheProcess::start(&sim.servers, &["--strategy", "round-robin"]).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let messages = json!([{"role": "user", "content": "Where is the nearest embassy?"}]);
    let mut served: BTreeMap<String, usize> = BTreeMap::new();
    for round in 0..8 {
        let chat = json!({"model": "sim-8b", "messages": messages, "max_tokens": 8, "stream": round % 2 == 1});
        let reply = ask(to, "/v1/chat/completions", chat).await;
        let text = String::from_utf8_lossy(&reply.body).into_owned();
        if round % 2 == 1 {
            assert!(text.trim_end().ends_with("data: [DONE]"), "a stream to its end: {text}");
        } else {
            assert!(reply.json()["usage"]["completion_tokens"].as_u64().is_some_and(|n| n > 0), "{text}");
        }
        *served.entry(reply.header("x-sim-server").to_owned()).or_default() += 1;
    }
    assert_eq!(served.values().copied().collect::<Vec<_>>(), [2; 4], "round robin over four servers: {served:?}");
    let reply = ask(to, "/v1/messages", json!({"model": "sim-8b", "messages": messages, "max_tokens": 8})).await;
    assert_eq!(reply.json()["type"], "message");
    let reply = ask(to, "/v1/completions", json!({"model": "sim-8b", "prompt": "Once", "max_tokens": 8})).await;
    assert_eq!(reply.json()["object"], "text_completion");
    let models = client::get(to, "/v1/models").await.expect("an answer");
    assert_eq!(models.json()["data"][0]["id"], "sim-8b");
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

/// Envoy responds 503 to the first requests. Then the picker has ejected the servers, and rejects requests at once.
#[tokio::test(flavor = "multi_thread")]
async fn dead_servers_are_ejected_and_the_live_one_serves() {
    let echo = Echo::start().await;
    let mut addresses = vec![echo.address];
    for _ in 0..2 {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        addresses.push(listener.local_addr().expect("an address"));
    }
    let picker = AttacheProcess::start(&addresses, &["--strategy", "round-robin"]).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).to_string();
    let ask =
        || async { client::post(to, "/v1/chat/completions", Bytes::from(body.clone())).await.expect("an answer") };
    // Envoy reports failed connections, so two failures for each server are enough.
    let mut failures = 0;
    for _ in 0..40 {
        failures += u32::from(ask().await.status != 200);
    }
    assert_eq!(failures, 4, "each dead server is tried twice, then left alone");
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_ready_server_rejections_have_retry_after() {
    let picker = AttacheProcess::configured(
        r#"{apiVersion: attache.dev/v1, kind: Attache, pools: [{name: p, endpoints: [{address: "127.0.0.1:1", draining: true}]}]}"#,
    )
    .await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).to_string();
    let reply = client::post(to, "/v1/chat/completions", Bytes::from(body)).await.expect("an answer");
    assert_eq!((reply.status.as_u16(), reply.header("x-attache-reason")), (503, "no_ready_endpoint"));
    assert!(reply.header("retry-after").parse::<u32>().is_ok(), "{:?}", reply.headers);
    picker.assert_settled().await;
}
