//! `attache replay` with sessions of agents.
//!
//! `data/traces/agents.jsonl` was made for these tests: three sessions with a sub-agent each, 19 requests, of which the
//! last one has 140,000 tokens.

use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Output};

fn attache(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_attache")).arg("replay").args(args).output().unwrap()
}

fn trace() -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/traces/agents.jsonl").display().to_string()
}

/// The JSON report and the messages of a run with `args`, on two servers.
fn played(args: &[&str]) -> (Value, String) {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("r.json").display().to_string();
    let trace = trace();
    let fixed = ["--trace", &trace, "--endpoints", "2", "--compare", "", "--json", &json];
    let output = attache(&[&fixed[..], args].concat());
    let messages = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{messages}");
    (serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap(), messages)
}

#[test]
fn requests_beyond_the_context_are_rejected_and_named_or_left_out() {
    let (report, messages) = played(&[]);
    let note = "note: servers rejected 1 requests of agents.jsonl as too long; --max-context 131072 leaves them out\n";
    assert!(messages.contains(note), "{messages}");
    assert!(messages.contains("agents.jsonl: not used: id, models\n"), "{messages}");
    let run = &report["runs"][0];
    assert_eq!((&run["requests"]["answered"], &run["requests"]["refused"]), (&Value::from(18), &Value::from(1)));
    let programs = &run["programs"];
    let counts = ["started", "complete", "incomplete"].map(|name| programs[name].as_u64().unwrap());
    assert_eq!(counts, [3, 2, 1]);

    let (report, messages) = played(&["--max-context", "131072"]);
    let note = "note: agents.jsonl: 1 of 19 requests have more than 131072 tokens and are left out; 3 of 3 sessions";
    assert!(messages.contains(note), "{messages}");
    let run = &report["runs"][0];
    assert_eq!((&run["requests"]["total"], &run["programs"]["complete"]), (&Value::from(18), &Value::from(3)));
    let figure = |name: &str| run["programs"][name]["mean"].as_f64().unwrap();
    assert!((0.9..1.1).contains(&figure("slowdown")), "{}, as sessions share tools", figure("slowdown"));
    // Pauses of 2, 0.5, 5, 7.5 and 121 s, and some seconds of responses.
    assert!((136.0..145.0).contains(&figure("time_seconds")), "{}", figure("time_seconds"));
}

#[test]
fn open_loop_keeps_recorded_times_and_pauses_are_cut() {
    let time = |args: &[&str]| {
        let (report, _) = played(&[args, &["--max-context", "131072"]].concat());
        report["runs"][0]["programs"]["time_seconds"]["mean"].as_f64().unwrap()
    };
    let (open, cut) = (time(&["--open-loop"]), time(&["--open-loop", "--max-pause", "1m"]));
    assert!((150.0..152.0).contains(&open), "{open}");
    assert!((open - cut - 61.0).abs() < 1.0, "{open} and {cut}");
}

#[test]
fn number_and_arrival_of_sessions_can_be_set() {
    let (report, _) = played(&["--sessions", "7", "--session-interval", "100s", "--max-context", "131072"]);
    let run = &report["runs"][0];
    assert_eq!((&run["programs"]["started"], &run["requests"]["total"]), (&Value::from(7), &Value::from(42)));
    let duration = run["duration_seconds"].as_f64().unwrap();
    assert!((730.0..750.0).contains(&duration), "six intervals and a session: {duration}");
    let seeded = |seed: &str| {
        let args = ["--sessions", "7", "--poisson", "0.1", "--max-context", "131072", "--seed", seed];
        played(&args).0["runs"][0]["duration_seconds"].as_f64().unwrap()
    };
    assert_eq!(seeded("3"), seeded("3"));
    assert_ne!(seeded("3"), seeded("4"));
}

