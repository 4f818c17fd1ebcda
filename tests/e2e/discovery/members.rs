//! Pods that are created, deleted, changed and replaced.

use super::picks::{known, pick, until_known};
use crate::api::{EXPERIMENTAL, FakeApi, NAMESPACE, STABLE, object, pod, pool};
use crate::support::attache::AttacheProcess;
use crate::support::client;
use crate::support::grpc::Connection;
use crate::support::process::eventually;
use serde_json::json;
use std::collections::BTreeSet;

/// Pods are not scraped in these tests, because no server listens at their addresses.
pub(crate) const NO_METRICS: &str = "--engine=none";

/// A ready picker for the pool `vllm`.
async fn started(api: &FakeApi) -> AttacheProcess {
    let picker = AttacheProcess::in_cluster(&api.kubeconfig(), &["--pool-name", "vllm", NO_METRICS]).await;
    picker.until_ready().await;
    picker
}

#[tokio::test(flavor = "multi_thread")]
async fn endpoints_follow_the_pods_of_the_pool() {
    let api = FakeApi::start().await;
    api.apply(STABLE, "inferencepools", pool("vllm", "vllm", &[8000]));
    api.pod(pod("a", "vllm", "10.0.0.1"));
    api.pod(pod("stranger", "postgres", "10.0.0.9"));
    let picker = started(&api).await;
    assert_eq!(known(&picker).await, ["a".to_owned()].into(), "known as soon as it is ready");
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    assert_eq!(pick(&connection, "m").await.destination(), "10.0.0.1:8000");

    api.pod(pod("b", "vllm", "10.0.0.2"));
    until_known(&picker, &["a", "b"]).await;
    let mut not_ready = pod("a", "vllm", "10.0.0.1");
    not_ready["status"]["conditions"][1]["status"] = json!("False");
    api.pod(not_ready);
    until_known(&picker, &["b"]).await;
    let mut ending = pod("b", "vllm", "10.0.0.2");
    ending["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:01:00Z");
    api.pod(pod("c", "vllm", "10.0.0.3"));
    api.pod(ending);
    until_known(&picker, &["c"]).await;
    assert_eq!(pick(&connection, "m").await.destination(), "10.0.0.3:8000");
    // A changed label removes a pod, as a deletion does.
    api.pod(pod("c", "other", "10.0.0.3"));
    until_known(&picker, &[]).await;
    assert!(picker.metric("attache_kube_events_total").await >= 5.0);
    assert_eq!(picker.metric("attache_kube_out_of_touch").await, 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn new_pod_at_a_reused_address_is_a_new_endpoint() {
    let api = FakeApi::start().await;
    api.apply(STABLE, "inferencepools", pool("vllm", "vllm", &[8000]));
    let with_uid = |uid: &str, engine: &str| {
        let mut pod = pod("stateful-0", "vllm", "10.0.0.1");
        pod["metadata"]["uid"] = json!(uid);
        pod["metadata"]["labels"]["note"] = json!(engine);
        pod
    };
    api.pod(with_uid("first", "a"));
    let picker = started(&api).await;
    let identity = async || picker.endpoints().await.first().map(|endpoint| endpoint["id"].as_u64());
    let before = identity().await;
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    for _ in 0..3 {
        assert_eq!(pick(&connection, "m").await.destination(), "10.0.0.1:8000");
    }
    let routed = "attache_endpoint_requests_total";
    assert_eq!(picker.metric(routed).await, 3.0);

    api.pod(with_uid("first", "b"));
    let labels = "the pod's new label";
    eventually(labels, || async {
        let endpoints = picker.endpoints().await;
        (endpoints.first()?["labels"]["note"] == "b").then_some(())
    })
    .await;
    assert_eq!(identity().await, before, "a pod that changes is the same endpoint");
    assert_eq!(picker.metric(routed).await, 3.0);

    api.pod(with_uid("second", "b"));
    eventually("another endpoint", || async { (identity().await? != before?).then_some(()) }).await;
    assert_eq!(picker.metric(routed).await, 0.0, "what was sent to the old pod says nothing about the new one");
    assert_eq!(pick(&connection, "m").await.destination(), "10.0.0.1:8000");
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_follow_the_pool_and_the_annotation() {
    let api = FakeApi::start().await;
    let mut limited = pod("b", "vllm", "10.0.0.2");
    limited["metadata"]["annotations"] = json!({"inference.networking.k8s.io/active-ports": "8001"});
    api.pod(pod("a", "vllm", "10.0.0.1"));
    api.pod(limited);
    api.apply(STABLE, "inferencepools", pool("vllm", "vllm", &[8000, 8001]));
    let picker = started(&api).await;
    until_known(&picker, &["a-rank-0", "a-rank-1", "b-rank-1"]).await;
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    let mut seen = BTreeSet::new();
    for _ in 0..200 {
        seen.insert(pick(&connection, "m").await.destination().to_owned());
    }
    let want = ["10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.2:8001"].map(str::to_owned);
    assert_eq!(seen, want.into());
    api.apply(STABLE, "inferencepools", pool("vllm", "vllm", &[9000]));
    until_known(&picker, &["a"]).await;
    assert_eq!(pick(&connection, "m").await.destination(), "10.0.0.1:9000");
    api.apply(STABLE, "inferencepools", pool("vllm", "other", &[9000]));
    until_known(&picker, &[]).await;
    api.pod(pod("c", "other", "10.0.0.3"));
    until_known(&picker, &["c"]).await;
    // An invalid pool is counted and changes nothing.
    let mut odd = pool("vllm", "other", &[9000]);
    odd["spec"]["targetPorts"] = json!([]);
    api.apply(STABLE, "inferencepools", odd);
    picker.until_metric("attache_kube_unreadable_objects_total", 1.0).await;
    assert_eq!(known(&picker).await, ["c".to_owned()].into());
}

#[tokio::test(flavor = "multi_thread")]
async fn experimental_group_and_label_selectors_are_served() {
    let api = FakeApi::start().await;
    api.install(EXPERIMENTAL, "inferencepools");
    let spec = json!({"selector": {"app": "vllm"}, "targetPortNumber": 8080, "extensionRef": {"name": "epp"}});
    api.apply(EXPERIMENTAL, "inferencepools", object("vllm", 0, spec));
    api.pod(pod("a", "vllm", "10.0.0.1"));
    api.pod(pod("b", "sglang", "10.0.0.2"));
    // The spelling of old manifests: one dash, camel case, an encoder flag.
    let old = ["-poolName", "vllm", "-poolNamespace", NAMESPACE, "--pool-group", "inference.networking.x-k8s.io"];
    let more = ["--zap-encoder", "json", "-v=4", "--enable-pprof", NO_METRICS];
    let picker = AttacheProcess::in_cluster(&api.kubeconfig(), &[&old[..], &more[..]].concat()).await;
    picker.until_ready().await;
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    assert_eq!(pick(&connection, "m").await.destination(), "10.0.0.1:8080");
    assert!(picker.process.stderr().contains("`--enable-pprof` has no effect"));

    let by_labels = ["--endpoint-selector", "app in (vllm,sglang)", "--endpoint-target-ports", "8000,8001"];
    let standalone = AttacheProcess::in_cluster(&api.kubeconfig(), &[&by_labels[..], &[NO_METRICS]].concat()).await;
    standalone.until_ready().await;
    until_known(&standalone, &["a-rank-0", "a-rank-1", "b-rank-0", "b-rank-1"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_process_serves_many_pools_and_follows_a_reload() {
    let api = FakeApi::start().await;
    for app in ["small", "large", "huge"] {
        api.apply(STABLE, "inferencepools", pool(app, app, &[8000]));
    }
    for (n, app) in ["small", "large", "huge"].iter().enumerate() {
        api.pod(pod(app, app, &format!("10.0.0.{}", n + 1)));
    }
    let text = |second: &str| {
        format!(
            "apiVersion: attache.dev/v1\nkind: Attache\npools:\n\
             - {{name: a, match: {{models: [small]}}, kubernetes: {{pool: small, engine: none}}}}\n\
             - {{name: b, kubernetes: {{pool: {second}, namespace: {NAMESPACE}, engine: none}}}}\n"
        )
    };
    let directory = crate::support::process::scratch("kube-reload");
    let file = directory.path().join("attache.yaml");
    std::fs::write(&file, text("large")).expect("writing the configuration");
    let path = file.display().to_string();
    let picker = AttacheProcess::in_cluster(&api.kubeconfig(), &["--config-file", &path]).await;
    picker.until_ready().await;
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    assert_eq!(pick(&connection, "small").await.destination(), "10.0.0.1:8000");
    assert_eq!(pick(&connection, "anything").await.destination(), "10.0.0.2:8000");
    std::fs::write(&file, text("huge")).expect("writing the configuration");
    eventually("the other pool's pod", || async {
        (pick(&connection, "anything").await.destination() == "10.0.0.3:8000").then_some(())
    })
    .await;
    assert_eq!(pick(&connection, "small").await.destination(), "10.0.0.1:8000");
    let dump = client::get(picker.metrics, "/config_dump").await.expect("the settings").json();
    assert_eq!(dump["pools"][1]["kubernetes"]["pool"], "huge", "{dump}");
}

#[tokio::test(flavor = "multi_thread")]
async fn rejected_reload_changes_no_endpoint() {
    let api = FakeApi::start().await;
    for (n, app) in ["small", "large"].iter().enumerate() {
        api.apply(STABLE, "inferencepools", pool(app, app, &[8000]));
        api.pod(pod(app, app, &format!("10.0.0.{}", n + 1)));
    }
    let directory = crate::support::process::scratch("kube-refused");
    let file = directory.path().join("attache.yaml");
    let write = |pool: &str, strategy: &str| {
        let pool = format!("{{name: a, strategy: {strategy}, kubernetes: {{pool: {pool}, engine: none}}}}");
        let text = format!("apiVersion: attache.dev/v1\nkind: Attache\npools: [{pool}]\n");
        std::fs::write(&file, text).expect("writing the configuration");
    };
    write("small", "random");
    let picker = AttacheProcess::in_cluster(&api.kubeconfig(), &["--config-file", &file.display().to_string()]).await;
    picker.until_ready().await;
    write("large", "{name: slo, parameters: {profiles: [/nowhere/profile.json]}}");
    let refused = || picker.process.stderr().contains("configuration reload failed").then_some(());
    eventually("the reload to be refused", || async { refused() }).await;
    api.pod(pod("small-2", "small", "10.0.0.3"));
    until_known(&picker, &["small", "small-2"]).await;
}

/// Load on the API server of five pools in one namespace: one list and one watch of each kind, and for pods one of each
/// selector.
#[tokio::test(flavor = "multi_thread")]
async fn pools_of_a_namespace_share_lists_and_watches() {
    let api = FakeApi::start().await;
    for kind in ["inferenceobjectives", "inferencemodelrewrites", "inferencemodels"] {
        api.install(EXPERIMENTAL, kind);
    }
    let mut text = "apiVersion: attache.dev/v1\nkind: Attache\npools:\n".to_owned();
    // The last two pools have the same pods and different ports.
    for (n, app) in ["a", "b", "c", "d", "d"].iter().enumerate() {
        let name = format!("pool-{n}");
        api.apply(STABLE, "inferencepools", pool(&name, app, &[8000 + n as u16]));
        api.pod(pod(app, app, &format!("10.0.0.{}", app.as_bytes()[0])));
        text += &format!("- {{name: {name}, match: {{models: [m{n}]}}, kubernetes: {{pool: {name}, engine: none}}}}\n");
    }
    let picker = AttacheProcess::in_cluster(&api.kubeconfig(), &["--config-text", &text]).await;
    picker.until_ready().await;
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    for (n, host) in [97, 98, 99, 100, 100].iter().enumerate() {
        let picked = pick(&connection, &format!("m{n}")).await;
        assert_eq!(picked.destination(), format!("10.0.0.{host}:{}", 8000 + n));
    }
    let kinds = ["inferencepools", "inferenceobjectives", "inferencemodelrewrites", "inferencemodels"];
    for verb in ["list", "watch"] {
        eventually("a watch of the pods of each selector", || async {
            (api.request_count(verb, "/pods") >= 4).then_some(())
        })
        .await;
        assert_eq!(api.request_count(verb, "/pods"), 4, "{verb}: one for each selector");
        for kind in kinds {
            // The two kinds that llm-d also defines are looked up in its group too.
            let most = if verb == "list" && kind.len() > 15 { 2 } else { 1 };
            assert!(api.request_count(verb, kind) <= most, "{verb} {kind}: {}", api.request_count(verb, kind));
        }
    }
    // All pools see a change, also a pool that joined a watch later.
    api.pod(pod("d2", "d", "10.0.0.200"));
    eventually("the pod in both pools", || async {
        (known(&picker).await.contains("d2") && picker.endpoints().await.len() == 7).then_some(())
    })
    .await;
    assert_eq!(api.request_count("list", "/pods"), 4);
}
