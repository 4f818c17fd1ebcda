//! Two versions: a rolling update behind one Envoy and back, and a recording of one that the other reads.
//!
//! `PREVIOUS_ATTACHE` names the program of the previous version; `release/upgrade.sh` builds it. Without the variable both
//! versions are this one.

use crate::replicas::away::Clients;
use crate::replicas::{SHORT_SSE, assert_served, open, peers, pool};
use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::client;
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::nats::NatsProcess;
use crate::support::process::{eventually, scratch};
use crate::support::sim::SimProcess;
use bytes::Bytes;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The program of the previous version.
fn previous() -> PathBuf {
    std::env::var_os("PREVIOUS_ATTACHE").map_or_else(|| PathBuf::from(env!("CARGO_BIN_EXE_attache")), PathBuf::from)
}

fn this() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_attache"))
}

/// Names the pickers to Envoy, as a control plane does.
fn announce(file: &Path, pickers: &[AttacheProcess]) {
    let endpoint = |picker: &AttacheProcess| {
        json!({"endpoint": {
            "address": {"socket_address": {"address": "127.0.0.1", "port_value": picker.grpc.port()}},
            "health_check_config": {"port_value": picker.health.port()}}})
    };
    let assignment = json!({
        "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment", "cluster_name": "picker",
        "endpoints": [{"lb_endpoints": pickers.iter().map(endpoint).collect::<Vec<_>>()}]});
    // Envoy watches for renames.
    let new = file.with_extension("new");
    std::fs::write(&new, json!({"resources": [assignment]}).to_string()).expect("writing");
    std::fs::rename(new, file).expect("renaming");
}

/// The shipped bootstrap with pickers that come and go.
fn bootstrap(picker: &AttacheProcess, announced: &Path) -> String {
    // Envoy wants a name where a control plane changes something.
    let shipped = by_header("original-dst.yaml", picker).replace("#mtls node: ", "node: ");
    let cluster = shipped.find("  - name: picker\n    type: STRICT_DNS\n").expect("the cluster of the picker");
    let (before, cluster) = shipped.split_at(cluster);
    let start = cluster.find("    load_assignment:\n").expect("its endpoints");
    let after = "            health_check_config: {port_value: ";
    let rest = cluster[start..].split_once(after).and_then(|(_, rest)| rest.split_once('\n')).expect("their end").1;
    let announced = announced.display();
    let discovered = cluster[..start].replace("type: STRICT_DNS\n", "type: EDS\n");
    format!(
        "{before}{discovered}    eds_cluster_config:\n      service_name: picker\n      eds_config: {{resource_api_version: \
         V3, path_config_source: {{path: \"{announced}\"}}}}\n{rest}"
    )
}

/// Pickers behind one Envoy.
struct Fleet {
    config: String,
    url: String,
    announced: PathBuf,
    pickers: Vec<AttacheProcess>,
}

impl Fleet {
    async fn start_picker(&self, program: &Path, name: &str) -> AttacheProcess {
        let arguments = ["--config-text", &self.config, "--sync-nats-url", &self.url, "--sync-name", name];
        let arguments = arguments.into_iter().chain(["--drain-min-delay", "3s"]).map(str::to_owned);
        AttacheProcess::with_command(Command::new(program), &arguments.collect::<Vec<_>>()).await
    }

    /// Replaces each picker by one of `program`: the new one is ready before the old one ends.
    async fn update(&mut self, program: &Path, names: [&str; 2], envoy: &EnvoyProcess) {
        for name in names {
            let new = self.start_picker(program, name).await;
            self.pickers.push(new);
            announce(&self.announced, &self.pickers);
            eventually("Envoy to know the new picker", async || {
                (envoy.stat("cluster.picker.membership_healthy").await == 3).then_some(())
            })
            .await;
            let mut old = self.pickers.remove(0);
            until_named(&self.pickers[1], &self.pickers[0]).await;
            old.process.signal("TERM");
            announce(&self.announced, &self.pickers);
            let ended = old.process.wait().await;
            assert_eq!(ended.code(), Some(0), "{}", old.process.stderr());
            assert!(!old.process.stderr().contains("panicked"), "{}", old.process.stderr());
        }
    }
}

/// Waits until the two pickers, which may have different versions, have received everything of each other.
async fn until_named(one: &AttacheProcess, other: &AttacheProcess) {
    for picker in [one, other] {
        eventually("its peer", async || peers(picker).await.iter().any(|peer| peer["behind"] == false).then_some(()))
            .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rolling_update_and_rollback_of_two_versions_lose_no_request() {
    let (nats, echo, directory) = (NatsProcess::start().await, Echo::start().await, scratch("announced"));
    let mut fleet = Fleet {
        config: pool("{name: least-request}", &[echo.address]),
        url: nats.url(),
        announced: directory.path().join("pickers.json"),
        pickers: Vec::new(),
    };
    for name in ["old-a", "old-b"] {
        let picker = fleet.start_picker(&previous(), name).await;
        fleet.pickers.push(picker);
    }
    announce(&fleet.announced, &fleet.pickers);
    let envoy = EnvoyProcess::start(&bootstrap(&fleet.pickers[0], &fleet.announced)).await;
    let to = envoy.listener("inference");
    assert_served(to).await;
    let clients = Clients::start([to, to]);
    fleet.update(&this(), ["new-a", "new-b"], &envoy).await;
    // Streams that are open at the end of a picker are served to their end by it.
    let held = open(to, SHORT_SSE).await;
    fleet.update(&previous(), ["back-a", "back-b"], &envoy).await;
    assert!(held.finish().await.expect("a whole response").body.ends_with(b"[DONE]\n\n"));
    let served = clients.end().await;
    assert!(served > 50, "{served} requests say little");
    for picker in &fleet.pickers {
        picker.assert_settled().await;
    }
    envoy.assert_picker_was_correct().await;
}

/// Exit code 2 says that decisions differ, which a version may do. Every other failure means that it is not read.
#[tokio::test(flavor = "multi_thread")]
async fn recording_of_the_previous_version_is_read() {
    let (sim, directory) = (SimProcess::start(2, &["--model", "sim-8b"]).await, scratch("recording"));
    let record = directory.path().join("run.jsonl");
    let arguments = ["--config-text", &pool("{name: predicted-latency}", &sim.servers), "--record"];
    let arguments = arguments.into_iter().map(str::to_owned).chain([record.display().to_string()]);
    let arguments: Vec<String> = arguments.collect();
    let mut picker = AttacheProcess::with_command(Command::new(previous()), &arguments).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    for turn in 0..20 {
        let content = format!("question {turn} of a conversation");
        let body = json!({"model": "sim-8b", "messages": [{"role": "user", "content": content}], "max_tokens": 4});
        let to = envoy.listener("inference");
        let reply = client::post(to, "/v1/chat/completions", Bytes::from(body.to_string())).await.expect("an answer");
        assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    }
    picker.assert_settled().await;
    picker.process.signal("INT");
    assert_eq!(picker.process.wait().await.code(), Some(0));
    let output = Command::new(this()).arg("replay").arg("--from-record").arg(&record).output().expect("an output");
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(matches!(output.status.code(), Some(0 | 2)), "{shown}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(shown.contains("20 decisions"), "{shown}");
}