#[test]
fn session_affinity_sees_sessions_and_keeps_them_on_a_server() {
    let (report, _) =
        played(&["--compare", "session-affinity,a=session-affinity={keyHeader: x-claude-code-session-id}"]);
    for run in &report["runs"].as_array().unwrap()[1..] {
        assert_eq!(run["programs"]["moves"], 0.0, "{}", run["policy"]);
    }
}

#[test]
fn flags_for_sessions_need_sessions() {
    let trace = trace();
    for (args, message) in [
        (&["--workload", "unique", "--sessions", "3"][..], "--trace <FILE>"),
        (&["--trace", &trace, "--clients", "3"], "--clients does not go with `agents.jsonl`, a trace of sessions"),
        (&["--trace", &trace, "--max-context", "100"], "--max-context 100 leaves no request of agents.jsonl"),
        (&["--trace", &trace, "--poisson", "0"], "`rate` is 0; a number above 0"),
        (&["--trace", &trace, "--poisson", "1", "--session-interval", "1s"], "cannot be used with"),
        (
            &["--trace", "tests/data/conversation-2000.jsonl", "--open-loop"],
            "--open-loop needs a trace of sessions, and `conversation-2000.jsonl` is none",
        ),
    ] {
        let output = attache(args);
        let shown = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(64), "{shown}");
        assert!(shown.contains(message), "{args:?}: {shown}");
    }
}

/// 32 sessions of 12 turns, with contexts of 8,000 to 75,000 tokens: twice what fits into the caches of two servers.
fn many_sessions() -> String {
    let session = |number: usize| {
        let first = [8_000, 16_000, 32_000, 64_000][number % 4];
        let mut at = 0;
        let turn = |turn: usize| {
            let tokens = first + 1_000 * turn;
            let begin = at;
            at += 4 + if (turn * 5 + number).is_multiple_of(7) { 40 } else { 6 + (turn * 7 + number * 3) % 11 };
            json!({
                "t": begin, "type": "n", "model": "m", "in": tokens, "out": 200, "api_time": 4, "stop": "tool_use",
                "input_types": [if turn == 0 { "text" } else { "tool_result" }],
                "hash_ids": (1..=tokens / 64).collect::<Vec<_>>(),
            })
        };
        let requests: Vec<Value> = (0..12).map(turn).collect();
        json!({
            "id": format!("s{number}"), "block_size": 64, "hash_id_scope": "local",
            "tool_tokens": 0, "system_tokens": 0, "requests": requests,
        })
    };
    (0..32).map(|number| format!("{}\n", session(number))).collect()
}

#[test]
fn long_prompts_are_held_back_only_if_contexts_do_not_fit() {
    let folder = tempfile::tempdir().unwrap();
    let [trace, json] = ["agents.jsonl", "r.json"].map(|name| folder.path().join(name).display().to_string());
    std::fs::write(&trace, many_sessions()).unwrap();
    let means = |sessions: &str, more: &[&str]| {
        let args = ["--trace", &trace, "--endpoints", "2", "--sessions", sessions, "--poisson", "0.3", "--seed", "1"];
        let at_once = ["--compare", "predicted-latency+at-once", "--json", &json];
        let output = attache(&[&args[..], &at_once, more].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let report: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
        let run = |number: usize| {
            let run = &report["runs"][number];
            assert_eq!(run["requests"]["answered"], run["requests"]["total"], "none is lost");
            ["ttft_seconds", "latency_seconds"].map(|name| run[name]["mean"].as_f64().unwrap())
        };
        [run(0), run(1)]
    };
    let [held_back, at_once] = means("12", &[]);
    assert_eq!(at_once, held_back, "all contexts fit");
    for (more, most) in [(&[][..], [0.9, 0.7]), (&["--kv-events", "20ms,0"], [0.9, 0.7])] {
        let [held_back, at_once] = means("32", more);
        let gains = [0, 1].map(|figure| held_back[figure] / at_once[figure]);
        assert!(gains[0] < most[0] && gains[1] < most[1], "{more:?}: {gains:?}");
    }
}
