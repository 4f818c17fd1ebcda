//! Conditions in the status of InferenceModels, and the replica that writes them.

use super::members::NO_METRICS;
use crate::api::{EXPERIMENTAL, FakeApi, STABLE, object, pod, pool};
use crate::support::attache::AttacheProcess;
use crate::support::client;
use crate::support::process::eventually;
use serde_json::{Value, json};

const MODELS: &str = "inferencemodels";
const ELECTION: &[&str] = &["--pool-name", "vllm", "--ha-enable-leader-election", "--drain-min-delay=0s", NO_METRICS];

fn cluster(api: &FakeApi) {
    api.apply(STABLE, "inferencepools", pool("vllm", "vllm", &[8000]));
    api.pod(pod("a", "vllm", "10.0.0.1"));
    api.install(EXPERIMENTAL, MODELS);
}

fn apply_model(api: &FakeApi, name: &str, second: u8, model: &str) {
    let mut model_object = object(name, second, json!({"poolRef": {"name": "vllm"}, "modelName": model}));
    model_object["metadata"]["generation"] = json!(1);
    // The default status of new objects of this kind.
    let pending = json!({"type": "Other", "status": "Unknown", "reason": "Pending", "message": "Waiting for controller",
                         "lastTransitionTime": "1970-01-01T00:00:00Z"});
    model_object["status"] = json!({"conditions": [pending]});
    api.apply(EXPERIMENTAL, MODELS, model_object);
}

/// The condition of this type, `Null` where the object has none.
fn condition(api: &FakeApi, name: &str, kind: &str) -> Value {
    let object = api.get(EXPERIMENTAL, MODELS, name).unwrap_or_default();
    let conditions = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
    conditions.into_iter().find(|condition| condition["type"] == kind).unwrap_or_default()
}

