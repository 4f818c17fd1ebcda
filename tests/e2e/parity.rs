//! Live decisions through real Envoy, explanations of the same requests, and the replay of their recording agree.
//!
//! Each row of [`ROWS`] uses something by which a dry run or a replay could differ from a live decision. Before each
//! request, `POST /explain` foretells it. Afterwards, its recording explains it, and the whole recording is replayed.

use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::Payload;
use crate::support::client::{self, Http, Reply};
use crate::support::envoy::EnvoyProcess;
use crate::support::process::scratch;
use crate::support::sim::SimProcess;
use attache::plugins::registry;
use attache_replay::record::replay_file;
use bytes::Bytes;
use serde_json::{Value, json};
use std::net::SocketAddr;

/// A request: what is special about it, path, headers, body.
pub(crate) type Row = (&'static str, &'static str, &'static [(&'static str, &'static str)], Value);

fn long_text(topic: &str) -> String {
    (0..60).map(|i| format!("sentence {i} about {topic}, which fills some blocks. ")).collect()
}

fn chat(model: &str, topic: &str) -> Value {
    json!({"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": long_text(topic)}]})
}

pub(crate) fn rows() -> Vec<Row> {
    let path = "/v1/chat/completions";
    vec![
        ("new prompt", path, &[], chat("sim-8b", "ships")),
        ("cached prompt", path, &[], chat("sim-8b", "ships")),
        ("blocks of another tenant are not its own", path, &[("x-tenant", "acme")], chat("sim-8b", "ships")),
        ("blocks of the tenant", path, &[("x-tenant", "acme")], chat("sim-8b", "ships")),
        ("priority by objective", path, &[("x-gateway-inference-objective", "batch")], chat("sim-8b", "maps")),
        ("model drawn by weight", path, &[], chat("canary", "trains")),
        ("model drawn by weight again", path, &[], chat("canary", "trains")),
        ("model named by a header", path, &[("x-gateway-model-name-rewrite", "sim-8b")], chat("other", "ships")),
        ("label filter", path, &[("external-filter", "zone=b")], chat("sim-8b", "ships")),
        ("strategy named by a header", path, &[("routing-strategy", "random")], chat("sim-8b", "ships")),
        ("session", path, &[("x-session-id", "7"), ("routing-strategy", "session-affinity")], chat("sim-8b", "ships")),
        ("strategy that looks nothing up", path, &[("routing-strategy", "least-request")], chat("sim-8b", "ships")),
        ("strategy that reads text", path, &[("routing-strategy", "prefix-affinity")], chat("sim-8b", "ships")),
        (
            "two responses",
            path,
            &[],
            json!({"n": 2, "model": "sim-8b", "messages": [{"role": "user", "content": "hi"}]}),
        ),
        (
            "completion",
            "/v1/completions",
            &[],
            json!({"model": "sim-8b", "prompt": long_text("ships"), "max_tokens": 4}),
        ),
        ("no KV cache", "/v1/embeddings", &[], json!({"model": "sim-8b", "input": "a word"})),
        ("body that can't be parsed", path, &[], json!({"model": "sim-8b", "messages": "none"})),
    ]
}

/// A pool whose state changes only by requests: metrics are scraped once, and stay fresh.
pub(crate) fn configuration(strategy: &str, servers: &[SocketAddr], kept: usize) -> String {
    let endpoints: Vec<String> = servers
        .iter()
        .enumerate()
        .map(|(i, server)| {
            format!("{{address: \"{server}\", labels: {{zone: {}}}}}", if i % 2 == 0 { "a" } else { "b" })
        })
        .collect();
    format!(
        "apiVersion: attache.dev/v1\nkind: Attache\nserver: {{seed: 11}}\n\
         exchange: {{trustClientHeaders: true, onUnparseable: fallback, objectives: {{batch: -1}}, \
         explain: {{kept: {kept}}}}}\n\
         pools:\n- name: default\n  strategy: {strategy}\n  endpoints: [{}]\n  \
         scrape: {{interval: 60s, idleInterval: 60s, staleAfter: 600s}}\n  \
         prefixCache: {{tenantHeader: x-tenant, isolateTenants: true}}\n  \
         modelRewrites: [{{model: canary, targets: [{{model: sim-8b, weight: 1}}, {{model: sim-8b-next, weight: 1}}]}}]\n  \
         requestStrategy: {{allow: ['*'], filterHeader: external-filter}}\n",
        endpoints.join(", ")
    )
}

