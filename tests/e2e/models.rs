//! The list of models, through real Envoy: the picker responds for all servers, or a server does.

use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::client::{self, Reply};
use crate::support::envoy::EnvoyProcess;
use crate::support::process::eventually;
use crate::support::sim::SimProcess;
use bytes::Bytes;
use serde_json::{Value, json};
use std::net::SocketAddr;

async fn load_adapter(server: SocketAddr, name: &str) {
    let body = json!({"lora_name": name, "lora_path": format!("adapters/{name}")}).to_string();
    let reply = client::post(server, "/v1/load_lora_adapter", Bytes::from(body)).await.expect("an answer");
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
}

async fn get(to: SocketAddr, path: &str) -> Reply {
    client::get(to, path).await.expect("an answer")
}

/// The ids of the list, in its order.
async fn listed(to: SocketAddr) -> Vec<String> {
    let reply = get(to, "/v1/models").await;
    assert_eq!((reply.status.as_u16(), reply.header("content-type")), (200, "application/json"));
    let list = reply.json();
    assert_eq!(list["object"], "list");
    let id = |entry: &Value| entry["id"].as_str().expect("an id").to_owned();
    list["data"].as_array().expect("a list").iter().map(id).collect()
}

fn config(servers: &[SocketAddr], models: &str) -> String {
    let endpoints: Vec<String> = servers.iter().map(|server| format!("\"{server}\"")).collect();
    format!(
        "apiVersion: attache.dev/v1\nkind: Attache\nexchange: {{models: {models}}}\npools:\n- name: default\n  strategy: round-robin\n  \
         endpoints: [{}]\n  modelRewrites: [{{model: house, targets: [{{model: sim-8b}}]}}]\n",
        endpoints.join(", ")
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn models_of_all_servers_are_listed() {
    let sim = SimProcess::start(2, &["--model", "sim-8b"]).await;
    load_adapter(sim.servers[0], "sql").await;
    load_adapter(sim.servers[1], "chat/formal").await;
    let picker = AttacheProcess::configured(&config(&sim.servers, "pool")).await;
    // Like a gateway that keeps encoded slashes.
    let bootstrap = by_header("original-dst.yaml", &picker).replace("REJECT_REQUEST", "KEEP_UNCHANGED");
    let envoy = EnvoyProcess::start(&bootstrap).await;
    let to = envoy.listener("inference");
    picker.until_metric("attache_served_models", 3.0).await;
    let want = ["chat/formal", "house", "sim-8b", "sql"];
    for _ in 0..4 {
        assert_eq!(listed(to).await, want, "the same for everybody");
    }
    for (path, id, root) in [
        ("/v1/models/sql", "sql", "adapters/sql"),
        ("/v1/models/chat%2Fformal", "chat/formal", "adapters/chat/formal"),
        ("/v1/models/chat/formal", "chat/formal", "adapters/chat/formal"),
        ("/v1/models/house?x=1", "house", "sim-8b"),
    ] {
        let entry = get(to, path).await.json();
        assert_eq!(
            (&entry["id"], &entry["root"], &entry["object"]),
            (&json!(id), &json!(root), &json!("model")),
            "{path}"
        );
    }
    let absent = get(to, "/v1/models/absent").await;
    assert_eq!((absent.status.as_u16(), absent.header("x-attache-reason")), (404, "model_not_found"));
    assert_eq!(absent.json()["error"]["code"], "model_not_found");

    // Loaded while the picker runs.
    load_adapter(sim.servers[1], "late").await;
    eventually("the adapter that came late", || async { listed(to).await.contains(&"late".to_owned()).then_some(()) })
        .await;
    envoy.assert_picker_was_correct().await;
    let books = picker.assert_settled().await;
    assert!(books.outcomes["answered"] >= 9 && books.outcomes["rejected"] == 1, "{books:?}");
    assert_eq!(books.outcomes["routed"] + books.outcomes["skipped"], 0, "no server was asked: {books:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn server_responds_to_model_lists_when_configured() {
    let sim = SimProcess::start(1, &["--model", "sim-8b"]).await;
    let picker = AttacheProcess::configured(&config(&sim.servers, "server")).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    assert_eq!(listed(to).await, ["sim-8b"], "without the names of rewrites");
    let books = picker.assert_settled().await;
    assert_eq!((books.outcomes["answered"], books.outcomes["skipped"]), (0, 1));
    assert_eq!(picker.metric("attache_model_lists_total").await, 0.0, "nobody is asked in vain");
}
