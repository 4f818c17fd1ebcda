//! The bootstraps in `envoy/`: each is valid and serves requests with only its ports changed.

use crate::coming_from::aibrix::MANIFEST;
use crate::support::attache::AttacheProcess;
use crate::support::body::{chat, sha256};
use crate::support::client;
use crate::support::echo::Echo;
use crate::support::envoy::{EnvoyProcess, binary, library_folder, shipped, with_mtls};
use crate::support::pki::{Authority, Secret};
use crate::support::process::{repository, scratch};
use std::net::SocketAddr;
use std::process::Command;

/// Larger than tonic's default limit of a message (4 MiB), smaller than the picker's.
const LARGE: usize = 5_000_000;

/// A pool with endpoint lists, for bootstraps whose Envoy walks them.
pub(crate) fn list_pool(servers: &[SocketAddr], strategy: &str) -> String {
    let endpoints: Vec<String> = servers.iter().map(|server| format!("\"{server}\"")).collect();
    format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  strategy: {{name: {strategy}}}\n  \
         destination: {{mode: list, max: 3}}\n  endpoints: [{}]\n",
        endpoints.join(", ")
    )
}

/// Renders a bootstrap that gets its servers only from the picker.
pub(crate) fn by_header(file: &str, picker: &AttacheProcess) -> String {
    shipped(file, &[(8080, 0), (9901, 0), (9002, picker.grpc.port()), (9003, picker.health.port())])
}

/// Renders a bootstrap that lists four servers itself.
pub(crate) fn by_list(file: &str, picker: &AttacheProcess, servers: [SocketAddr; 4]) -> String {
    let [a, b, c, d] = servers.map(|server| server.port());
    let picker = [(9002, picker.grpc.port()), (9003, picker.health.port())];
    shipped(file, &[&[(8080, 0), (9901, 0), (8001, a), (8002, b), (8003, c), (8004, d)], &picker[..]].concat())
}

async fn assert_serves_requests(envoy: &EnvoyProcess) {
    let to = envoy.listener("inference");
    for size in [300, LARGE] {
        for kind in ["json", "sse"] {
            let body = chat(size, kind == "sse", 1);
            let target = format!("/v1/chat/completions?kind={kind}&size=20000");
            let reply = client::post(to, &target, body.clone()).await.expect("an answer");
            assert_eq!(reply.status, 200, "{size} {kind}: {}", String::from_utf8_lossy(&reply.body));
            assert_eq!(reply.header("x-echo-sha256"), sha256(&body), "{size} {kind}");
            assert_eq!(reply.body.len(), 20000, "{size} {kind}");
        }
    }
    let reply = client::get(to, "/v1/models").await.expect("an answer");
    assert_eq!(reply.status, 200, "a request without a body");
    envoy.assert_picker_was_correct().await;
}

#[test]
fn every_bootstrap_is_valid() {
    let entries = std::fs::read_dir(repository().join("envoy")).expect("the directory").flatten();
    let files: Vec<_> = entries.map(|entry| entry.path()).filter(|path| path.is_file()).collect();
    assert!(files.len() >= 4, "bootstraps are missing: {files:?}");
    let (authority, scratch) = (Authority::new("a"), scratch("mtls"));
    let secret = Secret::new(scratch.path().join("tls"), &authority.identity("envoy"), &[&authority]);
    for file in files {
        let text = std::fs::read_to_string(&file).expect("a bootstrap");
        // Inside Envoy, no connection leads to the picker.
        let is_remote = !file.ends_with("inside.yaml") && !file.ends_with("inside-cluster.yaml");
        let mtls = is_remote.then(|| ("with mTLS", with_mtls(&text, secret.path(), scratch.path())));
        for (kind, text) in mtls.into_iter().chain([("as shipped", text)]) {
            let bootstrap = scratch.path().join("envoy.yaml");
            let configuration = scratch.path().join("attache.yaml");
            std::fs::write(&configuration, list_pool(&[([127, 0, 0, 1], 8001).into()], "random")).expect("writing");
            let text = text.replace("/etc/attache/config.yaml", &configuration.display().to_string());
            std::fs::write(&bootstrap, text).expect("writing");
            let mut command = Command::new(binary());
            command.env("ENVOY_DYNAMIC_MODULES_SEARCH_PATH", library_folder());
            let output = command.args(["--mode", "validate", "-l", "error", "-c"]).arg(&bootstrap).output();
            let output = output.expect("running Envoy");
            assert!(output.status.success(), "{file:?} {kind}: {}", String::from_utf8_lossy(&output.stderr));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn original_dst_bootstrap_serves_requests() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    assert_serves_requests(&envoy).await;
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn buffered_bootstrap_serves_requests() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let envoy = EnvoyProcess::start(&by_header("buffered.yaml", &picker)).await;
    assert_serves_requests(&envoy).await;
    picker.assert_settled().await;
}

/// The bootstrap with AIBrix's routes: a request goes to its server once it has the header `routing-strategy`, and the
/// route that it has before leads nowhere.
fn by_strategy(picker: &AttacheProcess) -> String {
    const ALL: &str = "- match: {prefix: /}\n";
    let bootstrap = by_header("target-pod.yaml", picker);
    assert_eq!(bootstrap.matches(ALL).count(), 1);
    let decided =
        "- match: {prefix: /, headers: [{name: routing-strategy, string_match: {safe_regex: {regex: \".*\"}}}]}\n";
    let before = "              - match: {prefix: /}\n                route: {cluster: picker}\n";
    let (head, rest) = bootstrap.split_once(ALL).expect("the route");
    let (route, rest) = rest.split_once('\n').expect("its cluster");
    format!("{head}{decided}{route}\n{before}{rest}")
}

#[tokio::test(flavor = "multi_thread")]
async fn target_pod_bootstrap_serves_requests_with_aibrix_environment() {
    let [echo, other] = [Echo::start().await, Echo::start().await];
    let pool = |server: &Echo| {
        format!("apiVersion: attache.dev/v1\nkind: Attache\npools: [{{name: a, endpoints: ['{}']}}]\n", server.address)
    };
    let picker = AttacheProcess::configured_with(&pool(&echo), &MANIFEST).await;
    let envoy = EnvoyProcess::start(&by_strategy(&picker)).await;
    assert_serves_requests(&envoy).await;
    picker.assert_settled().await;
    // The same by flags and keys, without AIBrix's variables.
    let named = pool(&other).replace("endpoints", "destination: {strategyHeader: routing-strategy}, endpoints");
    let arguments = ["--config-text", &named, "--destination-header", "target-pod"].map(str::to_owned);
    let picker = AttacheProcess::with_arguments(&arguments).await;
    let envoy = envoy.beside(&by_strategy(&picker)).await;
    assert_serves_requests(&envoy).await;
    assert_eq!(echo.requests(), other.requests());
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn endpoint_list_bootstraps_serve_requests() {
    for file in ["override-host.yaml", "fail-open.yaml"] {
        let [a, b, c, d] = [Echo::start().await, Echo::start().await, Echo::start().await, Echo::start().await];
        let servers = [a.address, b.address, c.address, d.address];
        // The picker knows only the last server, so a round robin by Envoy would be detected.
        let picker = AttacheProcess::configured(&list_pool(&servers[3..], "round-robin")).await;
        let envoy = EnvoyProcess::start(&by_list(file, &picker, servers)).await;
        assert_serves_requests(&envoy).await;
        assert_eq!([a.requests(), b.requests(), c.requests()], [0; 3], "{file}: only the picker's choice is served");
        picker.assert_settled().await;
    }
}
