//! Requests with a deadline for the first token, through real Envoy, to busy simulated servers. Unmeetable ones are
//! rejected at once with `retry-after`; the others are served.

use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::Payload;
use crate::support::client::{self, Http, Reply};
use crate::support::envoy::EnvoyProcess;
use crate::support::process::eventually;
use crate::support::sim::SimProcess;
use http::HeaderValue;
use serde_json::json;
use std::net::SocketAddr;

/// A server that prefills 10,000 tokens a second and responds with two tokens.
const SIM: &[&str] =
    &["--per-prefill-token", "100us", "--per-prefill-pair", "0ns", "--output-tokens", "2", "--no-prefix-caching"];
/// Bytes per prompt token, approximately.
const TOKEN: usize = 4;

async fn picker(sim: &SimProcess, more: &str) -> AttacheProcess {
    let server = sim.servers[0];
    AttacheProcess::configured(&format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  deadlineAdmission: true\n  endpoints: [\"{server}\"]\n{more}"
    ))
    .await
}

/// Sends a request with a new prompt and a deadline in milliseconds.
async fn ask(to: SocketAddr, number: usize, tokens: usize, deadline: Option<&'static str>) -> Reply {
    let text = format!("{number:08} ").repeat(tokens * TOKEN / 9 + 1);
    let body = json!({"model": "sim-8b", "messages": [{"role": "user", "content": text}], "stream": true});
    let target = "/v1/chat/completions";
    let mut request = client::request("POST", to, Http::H1, target, Payload::sized(body.to_string().into()));
    if let Some(ms) = deadline {
        request.headers_mut().insert("x-slo-ttft-ms", HeaderValue::from_static(ms));
    }
    client::send(to, Http::H1, request).await.expect("an answer")
}

/// Sends requests from which the picker learns the server's speed.
async fn warm_up(to: SocketAddr) {
    for round in 0..24 {
        assert_eq!(ask(to, round, 200 + round % 4 * 500, None).await.status, 200);
    }
}

/// Requests whose deadline had this outcome.
async fn deadlines_with_outcome(picker: &AttacheProcess, outcome: &str) -> u64 {
    let page = client::get(picker.metrics, "/metrics").await.expect("the picker's metrics");
    let text = String::from_utf8_lossy(&page.body).into_owned();
    let label = format!("outcome=\"{outcome}\"");
    let line = text.lines().find(|l| l.starts_with("attache_deadlines_total{") && l.contains(&label));
    line.and_then(|l| l.rsplit_once(' ')?.1.parse().ok()).expect("the series")
}

fn retry_after(reply: &Reply) -> u64 {
    reply.header("retry-after").parse().expect("seconds")
}

