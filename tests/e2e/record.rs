//! A live run through real Envoy is recorded, and all its decisions replay exactly.

use crate::disagg::Stack;
use crate::prefix;
use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::client;
use crate::support::envoy::EnvoyProcess;
use crate::support::process::{Process, scratch};
use crate::support::sim::SimProcess;
use attache::plugins::registry;
use attache_replay::record::{Summary, replay, replay_file};
use attache_sim::profiles;
use bytes::Bytes;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use tokio::task::JoinSet;

/// Strings that must not be in a recording: one of a prompt, and a credential.
const SECRET: &str = "xylophone-in-the-cellar";
const CREDENTIAL: &str = "sk-never-to-be-seen";

fn configuration(round: u32, strategy: &str, servers: &[SocketAddr]) -> String {
    let endpoints: Vec<String> = servers.iter().map(|s| format!("\"{s}\"")).collect();
    format!(
        "# round {round}\napiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  strategy: {strategy}\n  \
         health: {{consecutiveFailures: 2, ejection: 100ms}}\n  prefixCache: {{tenantHeader: authorization}}\n  \
         endpoints: [{}]\n",
        endpoints.join(", ")
    )
}

/// Turns of one conversation. Every second one is streamed, and a failed request ends it.
async fn converse(to: SocketAddr, client_number: u32, turns: usize) -> usize {
    let head = client_number % 4;
    let rules: String = (0..60).map(|i| format!("rule {i} of {SECRET} number {head}. ")).collect();
    let mut messages = vec![json!({"role": "system", "content": rules})];
    for turn in 0..turns {
        messages.push(json!({"role": "user", "content": format!("question {turn} of {client_number}, and why so?")}));
        let stream = (client_number + u32::try_from(turn).expect("few turns")).is_multiple_of(2);
        let body = json!({"model": "sim-8b", "messages": messages, "max_tokens": 20, "stream": stream});
        let payload = crate::support::body::Payload::sized(Bytes::from(body.to_string()));
        let mut request = client::request("POST", to, client::Http::H1, "/v1/chat/completions", payload);
        let headers = request.headers_mut();
        headers.insert("authorization", format!("Bearer {CREDENTIAL}-{}", client_number % 3).parse().expect("a value"));
        headers.insert("x-session-id", client_number.to_string().parse().expect("a value"));
        let reply = client::send(to, client::Http::H1, request).await.expect("an answer");
        if reply.status != 200 {
            return turn;
        }
        let answer = if stream { json!({"role": "assistant", "content": "so it is"}) } else { answer(&reply.json()) };
        messages.push(answer);
    }
    turns
}

fn answer(reply: &Value) -> Value {
    reply["choices"][0]["message"].clone()
}

/// Concurrent conversations with a server that fails sometimes. Returns the number of successful turns.
async fn traffic(to: SocketAddr, failing: SocketAddr, clients: std::ops::Range<u32>) -> usize {
    let mut open = JoinSet::new();
    for number in clients {
        if number % 10 == 5 {
            let faults = json!({"fail_next": {"count": 4, "status": 503}});
            client::post(failing, "/sim/faults", Bytes::from(faults.to_string())).await.expect("an answer");
        }
        open.spawn(converse(to, number, 5));
        if open.len() >= 16 {
            open.join_next().await;
        }
    }
    open.join_all().await.into_iter().sum()
}

/// Records a run with `strategies`, one after another by reloads, and replays it with its own configuration. `more` is
/// added to the pool's section.
async fn recorded(strategies: &[&str], more: &str, record: &Path) -> Summary {
    let sim = SimProcess::start(3, &["--model", "sim-8b"]).await;
    let files = scratch("record");
    let file = files.path().join("attache.yaml");
    let write = |round: usize, strategy: &str| {
        let round = u32::try_from(round).expect("few rounds");
        std::fs::write(&file, configuration(round, strategy, &sim.servers) + more).expect("a file");
    };
    write(0, strategies[0]);
    let picker =
        AttacheProcess::with_file(&file, &["--record", &record.display().to_string(), "--drain-min-delay", "100ms"])
            .await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    for (round, strategy) in strategies.iter().enumerate() {
        if round > 0 {
            write(round, strategy);
            picker.until_metric("attache_config_reloads_total", round as f64).await;
        }
        let first = u32::try_from(round).expect("few rounds") * 100;
        let answered = traffic(to, sim.servers[0], first..first + 40).await;
        assert!(answered > 20, "{answered} turns were answered");
    }
    picker.assert_settled().await;
    if more.contains("flowControl") {
        let waited = picker.metric("attache_queue_wait_seconds_count").await;
        assert!(waited > 20.0, "{waited} requests waited for their turn");
    }
    assert!(picker.metric("attache_recorded_bytes_total").await > 10_000.0);
    let summary = replayed(picker, envoy, record, &["end"]).await;
    // A conversation ends with its first failed request, so not all turns take place.
    assert!(summary.decisions >= 100 * strategies.len() as u64, "{summary}");
    summary
}

