//! Shipped configurations with real parts, and simulated servers at their addresses: nothing is wrong.

use super::servers::{event_ports, with_events};
use super::{Checked, PATIENT, closed, patient_picker, until_scraped};
use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::envoy::EnvoyProcess;
use crate::support::process::{eventually, repository, scratch};
use crate::support::sim::SimProcess;
use futures_util::future::join_all;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

/// Pickers that run at the same time, each with an Envoy.
const AT_ONCE: usize = 4;
const TWO: [&str; 2] = ["10.0.0.11:8000", "10.0.0.12:8000"];

/// A shipped configuration with the parts that run here.
pub(super) struct Shipped {
    name: &'static str,
    text: String,
    /// Endpoints of all pools.
    endpoints: usize,
}

impl Shipped {
    /// The file `examples/configs/NAME.yaml`, with these servers at the addresses that it names, in their order.
    pub(super) fn new(name: &'static str, addresses: &[&str], servers: &[SocketAddr]) -> Self {
        let file = repository().join(format!("examples/configs/{name}.yaml"));
        let text = std::fs::read_to_string(file).expect("a file");
        let shipped = Self { name, text, endpoints: addresses.len() };
        addresses.iter().zip(servers).fold(shipped, |shipped, (from, to)| shipped.with(from, &to.to_string()))
    }

    /// With another text instead of one that is there.
    pub(super) fn with(mut self, from: &str, to: &str) -> Self {
        assert!(self.text.contains(from), "{}: no {from:?}", self.name);
        self.text = self.text.replace(from, to);
        self
    }

    /// With this many endpoints in all pools.
    pub(super) fn endpoints(self, endpoints: usize) -> Self {
        Self { endpoints, ..self }
    }

    /// With metrics that are not late on a busy machine, in each pool.
    fn patient(mut self) -> Self {
        let (head, pools) = self.text.split_once("\npools:\n").expect("pools");
        let line = |line: &str| match line.starts_with("  - name: ") {
            true => format!("{line}\n    {PATIENT}\n"),
            false => format!("{line}\n"),
        };
        self.text = format!("{head}\npools:\n{}", pools.lines().map(line).collect::<String>());
        self
    }

    /// Writes the file, in this directory.
    pub(super) fn write(&self, directory: &Path) -> std::path::PathBuf {
        let file = directory.join(format!("{}.yaml", self.name));
        std::fs::write(&file, &self.text).expect("writing");
        file
    }

    /// Runs a picker with this file and these flags, and waits for the metrics and the KV events of its servers.
    async fn start(&self, file: &Path, flags: &[&str]) -> AttacheProcess {
        let picker = AttacheProcess::with_file(file, flags).await;
        until_scraped(&picker, self.endpoints).await;
        eventually("all KV events to be read", async || {
            let known = picker.endpoints().await;
            known
                .iter()
                .all(|endpoint| endpoint["kv_events"].is_null() || endpoint["kv_events"] == "exact")
                .then_some(())
        })
        .await;
        picker
    }

    /// Checks a picker with this file, and an Envoy before it, which runs beside `first`.
    async fn assert_nothing_is_wrong(&self, directory: &Path, first: &EnvoyProcess) {
        let file = self.write(directory);
        let picker = self.start(&file, &[]).await;
        self.check(&file, &picker, first).await;
    }

    async fn check(&self, file: &Path, picker: &AttacheProcess, first: &EnvoyProcess) {
        let envoy = first.beside(&by_header("original-dst.yaml", picker)).await;
        let (file, admin, envoy) = (file.to_owned(), picker.metrics.to_string(), envoy);
        let envoy_admin = envoy.admin.to_string();
        let checked = tokio::task::spawn_blocking(move || {
            Checked::run(&[file.to_str().expect("a path"), "--admin", &admin, "--envoy-admin", &envoy_admin])
        });
        let checked = checked.await.expect("a check");
        checked.assert_faults(self.name, "", &[]);
        assert_eq!(checked.code, 0, "{}", self.name);
        drop(envoy);
    }
}

