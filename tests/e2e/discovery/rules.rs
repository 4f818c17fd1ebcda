//! Objects that speak of models: rewrites, InferenceModels, objectives.

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

async fn until_asked_for(connection: &Connection, model: &str, target: &str) {
    eventually(&format!("{model} to become {target}"), || async {
        (pick(connection, model).await.model() == target).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rewrites_hold_from_the_first_request_and_change_without_a_reload() {
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
    until_asked_for(&connection, "gpt", "older").await;
    // llm-d's kind hides GIE's, and what can't be read changes nothing.
    api.install(LLM_D, "inferencemodelrewrites");
    let mut odd = rewrite("older", 2, Some("gpt"), &[("never", 1)]);
    odd["spec"]["poolRef"] = json!({});
    api.apply(EXPERIMENTAL, "inferencemodelrewrites", odd);
    picker.until_metric("attache_kube_unreadable_objects_total", 1.0).await;
    assert_eq!(pick(&connection, "gpt").await.model(), "older");
    api.delete(EXPERIMENTAL, "inferencemodelrewrites", "older");
    until_asked_for(&connection, "gpt", "llama").await;
}

/// A configuration file that says where the metrics of a pool's pods are.
fn at(directory: &std::path::Path, more: &str) -> String {
    let file = directory.join("attache.yaml");
    let pool = format!("{{name: a, kubernetes: {{pool: vllm, engine: none{more}}}}}");
    let text = format!("apiVersion: attache.dev/v1\nkind: Attache\npools: [{pool}]\n");
    std::fs::write(&file, text).expect("writing the configuration");
    file.display().to_string()
}

/// A reload that concerns the pool follows everything anew. What was known of a kind of rules holds until it has been
/// listed again.
#[tokio::test(flavor = "multi_thread")]
async fn a_reload_takes_no_rule_away_though_rules_cannot_be_listed() {
    let api = cluster().await;
    api.apply(EXPERIMENTAL, "inferencemodelrewrites", rewrite("exact", 1, Some("gpt"), &[("llama", 1)]));
    let directory = scratch("kube-rules");
    let picker = AttacheProcess::in_cluster(&api.kubeconfig(), &["--config-file", &at(directory.path(), "")]).await;
    picker.until_ready().await;
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    assert_eq!(pick(&connection, "gpt").await.model(), "llama");
    let listed = || api.asked("list", "inferencemodelrewrites");
    api.fail(Outage::Of("inferencemodelrewrites", 503));
    let before = listed();
    at(directory.path(), ", metrics: {port: 9999}");
    eventually("lists in vain", || async { (listed() > before + 2).then_some(()) }).await;
    // Pods are followed all the same.
    api.pod(pod("b", "vllm", "10.0.0.2"));
    until_known(&picker, &["a", "b"]).await;
    assert_eq!(pick(&connection, "gpt").await.model(), "llama", "what was known of rewrites");
    api.fail(Outage::None);
    api.delete(EXPERIMENTAL, "inferencemodelrewrites", "exact");
    until_asked_for(&connection, "gpt", "gpt").await;
    // Of another namespace's rules nothing is known, and nothing will be.
    api.apply(EXPERIMENTAL, "inferencemodelrewrites", rewrite("exact", 1, Some("gpt"), &[("qwen", 1)]));
    until_asked_for(&connection, "gpt", "qwen").await;
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

/// As an API server answers that has just started, or an aggregated one whose backend is away.
#[tokio::test(flavor = "multi_thread")]
async fn a_watch_that_finds_no_such_kind_takes_no_rule_away() {
    let api = cluster().await;
    api.apply(EXPERIMENTAL, "inferencemodelrewrites", rewrite("exact", 1, Some("gpt"), &[("llama", 1)]));
    let (_picker, connection) = started(&api, &[]).await;
    assert_eq!(pick(&connection, "gpt").await.model(), "llama");
    let listed = || api.asked("list", "inferencemodelrewrites");
    let before = listed();
    api.fail(Outage::Watches("inferencemodelrewrites", 404));
    eventually("a list after the watch", || async { (listed() > before + 1).then_some(()) }).await;
    for _ in 0..20 {
        assert_eq!(pick(&connection, "gpt").await.model(), "llama", "the kind is there, as its list says");
    }
    api.fail(Outage::None);
    api.apply(EXPERIMENTAL, "inferencemodelrewrites", rewrite("exact", 1, Some("gpt"), &[("qwen", 1)]));
    until_asked_for(&connection, "gpt", "qwen").await;
    // A kind that is really taken away takes its rules along.
    api.uninstall(EXPERIMENTAL, "inferencemodelrewrites");
    until_asked_for(&connection, "gpt", "gpt").await;
}

/// The examples of the proposal, as it prints them.
const PROPOSAL: &str = include_str!("../../data/kubernetes/proposal.yaml");

/// Puts the proposal's examples there. The group that it gives them, `inference.x-k8s.io`, has never had a definition:
/// they are under the one that the kinds were released with. Nothing else of them is changed.
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
async fn the_proposals_examples_route_by_name_and_half_and_half() {
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
    // Without any InferenceModel nobody says which models there are.
    for name in ["sql-code-assist", "npc-bot", "soon"] {
        api.delete(EXPERIMENTAL, "inferencemodels", name);
    }
    eventually("every model to be served", || async {
        matches!(pick(&connection, "nobody-s").await, Picked::Endpoint { .. }).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn objectives_give_priorities() {
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
    // Told at the latest with the next endpoints, which are told after it.
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
async fn objectives_that_nobody_may_name_are_told_of_once() {
    let api = cluster().await;
    let objective = |name: &str, second| object(name, second, json!({"poolRef": {"name": "vllm"}, "priority": 5}));
    let told = |picker: &AttacheProcess| {
        picker.process.stderr().matches("InferenceObjectives with a priority above 0 have no effect").count()
    };
    let (trusting, _) = started(&api, &["--trust-client-headers"]).await;
    let (picker, _) = started(&api, &[]).await;
    assert_eq!(told(&picker), 0, "there are none");
    api.apply(EXPERIMENTAL, "inferenceobjectives", objective("first", 1));
    eventually("the warning", || async { (told(&picker) == 1).then_some(()) }).await;
    let events = picker.metric("attache_kube_events_total").await;
    api.apply(EXPERIMENTAL, "inferenceobjectives", objective("second", 2));
    picker.until_metric("attache_kube_events_total", events + 1.0).await;
    trusting.until_metric("attache_kube_events_total", events + 1.0).await;
    assert_eq!((told(&picker), told(&trusting)), (1, 0));
}