/// Ends a recorded run without requests in flight, and replays it with its own configuration. Without the lines of these
/// kinds (`needed`), its decisions differ.
async fn replayed(mut picker: AttacheProcess, envoy: EnvoyProcess, record: &Path, needed: &[&str]) -> Summary {
    for (request, status) in [("70", 200), ("no-such-request", 404)] {
        let page = format!("/explain?request_id={request}");
        let reply = client::get(picker.metrics, &page).await.expect("an answer");
        assert_eq!(reply.status, status, "{page}: {}", String::from_utf8_lossy(&reply.body));
        if status == 200 {
            let explained = reply.json();
            assert_eq!(explained["choice"]["picks"], explained["recorded"], "{explained}");
            assert!(explained["request_id"].as_str().is_some_and(|id| !id.is_empty()), "{explained}");
        }
    }
    let explain = |id: &str, admin: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
        let output = command.args(["explain", "--request", id, "--admin", admin]).output().expect("an output");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let admin = picker.metrics.to_string();
    let (code, shown, error) = explain("70", &admin);
    assert_eq!(code, Some(0), "{error}");
    for part in ["request    70, line ", "\ngoes to    127.0.0.1:", "\nrecorded   the same (", "\nENDPOINT "] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    let (code, _, error) = explain("no-such-request", &admin);
    let unknown = "the recording has no decision about the request `no-such-request`";
    assert!(code == Some(64) && error.contains(unknown), "{error}");
    drop(envoy);
    picker.process.signal("TERM");
    assert!(picker.process.wait().await.success());
    let text = std::fs::read_to_string(record).expect("a recording");
    for secret in [SECRET, CREDENTIAL, "question 3", "so it is"] {
        assert!(!text.contains(secret), "`{secret}` is in the recording");
    }
    let summary = replay_file(record, None, &registry()).expect("a replay");
    assert_eq!(summary.cut, None);
    assert!(summary.is_exact(), "{summary}");
    // The comparison detects missing lines.
    let is_needed = |line: &str| needed.iter().any(|kind| line.starts_with(&format!("{{\"{kind}\"")));
    let without: String = text.lines().filter(|line| !is_needed(line)).flat_map(|l| [l, "\n"]).collect();
    let mangled = replay(without.as_bytes(), None, &registry()).expect("a replay");
    assert!(!mangled.is_exact(), "{mangled}");
    summary
}

