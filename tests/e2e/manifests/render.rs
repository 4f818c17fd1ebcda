//! The shipped manifests as a cluster would get them, from `kubectl kustomize` and `helm template`.

use crate::support::process::{repository, scratch};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// The objects of one installation.
pub(crate) struct Rendered {
    /// How it was rendered, for messages.
    pub(crate) name: String,
    pub(crate) objects: Vec<Value>,
}

impl Rendered {
    /// All objects of a kind.
    pub(crate) fn of(&self, kind: &str) -> impl Iterator<Item = &Value> + use<'_> {
        let kind = kind.to_owned();
        self.objects.iter().filter(move |object| object["kind"] == kind)
    }

    /// The only object of a kind.
    pub(crate) fn one(&self, kind: &str) -> &Value {
        let mut all = self.of(kind);
        let first = all.next().unwrap_or_else(|| panic!("{}: no {kind}", self.name));
        assert!(all.next().is_none(), "{}: several of kind {kind}", self.name);
        first
    }

    /// The object of a kind with a name.
    pub(crate) fn named(&self, kind: &str, name: &Value) -> &Value {
        let mut all = self.of(kind);
        let found = all.find(|object| object["metadata"]["name"] == *name);
        found.unwrap_or_else(|| panic!("{}: no {kind} {name}", self.name))
    }

    /// The picker's container.
    pub(crate) fn picker(&self) -> &Value {
        let containers = list(&self.one("Deployment")["spec"]["template"]["spec"]["containers"]);
        containers.iter().find(|c| c["name"] == "epp").unwrap_or_else(|| panic!("{}: no picker", self.name))
    }
}

/// The items of a list, or none if the value is no list.
pub(crate) fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// The text of a value.
pub(crate) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("not a text: {value}"))
}

pub(crate) fn examples() -> PathBuf {
    repository().join("examples/kubernetes")
}

/// A tool from tests/install-kubernetes-tools.sh. A missing tool fails the test, so that it is not skipped silently.
pub(crate) fn tool(name: &str) -> Command {
    let tools = std::env::var_os("ATTACHE_TOOLS").map_or_else(|| repository().join("target/tools"), PathBuf::from);
    let path = tools.join("kubernetes").join(name);
    assert!(path.exists(), "no {}: run `tests/install-kubernetes-tools.sh {}`", path.display(), tools.display());
    let mut command = Command::new(path);
    // Uses no cluster and no settings of this machine.
    command.env("KUBECONFIG", "/dev/null").env_remove("HELM_NAMESPACE");
    command
}

/// All non-empty documents of a YAML text.
pub(crate) fn documents(name: &str, yaml: &str) -> Vec<Value> {
    let all: Vec<Value> = serde_saphyr::from_multiple(yaml).unwrap_or_else(|error| panic!("{name}: {error}"));
    all.into_iter().filter(|document| !document.is_null()).collect()
}

fn output(name: &str, output: Output) -> String {
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

pub(crate) fn kustomize(directory: &Path) -> Rendered {
    let name = format!("kustomize {}", directory.display());
    let run = tool("kubectl").arg("kustomize").arg(directory).output().expect("running kubectl");
    let objects = documents(&name, &output(&name, run));
    Rendered { name, objects }
}

/// `helm template` with values in YAML.
pub(crate) fn template(chart: &str, values: &str) -> Output {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), values).expect("writing values");
    let chart = examples().join("helm").join(chart);
    let mut command = tool("helm");
    command.args(["template", "llm"]).arg(chart).args(["--namespace", "inference", "--values"]).arg(file.path());
    command.output().expect("running helm")
}

pub(crate) fn helm(chart: &str, values: &str) -> Rendered {
    let name = format!("helm template {chart} with {values}");
    let objects = documents(&name, &output(&name, template(chart, values)));
    Rendered { name, objects }
}

/// `helm lint --strict` of a chart.
pub(crate) fn lint(chart: &str, values: &str) -> Output {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), values).expect("writing values");
    let chart = examples().join("helm").join(chart);
    tool("helm").args(["lint", "--strict"]).arg(chart).arg("--values").arg(file.path()).output().expect("running helm")
}

