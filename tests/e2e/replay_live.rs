//! Workloads that are replayed through the real Envoy and the picker to simulated servers.

use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::client;
use crate::support::envoy::EnvoyProcess;
use crate::support::process::{Process, eventually, scratch};
use crate::support::sim::SimProcess;
use attache_loadgen::{LiveApi, LiveConfig, LiveOutcome, play};
use attache_report::Observer;
use attache_report::served::{Ending, Sample, Served};
use attache_types::clock::Timestamp;
use attache_workload::Workload;
use attache_workload::pace::ClosedLoop;
use attache_workload::synthetic;
use serde_json::Value;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

#[derive(Default)]
struct Seen {
    served: Vec<Served>,
    /// Cancelled when the first request ends, if `stops` is set.
    stop: CancellationToken,
    stops: bool,
}

impl Observer for Seen {
    fn served(&mut self, served: &Served) {
        self.served.push(*served);
        if self.stops {
            self.stop.cancel();
        }
    }

    fn sampled(&mut self, _: Timestamp, _: &[Sample]) {}
}

fn through(envoy: &EnvoyProcess) -> LiveConfig {
    LiveConfig {
        timeout: Duration::from_secs(60),
        ..LiveConfig::new(format!("http://{}", envoy.listener("inference")))
    }
}

fn workload(spelling: &str) -> Box<dyn Workload> {
    synthetic::build(spelling, 1).expect("a workload")
}

async fn play_workload(config: &LiveConfig, mut workload: Box<dyn Workload>) -> (LiveOutcome, Vec<Served>) {
    let mut seen = Seen::default();
    let stop = seen.stop.clone();
    let outcome = play(config, &mut *workload, &mut seen, &stop).await.expect("a run");
    (outcome, seen.served)
}