#[tokio::test(flavor = "multi_thread")]
async fn recording_replays_exactly_and_other_policies_differ() {
    let files = scratch("recording");
    let record = files.path().join("run.jsonl");
    let summary = recorded(
        &[
            "predicted-latency",
            "{name: pipeline, parameters: {scorers: [{type: prefix-cache-scorer}, {type: queue-scorer}]}}",
            "predicted-latency",
        ],
        "",
        &record,
    )
    .await;
    assert!(summary.matched_recorded > 1_000, "something was cached: {summary}");
    assert_eq!(summary.matched_recorded, summary.matched_replayed);
    let text = std::fs::read_to_string(&record).expect("a recording");
    assert!(text.contains("\"outcome\":\"error_response\""), "the failing server was seen");

    let settings = |strategy: &str| {
        let text = configuration(0, strategy, &[]).replace("endpoints: []", "endpoints: [\"127.0.0.1:1\"]");
        let text = attache_config::ConfigText { name: "other".into(), bytes: text.into_bytes() };
        let sources = attache_config::Sources { registry: registry(), text: Some(text), ..Default::default() };
        attache_config::load(&sources).expect("settings").0
    };
    let other = replay_file(&record, Some(&settings("random")), &registry()).expect("a replay");
    assert_eq!(other.decisions, summary.decisions);
    assert!(other.equal < other.decisions * 2 / 3, "{other}");
    assert!(other.matched_replayed < other.matched_recorded, "{other}");
    let requests: u64 = other.endpoints.values().map(|r| r.replayed).sum();
    assert_eq!(requests, other.decisions, "{other}");

    // The clients name their sessions, so other policies play them in a closed loop.
    let report = files.path().join("report.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
    command.args(["replay", "--endpoints", "3", "--compare", "", "--trace"]).arg(&record).arg("--json").arg(&report);
    let output = command.output().expect("an output");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&std::fs::read(&report).expect("a report")).expect("JSON");
    let programs = &report["runs"][0]["programs"];
    let routed = text.lines().filter(|line| line.starts_with("{\"decide\"") && !line.contains("\"picks\":[]"));
    assert_eq!(programs["complete"], 3 * 40, "three rounds of forty conversations: {programs}");
    assert_eq!(report["runs"][0]["requests"]["total"], routed.count(), "{}", report["runs"][0]["requests"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn random_text_and_session_strategies_replay_exactly() {
    let files = scratch("recording");
    let strategies = ["random", "power-of-two", "chwbl", "prefix-affinity", "session-affinity"];
    recorded(&strategies, "", &files.path().join("run.jsonl")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn queued_decisions_replay_exactly() {
    let files = scratch("recording");
    let queues =
        "  flowControl: {enabled: true, detector: {name: concurrency-detector, parameters: {maxConcurrency: 2}}}\n";
    let record = files.path().join("run.jsonl");
    recorded(&["predicted-latency"], queues, &record).await;
    let text = std::fs::read_to_string(&record).expect("a recording");
    let waits = |line: &str| Some(serde_json::from_str::<Value>(line).ok()?["decide"]["waited"]["nanos"].as_u64()? > 0);
    let waited = text.lines().filter(|line| waits(line).unwrap_or_default()).count();
    assert!(waited > 20, "{waited} decisions say that they waited");
}

#[tokio::test(flavor = "multi_thread")]
async fn split_decisions_replay_exactly() {
    for (disaggregation, sidecars) in [
        ("decider: always, prefillTimeout: 2s, hedgeAfter: 30ms", false),
        ("decider: {type: prefix-based, nonCachedTokens: 400}", false),
        ("mode: header, decider: always", true),
    ] {
        let files = scratch("recording");
        let record = files.path().join("run.jsonl");
        let arguments = ["--record", &record.display().to_string(), "--drain-min-delay", "100ms"];
        let stack = Stack::with_arguments(sidecars, disaggregation, &arguments).await;
        // A prefill server fails now and then.
        let answered = traffic(stack.to(), stack.prefill()[0], 0..40).await;
        assert!(answered > 20, "{answered} turns were answered");
        stack.picker.assert_settled().await;
        let Stack { picker, envoy, .. } = stack;
        let summary = replayed(picker, envoy, &record, &["first", "end"]).await;
        assert!(summary.decisions >= 100, "{disaggregation}: {summary}");
        let text = std::fs::read_to_string(&record).expect("a recording");
        for line in ["\"prefill\":[", "{\"dispatch\":", "\"leg\":\"prefill\"", "\"outcome\":\"error_response\""] {
            assert!(text.contains(line), "{disaggregation}: there is no `{line}`");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn decisions_by_kv_events_replay_exactly() {
    // Few blocks, so that the engines evict some.
    let sim = SimProcess::start(3, &[prefix::SIM, &["--blocks", "256"]].concat()).await;
    let files = scratch("recording");
    let (file, record) = (files.path().join("attache.yaml"), files.path().join("run.jsonl"));
    let config = prefix::config(prefix::BY_PREFIX, "tiktoken", &sim.servers).await;
    std::fs::write(&file, &config).expect("a file");
    let arguments = ["--record", &record.display().to_string(), "--drain-min-delay", "100ms"];
    let picker = AttacheProcess::with_file(&file, &arguments).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    prefix::load(to, 0..60).await;
    prefix::until_exact(&picker, &sim.servers).await;
    prefix::load(to, 60..200).await;
    // Another cache replaces the first: it has another size limit.
    std::fs::write(&file, config.replace("kvEvents: {}", "maxBytes: 67108864, kvEvents: {}")).expect("a file");
    picker.until_metric("attache_config_reloads_total", 1.0).await;
    prefix::until_exact(&picker, &sim.servers).await;
    prefix::load(to, 200..300).await;
    picker.assert_settled().await;
    let summary = replayed(picker, envoy, &record, &["kv"]).await;
    assert_eq!(summary.decisions, 300, "{summary}");
    let text = std::fs::read_to_string(&record).expect("a recording");
    for line in ["{\"stored\":", "{\"removed\":", "\"trust\":\"exact\"", "{\"caches\":", "\"number\":1"] {
        assert!(text.contains(line), "there is no `{line}`");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn full_recording_ends_and_requests_are_served() {
    let sim = SimProcess::start(1, &["--model", "sim-8b"]).await;
    let files = scratch("recording");
    let record = files.path().join("run.jsonl");
    let arguments =
        ["--record", &record.display().to_string(), "--record-max-bytes", "20000", "--drain-min-delay", "100ms"];
    let mut picker = AttacheProcess::start(&sim.servers, &arguments).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    assert_eq!(traffic(envoy.listener("inference"), sim.servers[0], 0..3).await, 15);
    assert_eq!(picker.metric("attache_recording").await, 0.0);
    picker.assert_settled().await;
    drop(envoy);
    picker.process.signal("TERM");
    assert!(picker.process.wait().await.success());
    let length = std::fs::metadata(&record).expect("a recording").len();
    assert!((10_000..=20_000).contains(&length), "{length} bytes");
    let summary = replay_file(&record, None, &registry()).expect("what is there is whole");
    assert!(summary.is_exact() && summary.cut.is_none(), "{summary}");
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_profile_is_fitted_from_a_recorded_run() {
    let costs = ["--step-base=2ms", "--weight-read=18ms", "--per-prefill-token=60us", "--per-prefill-pair=0ns"];
    let more = ["--model=sim-8b", "--per-decode-seq=0ns", "--per-context-token=0ns", "--blocks=20000"];
    let sim = SimProcess::start(1, &[&costs[..], &more].concat()).await;
    let files = scratch("recording");
    let path = |name: &str| files.path().join(name).display().to_string();
    let (record, profile) = (path("run.jsonl"), path("fitted.yaml"));
    let mut picker = AttacheProcess::start(&sim.servers, &["--record", &record, "--drain-min-delay", "100ms"]).await;
    // The constants are fitted from measured times.
    let envoy = EnvoyProcess::alone(&by_header("original-dst.yaml", &picker)).await;
    let attache = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
        Process::spawn("attache replay", command.arg("replay").args(arguments), scratch("replay"))
    };
    let target = format!("http://{}", envoy.listener("inference"));
    let workload = "unique:input=100..4000,output=10..60,stages=2x5/6x15";
    let mut played = attache(&["--workload", workload, "--target", &target, "--api", "completions"]);
    assert!(played.wait().await.success(), "{}", played.stderr());
    picker.assert_settled().await;
    drop(envoy);
    picker.process.signal("TERM");
    assert!(picker.process.wait().await.success());

    let mut fitted = attache(&["--fit-profile", &record, "--profile-out", &profile]);
    assert!(fitted.wait().await.success(), "{}", fitted.stderr());
    let engine = profiles::file::read(&std::fs::read(&profile).expect("a file")).expect("a profile");
    assert_eq!((engine.block_size, engine.num_blocks), (16, 20_000), "as its page says");
    let near = |found: Duration, truth: Duration| (found.as_secs_f64() / truth.as_secs_f64() - 1.0).abs() < 0.15;
    let latency = &engine.latency;
    assert!(near(latency.step_base + latency.weight_read, Duration::from_millis(20)), "{}", fitted.stdout());
    assert!(near(engine.latency.per_prefill_token, Duration::from_micros(60)), "{}", fitted.stdout());
}
