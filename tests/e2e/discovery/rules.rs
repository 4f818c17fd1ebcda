//! Objects about models: InferenceModelRewrites, InferenceModels, InferenceObjectives.

use super::members::NO_METRICS;
use super::picks::{Picked, pick, pick_with, until_known};
use crate::api::{EXPERIMENTAL, FakeApi, LLM_D, Outage, STABLE, object, pod, pool};
use crate::support::attache::AttacheProcess;
use crate::support::grpc::Connection;
use crate::support::process::{eventually, scratch};
use serde_json::{Value, json};

async fn cluster() -> FakeApi {
    let api = FakeApi::start().await;
    api.apply(STABLE, "inferencepools", pool("vllm", "vllm", &[8000]));
    api.pod(pod("a", "vllm", "10.0.0.1"));
    for plural in ["inferenceobjectives", "inferencemodelrewrites", "inferencemodels"] {
        api.install(EXPERIMENTAL, plural);
    }
    api
}

async fn started(api: &FakeApi, more: &[&str]) -> (AttacheProcess, Connection) {
    let arguments = [&["--pool-name", "vllm", NO_METRICS], more].concat();
    let picker = AttacheProcess::in_cluster(&api.kubeconfig(), &arguments).await;
    picker.until_ready().await;
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    (picker, connection)
}

fn rewrite(name: &str, second: u8, model: Option<&str>, targets: &[(&str, u32)]) -> Value {
    let targets: Vec<Value> = targets.iter().map(|(m, w)| json!({"modelRewrite": m, "weight": w})).collect();
    let matches: Vec<Value> = model.iter().map(|m| json!({"model": {"type": "Exact", "value": m}})).collect();
    let rules = json!([{"matches": matches, "targets": targets}]);
    object(name, second, json!({"poolRef": {"name": "vllm"}, "rules": rules}))
}

