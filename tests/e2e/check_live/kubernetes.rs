//! Planted mistakes of a cluster, with a real kube-apiserver.

use super::{Checked, closed};
use crate::api::{pod, pool};
use crate::real_kubernetes::cluster::Cluster;
use crate::support::process::scratch;
use serde_json::{Value, json};
use std::path::Path;

const NAMESPACE: &str = "check-live";

/// Checks a configuration with this pool by a kubeconfig.
fn check(directory: &Path, kubeconfig: &Path, kubernetes: &str) -> Checked {
    let file = directory.join("attache.yaml");
    let text = format!("apiVersion: attache.dev/v1\nkind: Attache\npools: [{{name: a, kubernetes: {kubernetes}}}]\n");
    std::fs::write(&file, text).expect("writing");
    Checked::with_kubeconfig(kubeconfig, &[file.to_str().expect("a path"), "--admin", &closed().to_string()])
}

pub(super) fn service(name: &str, app: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"selector": {"app": app}, "ports": [{"port": 9002, "targetPort": 9002}]}})
}

/// An InferencePool of the pods of `app`, with the picker behind `service`.
pub(super) fn named(name: &str, app: &str, service: &str, port: u16, mode: &str) -> Value {
    let mut object = pool(name, app, &[8000]);
    object["spec"]["endpointPickerRef"] = json!({"name": service, "port": {"number": port}, "failureMode": mode});
    object
}

#[tokio::test(flavor = "multi_thread")]
async fn planted_mistakes_of_a_cluster_are_found_with_their_fix() {
    let cluster = Cluster::start().await;
    cluster.create_namespace(NAMESPACE).await;
    cluster.create_pod(NAMESPACE, pod("a", "llm", "127.0.0.1")).await;
    cluster.create_pod(NAMESPACE, pod("picker", "epp", "127.0.0.3")).await;
    let mut waiting = pod("b", "slow", "127.0.0.2");
    waiting["status"]["conditions"] = json!([{"type": "Ready", "status": "False"}]);
    cluster.create_pod(NAMESPACE, waiting).await;
    let services = format!("/api/v1/namespaces/{NAMESPACE}/services");
    cluster.create(&services, &service("epp", "epp")).await;
    cluster.create(&services, &service("empty", "nothing")).await;
    let pools = format!("/apis/inference.networking.k8s.io/v1/namespaces/{NAMESPACE}/inferencepools");
    for object in [
        named("good", "llm", "epp", 9002, "FailOpen"),
        named("no-pods", "else", "epp", 9002, "FailOpen"),
        named("not-ready", "slow", "epp", 9002, "FailOpen"),
        named("no-service", "llm", "missing", 9002, "FailOpen"),
        named("no-port", "llm", "epp", 9003, "FailOpen"),
        named("no-picker", "llm", "empty", 9002, "FailOpen"),
        named("closed", "llm", "epp", 9002, "FailClose"),
    ] {
        cluster.create(&pools, &object).await;
    }
    let directory = scratch("check-kubernetes");
    let admin = cluster.kubeconfig_of_administrator(NAMESPACE);
    let of = |name: &str| check(directory.path(), &admin, &format!("{{pool: {name}}}"));
    for (name, wanted) in [
        ("good", &[][..]),
        ("no-pods", &[("kubernetes-pods", "spec.selector")]),
        ("not-ready", &[("kubernetes-pods", "kubectl")]),
        ("no-service", &[("kubernetes-picker-reference", "endpointPickerRef.name")]),
        ("no-port", &[("kubernetes-picker-reference", "port.number")]),
        ("no-picker", &[("kubernetes-picker-reference", "spec.selector")]),
        ("closed", &[("kubernetes-failure-mode", "FailOpen")]),
        ("else", &[("kubernetes-pool", "good")]),
    ] {
        of(name).assert_faults(name, "kubernetes", wanted);
    }
    let selected = check(directory.path(), &admin, "{selector: app=llm, targetPorts: [8000]}");
    selected.assert_faults("a selector", "kubernetes", &[]);

    let accounts = format!("/api/v1/namespaces/{NAMESPACE}/serviceaccounts");
    cluster.create(&accounts, &json!({"metadata": {"name": "no-rights"}})).await;
    let no_rights = cluster.kubeconfig_of(NAMESPACE, "no-rights").await;
    check(directory.path(), &no_rights, "{pool: good}").assert_faults(
        "no rights",
        "kubernetes",
        &[("kubernetes-pool", "inferencepools"), ("kubernetes-rights", "resources: [pods]")],
    );
}
