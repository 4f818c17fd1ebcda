//! The packaged charts, installed by helm.

use super::cluster::{Asked, Cluster};
use crate::api::{pod, pool};
use crate::manifests::live::{knows, local, start};
use crate::manifests::render::{Rendered, list, text};
use crate::release::{file, run};
use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::Payload;
use crate::support::client::{self, Http};
use crate::support::envoy::EnvoyProcess;
use crate::support::process::{PATIENCE, eventually, scratch};
use crate::support::sim::SimProcess;
use bytes::Bytes;
use http::{HeaderValue, header};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

const ACCOUNT: &str = "llm-epp";

/// An installed chart.
struct Release<'a> {
    cluster: &'a Cluster,
    namespace: &'static str,
    /// The objects that the picker needs, as the API server has them.
    rendered: Rendered,
    /// Has the rights of the chart's service account.
    kubeconfig: PathBuf,
}

impl<'a> Release<'a> {
    /// Installs a chart with values in YAML, in a namespace of its own with two pods: one of the label `app: llm` at
    /// 127.0.0.1, and another one.
    async fn install(cluster: &'a Cluster, chart: &str, namespace: &'static str, values: &str) -> Self {
        let scratch = scratch("values");
        let values_file = scratch.path().join("values.yaml");
        std::fs::write(&values_file, values).expect("writing");
        cluster.create_namespace(namespace).await;
        let mut helm = cluster.helm();
        helm.args(["install", "llm", "--namespace", namespace, "--values"]).arg(values_file);
        run(helm.arg(file(&format!("{chart}-"), ".tgz")));
        let mut kubectl = cluster.kubectl();
        kubectl.args(["get", "--namespace", namespace, "--selector", "app.kubernetes.io/instance=llm"]);
        let found = run(kubectl.args(["--output", "json", "deployments,configmaps,roles,clusterroles"]));
        let found: Value = serde_json::from_slice(&found.stdout).expect("JSON");
        // A release of another test may have a ClusterRole with the same labels.
        let own = |object: &&Value| {
            object["kind"] != "ClusterRole" || text(&object["metadata"]["name"]).starts_with(namespace)
        };
        let objects = list(&found["items"]).iter().filter(own).cloned().collect();
        cluster.create_pod(namespace, pod("a", "llm", "127.0.0.1")).await;
        cluster.create_pod(namespace, pod("stranger", "postgres", "127.0.0.2")).await;
        let rendered = Rendered { name: format!("{chart} in {namespace}"), objects };
        let kubeconfig = cluster.kubeconfig_of(namespace, ACCOUNT).await;
        Self { cluster, namespace, rendered, kubeconfig }
    }

    /// The path of a kind in the release's namespace.
    fn path(&self, kind: &str) -> String {
        let (group, plural) = kind.rsplit_once('/').expect("a group and a plural");
        format!("/apis/{group}/namespaces/{}/{plural}", self.namespace)
    }

    async fn start(&self) -> AttacheProcess {
        start(&self.rendered, &self.kubeconfig, None).await
    }

    /// Creates an InferenceModel of the pool `llm`. Returns its path.
    async fn create_model(&self) -> String {
        let models = self.path("inference.networking.x-k8s.io/v1alpha2/inferencemodels");
        let pool = json!({"group": "inference.networking.k8s.io", "name": "llm"});
        let model = json!({"apiVersion": "inference.networking.x-k8s.io/v1alpha2", "kind": "InferenceModel",
                           "metadata": {"name": "sim"}, "spec": {"modelName": "sim-8b", "poolRef": pool}});
        self.cluster.create(&models, &model).await;
        format!("{models}/sim")
    }

    /// Waits until the picker has accepted an InferenceModel.
    async fn until_accepted(&self, path: &str) {
        eventually("the InferenceModel to be accepted", || async {
            let model = self.cluster.get(path).await;
            let mut conditions = list(&model["status"]["conditions"]).iter();
            conditions.find(|condition| condition["type"] == "Accepted" && condition["status"] == "True").map(|_| ())
        })
        .await;
    }