pub(crate) async fn send(to: SocketAddr, id: &str, (_, path, headers, body): &Row) -> Reply {
    let mut request = client::request("POST", to, Http::H1, path, Payload::sized(Bytes::from(body.to_string())));
    let all = headers.iter().chain(&[("content-type", "application/json")]);
    for (name, value) in all.copied().chain([("x-request-id", id)]) {
        request.headers_mut().insert(name, value.parse().expect("a value"));
    }
    client::send(to, Http::H1, request).await.expect("an answer")
}

/// The explanation of the request, before it is sent.
async fn foretold(picker: &AttacheProcess, (_, path, headers, body): &Row) -> Value {
    let header = |(name, value): &(&str, &str)| format!("&header={name}:{}", value.replace('=', "%3D"));
    let target = format!("/explain?path={path}{}", headers.iter().map(header).collect::<String>());
    let body = Payload::sized(Bytes::from(body.to_string()));
    let mut request = client::request("POST", picker.metrics, Http::H1, &target, body);
    request.headers_mut().insert("content-type", "application/json".parse().expect("a value"));
    let reply = client::send(picker.metrics, Http::H1, request).await.expect("an answer");
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    reply.json()
}

async fn page(picker: &AttacheProcess, page: &str) -> Value {
    let reply = client::get(picker.metrics, page).await.expect("an answer");
    assert_eq!(reply.status, 200, "{page}: {}", String::from_utf8_lossy(&reply.body));
    reply.json()
}

#[tokio::test(flavor = "multi_thread")]
async fn explanation_live_decision_and_replay_agree_for_each_kind_of_request() {
    // The second picker keeps explanations; the others explain from their recordings.
    for (strategy, kept) in [("random", 0), ("prefix-cache", 100), ("predicted-latency", 0)] {
        let sim = SimProcess::start(4, &["--model", "sim-8b", "--lora", "sim-8b-next"]).await;
        let files = scratch("parity");
        let (file, record) = (files.path().join("attache.yaml"), files.path().join("run.jsonl"));
        std::fs::write(&file, configuration(strategy, &sim.servers, kept)).expect("a file");
        let arguments = ["--record", &record.display().to_string(), "--drain-min-delay", "100ms"];
        let mut picker = AttacheProcess::with_file(&file, &arguments).await;
        let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
        let to = envoy.listener("inference");
        let first =
            ("stored response", "/v1/responses", &[][..], json!({"model": "sim-8b", "input": long_text("ships")}));
        let stored = send(to, "stored", &first).await.json()["id"].clone();
        assert!(stored.is_string(), "{stored}");
        let next = json!({"model": "sim-8b", "input": "and then?", "previous_response_id": stored});
        let rows: Vec<Row> =
            rows().into_iter().chain([("next turn of a stored response", first.1, first.2, next)]).collect();
        for (i, row) in rows.iter().enumerate() {
            let id = format!("row-{i}");
            let foretold = foretold(&picker, row).await;
            send(to, &id, row).await;
            picker.assert_settled().await;
            let about = || format!("{strategy}, {}", row.0);
            let live = page(&picker, &format!("/decisions?request_id={id}")).await;
            let live = live["decisions"].get(0).unwrap_or(&live[0]).clone();
            assert_eq!(live["endpoint"], foretold["picks"][0], "{}: {foretold}\n{live}", about());
            assert_eq!(live["model"], foretold["model"], "{}", about());
            assert_eq!(live["reason"], foretold["reason"], "{}", about());
            let explained = page(&picker, &format!("/explain?request_id={id}")).await;
            assert_eq!(explained["choice"]["picks"], foretold["picks"], "{}: {explained}", about());
            assert_eq!(explained["choice"]["reason"], foretold["reason"], "{}", about());
            if kept == 0 {
                assert_eq!(explained["recorded"], foretold["picks"], "{}", about());
            } else {
                assert_eq!(explained["choice"]["parts"], foretold["parts"], "{}", about());
            }
            let excluded = |endpoint: &Value| (endpoint["address"].clone(), endpoint["excluded"].clone());
            let all =
                |of: &Value| of["endpoints"].as_array().expect("endpoints").iter().map(excluded).collect::<Vec<_>>();
            assert_eq!(all(&explained), all(&foretold), "{}", about());
        }
        drop(envoy);
        picker.process.signal("TERM");
        assert!(picker.process.wait().await.success());
        let summary = replay_file(&record, None, &registry()).expect("a replay");
        assert!(
            summary.is_exact() && summary.decisions + summary.preset == rows.len() as u64 + 1,
            "{strategy}: {summary}"
        );
    }
}
