//! A thousand requests of a recorded trace, by ext-proc and inside Envoy.

use super::{CHAT, TOLD, addresses, four, post, seen};
use crate::shipped::by_list;
use crate::support::attache::AttacheProcess;
use crate::support::body::{Payload, cut};
use crate::support::client::Http;
use crate::support::envoy::EnvoyProcess;
use crate::support::inside::Inside;
use bytes::Bytes;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;

const REQUESTS: usize = 1_000;
/// Lets Envoy tell clients the destinations in its dynamic metadata.
const REPORT: &str = "\n              response_headers_to_add: [{header: {key: x-metadata, value: \
                      \"%DYNAMIC_METADATA(envoy.lb:x-gateway-destination-endpoint)%\"}}]";

/// A pool whose state changes only by requests. One model is renamed.
fn configuration(servers: &[SocketAddr; 4]) -> String {
    let endpoints: Vec<String> =
        servers.iter().map(|server| format!("{{address: \"{server}\", engine: none}}")).collect();
    format!(
        "apiVersion: attache.dev/v1\nkind: Attache\nserver: {{seed: 11}}\npools:\n- name: default\n  \
         strategy: prefix-cache\n  destination: {{mode: list, max: 3}}\n  endpoints: [{}]\n  \
         modelRewrites: [{{model: canary, targets: [{{model: a-model-with-a-longer-name}}]}}]\n",
        endpoints.join(", ")
    )
}

/// The requests of the trace, with a text for each of its blocks. Every tenth one names the model that is renamed.
fn bodies() -> Vec<Bytes> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/conversation-2000.jsonl");
    let trace = std::fs::read_to_string(path).expect("the trace");
    let body = |(number, line): (usize, &str)| {
        let row: Value = serde_json::from_str(line).expect("a row");
        let blocks = row["hash_ids"].as_array().expect("the blocks of a prompt");
        let text: String = blocks.iter().map(|block| format!("{block:>8}").repeat(16)).collect();
        let model = if number % 10 == 0 { "canary" } else { "m" };
        let messages = [json!({"role": "user", "content": text})];
        Bytes::from(json!({"model": model, "messages": messages, "max_tokens": row["output_length"]}).to_string())
    };
    trace.lines().take(REQUESTS).enumerate().map(body).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn thousand_recorded_requests_are_handled_as_by_ext_proc() {
    let echoes = four().await;
    let servers = addresses(&echoes);
    let text = configuration(&servers);
    let reporting = |bootstrap: String| {
        let domains = "domains: [\"*\"]";
        assert_eq!(bootstrap.matches(domains).count(), 1, "{bootstrap}");
        bootstrap.replace(domains, &format!("{domains}{REPORT}"))
    };
    let picker = AttacheProcess::configured(&text).await;
    let envoy = EnvoyProcess::start(&reporting(by_list("override-host.yaml", &picker, servers))).await;
    let inside = Inside::beside_edited(&envoy, &text, servers, reporting).await;
    let bodies = bodies();
    assert_eq!(bodies.len(), REQUESTS);
    let (mut lists, mut renamed) = (BTreeSet::new(), 0);
    for (number, body) in bodies.iter().enumerate() {
        let http = [Http::H1, Http::H2][number % 2];
        let kind = ["json", "sse"][number / 2 % 2];
        let target = format!("{CHAT}?kind={kind}&size=2000&tell={TOLD}");
        let payload = || match number / 4 % 2 {
            0 => Payload::sized(body.clone()),
            _ => Payload::chunked(cut(body.clone(), 4 << 10, number as u64)),
        };
        let id = number.to_string();
        let headers = [("x-request-id", &*id), ("content-type", "application/json")];
        let theirs = post(envoy.listener("inference"), http, &target, payload(), &headers).await;
        picker.assert_settled().await;
        let ours = post(inside.clients(), http, &target, payload(), &headers).await;
        inside.assert_settled().await;
        let list = ours.header("x-metadata").to_owned();
        assert_eq!(ours.header("x-echo-destination"), list, "request {number}: header and metadata are the same list");
        assert_eq!(list.split(',').count(), 3, "request {number}: {list}");
        assert_eq!(list, theirs.header("x-metadata"), "request {number}");
        assert_eq!((ours.status, seen(&ours)), (theirs.status, seen(&theirs)), "request {number}");
        assert_eq!((&ours.sha256, &ours.trailers), (&theirs.sha256, &theirs.trailers), "request {number}");
        renamed += usize::from(ours.header("x-echo-length") != body.len().to_string());
        lists.insert(list);
    }
    assert!(lists.len() > 8, "the order of the list depends on the request: {lists:?}");
    assert_eq!(renamed, REQUESTS / 10);
}
