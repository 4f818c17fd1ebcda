//! Operation: configuration reloads under load, shutdown, DNS, and servers whose metrics fail.

use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::{Payload, chat};
use crate::support::client::{self, Http};
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::process::{Process, eventually, scratch};
use crate::support::sim::SimProcess;
use crate::traffic::Traffic;
use bytes::Bytes;
use serde_json::json;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use tokio::net::{TcpListener, UnixDatagram};
use tokio::time::Instant;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

const CHAT: &str = "/v1/chat/completions";

fn pool(strategy: &str, endpoints: &[&Echo]) -> String {
    let endpoints: Vec<String> = endpoints.iter().map(|echo| format!("\"{}\"", echo.address)).collect();
    format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  strategy: {{name: {strategy}}}\n  \
         endpoints: [{}]\n",
        endpoints.join(", ")
    )
}

/// Writes a new file and renames it over the old one, as editors and deployment tools do.
pub(crate) fn replace(file: &Path, text: &str) {
    let new = file.with_extension("new");
    std::fs::write(&new, text).expect("writing the configuration");
    std::fs::rename(&new, file).expect("renaming it over the old one");
}

async fn addresses(picker: &AttacheProcess) -> Vec<String> {
    let endpoints = picker.endpoints().await;
    endpoints.iter().filter_map(|endpoint| endpoint["address"].as_str().map(str::to_owned)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn configuration_reload_under_load_fails_no_request() {
    let (a, b, c) = (Echo::start().await, Echo::start().await, Echo::start().await);
    let directory = scratch("config");
    let file = directory.path().join("attache.yaml");
    replace(&file, &pool("random", &[&a]));
    let picker = AttacheProcess::with_file(&file, &[]).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let traffic = Traffic::start(envoy.listener("inference"), CHAT);
    traffic.more(10).await;
    assert_eq!((b.requests(), c.requests()), (0, 0));

    replace(&file, &pool("round-robin", &[&b, &c]));
    picker.until_metric("attache_config_reloads_total", 1.0).await;
    traffic.more(2).await;
    let before = a.requests();
    traffic.more(10).await;
    assert_eq!(a.requests(), before, "traffic has moved away");
    assert!(b.requests().abs_diff(c.requests()) <= 4, "round robin: {} and {}", b.requests(), c.requests());

    replace(&file, "apiVersion: attache.dev/v1\nkind: Attache\npools: [{name: default, endpoints: [nonsense]}]\n");
    picker.until_metric("attache_config_reload_failures_total", 1.0).await;
    traffic.more(10).await;
    assert_eq!(a.requests(), before, "the old configuration stays");
    assert!(b.requests().abs_diff(c.requests()) <= 4, "round robin: {} and {}", b.requests(), c.requests());

    // Each replacement is a complete file, and only the last one counts.
    let mut tick = tokio::time::interval(Duration::from_millis(10));
    for round in 0..100 {
        tick.tick().await;
        let server = if round == 99 { &c } else { [&a, &b][round % 2] };
        replace(&file, &pool("random", &[server]));
    }
    eventually("the last configuration", || async {
        (addresses(&picker).await == [c.address.to_string()]).then_some(())
    })
    .await;
    traffic.more(2).await;
    let before = (a.requests(), b.requests());
    traffic.more(10).await;
    assert_eq!((a.requests(), b.requests()), before, "only the last file's server is asked");
    assert_eq!(picker.metric("attache_config_reload_failures_total").await, 1.0);
    traffic.stop().await;
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

/// Readiness ends at once, and the picker serves on while load balancers react. An endless stream does not prevent the
/// end of the process.
#[tokio::test(flavor = "multi_thread")]
async fn shutdown_is_unready_at_once_and_ends_within_the_deadline() {
    let echo = Echo::start().await;
    // The delay is longer than a busy machine pauses.
    let (delay, drain) = (Duration::from_secs(5), ["--drain-min-delay", "5s", "--drain-deadline", "6s"]);
    let mut picker = AttacheProcess::start(&[echo.address], &drain).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{}", picker.health)).expect("an address");
    let mut health = HealthClient::new(channel.connect().await.expect("the health port"));
    let request = HealthCheckRequest { service: "envoy.service.ext_proc.v3.ExternalProcessor".into() };
    let mut watch = health.watch(request).await.expect("a watch").into_inner();
    assert_eq!(watch.message().await.expect("a status").map(|m| m.status()), Some(ServingStatus::Serving));
    let endless = "/v1/chat/completions?kind=sse&size=20000000&events=100000&pace_ms=20";
    let request = client::request("POST", to, Http::H1, endless, Payload::sized(chat(300, true, 1)));
    let mut open = client::open(to, Http::H1, request).await.expect("an answer");
    assert!(open.next().await.expect("a first event").is_some());

    picker.process.signal("TERM");
    let asked = Instant::now();
    assert_eq!(watch.message().await.expect("a status").map(|m| m.status()), Some(ServingStatus::NotServing));
    let page = client::get(picker.metrics, "/ready").await.expect("the page /ready");
    assert_eq!(page.status, 503);
    let reply = client::post(to, CHAT, chat(300, false, 1)).await.expect("an answer");
    assert_eq!(reply.status, 200, "served while load balancers look away ({:?})", asked.elapsed());
    assert!(open.next().await.expect("the stream goes on").is_some());
    let status = picker.process.wait().await;
    assert_eq!(status.code(), Some(0));
    assert!(asked.elapsed() >= delay, "not before the delay: {:?}", asked.elapsed());
}

/// A person at a terminal need not wait for load balancers: the delay is longer than this test waits for the end. Every
/// line of the log is JSON, warnings of the start too.
#[tokio::test(flavor = "multi_thread")]
async fn interrupt_ends_an_idle_picker_and_start_warnings_are_json_lines() {
    let echo = Echo::start().await;
    let drain = ["--drain-min-delay", "60s", "--trace-ratio", "0.5", "--enable-pprof"];
    let mut picker = AttacheProcess::start(&[echo.address], &drain).await;
    picker.process.signal("INT");
    assert_eq!(picker.process.wait().await.code(), Some(0));

    let log = picker.process.stderr();
    let lines = log.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect(line));
    let warnings: Vec<_> = lines.filter(|line| line["level"] == "WARN").collect();
    let about = |words: &str| warnings.iter().find(|line| line["message"].as_str().unwrap().contains(words));
    assert!(about("`--enable-pprof` has no effect").is_some(), "{log}");
    let ratio = about("`--trace-ratio` of 0.5 has no effect").expect(&log);
    assert_eq!((&ratio["code"], &ratio["path"]), (&json!("W307"), &json!("--trace-ratio")));
    assert_eq!((ratio.get("source"), ratio.get("line")), (None, None), "a flag is in no file");
}

#[tokio::test(flavor = "multi_thread")]
async fn dns_name_is_resolved_and_its_server_gets_requests() {
    let echo = Echo::start().await;
    // If the name also has an IPv6 address, a server must listen there.
    let _v6 = TcpListener::bind(("::1", echo.address.port())).await.map(Echo::on);
    let config = format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  dns: [{{host: localhost, port: {}}}]\n",
        echo.address.port()
    );
    let picker = AttacheProcess::configured(&config).await;
    assert!(addresses(&picker).await.contains(&echo.address.to_string()), "{:?}", addresses(&picker).await);
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    for _ in 0..10 {
        let reply = client::post(envoy.listener("inference"), CHAT, chat(300, false, 1)).await.expect("an answer");
        assert_eq!(reply.status, 200);
    }
    assert!(echo.requests() > 0);
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

async fn set_faults(server: SocketAddr, faults: serde_json::Value) {
    let reply = client::post(server, "/sim/faults", Bytes::from(faults.to_string())).await.expect("an answer");
    assert!(reply.status.is_success(), "{}: {}", reply.status, String::from_utf8_lossy(&reply.body));
}

/// Whether the metrics of each server are stale.
async fn stale_servers(picker: &AttacheProcess) -> Vec<bool> {
    let endpoints = picker.endpoints().await;
    endpoints.iter().map(|endpoint| endpoint["metrics"]["stale"].as_bool().unwrap_or(true)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn broken_metrics_make_only_one_server_stale() {
    let sim = SimProcess::start(3, &["--model", "sim-8b"]).await;
    let servers: Vec<String> = sim.servers.iter().map(|server| format!("\"{server}\"")).collect();
    let config = format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  scrape: {{interval: 50ms, idleInterval: \
         100ms, timeout: 200ms, staleAfter: 1500ms}}\n  endpoints: [{}]\n",
        servers.join(", ")
    );
    let picker = AttacheProcess::configured(&config).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let traffic = Traffic::start(envoy.listener("inference"), CHAT);
    for fault in ["hang", "garbage", "huge", "error"] {
        set_faults(sim.servers[0], json!({"metrics": fault})).await;
        eventually(&format!("one stale server ({fault})"), || async {
            (stale_servers(&picker).await == [true, false, false]).then_some(())
        })
        .await;
        traffic.more(3).await;
        set_faults(sim.servers[0], json!({})).await;
        eventually(&format!("no stale server (after {fault})"), || async {
            (stale_servers(&picker).await == [false; 3]).then_some(())
        })
        .await;
    }
    traffic.stop().await;
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

/// Envoy's bootstrap in GIE's and llm-d's standalone charts checks health on this port, and these charts set no flag
/// for it.
#[tokio::test(flavor = "multi_thread")]
async fn ext_proc_port_serves_health_checks_unless_disabled() {
    let echo = Echo::start().await;
    for (flags, answers) in [(&[][..], true), (&["--health-checking=false"], false)] {
        let picker = AttacheProcess::start(&[echo.address], flags).await;
        let channel = tonic::transport::Endpoint::from_shared(format!("http://{}", picker.grpc)).expect("an address");
        let health = HealthClient::new(channel.connect().await.expect("the ext-proc port"));
        let expected = if answers { Ok(ServingStatus::Serving) } else { Err(tonic::Code::Unimplemented) };
        eventually("the picker's health", || async {
            let service = "envoy.service.ext_proc.v3.ExternalProcessor".to_owned();
            let checked = health.clone().check(HealthCheckRequest { service }).await;
            let status = checked.map(|response| response.into_inner().status()).map_err(|status| status.code());
            (status == expected).then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn service_manager_is_told_of_start_and_end() {
    let directory = scratch("notify");
    let path = directory.path().join("socket");
    let socket = UnixDatagram::bind(&path).expect("a socket");
    let told = async || {
        let mut message = [0; 64];
        let received = tokio::time::timeout(Duration::from_secs(30), socket.recv(&mut message)).await;
        let length = received.expect("a message within 30 s").expect("a message");
        String::from_utf8_lossy(&message[..length]).into_owned()
    };
    let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
    command.args([
        "run",
        "--bind",
        "127.0.0.1",
        "--secure-serving=false",
        "--drain-min-delay",
        "0s",
        "--engine",
        "none",
    ]);
    command.args(["--grpc-port", "0", "--grpc-health-port", "0", "--metrics-port", "0", "--endpoint", "127.0.0.1:9"]);
    let mut process = Process::spawn("attache", command.env("NOTIFY_SOCKET", &path), directory);
    assert_eq!(told().await.trim_end(), "READY=1");
    assert!(process.stderr().contains("listening"), "the ports are open: {}", process.stderr());
    process.signal("TERM");
    assert_eq!(told().await.trim_end(), "STOPPING=1");
    assert_eq!(process.wait().await.code(), Some(0));
}
