//! Files of llm-d's router, through real Envoy: fair queues for agent sessions, and endpoints from a file that changes.

use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::Payload;
use crate::support::client::{self, Http, Reply};
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::process::eventually;
use http::{HeaderName, HeaderValue};
use serde_json::json;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// Requests that one session has queued before another session sends one.
const FLOOD: usize = 11;

const AGENTS: &str = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nfeatureGates: [flowControl]\nplugins:\n\
    - {type: agent-identity, parameters: {additionalSessionHeaders: [x-my-agent]}}\n- {type: round-robin-fairness-policy}\n\
    - {type: concurrency-detector, parameters: {maxConcurrency: 1}}\n- {type: random-picker}\n\
    flowControl:\n  saturationDetector: {pluginRef: concurrency-detector}\n  \
    defaultPriorityBand: {fairnessPolicyRef: round-robin-fairness-policy}\n";

/// Sends a request of a session, whose response pauses four times for `ms`.
async fn ask(to: SocketAddr, session: (&'static str, &'static str), ms: u64) -> Reply {
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "a"}], "stream": true}).to_string();
    let target = format!("/v1/chat/completions?kind=sse&size=1000&events=4&pace_ms={ms}");
    let mut request = client::request("POST", to, Http::H1, &target, Payload::sized(body.into()));
    request.headers_mut().insert(HeaderName::from_static(session.0), HeaderValue::from_static(session.1));
    client::send(to, Http::H1, request).await.expect("a response")
}

#[tokio::test(flavor = "multi_thread")]
async fn agent_sessions_are_queued_fairly_without_a_fairness_header() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &["--engine=none", "--config-text", AGENTS]).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    for quiet in [("session-id", "b"), ("x-session-affinity", "c"), ("x-my-agent", "d")] {
        let flood = ("x-claude-code-session-id", "a");
        let first = tokio::spawn(ask(to, flood, 300));
        eventually("the first request to be served", || async {
            (picker.metric("attache_endpoint_in_flight").await > 0.0).then_some(())
        })
        .await;
        let served = Arc::new(AtomicUsize::new(0));
        let mut clients = tokio::task::JoinSet::new();
        for _ in 0..FLOOD {
            let served = served.clone();
            clients.spawn(async move {
                assert_eq!(ask(to, flood, 10).await.status, 200);
                served.fetch_add(1, SeqCst);
            });
        }
        picker.until_metric("attache_queued_requests", FLOOD as f64).await;
        for _ in 0..3 {
            assert_eq!(ask(to, quiet, 10).await.status, 200);
        }
        let before = served.load(SeqCst);
        assert!(before < FLOOD - 3, "{quiet:?} waited for {before} of {FLOOD} requests of another session");
        clients.join_all().await;
        assert_eq!(first.await.expect("a client").status, 200);
    }
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

/// Replaces the file by a rename, as Kubernetes and editors do.
fn replace(file: &Path, text: &str) {
    let new = file.with_extension("new");
    std::fs::write(&new, text).expect("writing");
    std::fs::rename(&new, file).expect("renaming");
}

#[tokio::test(flavor = "multi_thread")]
async fn endpoints_follow_changes_of_their_file() {
    let servers = [Echo::start().await, Echo::start().await];
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("endpoints.yaml");
    let listed = |echo: &Echo| {
        let (ip, port) = (echo.address.ip(), echo.address.port());
        format!(
            "endpoints:\n- {{name: server, address: {ip}, port: \"{port}\"}}\n- {{name: broken, address: host, port: \"1\"}}\n"
        )
    };
    replace(&file, &listed(&servers[0]));
    let text = format!(
        "apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\nplugins:\n- {{type: random-picker}}\n\
         - {{type: file-discovery, parameters: {{path: '{}', watchFile: true}}}}\n\
         dataLayer: {{injectDefaults: false, discovery: {{endpoints: {{pluginRef: file-discovery}}}}}}\n",
        file.display()
    );
    let picker = AttacheProcess::configured(&text).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let counts = || servers.each_ref().map(Echo::requests);
    assert_eq!(ask(to, ("x-session-id", "a"), 0).await.status, 200);
    assert_eq!(counts(), [1, 0]);
    replace(&file, &listed(&servers[1]));
    let second = servers[1].address.to_string();
    eventually("the other endpoint to be the only one", || async {
        let shown = picker.endpoints().await;
        (shown.len() == 1 && shown[0]["address"] == second.as_str()).then_some(())
    })
    .await;
    assert_eq!(ask(to, ("x-session-id", "a"), 0).await.status, 200);
    assert_eq!(counts(), [1, 1]);
    replace(&file, "endpoints: [");
    picker.until_metric("attache_endpoints_file_failures_total", 1.0).await;
    assert_eq!(ask(to, ("x-session-id", "a"), 0).await.status, 200);
    assert_eq!(counts(), [1, 2], "the last endpoints stay");
    assert_eq!(picker.metric("attache_endpoints_file_invalid_entries_total").await, 2.0);
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}
