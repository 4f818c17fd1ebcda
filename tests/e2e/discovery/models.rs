//! The list of models where InferencePools are discovered. Each gateway gets the models of its own pool, from servers
//! and from objects.

use super::pools::{called, labelled};
use crate::api::{EXPERIMENTAL, FakeApi, STABLE, object, pod};
use crate::support::attache::AttacheProcess;
use crate::support::grpc::{Connection, PROCESS, request_headers};
use crate::support::process::eventually;
use crate::support::sim::SimProcess;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use serde_json::{Value, json};

const CONFIGURATION: &str = "apiVersion: attache.dev/v1\nkind: Attache\nexchange: {models: pool}\n\
                             pools: [{name: found, kubernetes: {poolSelector: tier=gold}}]\n";

/// Applies a pool with one simulated server.
async fn serve(api: &FakeApi, name: &str, model: &str) -> SimProcess {
    let sim = SimProcess::start(1, &["--model", model]).await;
    let mut pool = labelled(name, "gold");
    pool["spec"]["targetPorts"] = json!([{"number": sim.servers[0].port()}]);
    api.pod(pod(name, name, "127.0.0.1"));
    api.apply(STABLE, "inferencepools", pool);
    sim
}

/// Status and listed ids. The status is 0 where a server has to respond, because the pool's models are not known yet.
async fn listed(connection: &Connection) -> (i32, Vec<String>) {
    let mut stream = connection.stream(PROCESS, &[]).await.expect("a stream");
    stream.send(&request_headers(&[(":path", b"/v1/models"), (":method", b"GET")], true)).expect("sending headers");
    let answer = stream.answer().await.expect("an answer").expect("a message");
    let Some(Response::ImmediateResponse(answer)) = answer.response else { return (0, Vec::new()) };
    let list: Value = serde_json::from_slice(&answer.body).expect("JSON");
    let id = |entry: &Value| entry["id"].as_str().expect("an id").to_owned();
    (answer.status.map_or(0, |status| status.code), list["data"].as_array().into_iter().flatten().map(id).collect())
}

async fn until_listed(connection: &Connection, want: &[&str]) {
    eventually(&format!("the models {want:?}"), || async {
        (listed(connection).await == (200, want.iter().map(|id| (*id).to_owned()).collect())).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_found_pool_lists_its_own_models() {
    let api = FakeApi::start().await;
    api.install("v1", "configmaps");
    api.install(EXPERIMENTAL, "inferencemodelrewrites");
    let _small_server = serve(&api, "small", "sim-8b").await;
    let picker = AttacheProcess::in_cluster(&api.kubeconfig(), &["--config-text", CONFIGURATION]).await;
    picker.until_ready().await;
    let (small, large) = (called(&picker, "small-epp").await, called(&picker, "large-epp").await);
    until_listed(&small, &["sim-8b"]).await;
    assert_eq!(listed(&large).await, (404, Vec::new()), "there is none yet");
    let _large_server = serve(&api, "large", "sim-70b").await;
    until_listed(&large, &["sim-70b"]).await;
    assert_eq!(listed(&small).await.1, ["sim-8b"], "and nobody else's");
    let rules = json!([{"matches": [{"model": {"value": "house"}}], "targets": [{"modelRewrite": "sim-70b"}]}]);
    api.apply(
        EXPERIMENTAL,
        "inferencemodelrewrites",
        object("house", 1, json!({"poolRef": {"name": "large"}, "rules": rules})),
    );
    until_listed(&large, &["house", "sim-70b"]).await;
    assert_eq!(listed(&small).await.1, ["sim-8b"]);
    api.delete(STABLE, "inferencepools", "large");
    eventually("the pool to be gone", || async { (listed(&large).await.0 == 404).then_some(()) }).await;
}
