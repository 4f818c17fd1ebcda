//! Installations that run: the picker's binary with a container's arguments and configuration, a fake API server with
//! the rendered InferencePool, and the standalone chart's Envoy.

use super::render::{POOL, Rendered, STANDALONE, all, examples, helm, kustomize, list, text};
use crate::api::{FakeApi, NAMESPACE, STABLE, pod, pool};
use crate::support::attache::AttacheProcess;
use crate::support::body::{chat, sha256};
use crate::support::client;
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::grpc::{Connection, PROCESS, request_headers};
use crate::support::pki::{Authority, Secret};
use crate::support::process::scratch;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

/// Starts the picker as in its pod, with other ports and another directory for its configuration.
pub(crate) async fn start(rendered: &Rendered, kubeconfig: &Path, tls: Option<&Secret>) -> AttacheProcess {
    let directory = scratch("mounted");
    let maps = rendered.of("ConfigMap").flat_map(|map| map["data"].as_object().into_iter().flatten());
    maps.for_each(|(file, config)| std::fs::write(directory.path().join(file), text(config)).expect("writing"));
    let mounted = format!("--config-file={}/", directory.path().display());
    let arguments = list(&rendered.picker()["args"]).iter().map(text).filter(|argument| *argument != "run");
    let arguments = arguments
        .filter(|argument| !argument.starts_with("--grpc-port=") && !argument.starts_with("--secure-serving="));
    let mut arguments: Vec<String> =
        arguments.map(|argument| argument.replace("--config-file=/config/", &mounted)).collect();
    if let Some(tls) = tls {
        let mounted = format!("={}", tls.path().display());
        arguments.iter_mut().for_each(|argument| *argument = argument.replace("=/tls", &mounted));
    }
    // Uses TLS if the installation's Envoy does.
    if rendered.of("ConfigMap").any(|map| map["data"]["envoy.yaml"].is_string()) {
        let plain = rendered.picker()["args"].to_string().contains("--secure-serving=false");
        arguments.push(format!("--secure-serving={}", !plain));
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
    command.env("KUBECONFIG", kubeconfig);
    let namespace = rendered.one("Deployment")["metadata"]["namespace"].as_str().unwrap_or(NAMESPACE);
    for variable in list(&rendered.picker()["env"]) {
        let value = match variable["valueFrom"]["fieldRef"]["fieldPath"].as_str() {
            Some("metadata.namespace") => namespace,
            Some("metadata.name") => "llm-epp-0",
            _ => text(&variable["value"]),
        };
        command.env(text(&variable["name"]), value);
    }
    AttacheProcess::with_command(command, &arguments).await
}

/// The object, moved to the namespace of this test's picker.
fn here(object: &Value) -> Value {
    let mut object = object.clone();
    object["metadata"]["namespace"] = json!(NAMESPACE);
    object
}

/// Whether the page `/endpoints` lists this address.
pub(crate) async fn knows(picker: &AttacheProcess, address: &str) -> bool {
    picker.endpoints().await.iter().any(|endpoint| endpoint.to_string().contains(&format!("\"{address}\"")))
}

#[tokio::test(flavor = "multi_thread")]
async fn every_installation_discovers_its_pods() {
    let old = "inferencePool:\n  apiVersion: inference.networking.x-k8s.io/v1alpha2\n  modelServers: {matchLabels: {app: llm}}\n";
    let installations = [
        kustomize(&examples().join("base")),
        kustomize(&examples().join("overlays/production")),
        helm("inferencepool", POOL),
        helm("inferencepool", old),
        helm("standalone", STANDALONE),
    ];
    for rendered in installations {
        let api = FakeApi::start().await;
        let mut label = "llm".to_owned();
        for pool in rendered.of("InferencePool") {
            let version = text(&pool["apiVersion"]);
            api.install(version, "inferencepools");
            api.apply(version, "inferencepools", here(pool));
            let selector = &pool["spec"]["selector"];
            let labels = [&selector["matchLabels"]["app"], &selector["app"]];
            label = labels.into_iter().find_map(Value::as_str).expect("the label of its pods").to_owned();
        }
        api.pod(pod("a", &label, "127.0.0.1"));
        api.pod(pod("stranger", "postgres", "127.0.0.2"));
        let picker = start(&rendered, &api.kubeconfig(), None).await;
        assert!(knows(&picker, "127.0.0.1:8000").await, "{}", rendered.name);
        assert!(!knows(&picker, "127.0.0.2:8000").await, "{}", rendered.name);
        if rendered.of("InferencePool").count() == 0 {
            assert_eq!(api.request_count("list", "inferencepools"), 0, "{}: no CRD is needed", rendered.name);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_pool_installation_discovers_pools_and_their_config_maps() {
    let charted = helm("inferencepool", "inferenceExtension: {poolSelector: serving=attache}\n");
    let kustomized = all().iter().find(|rendered| rendered.name == "base with many-pools");
    for rendered in [kustomized.expect("the component"), &charted] {
        let api = FakeApi::start().await;
        api.install("v1", "configmaps");
        for own in rendered.of("InferencePool") {
            api.apply(STABLE, "inferencepools", here(own));
        }
        for (n, name) in ["llm", "qwen", "stranger"].iter().enumerate() {
            api.pod(pod(name, name, &format!("127.0.0.{}", n + 1)));
            let mut pool = pool(name, name, &[8000]);
            if *name != "stranger" {
                pool["metadata"]["labels"] = json!({"serving": "attache"});
            }
            if api.get(STABLE, "inferencepools", name).is_none() {
                api.apply(STABLE, "inferencepools", pool);
            }
        }
        let text = "apiVersion: attache.dev/v1\nkind: Attache\npools: [{name: any, strategy: random}]\n";
        let labels = json!({"attache.dev/pool": "qwen"});
        let map = json!({"metadata": {"name": "of-qwen", "labels": labels}, "data": {"attache.yaml": text}});
        api.apply("v1", "configmaps", map);
        let picker = start(rendered, &api.kubeconfig(), None).await;
        assert!(knows(&picker, "127.0.0.1:8000").await && knows(&picker, "127.0.0.2:8000").await, "{}", rendered.name);
        assert!(!knows(&picker, "127.0.0.3:8000").await, "{}", rendered.name);
        let dump = client::get(picker.metrics, "/config_dump").await.expect("the settings").json();
        let strategies: Vec<&Value> = list(&dump["pools"]).iter().map(|pool| &pool["strategy"]["name"]).collect();
        assert_eq!(strategies, ["predicted-latency", "random"], "{}", rendered.name);
    }
}

/// Envoy's bootstrap in a rendered chart.
pub(crate) fn bootstrap(rendered: &Rendered) -> String {
    text(&rendered.named("ConfigMap", &"llm-epp-envoy".into())["data"]["envoy.yaml"]).to_owned()
}

/// The same for Envoy on the loopback beside this picker, with files in `directory`.
pub(crate) fn local(rendered: &Rendered, picker: &AttacheProcess, directory: &Path) -> String {
    let mut bootstrap = bootstrap(rendered)
        .replace("/etc/envoy", &directory.display().to_string())
        .replace("address: 0.0.0.0", "address: 127.0.0.1");
    for (from, to) in [(8081, 0), (19000, 0), (19001, 0), (9002, picker.grpc.port()), (9003, picker.health.port())] {
        let from = format!("port_value: {from}}}");
        assert!(bootstrap.contains(&from), "the bootstrap has no `{from}`");
        // The admin port occurs twice: its cluster, which then has port 0, gets no requests here.
        bootstrap = bootstrap.replace(&from, &format!("port_value: {to}}}"));
    }
    bootstrap
}

#[tokio::test(flavor = "multi_thread")]
async fn standalone_chart_serves_requests() {
    assert_serves_requests("", false).await;
}

/// The picker also serves gateways, which use TLS.
#[tokio::test(flavor = "multi_thread")]
async fn standalone_chart_with_gateway_services_serves_requests() {
    assert_serves_requests(", poolServices: [others-epp]", true).await;
    assert_serves_requests(", poolServices: [others-epp], flags: {secure-serving: false}", false).await;
}

/// Envoy and the picker read their certificates from the same secret.
#[tokio::test(flavor = "multi_thread")]
async fn standalone_chart_with_mtls_serves_and_refuses_other_clients() {
    let names = "mtls: {enabled: true, clientNames: [gateway.example.com], certManager: {issuerRef: {name: ca}}}";
    assert_serves_requests(&format!(", {names}"), true).await;
    assert_serves_requests(&format!(", poolServices: [others-epp], {names}"), true).await;
}

async fn assert_serves_requests(more: &str, tls: bool) {
    let echo = Echo::start().await;
    let servers = format!("endpointSelector: app=llm, targetPorts: [{}], modelServerType: none", echo.address.port());
    let rendered = helm("standalone", &format!("inferenceExtension: {{endpointsServer: {{{servers}}}{more}}}\n"));
    assert_eq!(bootstrap(&rendered).contains("UpstreamTlsContext"), tls);
    let api = FakeApi::start().await;
    api.pod(pod("a", "llm", "127.0.0.1"));
    let (scratch, authority) = (scratch("mtls"), Authority::new("ca"));
    let dns_names = rendered.of("Certificate").next().map(|certificate| text(&certificate["spec"]["dnsNames"][0]));
    let secret = dns_names.map(|name| {
        let secret = Secret::new(scratch.path().join("tls"), &authority.identity(name), &[&authority]);
        let files = &rendered.named("ConfigMap", &"llm-epp-envoy".into())["data"];
        for file in ["certificate.yaml", "authority.yaml"] {
            let text = text(&files[file]).replace(": /tls", &format!(": {}", secret.path().display()));
            std::fs::write(scratch.path().join(file), text).expect("writing");
        }
        secret
    });
    let picker = start(&rendered, &api.kubeconfig(), secret.as_ref()).await;
    let envoy = EnvoyProcess::start(&local(&rendered, &picker, scratch.path())).await;
    for size in [300, 3_000_000] {
        let body = chat(size, true, 1);
        let to = envoy.listener("inference");
        let reply =
            client::post(to, "/v1/chat/completions?kind=sse&size=20000", body.clone()).await.expect("an answer");
        assert_eq!((reply.status.as_u16(), reply.body.len()), (200, 20000));
        assert_eq!(reply.header("x-echo-sha256"), sha256(&body));
    }
    let ready = client::get(envoy.listener("metrics"), "/ready").await.expect("an answer");
    assert_eq!(ready.status, 200, "what the kubelet asks");
    let hidden = client::get(envoy.listener("metrics"), "/config_dump").await.expect("an answer");
    assert_eq!(hidden.status, 404, "Envoy's admin pages are not for the network");
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
    if secret.is_some() {
        let stream = async {
            let connection = Connection::open(picker.grpc).await?;
            let mut stream = connection.stream(PROCESS, &[]).await?;
            stream.send(&request_headers(&[(":path", b"/v1/models"), (":method", b"GET")], true))?;
            stream.answer().await
        };
        assert!(stream.await.is_err(), "a stream without certificate");
        // The client may see the end before the picker counts it.
        picker.until_metric("attache_tls_handshake_failures_total", 1.0).await;
    }
}
