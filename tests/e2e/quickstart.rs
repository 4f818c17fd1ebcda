//! `attache quickstart`: the demonstration through real Envoy, and its end.

use crate::support::envoy;
use crate::support::process::{Process, eventually, scratch};
use std::path::Path;
use std::process::Command;

/// Every process that the command starts inherits it.
const MARK: &str = "ATTACHE_TEST_MARK";

fn quickstart(mark: &str, envoy: &Path, arguments: &[&str]) -> Process {
    let directory = scratch("quickstart");
    let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
    command.arg("quickstart").args(arguments).env(MARK, mark).env("ATTACHE_ENVOY", envoy);
    command.env("TMPDIR", directory.path());
    Process::spawn("quickstart", &mut command, directory)
}

/// Ids of the running processes with this mark.
fn marked(mark: &str) -> Vec<u32> {
    let wanted = format!("{MARK}={mark}");
    let processes = std::fs::read_dir("/proc").expect("processes").filter_map(Result::ok);
    let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    ids.filter(|id| {
        let variables = std::fs::read(format!("/proc/{id}/environ")).unwrap_or_default();
        variables.split(|byte| *byte == 0).any(|variable| variable == wanted.as_bytes())
    })
    .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn quickstart_compares_strategies_and_leaves_nothing_behind() {
    let mut process = quickstart("whole", &envoy::binary(), &[]);
    // Each of the two runs lasts as long as its longest conversation; 30 s, the patience of `wait`, can be too little.
    process
        .wait_for("the first run", |process| process.stdout().contains("with predicted-latency").then_some(()))
        .await;
    assert_eq!(process.wait().await.code(), Some(0));
    let output = process.stdout();
    let rows = output.lines().filter(|line| line.starts_with("chat ")).count();
    assert_eq!(rows, 48, "12 conversations of 4 turns\n{output}");
    for text in ["messages stream", "embedding", "runner-up 127.0.0.1:", "every request got a response", "/decisions"] {
        assert!(output.contains(text), "no {text:?} in\n{output}");
    }
    let figures = output.lines().find(|line| line.starts_with("TTFT of chats, p90")).unwrap_or_default();
    assert_eq!(figures.matches(" ms").count(), 2, "{output}");
    assert_eq!(marked("whole"), Vec::<u32>::new());
    let logs = output.lines().find_map(|line| line.split_once("logs in ")).expect("the place of the logs").1;
    assert!(!Path::new(logs).exists(), "{logs}");
}

#[tokio::test(flavor = "multi_thread")]
async fn interrupted_quickstart_ends_its_processes() {
    let mut process = quickstart("interrupted", &envoy::binary(), &[]);
    let page = process
        .wait_for("the load", |process| {
            let output = process.stdout();
            let (_, line) = output.split_once("playing the load")?;
            let (_, page) = line.split_once("http://")?;
            page.split_once('/').map(|(address, _)| address.to_owned())
        })
        .await;
    assert!(marked("interrupted").len() >= 4, "itself, servers, picker and Envoy");
    crate::check_live::Checked::run(&["--admin", &page]).assert_faults("the quickstart", "", &[]);
    process.signal("INT");
    assert_eq!(process.wait().await.code(), Some(130));
    eventually("no process to be left", || async { marked("interrupted").is_empty().then_some(()) }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quickstart_names_what_is_missing_or_wrong() {
    let no_envoy = Path::new("/does/not/exist/envoy");
    let mut process = quickstart("missing", no_envoy, &[]);
    assert_eq!(process.wait().await.code(), Some(64));
    assert!(process.stderr().contains("`/does/not/exist/envoy --version` fails"), "{}", process.stderr());
    let mut process = quickstart("unknown", &envoy::binary(), &["--strategy", "fastest"]);
    assert_eq!(process.wait().await.code(), Some(70));
    let error = process.stderr();
    assert!(error.contains("fastest") && error.contains("logs are in "), "{error}");
    assert_eq!(marked("unknown"), Vec::<u32>::new());
}
