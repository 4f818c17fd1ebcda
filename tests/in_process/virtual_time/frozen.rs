//! Decisions that a refactoring must keep, for eight configurations.
//!
//! Six run in virtual time, by `attache replay`. Two are recordings of `attache run --record`, from Kubernetes and with
//! AIBrix's headers. They are replayed with the configuration in their first line. `frozen/NAME.txt` has each result.
//!
//! `ATTACHE_BLESS=1 cargo test --release --test in_process frozen` rewrites the results. Use it only when a change is
//! meant to alter decisions: another default, cost function, scorer, queue or cache rule, or simulated engine. A change
//! that only moves or renames code must not alter them. Recordings are inputs and stay unchanged.

use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

const HEAD: &str = "\
# Decisions of one configuration, compared by tests/in_process/virtual_time/frozen.rs; see there when they may change.
# ATTACHE_BLESS=1 cargo test --release --test in_process frozen
";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/in_process/virtual_time/frozen")
}

/// Compares `got` with `frozen/NAME.txt`, or writes it there.
fn compare(name: &str, got: &str) {
    let file = folder().join(name).with_extension("txt");
    let got = format!("{HEAD}{got}");
    if std::env::var_os("ATTACHE_BLESS").is_some() {
        std::fs::write(&file, &got).expect("a file that can be written");
    }
    let want = std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    assert_eq!(got, want, "{name} decides otherwise");
}

fn attache(arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("ATTACHE_") {
            command.env_remove(name);
        }
    }
    command.current_dir(env!("CARGO_MANIFEST_DIR")).arg("replay").args(arguments);
    let output = command.output().expect("a replay");
    let error = String::from_utf8_lossy(&output.stderr);
    // Exit code 2: decisions of a recording differ, which the compared text counts.
    assert!(matches!(output.status.code(), Some(0 | 2)), "attache replay {arguments:?}: {error}");
    String::from_utf8(output.stdout).expect("text")
}

/// Replays `workload` with `frozen/NAME.yaml` and compares the result.
fn compare_played(name: &str, workload: [&str; 2], more: &[&str]) {
    let files = tempfile::tempdir().expect("a directory");
    let figures = files.path().join("figures.json").display().to_string();
    let config = folder().join(name).with_extension("yaml").display().to_string();
    let fixed = ["--seed", "7", "--metrics-every", "100ms", "--json", &figures, "--config-file", &config];
    attache(&[&fixed[..], &workload, &["--compare", ""], more].concat());
    let figures: Value = serde_json::from_slice(&std::fs::read(&figures).expect("figures")).expect("JSON");
    let runs = figures["runs"].as_array().expect("runs");
    assert_eq!(runs.len(), 1, "the configuration alone is played");
    compare(name, &run_summary(&runs[0]));
}

/// The hash of all decisions, and values that help to explain a difference.
fn run_summary(run: &Value) -> String {
    let mut out = String::new();
    let mut line = |name: &str, value: &Value| writeln!(out, "{name} {value}").expect("text");
    for name in ["policy", "decisions", "requests", "tokens", "hit_rate", "preemptions", "duration_seconds"] {
        line(name, &run[name]);
    }
    for name in ["ttft_seconds", "latency_seconds"] {
        line(name, &json!([run[name]["mean"], run[name]["p50"], run[name]["p90"], run[name]["max"]]));
    }
    for name in ["split", "queue"].into_iter().filter(|name| !run[*name].is_null()) {
        let part = &run[name];
        line(name, if part["turns"].is_null() { part } else { &part["turns"] });
    }
    for endpoint in run["endpoints"].as_array().expect("endpoints") {
        let counts = ["requests", "prompt_tokens", "cached_tokens", "prefills"].map(|name| &endpoint[name]);
        line("endpoint", &json!(counts));
    }
    out
}

/// Requests of four tenants in three priorities. Two tenants send most, and each prompt starts with a shared document.
fn tenants(file: &Path) {
    let mut text = "{\"format\":\"attache.trace.v1\"}\n".to_owned();
    for i in 0..600_u64 {
        let tenant = [0, 0, 0, 1, 1, 2, 3][(i * 5 % 7) as usize];
        let priority = [0, 0, 10, -1][(i / 3 % 4) as usize];
        let at = (i / 40) as f64 * 2.0 + (i % 40) as f64 * 0.005;
        let request = json!({
            "at": at,
            "parts": [["system", format!("document {}", i % 3), 3_000], ["user", i, 200 + i % 11 * 90]],
            "answer": [format!("a{i}"), 40 + i % 7 * 30],
            "session": i % 50,
            "tenant": format!("tenant-{tenant}"),
            "priority": priority,
        });
        writeln!(text, "{request}").expect("text");
    }
    std::fs::write(file, text).expect("a trace");
}

/// Replays a recording with the configuration that it was made with.
fn compare_replayed(name: &str) {
    let recording = folder().join(name).with_extension("jsonl").display().to_string();
    compare(name, &attache(&["--from-record", &recording]));
}

/// The start of a recorded trace, sped up to about the capacity of eight servers.
const CHAT: [&str; 2] = ["--trace", "tests/data/conversation-2000.jsonl"];
const FAST: [&str; 4] = ["--requests", "500", "--speed", "6"];

#[test]
fn frozen_default() {
    compare_played("default", CHAT, &[&FAST[..], &["--change", "20s restart 1"]].concat());
}

#[test]
fn frozen_pipeline() {
    compare_played("pipeline", CHAT, &FAST);
}

#[test]
fn frozen_kv_events() {
    let servers = "8b-h100*6,8b-h100@0.5*2";
    compare_played("kv-events", CHAT, &[&FAST[..], &["--kv-events", "10ms,0.02", "--profile", servers]].concat());
}

#[test]
fn frozen_disaggregation() {
    let workload = ["--workload", "long-short:share=0.2,long=20000"];
    let servers = "8b-h100:prefill*2,8b-h100:decode*3,8b-h100:both";
    compare_played("disaggregation", workload, &["--profile", servers, "--requests", "400"]);
}

#[test]
fn frozen_flow_control() {
    let files = tempfile::tempdir().expect("a directory");
    let trace = files.path().join("tenants.jsonl");
    tenants(&trace);
    compare_played("flow-control", ["--trace", &trace.display().to_string()], &["--endpoints", "2"]);
}

#[test]
fn frozen_tenants() {
    let files = tempfile::tempdir().expect("a directory");
    let trace = files.path().join("tenants.jsonl");
    tenants(&trace);
    compare_played("tenants", ["--trace", &trace.display().to_string()], &["--endpoints", "4"]);
}

#[test]
fn frozen_kubernetes() {
    compare_replayed("kubernetes");
}

#[test]
fn frozen_aibrix() {
    compare_replayed("aibrix");
}