    /// Rights by the rules of the release's roles: groups, resource, verb.
    fn granted(&self) -> BTreeSet<(Vec<String>, String, String)> {
        let rules = self.rendered.of("Role").chain(self.rendered.of("ClusterRole"));
        let mut granted = BTreeSet::new();
        for rule in rules.flat_map(|role| list(&role["rules"])) {
            let words = |key: &str| list(&rule[key]).iter().map(|word| text(word).to_owned()).collect::<Vec<_>>();
            for resource in words("resources") {
                granted.extend(words("verbs").into_iter().map(|verb| (words("apiGroups"), resource.clone(), verb)));
            }
        }
        granted
    }

    /// Rights of which no request made use. One group of a rule is enough: a resource has several where it moved.
    fn unused(&self) -> Vec<(Vec<String>, String, String)> {
        let asked = self.cluster.asked_by(self.namespace, ACCOUNT);
        let uses = |asked: &Asked, (groups, resource, verb): &(Vec<String>, String, String)| {
            groups.contains(&asked.group) && asked.resource == *resource && asked.verb == *verb
        };
        let granted = self.granted().into_iter();
        granted.filter(|right| !asked.iter().any(|asked| uses(asked, right))).collect()
    }

    /// Waits until the picker has used each right, and checks that it has missed none.
    async fn assert_rights_fit(&self, picker: &AttacheProcess) {
        let used = tokio::time::timeout(PATIENCE, async {
            while !self.unused().is_empty() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        assert!(used.await.is_ok(), "{}: granted and not used: {:?}", self.rendered.name, self.unused());
        let mut refused = self.cluster.asked_by(self.namespace, ACCOUNT);
        refused.retain(|asked| [401, 403].contains(&asked.status));
        assert_eq!(refused, [], "{}: missing rights", self.rendered.name);
        let log = picker.process.stderr();
        let complaint = log.lines().find(|line| line.contains("the API server refuses") || line.contains("orbidden"));
        assert_eq!(complaint, None, "{}", self.rendered.name);
    }
}

/// A request through Envoy is answered by the simulated server.
async fn assert_serves(envoy: &EnvoyProcess, sim: &SimProcess) {
    let body = json!({"model": "sim-8b", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8});
    let body = Bytes::from(body.to_string());
    let reply = client::post(envoy.listener("inference"), "/v1/chat/completions", body).await.expect("an answer");
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    assert_eq!(reply.header("x-sim-server"), sim.servers[0].port().to_string());
    assert!(reply.json()["usage"]["completion_tokens"].as_u64().is_some_and(|tokens| tokens > 0));
    envoy.assert_picker_was_correct().await;
}

async fn sim() -> (SimProcess, u16) {
    let sim = SimProcess::start(1, &["--model", "sim-8b"]).await;
    let port = sim.servers[0].port();
    (sim, port)
}

#[tokio::test(flavor = "multi_thread")]
async fn inferencepool_chart_serves_with_exactly_its_rights() {
    let cluster = Cluster::start().await;
    let (sim, port) = sim().await;
    let values = format!(
        "inferencePool: {{modelServers: {{matchLabels: {{app: llm}}}}, targetPorts: [{{number: {port}}}]}}\n\
         inferenceObjectives: [{{name: interactive, priority: 10}}]\nprovider: {{name: istio}}\n\
         experimentalHttpRoute: {{enabled: true}}\n\
         inferenceExtension: {{monitoring: {{prometheus: {{enabled: true}}}}, autoscaling: {{enabled: true}}}}\n"
    );
    let release = Release::install(&cluster, "inferencepool", "one-pool", &values).await;
    let model = release.create_model().await;
    let picker = release.start().await;
    assert!(knows(&picker, &format!("127.0.0.1:{port}")).await);
    assert!(!knows(&picker, &format!("127.0.0.2:{port}")).await);
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    assert_serves(&envoy, &sim).await;
    release.until_accepted(&model).await;
    release.assert_rights_fit(&picker).await;
    picker.assert_settled().await;
}

/// All that a Role has by flags: a lease, and reviews of tokens for the metrics.
#[tokio::test(flavor = "multi_thread")]
async fn chart_with_leader_election_and_guarded_metrics_has_exactly_its_rights() {
    let cluster = Cluster::start().await;
    let (sim, port) = sim().await;
    let values = format!(
        "inferencePool: {{modelServers: {{matchLabels: {{app: llm}}}}, targetPorts: [{{number: {port}}}]}}\n\
         inferenceExtension: {{flags: {{ha-enable-leader-election: true, metrics-endpoint-auth: true, \
         model-status: false}}}}\n"
    );
    let release = Release::install(&cluster, "inferencepool", "elected", &values).await;
    let picker = release.start().await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    assert_serves(&envoy, &sim).await;
    let mut request = client::request("GET", picker.metrics, Http::H1, "/metrics", Payload::sized(Bytes::new()));
    let token = std::fs::read_to_string(release.kubeconfig.with_extension("token")).expect("a token");
    let token = HeaderValue::from_str(&format!("Bearer {token}")).expect("a header value");
    request.headers_mut().insert(header::AUTHORIZATION, token);
    let page = client::send(picker.metrics, Http::H1, request).await.expect("an answer");
    assert_eq!(page.status, 403, "the picker's own account may not see the page");
    release.assert_rights_fit(&picker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn chart_of_many_pools_has_exactly_its_rights() {
    let cluster = Cluster::start().await;
    let (sim, port) = sim().await;
    let values = "inferenceExtension: {poolSelector: serving=attache}\n";
    let release = Release::install(&cluster, "inferencepool", "many-pools", values).await;
    let mut pool = pool("llm", "llm", &[port]);
    pool["metadata"]["labels"] = json!({"serving": "attache"});
    cluster.create(&release.path("inference.networking.k8s.io/v1/inferencepools"), &pool).await;
    let model = release.create_model().await;
    let picker = release.start().await;
    eventually("the pool to be found", || async { knows(&picker, &format!("127.0.0.1:{port}")).await.then_some(()) })
        .await;
    // The gateway names the Service of the pool.
    let called = "envoy_grpc: {cluster_name: picker}";
    let bootstrap = by_header("original-dst.yaml", &picker);
    assert!(bootstrap.contains(called), "{bootstrap}");
    let authority = format!("envoy_grpc: {{cluster_name: picker, authority: 'epp.{}.svc:9002'}}", release.namespace);
    let envoy = EnvoyProcess::start(&bootstrap.replace(called, &authority)).await;
    assert_serves(&envoy, &sim).await;
    release.until_accepted(&model).await;
    release.assert_rights_fit(&picker).await;
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn standalone_chart_serves_with_exactly_its_rights() {
    let cluster = Cluster::start().await;
    let (sim, port) = sim().await;
    let values =
        format!("inferenceExtension: {{endpointsServer: {{endpointSelector: app=llm, targetPorts: [{port}]}}}}\n");
    let release = Release::install(&cluster, "standalone", "standalone", &values).await;
    let model = release.create_model().await;
    let picker = release.start().await;
    assert!(knows(&picker, &format!("127.0.0.1:{port}")).await);
    assert!(!knows(&picker, &format!("127.0.0.2:{port}")).await);
    let scratch = scratch("envoy");
    let envoy = EnvoyProcess::start(&local(&release.rendered, &picker, scratch.path())).await;
    assert_serves(&envoy, &sim).await;
    release.until_accepted(&model).await;
    release.assert_rights_fit(&picker).await;
    picker.assert_settled().await;
}