/// The required values of the chart `inferencepool`.
pub(crate) const POOL: &str = "inferencePool: {modelServers: {matchLabels: {app: llm}}}\n";
/// The required values of the chart `standalone`.
pub(crate) const STANDALONE: &str = "inferenceExtension: {endpointsServer: {endpointSelector: app=llm}}\n";

/// All InferencePools with a label instead of one pool.
const MANY_POOLS: &str = "poolSelector: serving=attache";

/// Enables everything that is off by default and that both charts have.
const EVERYTHING: &str = "
  replicas: 3
  image: {registry: r.example.com/x, repository: picker, tag: v1, pullPolicy: Always}
  metricsDataSource: {scheme: https, path: /prometheus/metrics, insecureSkipVerify: false}
  imagePullSecrets: [{name: pull}]
  extProcPort: 9102
  pluginsConfigFile: mine.yaml
  pluginsCustomConfig:
    mine.yaml: |
      apiVersion: inference.networking.x-k8s.io/v1alpha1
      kind: EndpointPickerConfig
      plugins:
      - type: queue-scorer
  flags: {v: 1, refresh-metrics-interval: 100ms, health-checking: true, trace-ratio: 0.5, record-max-bytes: 4000000000}
  env: [{name: ATTACHE_LOG_FORMAT, value: json}]
  extraContainerPorts: [{name: zmq, containerPort: 5557}]
  extraServicePorts: [{name: zmq, port: 5557, targetPort: zmq}]
  volumes: [{name: tls, secret: {secretName: tls}}]
  volumeMounts: [{name: tls, mountPath: /certs, readOnly: true}]
  podAnnotations: {example.com/a: b}
  sync: {nats: {servers: ['nats://nats-0.nats:4222', 'nats://nats-1.nats:4222']}}
  nodeSelector: {kubernetes.io/os: linux}
  affinity: {nodeAffinity: {}}
  tolerations: [{key: dedicated, operator: Exists}]
  autoscaling: {enabled: true}
  networkPolicy: {enabled: true}
  monitoring:
    prometheus: {enabled: true, extraLabels: {release: prometheus}, rules: {enabled: true}}
    grafana: {enabled: true, extraLabels: {team: llm}}
  tracing: {enabled: true}
";

/// A configuration that enables features that also have flags.
const BY_FILE: &str = "inferenceExtension:
  poolServices: [others-epp]
  extraContainerPorts: [{name: zmq, containerPort: 5557}]
  networkPolicy:
    enabled: true
    extraIngress: [{from: [{podSelector: {matchLabels: {app: llm}}}], ports: [{port: zmq, protocol: TCP}]}]
  pluginsConfigFile: a.yaml
  pluginsCustomConfig:
    a.yaml: |
      apiVersion: attache.dev/v1
      kind: Attache
      server: {leaderElection: true, metricsAuth: true}
      pools:
      - {name: a, kubernetes: {pool: llm}, prefixCache: {tokenizer: remote, kvEvents: {bind: 'tcp://0.0.0.0:5557'}}}
";

/// Client certificates from cert-manager. The gateway has its own in a secret in its namespace.
pub(crate) const MTLS: &str = "inferenceExtension:\n  mtls: {enabled: true, clientNames: ['spiffe://cluster.local/ns/gateways/*'], \
                               certManager: {issuerRef: {name: ca}}}\n";
pub(crate) const MTLS_ISTIO: &str = "istio: {destinationRule: {credentialName: gateway-to-picker}}\n";

/// Pickers that share their state, with all that the values of `sync` can say.
pub(crate) const SYNC: &str = "sync: {waitForSnapshot: 10s, keySecret: pickers, nats: {\
                               servers: ['tls://nats-0.nats:4222', 'tls://nats-1.nats:4222'], \
                               credentialsSecret: nats-user, tls: {caSecret: nats-ca, certSecret: picker}}}";

/// Every installation that the tests check, rendered once.
pub(crate) fn all() -> &'static [Rendered] {
    static ALL: OnceLock<Vec<Rendered>> = OnceLock::new();
    ALL.get_or_init(render_all)
}

