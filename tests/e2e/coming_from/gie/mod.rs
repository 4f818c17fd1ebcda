//! The first API proposal of Gateway API Inference Extension (GIE): InferencePool and InferenceModel.

mod criticality;
mod models;
mod pools;
mod status;

use super::Row;
use crate::api::picks::{Picked, outcome, pick, sent, sent_body};
use crate::api::{EXPERIMENTAL, FakeApi, object, pod};
use crate::support::attache::AttacheProcess;
use crate::support::grpc::{Connection, Stream};
use crate::support::process::eventually;
use serde_json::{Value, json};

pub(super) const TOPICS: &[(&str, &[Row])] =
    &[("pools", pools::ROWS), ("models", models::ROWS), ("criticality", criticality::ROWS), ("status", status::ROWS)];

const MODELS: &str = "inferencemodels";
/// The released API group of the proposal's pool.
const GROUP: &str = "inference.networking.x-k8s.io";
/// Flags of a picker for the proposal's pool. Its servers have no metrics.
const FLAGS: [&str; 5] = ["--pool-name", "vllm", "--pool-group", GROUP, "--engine=none"];

/// A pool as the proposal writes it: `selector` is a map, the port is a number.
fn proposed_pool(name: &str) -> Value {
    json!({
        "metadata": {"name": name},
        "spec": {"selector": {"app": name}, "targetPortNumber": 8080, "extensionRef": {"name": "epp"}},
    })
}

/// A cluster with the pool `vllm`, one pod, and these InferenceModels. Each is a name, the second of its creation, and
/// its spec without `poolRef`.
async fn cluster(models: &[(&str, u8, Value)]) -> FakeApi {
    let api = FakeApi::start().await;
    api.install(EXPERIMENTAL, "inferencepools");
    api.install(EXPERIMENTAL, MODELS);
    api.apply(EXPERIMENTAL, "inferencepools", proposed_pool("vllm"));
    api.pod(pod("a", "vllm", "10.0.0.1"));
    for (name, second, spec) in models {
        apply_model(&api, name, *second, spec.clone());
    }
    api
}

/// Applies an InferenceModel of the pool `vllm`.
fn apply_model(api: &FakeApi, name: &str, second: u8, mut spec: Value) {
    if spec["poolRef"].is_null() {
        spec["poolRef"] = json!({"name": "vllm"});
    }
    api.apply(EXPERIMENTAL, MODELS, object(name, second, spec));
}

async fn started(api: &FakeApi, flags: &[&str]) -> (AttacheProcess, Connection) {
    let picker = AttacheProcess::in_cluster(&api.kubeconfig(), flags).await;
    picker.until_ready().await;
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    (picker, connection)
}

/// A picker for the pool `vllm` that is configured by a file with `more` in the pool's section.
async fn configured(api: &FakeApi, more: &str) -> (AttacheProcess, Connection) {
    let source = format!("kubernetes: {{pool: vllm, group: {GROUP}, engine: none}}");
    let text = format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools: [{{name: vllm, strategy: random, {source}, {more}}}]\n"
    );
    started(api, &["--config-text", &text]).await
}

/// A picker for a cluster with these InferenceModels.
async fn world(models: &[(&str, u8, Value)]) -> (FakeApi, AttacheProcess, Connection) {
    let api = cluster(models).await;
    let (picker, connection) = started(&api, &FLAGS).await;
    (api, picker, connection)
}

/// Status and message of a rejection.
fn refused(picked: Picked) -> (i32, String) {
    let Picked::Refused(status, body) = picked else { panic!("{picked:?} is no refusal") };
    let body: Value = serde_json::from_str(&body).expect("an error as JSON");
    (status, body["error"]["message"].as_str().unwrap_or_default().to_owned())
}

/// Waits until the picker's log has this text.
async fn until_logged(picker: &AttacheProcess, text: &str) -> String {
    let line = || async { picker.process.stderr().lines().find(|line| line.contains(text)).map(str::to_owned) };
    eventually(&format!("`{text}` in the log"), line).await
}

/// Sends `count` requests for `model` that get no response yet.
async fn unanswered(connection: &Connection, model: &str, count: usize) -> Vec<Stream> {
    let mut streams = Vec::new();
    for _ in 0..count {
        // The first token of a streamed response is visible to the picker.
        let body = json!({"model": model, "prompt": "hello", "stream": true}).to_string();
        let mut stream = sent_body(connection, &body, &[], None).await;
        outcome(&mut stream).await.destination();
        streams.push(stream);
    }
    streams
}

/// The model name that the server gets for a request for `model`.
async fn target(connection: &Connection, model: &str) -> String {
    pick(connection, model).await.model().to_owned()
}
