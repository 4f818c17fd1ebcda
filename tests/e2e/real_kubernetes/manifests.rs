//! Every rendered object, accepted by the API server.

use super::cluster::Cluster;
use crate::api::NAMESPACE;
use crate::manifests::render::{Rendered, all, documents, examples, kustomize, list};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Output;

/// GKE's kinds, whose definitions are not public as files.
const NOT_INSTALLED: &str = "networking.gke.io/v1";

/// The objects of a list, as the API server would store them. It stores nothing.
fn dry_run(cluster: &Cluster, directory: &Path, objects: &[Value]) -> Output {
    let file = directory.join("objects.json");
    let objects = json!({"apiVersion": "v1", "kind": "List", "items": objects});
    std::fs::write(&file, objects.to_string()).expect("writing");
    let mut command = cluster.kubectl();
    command.args(["apply", "--server-side", "--dry-run=server", "--validate=strict", "-f"]).arg(&file);
    command.output().expect("running kubectl")
}

/// The files that no kustomization or chart has.
fn files() -> Vec<Rendered> {
    let folders =
        ["gateways", "inside-envoy"].map(|folder| std::fs::read_dir(examples().join(folder)).expect("a folder"));
    let read = folders.into_iter().flatten().map(|entry| {
        let entry = entry.expect("a file");
        let name = entry.path().display().to_string();
        let text = std::fs::read_to_string(entry.path()).expect("a manifest");
        Rendered { objects: documents(&name, &text), name }
    });
    read.chain([kustomize(&examples().join("reconciler"))]).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn real_api_server_accepts_every_manifest_with_strict_validation() {
    let cluster = Cluster::start().await;
    let scratch = crate::support::process::scratch("manifests");
    let files = files();
    assert!(files.len() >= 9, "only {} files", files.len());
    let rendered: Vec<&Rendered> = all().iter().chain(&files).collect();
    let namespaces = rendered.iter().flat_map(|rendered| &rendered.objects);
    let mut namespaces: BTreeSet<&str> =
        namespaces.filter_map(|object| object["metadata"]["namespace"].as_str()).collect();
    namespaces.insert(NAMESPACE);
    for namespace in namespaces.iter().filter(|name| **name != "default") {
        cluster.create_namespace(namespace).await;
    }
    let mut left_out = BTreeSet::new();
    for rendered in &rendered {
        let (unknown, objects): (Vec<Value>, Vec<Value>) =
            rendered.objects.iter().cloned().partition(|object| object["apiVersion"] == NOT_INSTALLED);
        left_out.extend(unknown.iter().map(|object| object["kind"].to_string()));
        let output = dry_run(&cluster, scratch.path(), &objects);
        let complaints = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && complaints.is_empty(), "{}: {complaints}", rendered.name);
    }
    assert_eq!(left_out, ["\"GCPBackendPolicy\"", "\"HealthCheckPolicy\""].map(str::to_owned).into());

    // The check finds a field that the kind does not have.
    let mut misspelt = list(&json!(all()[0].objects)).to_vec();
    let deployment = misspelt.iter_mut().find(|object| object["kind"] == "Deployment").expect("a Deployment");
    deployment["spec"]["template"]["spec"]["serviceAccountNam"] = json!("llm-epp");
    let output = dry_run(&cluster, scratch.path(), &misspelt);
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && complaints.contains("serviceAccountNam"), "{complaints}");
}