async fn until_rewritten(connection: &Connection, model: &str, target: &str) {
    eventually(&format!("{model} to become {target}"), || async {
        (pick(connection, model).await.model() == target).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rewrites_apply_from_the_first_request_and_follow_changes() {
    let api = cluster().await;
    api.apply(EXPERIMENTAL, "inferencemodelrewrites", rewrite("exact", 5, Some("gpt"), &[("llama", 1)]));
    api.apply(EXPERIMENTAL, "inferencemodelrewrites", rewrite("any", 1, None, &[("base", 1)]));
    let elsewhere = object(
        "elsewhere",
        0,
        json!({"poolRef": {"name": "another"}, "rules": [{"targets": [{"modelRewrite": "x"}]}]}),
    );
    api.apply(EXPERIMENTAL, "inferencemodelrewrites", elsewhere);
    let (picker, connection) = started(&api, &[]).await;
    assert_eq!(pick(&connection, "gpt").await.model(), "llama", "exact before general, though younger");
    assert_eq!(pick(&connection, "other").await.model(), "base");

    api.apply(EXPERIMENTAL, "inferencemodelrewrites", rewrite("older", 2, Some("gpt"), &[("older", 1)]));
    until_rewritten(&connection, "gpt", "older").await;
    // llm-d's kind takes precedence over GIE's, and an invalid object changes nothing.
    api.install(LLM_D, "inferencemodelrewrites");
    let mut odd = rewrite("older", 2, Some("gpt"), &[("never", 1)]);
    odd["spec"]["poolRef"] = json!({});
    api.apply(EXPERIMENTAL, "inferencemodelrewrites", odd);
    picker.until_metric("attache_kube_unreadable_objects_total", 1.0).await;
    assert_eq!(pick(&connection, "gpt").await.model(), "older");
    api.delete(EXPERIMENTAL, "inferencemodelrewrites", "older");
    until_rewritten(&connection, "gpt", "llama").await;
}

/// Writes a configuration file with `more` in the pool's Kubernetes section.
fn at(directory: &std::path::Path, more: &str) -> String {
    let file = directory.join("attache.yaml");
    let pool = format!("{{name: a, kubernetes: {{pool: vllm, engine: none{more}}}}}");
    let text = format!("apiVersion: attache.dev/v1\nkind: Attache\npools: [{pool}]\n");
    std::fs::write(&file, text).expect("writing the configuration");
    file.display().to_string()
}

/// A reload that changes the pool restarts all its watches. The known rules stay in effect until they have been listed
/// again.
#[tokio::test(flavor = "multi_thread")]
async fn reload_keeps_rules_while_they_cannot_be_listed() {
    let api = cluster().await;
    api.apply(EXPERIMENTAL, "inferencemodelrewrites", rewrite("exact", 1, Some("gpt"), &[("llama", 1)]));
    let directory = scratch("kube-rules");
    let picker = AttacheProcess::in_cluster(&api.kubeconfig(), &["--config-file", &at(directory.path(), "")]).await;
    picker.until_ready().await;
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    assert_eq!(pick(&connection, "gpt").await.model(), "llama");
    let listed = || api.request_count("list", "inferencemodelrewrites");
    api.fail(Outage::Of("inferencemodelrewrites", 503));
    let before = listed();
    at(directory.path(), ", metrics: {port: 9999}");
    eventually("lists in vain", || async { (listed() > before + 2).then_some(()) }).await;
    // Pods are still watched.
    api.pod(pod("b", "vllm", "10.0.0.2"));
    until_known(&picker, &["a", "b"]).await;
    assert_eq!(pick(&connection, "gpt").await.model(), "llama", "what was known of rewrites");
    api.fail(Outage::None);
    api.delete(EXPERIMENTAL, "inferencemodelrewrites", "exact");
    until_rewritten(&connection, "gpt", "gpt").await;
    // No rules of the other namespace are known, and they can't be listed.
    api.apply(EXPERIMENTAL, "inferencemodelrewrites", rewrite("exact", 1, Some("gpt"), &[("qwen", 1)]));
    until_rewritten(&connection, "gpt", "qwen").await;
    for plural in ["inferenceobjectives", "inferencemodelrewrites", "inferencemodels"] {
        api.forbid_in("elsewhere", "list", plural, true);
    }
    for (group, plural, mut object) in
        [(STABLE, "inferencepools", pool("vllm", "vllm", &[8000])), ("v1", "pods", pod("c", "vllm", "10.0.0.3"))]
    {
        object["metadata"]["namespace"] = json!("elsewhere");
        api.apply(group, plural, object);
    }
    at(directory.path(), ", namespace: elsewhere");
    until_known(&picker, &["c"]).await;
    assert_eq!(pick(&connection, "gpt").await.model(), "gpt", "with the endpoints of the other namespace go its rules");
}

/// The 404 of an API server that has just started, or of an aggregated one whose backend is down.
#[tokio::test(flavor = "multi_thread")]
async fn watch_that_gets_404_keeps_the_rules() {
    let api = cluster().await;
    api.apply(EXPERIMENTAL, "inferencemodelrewrites", rewrite("exact", 1, Some("gpt"), &[("llama", 1)]));
    let (_picker, connection) = started(&api, &[]).await;
    assert_eq!(pick(&connection, "gpt").await.model(), "llama");
    let listed = || api.request_count("list", "inferencemodelrewrites");
    let before = listed();
    api.fail(Outage::Watches("inferencemodelrewrites", 404));
    eventually("a list after the watch", || async { (listed() > before + 1).then_some(()) }).await;
    for _ in 0..20 {
        assert_eq!(pick(&connection, "gpt").await.model(), "llama", "the kind is there, as its list says");
    }
    api.fail(Outage::None);
    api.apply(EXPERIMENTAL, "inferencemodelrewrites", rewrite("exact", 1, Some("gpt"), &[("qwen", 1)]));
    until_rewritten(&connection, "gpt", "qwen").await;
    // A kind that is really uninstalled removes its rules.
    api.uninstall(EXPERIMENTAL, "inferencemodelrewrites");
    until_rewritten(&connection, "gpt", "gpt").await;
}

/// The examples of the proposal, unchanged.
const PROPOSAL: &str = include_str!("../../data/kubernetes/proposal.yaml");

/// Applies the proposal's examples. Their group `inference.x-k8s.io` has never had a definition, so the released group
/// replaces it. Nothing else is changed.
fn apply_proposal(api: &FakeApi) {
    let documents: Vec<Value> = serde_saphyr::from_multiple(PROPOSAL).expect("the proposal's YAML");
    assert_eq!(documents.len(), 3);
    for mut document in documents {
        assert_eq!(document["apiVersion"], "inference.x-k8s.io/v1alpha2");
        document["apiVersion"] = json!(EXPERIMENTAL);
        let plural = format!("{}s", document["kind"].as_str().expect("a kind").to_lowercase());
        api.install(EXPERIMENTAL, &plural);
        api.apply(EXPERIMENTAL, &plural, document);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn proposal_examples_route_by_name_and_split_by_weight() {
    let api = FakeApi::start().await;
    apply_proposal(&api);
    api.pod(pod("a", "llm-server", "10.0.0.1"));
    let reserved = json!({"modelName": "soon", "targetModels": [{"name": "soon-v1", "weight": 0}],
                          "poolRef": {"name": "base-model-pool"}});
    api.apply(EXPERIMENTAL, "inferencemodels", object("soon", 3, reserved));
    let old = ["--pool-name", "base-model-pool", "--pool-group", "inference.networking.x-k8s.io", NO_METRICS];
    let picker = AttacheProcess::in_cluster(&api.kubeconfig(), &old).await;
    picker.until_ready().await;
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    assert_eq!(pick(&connection, "sql-code-assist").await.destination(), "10.0.0.1:8080");
    assert_eq!(pick(&connection, "sql-code-assist").await.model(), "sql-code-assist");
    let mut first = 0;
    for _ in 0..400 {
        match pick(&connection, "npc-bot").await.model() {
            "npc-bot-v1" => first += 1,
            other => assert_eq!(other, "npc-bot-v2"),
        }
    }
    // Five standard deviations of 400 fair draws are 50.
    assert!((150..=250).contains(&first), "{first} of 400");
    let Picked::Refused(404, body) = pick(&connection, "soon").await else { panic!("a reserved name is served") };
    assert!(body.contains("no valid target model"), "{body}");
    let Picked::Refused(404, body) = pick(&connection, "nobody-s").await else { panic!("an unknown model is served") };
    assert!(body.contains("known models: npc-bot, sql-code-assist"), "{body}");
    // Without any InferenceModel the picker accepts every model.
    for name in ["sql-code-assist", "npc-bot", "soon"] {
        api.delete(EXPERIMENTAL, "inferencemodels", name);
    }
    eventually("every model to be served", || async {
        matches!(pick(&connection, "nobody-s").await, Picked::Endpoint { .. }).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn inference_objectives_set_request_priorities() {
    let api = cluster().await;
    let spec = |priority: i32| json!({"poolRef": {"name": "vllm"}, "priority": priority});
    api.apply(EXPERIMENTAL, "inferenceobjectives", object("batch", 1, spec(-5)));
    let text = "apiVersion: attache.dev/v1\nkind: Attache\nexchange: {trustClientHeaders: true}\n\
                pools: [{name: a, kubernetes: {pool: vllm, engine: none}}]\n";
    let directory = scratch("kube-record");
    let file = directory.path().join("record").display().to_string();
    let arguments = ["--config-text", text, "--record", &file, "--drain-min-delay", "0s"];
    let mut picker = AttacheProcess::in_cluster(&api.kubeconfig(), &arguments).await;
    picker.until_ready().await;
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    let ask = async |objective: &[u8]| {
        let headers: &[(&str, &[u8])] = &[("x-gateway-inference-objective", objective)];
        pick_with(&connection, "m", headers).await.destination().to_owned()
    };
    assert_eq!(ask(b"batch").await, "10.0.0.1:8000");
    let events = picker.metric("attache_kube_events_total").await;
    api.apply(EXPERIMENTAL, "inferenceobjectives", object("batch", 1, spec(7)));
    picker.until_metric("attache_kube_events_total", events + 1.0).await;
    // The picker applies the objective before these endpoints.
    api.pod(pod("b", "vllm", "10.0.0.2"));
    until_known(&picker, &["a", "b"]).await;
    ask(b"batch").await;
    ask(b"unknown").await;
    drop(connection);
    picker.process.signal("TERM");
    picker.process.wait().await;
    let record = std::fs::read_to_string(&file).expect("the recording");
    let lines = record.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let priorities: Vec<i64> = lines.filter_map(|line| find(&line, "priority")?.as_i64()).collect();
    assert_eq!(priorities, [-5, 7], "0 is not written");
}

/// The value under this key, at any depth.
fn find<'a>(value: &'a Value, key: &str) -> Option<&'a Value> {
    match value {
        Value::Object(map) => map.get(key).or_else(|| map.values().find_map(|inner| find(inner, key))),
        Value::Array(list) => list.iter().find_map(|inner| find(inner, key)),
        _ => None,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn positive_objectives_without_effect_are_logged_once() {
    let api = cluster().await;
    let objective = |name: &str, second| object(name, second, json!({"poolRef": {"name": "vllm"}, "priority": 5}));
    let warnings = |picker: &AttacheProcess| {
        picker.process.stderr().matches("InferenceObjectives with a priority above 0 have no effect").count()
    };
    let (trusting, _) = started(&api, &["--trust-client-headers"]).await;
    let (picker, _) = started(&api, &[]).await;
    assert_eq!(warnings(&picker), 0, "there are none");
    api.apply(EXPERIMENTAL, "inferenceobjectives", objective("first", 1));
    eventually("the warning", || async { (warnings(&picker) == 1).then_some(()) }).await;
    let events = picker.metric("attache_kube_events_total").await;
    api.apply(EXPERIMENTAL, "inferenceobjectives", objective("second", 2));
    picker.until_metric("attache_kube_events_total", events + 1.0).await;
    trusting.until_metric("attache_kube_events_total", events + 1.0).await;
    assert_eq!((warnings(&picker), warnings(&trusting)), (1, 0));
}