/// Checks these configurations, some at a time. The Envoys run beside `first`.
async fn assert_nothing_is_wrong(all: &[Shipped], first: &EnvoyProcess) {
    let directory = scratch("check-shipped");
    for some in all.chunks(AT_ONCE) {
        join_all(some.iter().map(|shipped| shipped.assert_nothing_is_wrong(directory.path(), first))).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_wrong_with_shipped_configurations() {
    let plain = SimProcess::start(2, &[]).await;
    let adapters = SimProcess::start(6, &["--model", "llama-3.1-8b", "--lora", "llama-3.1-8b-lora"]).await;
    let split = SimProcess::with_roles("prefill=2,decode=2,both=1", 5, &[]).await;
    let events = SimProcess::start(2, &["--kv-events-port", "0", "--kv-events-replay-port", "0"]).await;
    let [a, b] = events.servers[..] else { panic!("two servers") };
    let with_events = format!("[{}, {}]", with_events(a, event_ports(a).await), with_events(b, event_ports(b).await));
    let several =
        ["10.0.1.1:8000", "10.0.1.2:8000", "[fd00::7]:8000", "10.0.3.1:8000", "10.0.5.1:8000", "10.0.4.1:8000"];
    let roles = ["10.0.0.11:8000", "10.0.0.12:8000", "10.0.0.21:8000", "10.0.0.22:8000", "10.0.0.23:8000"];
    let all = [
        Shipped::new("minimal", &["127.0.0.1:8001", "127.0.0.1:8002"], &plain.servers),
        Shipped::new("overload", &TWO, &plain.servers),
        Shipped::new("flow-control", &TWO, &plain.servers),
        Shipped::new("disaggregation", &roles, &split.servers),
        Shipped::new("several-pools", &several, &adapters.servers),
        Shipped::new("prefix-cache", &[], &[]).with("[10.0.0.11:8000, 10.0.0.12:8000]", &with_events).endpoints(2),
        Shipped::new("dns", &[], &[])
            .with("host: vllm.default.svc.cluster.local", "host: 127.0.0.1")
            .with("port: 8000", &format!("port: {}", plain.servers[0].port()))
            .endpoints(1),
    ];
    let picker = patient_picker(&plain.servers, &[]).await;
    let first = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    assert_nothing_is_wrong(&all.map(Shipped::patient), &first).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_wrong_with_shipped_configurations_that_use_redis() {
    let redis = crate::support::redis::RedisProcess::start().await;
    let fleet = SimProcess::start(2, &[]).await;
    let (chat, batch) =
        (SimProcess::start(2, &["--model", "chat"]).await, SimProcess::start(2, &["--model", "batch"]).await);
    let profiles = scratch("check-profiles");
    for gpu in ["a100", "l40s"] {
        let profile = serde_json::json!({
            "gpu": gpu, "cost": 1.0, "created": 1_725_000_000.0, "indexes": [[4], [128]], "tputs": [[1000.0]],
            "e2e": [[0.5]], "slos": {"percentile": 99, "e2e": 5.0},
        });
        std::fs::write(profiles.path().join(format!("{gpu}.json")), profile.to_string()).expect("writing");
    }
    let four = [TWO[0], TWO[1], "10.0.1.11:8000", "10.0.1.12:8000"];
    let all = [
        Shipped::new("limits", &TWO, &fleet.servers)
            .with("redis://redis.default.svc:6379/0", &redis.url())
            .with("timeout: 50ms", "timeout: 1s"),
        Shipped::new("slo", &four, &[&chat.servers[..], &batch.servers].concat())
            .with("redis://aibrix-redis-master.aibrix-system.svc:6379/0", &format!("{}\n  timeout: 1s", redis.url()))
            .with("/etc/attache/profiles", &profiles.path().display().to_string()),
    ];
    let picker = patient_picker(&fleet.servers, &[]).await;
    let first = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    assert_nothing_is_wrong(&all.map(Shipped::patient), &first).await;
}

/// NATS with an operator, an account and a user, and with TLS on both sides.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_wrong_with_shipped_replicas() {
    use crate::support::nats::NatsProcess;
    use crate::support::pki::{Authority, Secret};
    let (authority, directory) = (Authority::new("nats"), scratch("check-replicas"));
    let path = |name: &str| directory.path().join(name);
    let secret = |name: &str, identity| Secret::new(path(name), &authority.identity(identity), &[&authority]);
    let (server, own) = (secret("nats", "127.0.0.1"), secret("picker", "picker"));
    let data = repository().join("tests/data/nats");
    let certificates = server.path().display();
    let settings = format!(
        "include accounts.conf\ntls {{cert_file: \"{certificates}/tls.crt\", key_file: \"{certificates}/tls.key\", \
         ca_file: \"{certificates}/ca.crt\", verify: true}}\n"
    );
    std::fs::copy(data.join("accounts.conf"), path("accounts.conf")).expect("copying");
    std::fs::write(path("nats.conf"), settings).expect("writing");
    std::fs::write(path("sync.key"), "a key of more than 16 bytes").expect("writing");
    let nats = NatsProcess::with_arguments(&["--config", path("nats.conf").to_str().expect("a path")]).await;
    let fleet = SimProcess::start(2, &[]).await;
    let named = |file: &Path| file.display().to_string();
    let shipped = Shipped::new("replicas", &TWO, &fleet.servers)
        .with("nats://nats-0.nats:4222", &nats.url())
        .with("nats://nats-1.nats:4222", &nats.url())
        .with("/etc/attache/sync.key", &named(&path("sync.key")))
        .with("/etc/attache/nats.creds", &named(&data.join("user.creds")))
        .with("/etc/attache/nats-ca.crt", &named(&own.ca()))
        .with("/etc/attache/nats.crt", &named(&own.path().join("tls.crt")))
        .with("/etc/attache/nats.key", &named(&own.path().join("tls.key")))
        // The first picker has no peer to wait for.
        .with("waitForSnapshot: 10s", "waitForSnapshot: 100ms")
        .patient();
    let file = shipped.write(directory.path());
    let (picker, peer) = (shipped.start(&file, &[]).await, shipped.start(&file, &["--sync-name", "picker-1"]).await);
    for picker in [&picker, &peer] {
        eventually("both pickers to know each other", async || {
            (picker.metric("attache_sync_peer_age_seconds").await > 0.0).then_some(())
        })
        .await;
    }
    let first = EnvoyProcess::start(&by_header("original-dst.yaml", &peer)).await;
    shipped.check(&file, &picker, &first).await;
}

#[test]
fn system_that_does_not_run_has_another_exit_code_than_one_with_mistakes() {
    let checked = Checked::run(&["--admin", &closed().to_string(), "--envoy-admin", &closed().to_string()]);
    assert_eq!(checked.code, 69);
}

#[test]
fn wrong_url_of_an_admin_port_is_refused_with_flag_value_and_what_is_allowed() {
    for flag in ["--admin", "--envoy-admin"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
        let refused = command.args(["check", "--live", flag, "https://127.0.0.1:1"]).output().expect("attache");
        assert_eq!(refused.status.code(), Some(64));
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        let wanted = format!(
            "invalid value 'https://127.0.0.1:1' for '{flag} <URL>': allowed is `host:port` or `http://host:port`"
        );
        assert!(text.contains(&wanted), "{text}");
    }
}