/// Running and waiting requests on all servers together.
async fn load(servers: &[SocketAddr]) -> u64 {
    let mut all = 0;
    for server in servers {
        let page = client::get(*server, "/load").await.expect("an answer").json();
        all += page["server_load"].as_u64().expect("a number");
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn workload_completes_and_repeated_prompts_hit_caches() {
    let sim = SimProcess::start(3, &["--model", "sim-8b", "--speed", "100"]).await;
    let picker = AttacheProcess::start(&sim.servers, &[]).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let ports: BTreeSet<String> = sim.servers.iter().map(|server| server.port().to_string()).collect();
    // 4 groups of 3 prompts and 48 requests: each prompt occurs four times.
    let spelling = "shared-prefix:groups=4,prompts=3,system=512,question=64,output=8,stages=48x1,cv=0";
    for (seed, api) in [(1, LiveApi::Completions), (2, LiveApi::Chat)] {
        let config = LiveConfig { api, seed, ..through(&envoy) };
        let (outcome, seen) = play_workload(&config, workload(spelling)).await;
        assert_eq!(outcome.sent, outcome.answered, "{outcome:?}");
        assert!(outcome.sent >= 40 && seen.len() as u64 == outcome.sent, "{outcome:?}");
        assert_eq!(outcome.model, "sim-8b", "asked through the gateway");
        for served in &seen {
            assert_eq!((served.ending, served.generated_tokens), (Ending::Answered, 8));
            let beside = if api == LiveApi::Chat { 14 } else { 0 };
            assert_eq!(served.prompt_tokens, 576 + beside, "the text has the tokens that the workload says");
            assert!(served.first_token.is_some_and(|first| first <= served.total), "{served:?}");
            let place = served.endpoint.and_then(|at| outcome.endpoints.get(at as usize)).expect("a server");
            assert!(ports.contains(place), "{place}");
        }
        let distinct: BTreeSet<&String> = outcome.endpoints.iter().collect();
        assert_eq!(distinct.len(), outcome.endpoints.len(), "{outcome:?}");
        // Each of twelve prompts is new to three servers at most, so at least 12 of 48 requests are repetitions.
        let repeated = seen.iter().filter(|served| served.cached_tokens >= 512).count();
        assert!(repeated >= 12, "{repeated} of {} found their prompt: {seen:?}", seen.len());
    }
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn closed_loop_never_exceeds_its_number_of_clients() {
    let sim = SimProcess::start(2, &["--model", "sim-8b"]).await;
    let picker = AttacheProcess::start(&sim.servers, &[]).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let inner = workload("shared-prefix:groups=4,prompts=3,system=128,question=32,output=12,stages=30x1,cv=0");
    let closed = Box::new(ClosedLoop::new(inner, 3, Duration::ZERO).unwrap());
    let config = through(&envoy);
    let done = CancellationToken::new();
    let looking = async {
        let mut most = 0;
        while !done.is_cancelled() {
            most = most.max(load(&sim.servers).await);
        }
        most
    };
    let playing = async {
        let result = play_workload(&config, closed).await;
        done.cancel();
        result
    };
    let ((outcome, seen), most) = tokio::join!(playing, looking);
    assert_eq!((outcome.answered, outcome.most_in_flight), (outcome.sent, 3), "{outcome:?}");
    assert!(outcome.sent >= 20 && (1..=3).contains(&most), "{most} at a time, {outcome:?}");
    // From the clients' view: a client sends its next request after the response.
    for served in &seen {
        let ended = served.at.after(served.total);
        let open = seen.iter().filter(|other| other.at < ended && served.at < other.at.after(other.total));
        let beside = open.filter(|other| other.at <= served.at).count();
        assert!(beside <= 3, "{beside} under way when {served:?} came");
    }
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rejections_are_counted_by_reason() {
    let draining = "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  endpoints: \
                    [{address: \"127.0.0.1:9\", draining: true}]\n";
    let picker = AttacheProcess::configured(draining).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let config = LiveConfig { model: Some("sim-8b".to_owned()), ..through(&envoy) };
    let few = "unique:qps=20,seconds=0.5,cv=0,input=200,output=50";
    let (outcome, seen) = play_workload(&config, workload(few)).await;
    assert!(outcome.sent > 0 && outcome.refused == outcome.sent, "{outcome:?}");
    assert_eq!(outcome.failures, [("status 503 (no_ready_endpoint)".to_owned(), outcome.sent)].into());
    assert!(seen.iter().all(|served| served.ending == Ending::Refused && served.endpoint.is_none()), "{seen:?}");

    let unasked = LiveConfig { model: None, ..config };
    let error = play(&unasked, &mut *workload(few), &mut Seen::default(), &CancellationToken::new()).await;
    assert!(error.is_err_and(|error| error.to_string().contains("got status 503, want 200")));
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn aborted_streams_count_as_lost() {
    // At the model's own speed, so the chunks before the abort reach the client in time.
    let faults = r#"{"cut_after_tokens": 20}"#;
    let sim = SimProcess::start(1, &["--model", "sim-8b", "--faults", faults]).await;
    let picker = AttacheProcess::start(&sim.servers, &[]).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let (outcome, seen) =
        play_workload(&through(&envoy), workload("unique:qps=20,seconds=0.5,cv=0,input=200,output=50")).await;
    assert!(outcome.sent > 0, "{outcome:?}");
    assert_eq!(outcome.lost, outcome.sent, "{outcome:?}");
    assert_eq!(outcome.failures.values().sum::<u64>(), outcome.lost, "{outcome:?}");
    assert!(seen.iter().all(|served| served.first_token.is_some() && served.generated_tokens <= 20), "{seen:?}");
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stopped_run_ends_early_and_leaves_no_request_in_flight() {
    let sim = SimProcess::start(2, &["--model", "sim-8b", "--speed", "100"]).await;
    let picker = AttacheProcess::start(&sim.servers, &[]).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let mut seen = Seen { stops: true, ..Seen::default() };
    let stop = seen.stop.clone();
    // An hour of requests, which the first response stops.
    let mut hour = workload("unique:qps=20,seconds=3600,input=200,output=50");
    let outcome = play(&through(&envoy), &mut *hour, &mut seen, &stop).await.expect("a run");
    assert!(outcome.stopped && outcome.sent < 1_000, "{outcome:?}");
    assert_eq!(outcome.answered + outcome.refused + outcome.lost + outcome.cut, outcome.sent, "{outcome:?}");
    assert_eq!(seen.served.len() as u64, outcome.sent - outcome.cut);
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replay_command_reports_endpoints_and_failure_reasons() {
    let faults = r#"{"fail_next": {"count": 3, "status": 500}}"#;
    let sim = SimProcess::start(2, &["--model", "sim-8b", "--speed", "100", "--faults", faults]).await;
    // Round robin, because the default may stay with one of two idle servers.
    let picker = AttacheProcess::start(&sim.servers, &["--strategy", "round-robin"]).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let files = scratch("replay");
    let path = |name: &str| files.path().join(name).display().to_string();
    let (lines, json, target) =
        (path("requests.jsonl"), path("r.json"), format!("http://{}", envoy.listener("inference")));
    let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
    command.args(["replay", "--workload", "unique:qps=20,seconds=2,cv=0,input=200,output=5", "--target", &target]);
    command.args(["--endpoints", "4", "--requests-out", &lines, "--json", &json]);
    let mut process = Process::spawn("attache replay", &mut command, scratch("replay"));
    assert_eq!(process.wait().await.code(), Some(0), "{}", process.stderr());

    let ports: BTreeSet<String> = sim.servers.iter().map(|server| server.port().to_string()).collect();
    let text = std::fs::read_to_string(&lines).expect("a file");
    let rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let (answered, failed): (Vec<&Value>, Vec<_>) = rows.iter().partition(|row| row["status"] == "answered");
    assert!(rows.len() >= 38 && !failed.is_empty(), "{text}");
    for row in &answered {
        assert!(ports.contains(row["endpoint"].as_str().expect("a name")), "{row}");
        assert!(row["ttft"].as_f64() <= row["total"].as_f64() && row["output_tokens"] == 5, "{row}");
        assert!(row["prompt_tokens"].as_u64() >= Some(200) && row["cached_tokens"].is_u64(), "{row}");
    }
    assert!(failed.iter().all(|row| row["reason"].as_str().is_some_and(|r| r.starts_with("status 500"))), "{text}");
    let numbers: BTreeSet<u64> = rows.iter().filter_map(|row| row["number"].as_u64()).collect();
    assert_eq!(numbers, (0..rows.len() as u64).collect());

    let document: Value = serde_json::from_slice(&std::fs::read(&json).expect("a file")).expect("JSON");
    let run = &document["runs"][0];
    let named = run["endpoints"].as_array().expect("a list").iter().filter_map(|e| e["name"].as_str());
    let named: BTreeSet<String> = named.filter(|name| !name.is_empty()).map(str::to_owned).collect();
    assert_eq!(named, ports);
    let counted: u64 = run["failures"].as_object().expect("reasons").values().filter_map(Value::as_u64).sum();
    assert_eq!(counted, failed.len() as u64, "{}", run["failures"]);
    // Two of four endpoints get no request.
    assert!(run["imbalance"]["max_over_mean"].as_f64() >= Some(2.0), "{}", run["imbalance"]);
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interrupted_replay_command_prints_results_without_verdict() {
    let sim = SimProcess::start(1, &["--model", "sim-8b"]).await;
    let target = format!("http://{}", sim.servers[0]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
    let hour = "unique:qps=20,seconds=3600,input=200,output=50";
    command.args(["replay", "--workload", hour, "--workload", hour, "--target", &target, "--assert", "ttft_mean<1us"]);
    let mut process = Process::spawn("attache replay", &mut command, scratch("replay"));
    eventually("a request at the server", || async { (load(&sim.servers).await > 0).then_some(()) }).await;
    process.signal("INT");
    assert_eq!(process.wait().await.code(), Some(130), "{}", process.stderr());
    assert!(process.stdout().contains("TTFT mean"), "{}", process.stdout());
    assert!(!process.stdout().contains("FAIL"), "{}", process.stdout());
    assert!(process.stderr().contains("stopped; the figures are of what was played"), "{}", process.stderr());
}