async fn until_accepted_is(api: &FakeApi, name: &str, status: &str, reason: &str) -> Value {
    eventually(&format!("{name} to be {status} {reason}"), || async {
        let found = condition(api, name, "Accepted");
        (found["status"] == status && found["reason"] == reason).then_some(found)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn leader_writes_model_name_conflicts_to_the_status() {
    let api = FakeApi::start().await;
    cluster(&api);
    apply_model(&api, "old", 1, "llama");
    apply_model(&api, "young", 2, "llama");
    apply_model(&api, "other", 3, "qwen");
    let mut first = AttacheProcess::in_cluster(&api.kubeconfig(), ELECTION).await;
    let found = until_accepted_is(&api, "young", "False", "ModelNameInUse").await;
    assert_eq!(found["message"], "the model name `llama` is the older InferenceModel `old`'s");
    assert_eq!(found["observedGeneration"], 1);
    let since = until_accepted_is(&api, "old", "True", "Accepted").await["lastTransitionTime"].clone();
    assert!(since.as_str().is_some_and(|time| time.ends_with('Z') && time.len() == 20), "{since}");
    until_accepted_is(&api, "other", "True", "Accepted").await;
    assert_eq!(condition(&api, "old", "Other")["reason"], "Pending", "what others say stays");
    first.until_metric("attache_kube_status_writes_total", 3.0).await;

    // A second replica watches and writes nothing.
    let second = AttacheProcess::in_cluster(&api.kubeconfig(), ELECTION).await;
    eventually("the second to lack nothing but the lease", || async {
        let page = client::get(second.metrics, "/ready").await.ok()?;
        let text = String::from_utf8_lossy(&page.body).into_owned();
        (text.contains("leadership (the Lease)") && !text.contains("discovered")).then_some(())
    })
    .await;
    apply_model(&api, "third", 9, "qwen");
    until_accepted_is(&api, "third", "False", "ModelNameInUse").await;
    assert_eq!(second.metric("attache_kube_status_writes_total").await, 0.0);
    assert_eq!(api.request_count("patch", MODELS), 4, "what an object says already is not written again");

    // The next leader continues: a free name belongs to the next oldest object.
    first.process.signal("TERM");
    first.process.wait().await;
    api.delete(EXPERIMENTAL, MODELS, "old");
    second.until_ready().await;
    until_accepted_is(&api, "young", "True", "Accepted").await;
    assert_eq!(condition(&api, "other", "Accepted")["status"], "True");
    second.until_metric("attache_kube_status_writes_total", 1.0).await;
    assert_eq!(api.request_count("patch", MODELS), 5, "what the leader before it wrote stands");
}

/// Only the lease holder writes the status. All replicas route.
#[tokio::test(flavor = "multi_thread")]
async fn all_replicas_route_and_one_writes_the_model_status() {
    let api = FakeApi::start().await;
    cluster(&api);
    apply_model(&api, "old", 1, "llama");
    apply_model(&api, "young", 2, "llama");
    let arguments = ["--pool-name", "vllm", "--model-status", "--drain-min-delay=0s", NO_METRICS];
    let mut first = AttacheProcess::in_cluster(&api.kubeconfig(), &arguments).await;
    first.until_ready().await;
    until_accepted_is(&api, "young", "False", "ModelNameInUse").await;
    until_accepted_is(&api, "old", "True", "Accepted").await;
    let second = AttacheProcess::in_cluster(&api.kubeconfig(), &arguments).await;
    second.until_ready().await;
    assert!(first.is_ready().await, "both of them");
    apply_model(&api, "third", 3, "llama");
    until_accepted_is(&api, "third", "False", "ModelNameInUse").await;
    assert_eq!(second.metric("attache_kube_status_writes_total").await, 0.0);
    first.process.signal("TERM");
    first.process.wait().await;
    api.delete(EXPERIMENTAL, MODELS, "old");
    until_accepted_is(&api, "young", "True", "Accepted").await;
    assert!(second.metric("attache_kube_status_writes_total").await >= 1.0, "the lease was given back");
}

#[tokio::test(flavor = "multi_thread")]
async fn denied_status_writes_block_no_others_and_are_retried() {
    let api = FakeApi::start().await;
    cluster(&api);
    apply_model(&api, "old", 1, "llama");
    apply_model(&api, "young", 2, "llama");
    apply_model(&api, "other", 3, "qwen");
    api.deny(MODELS, "old", true);
    let leader = AttacheProcess::in_cluster(&api.kubeconfig(), ELECTION).await;
    until_accepted_is(&api, "young", "False", "ModelNameInUse").await;
    until_accepted_is(&api, "other", "True", "Accepted").await;
    assert_eq!(condition(&api, "old", "Accepted"), Value::Null);
    // A second denied object is a separate failure, logged separately.
    api.deny(MODELS, "third", true);
    apply_model(&api, "third", 4, "third");
    eventually("both to have been tried twice", || async {
        (leader.metric("attache_kube_status_failures_total").await >= 4.0).then_some(())
    })
    .await;
    let log = leader.process.stderr();
    for name in ["old", "third"] {
        let of = format!("\"name\":\"{name}\"");
        let found = log.lines().filter(|line| line.contains(&of) && line.contains("denied the request"));
        assert_eq!(found.count(), 1, "{name}: {log}");
    }
    api.deny(MODELS, "old", false);
    until_accepted_is(&api, "old", "True", "Accepted").await;

    // Another client removes the condition, perhaps before the watch has reported it.
    for _ in 0..3 {
        apply_model(&api, "other", 3, "qwen");
        assert_eq!(condition(&api, "other", "Accepted"), Value::Null);
        until_accepted_is(&api, "other", "True", "Accepted").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_status_right_is_logged_once_and_retried() {
    let api = FakeApi::start().await;
    cluster(&api);
    apply_model(&api, "old", 1, "llama");
    api.forbid("patch", MODELS, true);
    let silent = ["--pool-name", "vllm", "--model-status=false", NO_METRICS];
    let alone = AttacheProcess::in_cluster(&api.kubeconfig(), &silent).await;
    alone.until_ready().await;
    let leader = AttacheProcess::in_cluster(&api.kubeconfig(), ELECTION).await;
    leader.until_ready().await;
    let tried = async |times: usize| {
        let enough = async || (api.request_count("patch", MODELS) >= times).then_some(());
        eventually("another try", enough).await;
    };
    tried(2).await;
    let log = leader.process.stderr();
    assert_eq!(log.lines().filter(|line| line.contains("`patch` on `inferencemodels/status` is needed")).count(), 1);
    assert!(leader.metric("attache_kube_status_failures_total").await >= 1.0);
    api.forbid("patch", MODELS, false);
    until_accepted_is(&api, "old", "True", "Accepted").await;
    assert_eq!(alone.metric("attache_kube_status_writes_total").await, 0.0, "it is not to write");
    assert_eq!(alone.metric("attache_kube_status_failures_total").await, 0.0);
}