#[tokio::test(flavor = "multi_thread")]
async fn unmeetable_deadlines_are_rejected_and_other_requests_served() {
    let sim = SimProcess::start(1, &[SIM, &["--model", "sim-8b"]].concat()).await;
    let picker = picker(&sim, "").await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    // The speed is unknown yet, so no request is rejected.
    assert_eq!(ask(to, 900, 100, Some("1")).await.status, 200);
    warm_up(to).await;
    assert_eq!(ask(to, 901, 200, Some("2000")).await.status, 200, "an idle server has it in time");
    // Prompts that take four seconds to prefill.
    let mut busy = tokio::task::JoinSet::new();
    for number in 0..4 {
        busy.spawn(ask(to, 1_000 + number, 10_000, None));
    }
    picker.until_metric("attache_endpoint_in_flight", 4.0).await;
    let refused = ask(to, 902, 200, Some("500")).await;
    assert_eq!((refused.status.as_u16(), refused.header("x-attache-reason")), (429, "deadline_unmet"));
    assert!((1..=10).contains(&retry_after(&refused)), "{}", retry_after(&refused));
    assert_eq!(ask(to, 903, 200, Some("30000")).await.status, 200, "it has time");
    assert_eq!(ask(to, 904, 200, None).await.status, 200, "it asks for nothing");
    assert!(busy.join_all().await.iter().all(|reply| reply.status == 200));
    picker.until_metric("attache_endpoint_in_flight", 0.0).await;
    assert_eq!(ask(to, 905, 200, Some("2000")).await.status, 200, "the server is idle again");
    for (outcome, count) in [("unknown", 1), ("fits", 3), ("late", 1), ("queue", 0)] {
        assert_eq!(deadlines_with_outcome(&picker, outcome).await, count, "{outcome}");
    }
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deadline_shorter_than_the_queue_wait_is_rejected() {
    for (ordering, trusted, goes_first) in
        [("fcfs", true, false), ("slo-urgency", false, false), ("slo-urgency", true, true)]
    {
        let flow = format!(
            "  flowControl:\n    enabled: true\n    detector: {{name: concurrency-detector, parameters: {{maxConcurrency: 1}}}}\n    \
             defaultBand: {{ordering: {ordering}}}\nexchange:\n  trustClientHeaders: {trusted}\n"
        );
        let sim = SimProcess::start(1, &[SIM, &["--model", "sim-8b"]].concat()).await;
        let picker = picker(&sim, &flow).await;
        let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
        let to = envoy.listener("inference");
        warm_up(to).await;
        // Prompts that take eight seconds, one after another. The first few show how fast the queue moves.
        let mut busy = tokio::task::JoinSet::new();
        for number in 0..40 {
            busy.spawn(ask(to, 1_000 + number, 2_000, None));
        }
        eventually("the queue to be full and to have moved", || async {
            let dispatches = picker.metric("attache_queue_wait_seconds_count").await;
            (dispatches >= 4.0 && picker.metric("attache_queued_requests").await >= 20.0).then_some(())
        })
        .await;
        let urgent = ask(to, 902, 200, Some("1500")).await;
        if goes_first {
            assert_eq!(urgent.status, 200, "its turn is next, whoever else waits");
        } else {
            assert_eq!((urgent.status.as_u16(), urgent.header("x-attache-reason")), (429, "deadline_unmet"));
            assert!((1..=30).contains(&retry_after(&urgent)), "{}", retry_after(&urgent));
        }
        assert_eq!(ask(to, 903, 200, Some("45000")).await.status, 200, "its turn comes in time");
        assert!(busy.join_all().await.iter().all(|reply| reply.status == 200), "who asks for nothing is served");
        let refused = u64::from(!goes_first);
        for (outcome, count) in [("queue", refused), ("waits", 2 - refused), ("passed", 0)] {
            assert_eq!(deadlines_with_outcome(&picker, outcome).await, count, "{ordering} {trusted}: {outcome}");
        }
        picker.until_metric("attache_queued_requests", 0.0).await;
        envoy.assert_picker_was_correct().await;
        picker.assert_settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn slo_profile_limits_requests_per_server_and_queues_the_rest() {
    let sim = SimProcess::start(2, &[SIM, &["--model", "sim-8b"]].concat()).await;
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("profile.json");
    // The objective allows one request at a time.
    let profile = json!({
        "gpu": "any", "indexes": [[4, 1024], [64, 8192]], "tputs": [[2.0, 2.0], [2.0, 2.0]], "e2e": [[0.5, 0.5], [0.5, 0.5]],
        "slos": {"percentile": 99, "e2e": 5.0},
    });
    std::fs::write(&path, profile.to_string()).expect("a profile");
    let picker = AttacheProcess::configured(&format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  \
         strategy: {{name: slo, parameters: {{profiles: [{}]}}}}\n  endpoints: [\"{}\", \"{}\"]\n  flowControl:\n    enabled: true\n    \
         detector: slo-load-detector\n    defaultBand: {{ordering: slo-urgency}}\n",
        path.display(),
        sim.servers[0],
        sim.servers[1]
    ))
    .await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let mut clients = tokio::task::JoinSet::new();
    for number in 0..12 {
        clients.spawn(ask(to, number, 4_000, None));
    }
    assert!(clients.join_all().await.iter().all(|reply| reply.status == 200));
    // Two requests start at once, and one or two later ones may find a server that is free again.
    let waited = picker.metric("attache_queue_wait_seconds_count").await;
    assert!(waited >= 6.0, "{waited}");
    assert_eq!(picker.metric("attache_endpoint_requests_total").await, 12.0);
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}