fn render_all() -> Vec<Rendered> {
    let mut all = vec![kustomize(&examples().join("base")), kustomize(&examples().join("overlays/production"))];
    all.extend(components());
    all.push(helm("inferencepool", POOL));
    for provider in ["istio", "gke"] {
        let more = format!(
            "{POOL}provider: {{name: {provider}}}\nexperimentalHttpRoute: {{enabled: true}}\n\
             inferenceObjectives: [{{name: interactive, priority: 10}}]\ninferenceExtension:{EVERYTHING}"
        );
        all.push(helm("inferencepool", &more));
    }
    let old = "inferencePool:\n  apiVersion: inference.networking.x-k8s.io/v1alpha2\n  modelServers: {matchLabels: {app: llm}}\n";
    all.push(helm("inferencepool", old));
    all.push(helm("inferencepool", &format!("{old}provider: {{name: gke}}\n")));
    all.push(helm(
        "inferencepool",
        &format!("{POOL}inferenceExtension: {{flags: {{ha-enable-leader-election: true}}}}\n"),
    ));
    all.push(helm("inferencepool", &format!("{POOL}inferenceExtension: {{flags: {{model-status: true}}}}\n")));
    all.push(helm("inferencepool", &format!("inferenceExtension: {{{MANY_POOLS}}}\nprovider: {{name: istio}}\n")));
    all.push(helm("standalone", &format!("inferenceExtension: {{{MANY_POOLS}}}\n")));
    let configured = "pluginsConfigFile: a.yaml, pluginsCustomConfig: {a.yaml: \"apiVersion: attache.dev/v1\\nkind: Attache\\npools: \
                      [{name: a, kubernetes: {poolSelector: serving=attache}}]\"}";
    all.push(helm("standalone", &format!("inferenceExtension: {{{configured}}}\n")));
    all.push(helm("standalone", STANDALONE));
    all.push(helm("inferencepool", &format!("{POOL}inferenceExtension: {{flags: {{metrics-endpoint-auth: true}}}}\n")));
    all.push(helm("standalone", BY_FILE));
    all.push(helm("inferencepool", &format!("{POOL}{MTLS}provider: {{name: istio}}\n{MTLS_ISTIO}")));
    all.push(helm("standalone", &format!("{MTLS}  endpointsServer: {{endpointSelector: app=llm}}\n")));
    all.push(helm(
        "standalone",
        &format!("{MTLS}  endpointsServer: {{endpointSelector: app=llm}}\n  poolServices: [a-epp]\n"),
    ));
    all.push(helm("inferencepool", &format!("{POOL}inferenceExtension: {{replicas: 3, {SYNC}}}\n")));
    let shared = format!("endpointsServer: {{endpointSelector: app=llm}}, {SYNC}");
    all.push(helm("standalone", &format!("inferenceExtension: {{{shared}}}\n")));
    let servers = "  endpointsServer: {endpointSelector: \"app=llm,tier in (a, b)\", targetPorts: [8000, 8001]}";
    all.push(helm("standalone", &format!("inferenceExtension:\n{servers}{EVERYTHING}")));
    all
}

/// The base with each component by itself.
fn components() -> Vec<Rendered> {
    let scratch = scratch("kustomize");
    let directory = scratch.path();
    // kustomize accepts no absolute paths.
    let up = "../".repeat(directory.canonicalize().expect("a path").components().count() - 1);
    let root = examples().canonicalize().expect("a path").display().to_string();
    let components = std::fs::read_dir(examples().join("components")).expect("components");
    let rendered = components.map(|component| {
        let component = component.expect("an entry").file_name().into_string().expect("a name");
        let text = format!("resources: [{up}{0}/base]\ncomponents: [{up}{0}/components/{component}]\n", &root[1..]);
        std::fs::write(directory.join("kustomization.yaml"), text).expect("writing");
        Rendered { name: format!("base with {component}"), ..kustomize(directory) }
    });
    let rendered: Vec<_> = rendered.collect();
    assert!(rendered.len() >= 4, "components are missing");
    rendered
}
