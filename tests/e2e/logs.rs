//! The log of a picker, whose servers and configuration fail: each line fits the schema, and requests have none.

#[path = "../support/log_schema.rs"]
mod log_schema;

use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::chat;
use crate::support::client;
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::process::{Process, eventually, scratch};
use log_schema::LogSchema;
use serde_json::Value;
use std::net::SocketAddr;
use std::process::Command;
use tokio::net::TcpListener;

const CHAT: &str = "/v1/chat/completions";

/// The lines with this message so far.
fn with_message(picker: &AttacheProcess, message: &str) -> Vec<Value> {
    let log = picker.process.stderr();
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|line| line["message"].as_str().is_some_and(|text| text.starts_with(message))).collect()
}

async fn until_logged(picker: &AttacheProcess, message: &str) -> Value {
    eventually(message, || async { with_message(picker, message).pop() }).await
}

/// Every line fits the schema.
fn assert_fits(picker: &AttacheProcess) -> usize {
    let (schema, log) = (LogSchema::read(), picker.process.stderr());
    for line in log.lines() {
        if let Some(error) = schema.error(line) {
            panic!("{error}: {line}");
        }
    }
    log.lines().count()
}

fn configuration(more: &str, endpoints: &[SocketAddr]) -> String {
    let endpoints: Vec<String> = endpoints.iter().map(|address| format!("\"{address}\"")).collect();
    format!(
        "apiVersion: attache.dev/v1\nkind: Attache\n{more}\npools:\n- name: default\n  \
         health: {{consecutiveFailures: 2, errorPeriod: 0s, ejection: 100ms, maxEjectionPercent: 100}}\n  \
         endpoints: [{}]\n",
        endpoints.join(", ")
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn log_of_failures_fits_the_schema_and_has_no_line_for_each_request() {
    let (good, bad) = (Echo::start().await, Echo::failing().await);
    let files = scratch("logs");
    let file = files.path().join("attache.yaml");
    let write = |more: &str| std::fs::write(&file, configuration(more, &[good.address, bad.address])).expect("a file");
    write("");
    let picker = AttacheProcess::with_file(&file, &[]).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    for request in 0..300 {
        let reply = client::post(to, CHAT, chat(300, request % 2 == 0, 1)).await.expect("a response");
        assert!([200, 503].contains(&reply.status.as_u16()), "{}", reply.status);
        let refused = client::post(to, CHAT, "{".into()).await.expect("a response");
        assert_eq!(refused.status, 400);
    }
    write("exchange: {explain: {kept: -1}}");
    let failed = until_logged(&picker, "configuration refused").await;
    assert!(failed["line"].is_u64() && failed["path"] == "exchange.explain.kept", "{failed}");
    write("exchange: {explain: {logRatio: 1}}");
    until_logged(&picker, "configuration reloaded").await;
    let reply = client::post(to, CHAT, chat(300, false, 1)).await.expect("a response");
    assert!([200, 503].contains(&reply.status.as_u16()), "{}", reply.status);
    let decision = until_logged(&picker, "decision").await;
    assert!(decision["request_id"].is_string() && decision["parts"].is_string(), "{decision}");
    assert!(decision["margin"].is_number() && decision["runner_up"].is_string(), "{decision}");
    let scraped = with_message(&picker, "scrape failed");
    assert!(scraped.iter().all(|line| line["help"].is_string() && line["url"].is_string()), "{scraped:?}");
    let lines = assert_fits(&picker);
    let ejections = with_message(&picker, "endpoint ejected").len();
    assert!(lines - ejections < 20, "{lines} lines, {ejections} ejections:\n{}", picker.process.stderr());
    drop(envoy);
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pool_without_a_server_is_logged_once_and_again_when_it_serves() {
    let port = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = port.local_addr().expect("an address");
    drop(port);
    let picker = AttacheProcess::unready(&["--config-text".to_owned(), configuration("", &[address])]).await;
    let warnings = async || {
        let page = client::get(picker.metrics, "/endpoints").await.expect("the page").json();
        page["warnings"].as_array().expect("a list").clone()
    };
    let shown = eventually("the cause", || async {
        warnings().await.into_iter().find(|w| w["message"].as_str().is_some_and(|text| text.contains("/metrics")))
    })
    .await;
    assert_eq!((&shown["code"], &shown["pool"]), (&"no_endpoint_reached".into(), &"default".into()), "{shown}");
    let logged = until_logged(&picker, "pool can't serve").await;
    assert_eq!((&logged["level"], &logged["code"]), (&"WARN".into(), &"no_endpoint_reached".into()), "{logged}");
    assert!(logged["help"].is_string() && logged["message"].as_str().is_some_and(|m| m.contains(&address.to_string())));
    let _server = Echo::on(TcpListener::bind(address).await.expect("the same port"));
    let again = until_logged(&picker, "pool can serve again").await;
    assert_eq!((&again["reached"], &again["endpoints"]), (&1.into(), &1.into()), "{again}");
    eventually("no warning", async || warnings().await.is_empty().then_some(())).await;
    assert_eq!(with_message(&picker, "pool can't serve").len(), 1);
    assert_fits(&picker);
}

#[tokio::test(flavor = "multi_thread")]
async fn gateway_that_leaves_no_time_to_queue_is_named_at_the_first_request() {
    let server = Echo::start().await;
    let queue = configuration("", &[server.address]) + "  flowControl: {enabled: true}\n";
    let picker = AttacheProcess::configured(&queue).await;
    let envoy = EnvoyProcess::start(&by_header("buffered.yaml", &picker)).await;
    for _ in 0..5 {
        let reply = client::post(envoy.listener("inference"), CHAT, chat(300, false, 1)).await.expect("a response");
        assert_eq!(reply.status, 200);
    }
    let warning = eventually("a warning", async || {
        let page = client::get(picker.metrics, "/endpoints").await.expect("the page").json();
        page["warnings"].as_array().expect("a list").first().cloned()
    })
    .await;
    assert_eq!(warning["code"], "no_time_to_queue");
    assert!(warning["help"].as_str().is_some_and(|help| help.contains("FULL_DUPLEX_STREAMED")), "{warning}");
    assert_eq!(with_message(&picker, "requests are not queued").len(), 1);
    assert_fits(&picker);
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

/// Runs `attache run` below Python, which gives it a terminal if `terminal` is set. Returns its output when it listens,
/// or when it has shown its summary.
async fn output(terminal: bool, server: SocketAddr) -> String {
    let run = if terminal {
        "import pty, sys; pty.spawn(sys.argv[1:])"
    } else {
        "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
    };
    let mut command = Command::new("python3");
    command.args(["-c", run, env!("CARGO_BIN_EXE_attache"), "run", "--endpoint", &server.to_string()]);
    command.args(["--bind", "127.0.0.1", "--grpc-port", "0", "--grpc-health-port", "0", "--metrics-port", "0"]);
    let mut process = Process::spawn("attache on a terminal", &mut command, scratch("terminal"));
    let everything = |process: &Process| process.stdout() + &process.stderr();
    let last = if terminal { "status page" } else { "pool can't serve" };
    process.wait_for(last, |process| everything(process).contains(last).then_some(())).await;
    everything(&process)
}

#[tokio::test(flavor = "multi_thread")]
async fn terminal_shows_pools_endpoints_and_addresses_at_the_start() {
    let server = Echo::start().await;
    let shown = output(true, server.address).await;
    for part in ["serves 1 pool", "default  predicted-latency, 1 of 1 endpoint reached", "ext-proc (Envoy)  127.0.0.1:"]
    {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    let closed = SocketAddr::from(([127, 0, 0, 1], 1));
    let unreached = output(true, closed).await;
    for part in ["0 of 1 endpoint reached", "127.0.0.1:1: http://127.0.0.1:1/metrics: "] {
        assert!(unreached.contains(part), "{part}: {unreached}");
    }
    let silent = output(false, closed).await;
    assert!(!silent.contains("status page") && silent.contains("listening"), "{silent}");
}
