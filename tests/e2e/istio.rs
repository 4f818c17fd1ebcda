//! Envoy as Istio configures it for an InferencePool, with TLS to the picker.

use crate::shipped::list_pool;
use crate::support::attache::AttacheProcess;
use crate::support::body::{chat, sha256};
use crate::support::client;
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use serde_json::{Value, json};
use std::net::SocketAddr;

const CAPTURED: &str = include_str!("../data/istio/1.30.3.json");
/// The name of the captured listener.
const LISTENER: &str = "0.0.0.0_24085";
/// `sni` of the DestinationRule in the examples.
const SNI: &str = "llm-epp.ai.svc.cluster.local";
const POSTS: usize = 12;

/// A bootstrap with the captured configuration and static endpoints and routes. `change` changes the TLS context of the
/// picker's cluster.
fn bootstrap(picker: SocketAddr, servers: &[SocketAddr], change: impl Fn(&mut Value)) -> String {
    let mut captured: Value = serde_json::from_str(CAPTURED).expect("what was captured");
    let mut clusters = captured["clusters"].take();
    for cluster in clusters.as_array_mut().expect("clusters") {
        let of_picker = cluster["name"].as_str().expect("a name").starts_with("outbound|9002|");
        let endpoints = if of_picker { &[picker][..] } else { servers };
        let endpoints: Vec<Value> = endpoints.iter().map(endpoint).collect();
        cluster["type"] = json!("STATIC");
        cluster.as_object_mut().expect("a cluster").remove("eds_cluster_config");
        cluster["load_assignment"] =
            json!({"cluster_name": cluster["name"], "endpoints": [{"lb_endpoints": endpoints}]});
        if of_picker {
            assert!(cluster.to_string().contains(r#""auto_sni":true"#), "what made every request fail");
            change(&mut cluster["transport_socket"]["typed_config"]);
        }
    }
    // The listener's filter names a dummy cluster, which every route replaces.
    clusters.as_array_mut().expect("clusters").push(json!({"name": "dummy", "type": "STATIC"}));
    let mut listener = captured["listener"].take();
    listener["address"] = json!({"socket_address": {"address": "127.0.0.1", "port_value": 0}});
    let manager = &mut listener["filter_chains"][0]["filters"][0]["typed_config"];
    manager.as_object_mut().expect("a filter").remove("rds");
    manager["route_config"] = captured["route_config"].take();
    json!({
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}},
        "static_resources": {"listeners": [listener], "clusters": clusters},
    })
    .to_string()
}

fn endpoint(address: &SocketAddr) -> Value {
    let address = json!({"socket_address": {"address": address.ip(), "port_value": address.port()}});
    json!({"endpoint": {"address": address}})
}

/// Sends requests through this Envoy and returns the statuses.
async fn statuses(change: impl Fn(&mut Value)) -> Vec<u16> {
    let servers = [Echo::start().await, Echo::start().await];
    let addresses = servers.each_ref().map(|server| server.address);
    let pool = ["--config-text", &list_pool(&addresses[1..], "round-robin"), "--secure-serving=true"];
    let picker = AttacheProcess::with_arguments(&pool.map(str::to_owned)).await;
    let envoy = EnvoyProcess::start(&bootstrap(picker.grpc, &addresses, change)).await;
    let mut statuses = Vec::new();
    for seed in 0..POSTS {
        let body = chat(2_000, true, seed as u64);
        let target = "/v1/chat/completions?kind=sse&size=2000&events=10";
        let reply = client::post(envoy.listener(LISTENER), target, body.clone()).await.expect("a response");
        if reply.status == 200 {
            assert_eq!((reply.body.len(), reply.header("x-echo-sha256")), (2_000, sha256(&body).as_str()));
        }
        statuses.push(reply.status.as_u16());
    }
    assert_eq!(servers[0].requests(), 0, "Envoy's own round robin chose a server");
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
    statuses
}

#[tokio::test(flavor = "multi_thread")]
async fn istio_with_sni_every_post_completes() {
    assert_eq!(statuses(|tls| tls["sni"] = json!(SNI)).await, [200; POSTS]);
}

/// Istio then sends `outbound|9002||llm-epp.ai.svc.cluster.local`, which is no DNS name.
#[tokio::test(flavor = "multi_thread")]
async fn istio_without_sni_every_post_completes() {
    assert_eq!(statuses(|_| {}).await, [200; POSTS]);
}

#[tokio::test(flavor = "multi_thread")]
async fn istio_without_sni_in_tls_1_2_every_post_completes() {
    let old =
        |tls: &mut Value| tls["common_tls_context"]["tls_params"]["tls_maximum_protocol_version"] = json!("TLSv1_2");
    assert_eq!(statuses(old).await, [200; POSTS]);
}

/// The client offers a key share that the picker does not support, so it sends a second ClientHello.
#[tokio::test(flavor = "multi_thread")]
async fn istio_without_sni_after_a_hello_retry_every_post_completes() {
    let retry = |tls: &mut Value| tls["common_tls_context"]["tls_params"]["ecdh_curves"] = json!(["P-521", "P-256"]);
    assert_eq!(statuses(retry).await, [200; POSTS]);
}
