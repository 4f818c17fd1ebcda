//! Why did this request go to that endpoint? The log, the decisions, a response header and `attache explain` answer it.

use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::Payload;
use crate::support::client::{self, Http, Reply};
use crate::support::envoy::EnvoyProcess;
use crate::support::process::eventually;
use crate::support::sim::SimProcess;
use bytes::Bytes;
use http::HeaderValue;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::process::Command;

const ROUTE: &str = "x-attache-route";

fn configuration(exchange: &str, servers: &[SocketAddr]) -> String {
    let endpoints: Vec<String> = servers.iter().map(|server| format!("\"{server}\"")).collect();
    format!(
        "apiVersion: attache.dev/v1\nkind: Attache\nexchange: {exchange}\npools:\n- name: default\n  endpoints: [{}]\n",
        endpoints.join(", ")
    )
}

/// Sends a streamed request with this id.
async fn ask(to: SocketAddr, id: &str) -> Reply {
    let text = format!("{} What follows from that? {id}", "A long text about queues. ".repeat(100));
    let body =
        json!({"model": "sim-8b", "stream": true, "max_tokens": 10, "messages": [{"role": "user", "content": text}]});
    let payload = Payload::sized(Bytes::from(body.to_string()));
    let mut request = client::request("POST", to, Http::H1, "/v1/chat/completions", payload);
    request.headers_mut().insert("x-request-id", HeaderValue::from_str(id).expect("an id"));
    request.headers_mut().insert("x-session-affinity", HeaderValue::from_static("ses_2"));
    request.headers_mut().insert("x-parent-session-id", HeaderValue::from_static("ses_1"));
    let reply = client::send(to, Http::H1, request).await.expect("a response");
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    reply
}

/// The record of the request with this id.
async fn record(picker: &AttacheProcess, id: &str) -> Value {
    let page = format!("/decisions?request_id={id}");
    eventually("the record", || async {
        let list = client::get(picker.metrics, &page).await.expect("the page").json();
        list.as_array().and_then(|list| list.first().cloned())
    })
    .await
}

/// Exit code and output of `attache explain` for a request of this picker.
fn explain(picker: &AttacheProcess, flag: &str, id: &str) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
    let output =
        command.args(["explain", flag, id, "--admin", &picker.metrics.to_string()]).output().expect("an output");
    (output.status.code(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn log_decisions_header_and_command_say_why_a_request_went_there() {
    let sim = SimProcess::start(3, &["--model", "sim-8b", "--speed", "20"]).await;
    let exchange = "{routeHeader: true, explain: {logRatio: 1, timeRatio: 1}}";
    let picker = AttacheProcess::configured(&configuration(exchange, &sim.servers)).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    for request in 0..30 {
        ask(to, &format!("earlier-{request}")).await;
    }
    let reply = ask(to, "why-1").await;
    let record = record(&picker, "why-1").await;
    let endpoint = record["endpoint"].as_str().expect("an endpoint").to_owned();

    let receipt = reply.header(ROUTE);
    let begin = format!("endpoint=\"{endpoint}\"; cached={}; prompt=", record["estimated_cached_tokens"]);
    assert!(receipt.starts_with(&begin) && receipt.len() <= 256, "{receipt}: {record}");
    assert!(receipt.ends_with("; queue_ms=0; reason=\"least predicted cost\""), "{receipt}");

    assert_eq!((&record["explained"], &record["reason"]), (&true.into(), &"least predicted cost".into()), "{record}");
    let runner_up = record["runner_up"]["endpoint"].as_str().expect("a runner-up").to_owned();
    assert!(runner_up != endpoint && sim.servers.iter().any(|server| server.to_string() == runner_up), "{record}");
    assert!(record["runner_up"]["margin_ms"].as_f64().is_some_and(|margin| margin >= 0.0), "{record}");
    for time in ["predicted_ttft_ms", "ttft_ms"] {
        assert!(record[time].as_f64().is_some_and(|ms| ms > 0.0 && ms < 60_000.0), "{time}: {record}");
    }

    let log = picker.process.stderr();
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let logged = lines.filter(|line| line["request_id"] == "why-1").collect::<Vec<_>>();
    assert_eq!(logged.len(), 1, "{logged:?}");
    assert!(logged[0]["picks"].as_str().is_some_and(|picks| picks.starts_with(&endpoint)), "{}", logged[0]["picks"]);
    assert_eq!(logged[0]["runner_up"], record["runner_up"]["endpoint"]);

    let agent = json!({
        "program": "ses_1", "chain": "ses_2", "parent": "ses_1",
        "kind": "sub_agent", "source": "header", "field": "x-session-affinity",
    });
    assert_eq!(record["agent"], agent, "{record}");
    for (field, said) in [
        ("program", "ses_1"),
        ("chain", "ses_2"),
        ("parent_chain", "ses_1"),
        ("agent_kind", "sub_agent"),
        ("agent_source", "header"),
        ("named_by", "x-session-affinity"),
    ] {
        assert_eq!(logged[0][field], said, "{}", logged[0]);
    }

    for flag in ["--request-id", "--request"] {
        let (code, shown) = explain(&picker, flag, "why-1");
        assert_eq!(code, Some(0), "{shown}");
        let goes_to = format!("\ngoes to    {endpoint}");
        let agent = "\nagent      sub-agent of program ses_1, chain ses_2, parent ses_1 (header: x-session-affinity)";
        assert!(shown.contains(agent), "{shown}");
        for part in ["id         why-1", &goes_to, "WHY predicted-latency", "first token, s", "delay of others, s"] {
            assert!(shown.contains(part), "{part}: {shown}");
        }
        // In the table of endpoints and in that of scores.
        for server in &sim.servers {
            let rows = shown.lines().filter(|line| line.starts_with(&server.to_string())).count();
            assert_eq!(rows, 2, "{server}: {shown}");
        }
    }
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn explanations_are_kept_by_default_and_the_header_is_not_sent() {
    let sim = SimProcess::start(2, &["--model", "sim-8b", "--speed", "20"]).await;
    let picker = AttacheProcess::configured(&configuration("{}", &sim.servers)).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let reply = ask(to, "first").await;
    assert_eq!(reply.header(ROUTE), "");
    assert_eq!(record(&picker, "first").await["explained"], true);
    assert_eq!(explain(&picker, "--request-id", "first").0, Some(0));
    let (code, shown) = explain(&picker, "--request-id", "unknown");
    assert!(code == Some(64) && shown.contains("`unknown` is kept: the latest 4096 are"), "{code:?}: {shown}");
    // Unless explanations are off.
    let without = AttacheProcess::configured(&configuration("{explain: {kept: 0}}", &sim.servers)).await;
    let envoy_of_it = envoy.beside(&by_header("original-dst.yaml", &without)).await;
    ask(envoy_of_it.listener("inference"), "first").await;
    assert_eq!(record(&without, "first").await["explained"], false);
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}
