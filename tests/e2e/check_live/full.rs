//! The shipped configuration with every key, in a real cluster, with servers from every kind of discovery.

use super::Checked;
use super::kubernetes::{named, service};
use super::shipped::Shipped;
use super::{closed, until_scraped};
use crate::api::pod;
use crate::real_kubernetes::cluster::Cluster;
use crate::shipped::by_list;
use crate::support::attache::AttacheProcess;
use crate::support::envoy::EnvoyProcess;
use crate::support::process::{eventually, scratch};
use crate::support::redis::RedisProcess;
use crate::support::sim::SimProcess;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::Command;

/// Addresses of the servers: of the file, of SGLang, of DNS, of the file with endpoints, and of the pod.
const HOSTS: [Ipv4Addr; 5] = [
    Ipv4Addr::new(127, 0, 0, 1),
    Ipv4Addr::new(127, 0, 0, 5),
    Ipv4Addr::new(127, 0, 0, 2),
    Ipv4Addr::new(127, 0, 0, 3),
    Ipv4Addr::new(127, 0, 0, 4),
];

/// The first of four ports that are free on all hosts: for the events and the replays of two ranks. They lie below the
/// ports that the system gives to connections.
fn four_ports() -> u16 {
    let is_free = |port: u16| HOSTS.iter().all(|host| TcpListener::bind((*host, port)).is_ok());
    let start = 20_000 + u16::try_from(std::process::id() % 2_000).expect("below 2,000") * 4;
    let mut candidates = (start..30_000).step_by(4);
    candidates.find(|first| (*first..first + 4).all(is_free)).expect("four free ports")
}

/// A server with two ranks on each host.
async fn servers(first: u16) -> Vec<SimProcess> {
    let (events, replay) = (first.to_string(), (first + 2).to_string());
    let common = ["--model", "llama", "--lora", "qwen", "--data-parallel-size", "2"];
    let ports = ["--kv-events-port", &events, "--kv-events-replay-port", &replay];
    let mut all = Vec::new();
    for (number, host) in HOSTS.iter().enumerate() {
        let style: &[&str] = if number == 1 { &["--metrics-style", "sglang"] } else { &[] };
        all.push(SimProcess::at(&host.to_string(), 1, &[&common[..], &ports, style].concat()).await);
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_wrong_with_the_shipped_file_of_every_key() {
    let (cluster, redis, first) = (Cluster::start().await, RedisProcess::start().await, four_ports());
    let fleet = servers(first).await;
    let [own, sglang, dns, file, in_pod] = [0, 1, 2, 3, 4].map(|number: usize| fleet[number].servers[0]);
    let mut server = pod("vllm-0", "vllm", &in_pod.ip().to_string());
    server["spec"]["containers"][0]["ports"][0]["containerPort"] = in_pod.port().into();
    cluster.create_pod("default", server).await;
    cluster.create_pod("default", pod("epp-0", "epp", "127.0.0.6")).await;
    cluster.create("/api/v1/namespaces/default/services", &service("llama-epp", "epp")).await;
    let mut pool = named("vllm-pool", "vllm", "llama-epp", 9002, "FailOpen");
    pool["spec"]["targetPorts"] = serde_json::json!([{"number": in_pod.port()}]);
    cluster.create("/apis/inference.networking.k8s.io/v1/namespaces/default/inferencepools", &pool).await;

    let directory = scratch("check-full");
    let path = |name: &str| directory.path().join(name).display().to_string();
    std::fs::write(path("token"), "token\n").expect("writing");
    let endpoints = format!("endpoints: [{{name: f, address: {}, port: \"{}\"}}]\n", file.ip(), file.port());
    std::fs::write(path("endpoints.yaml"), endpoints).expect("writing");
    let shipped = Shipped::new("full", &["127.0.0.1:8001", "[::1]:8002"], &[own, sglang])
        .with("metrics: {scheme: http, port: 9000", &format!("metrics: {{scheme: http, port: {}", sglang.port()))
        .with(
            "host: vllm.default.svc\n        port: 8000",
            &format!("host: {}\n        port: {}", dns.ip(), dns.port()),
        )
        .with("/etc/attache/endpoints.yaml", &path("endpoints.yaml"))
        .with("/etc/attache/token", &path("token"))
        .with("redis://localhost:6379/0", &redis.url())
        .with("timeout: 50ms", "timeout: 1s")
        .with("http://localhost:4318", &format!("http://{}", closed()))
        .with("port: 5557 #", &format!("port: {first} #"))
        .with("replayPort: 5657 #", &format!("replayPort: {} #", first + 2))
        .with("timeout: 500ms", "timeout: 30s")
        .with("staleAfter: 2s", "staleAfter: 60s");
    let written = shipped.write(directory.path()).display().to_string();
    let kubeconfig = cluster.kubeconfig_of_administrator("default");
    // A new API server refuses to watch some kinds for a moment, and a picker reports that until their first event.
    let picker = eventually("a picker that can follow all kinds", async || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
        command.env("KUBECONFIG", &kubeconfig);
        let picker = AttacheProcess::with_command(command, &["--config-file".to_owned(), written.clone()]).await;
        until_scraped(&picker, HOSTS.len()).await;
        (picker.metric("attache_kube_out_of_touch").await == 0.0).then_some(picker)
    })
    .await;
    eventually("all KV events to be read", async || {
        picker.endpoints().await.iter().all(|endpoint| endpoint["kv_events"] == "exact").then_some(())
    })
    .await;
    let bootstrap = by_list("override-host.yaml", &picker, [own, dns, file, in_pod]);
    let envoy = EnvoyProcess::start(&bootstrap).await;
    let (admin, envoy_admin): (SocketAddr, SocketAddr) = (picker.metrics, envoy.admin);
    let checked = Checked::with_kubeconfig(
        &kubeconfig,
        &[&written, "--admin", &admin.to_string(), "--envoy-admin", &envoy_admin.to_string()],
    );
    checked.assert_faults("full", "", &[]);
    assert_eq!(checked.code, 0);
    assert_eq!(checked.of("endpoint-kv-events").len(), HOSTS.len(), "findings of all servers");
}
