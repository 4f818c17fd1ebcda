//! Prompts that cost the picker much more than their bytes: values in chat templates, tokenizer input, and background
//! work for disconnected clients.

use super::honest::Honest;
use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::Payload;
use crate::support::client::{self, Http};
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::process::{memory, repository, scratch};
use bytes::Bytes;
use http::HeaderValue;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;
use tokio::task::JoinSet;

/// Concurrent requests of one attack.
const REQUESTS: usize = 12;
/// Size of the bodies of an attack, bytes.
const BODY_BYTES: usize = 1 << 20;
/// Body size where latencies are compared. An unoptimised build takes a hundred times as long to parse the values of a
/// body.
const TIMED_BODY_BYTES: usize = if cfg!(debug_assertions) { 64 << 10 } else { BODY_BYTES };
/// Concurrent requests where latencies are compared.
const TIMED_REQUESTS: usize = if cfg!(debug_assertions) { 3 } else { REQUESTS };
/// Concurrent clients that disconnect before they are served.
const LEAVING_CLIENTS: usize = 12;
/// The picker may use four times the size of a body and this much more, bytes.
const EXTRA_MEMORY: u64 = 256 << 10;
/// CPU time of an idle picker in one second, in an unoptimised build.
const IDLE_CPU: Duration = Duration::from_millis(300);
/// Maximum duration of the last step of cancelled work in an unoptimised build: a text of 64 KiB without a space.
const LAST_STEP_SECONDS: usize = 4;

/// The files of a small model: a tokenizer like that of large models, and a chat template with tools.
fn model() -> std::path::PathBuf {
    repository().join("tests/data/chat_vectors")
}

async fn picker(echo: &Echo, model: &Path) -> AttacheProcess {
    let tokenizer = format!("{{type: huggingface, directory: {}}}", model.display());
    AttacheProcess::configured(&format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  \
         strategy: {{name: pipeline, parameters: {{scorers: [{{type: prefix-cache-scorer}}, {{type: queue-scorer}}]}}}}\n  \
         prefixCache: {{tokenizer: {tokenizer}}}\n  endpoints: [\"{}\"]\n",
        echo.address
    ))
    .await
}

/// Resets the peak resident size.
fn reset_peak(picker: &AttacheProcess) {
    std::fs::write(format!("/proc/{}/clear_refs", picker.process.id()), "5").expect("a process of this user");
}

/// CPU time that the picker has used.
pub(super) fn cpu(picker: &AttacheProcess) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", picker.process.id())).expect("a running picker");
    let fields: Vec<&str> = stat.rsplit_once(')').expect("a name").1.split_whitespace().collect();
    let ticks = |at: usize| fields[at].parse::<u64>().expect("a number");
    // The unit is a hundredth of a second.
    Duration::from_millis(10 * (ticks(11) + ticks(12)))
}

/// `head`, then comma-separated copies of `part` as `size` bytes and `limit` allow, then `tail`.
fn filled(size: usize, head: &str, part: &str, tail: &str, limit: usize) -> Bytes {
    let count = ((size - head.len() - tail.len()) / (part.len() + 1)).min(limit);
    Bytes::from(format!("{head}{}{tail}", vec![part; count].join(",")))
}

fn all(size: usize, head: &str, part: &str, tail: &str) -> Bytes {
    filled(size, head, part, tail, usize::MAX)
}

/// An attack: its name, its path and its body.
type Attack = (&'static str, &'static str, Bytes);

const CHAT: &str = "/v1/chat/completions";
const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";
const COMPLETIONS: &str = "/v1/completions";

/// A chat request whose only tool has these parameters.
fn tool(size: usize, part: &str) -> Bytes {
    let head = r#"{"model":"sim-8b","messages":[{"role":"user","content":"hi"}],"tools":[{"type":"function","function":{"name":"f","parameters":{"enum":["#;
    // The picker parses at most 500,000 values of a body.
    let limit = 490_000 / part.matches(['[', '{', '1']).count().max(1);
    filled(size, head, part, "]}}}]}", limit)
}

/// Nested lists.
fn nested() -> String {
    format!("{}{}", "[".repeat(100), "]".repeat(100))
}

/// Bodies with many small values for a chat template.
fn many_values(size: usize) -> Vec<Attack> {
    let chat = r#"{"model":"sim-8b","messages":[{"role":"user","content":"#;
    vec![
        ("numbers in a tool", CHAT, tool(size, "10")),
        ("objects in a tool", CHAT, tool(size, "{}")),
        ("token ids", COMPLETIONS, all(size, r#"{"model":"sim-8b","prompt":["#, "1", "]}")),
        ("lists of token ids", COMPLETIONS, filled(size, r#"{"model":"sim-8b","prompt":["#, "[1,2,3]", "]}", 2_048)),
        ("nested lists in a tool", CHAT, tool(size, &nested())),
        (
            "tiny tools",
            CHAT,
            all(
                size,
                r#"{"model":"sim-8b","messages":[{"role":"user","content":"hi"}],"tools":["#,
                r#"{"type":"function","function":{"name":"a"}}"#,
                "]}",
            ),
        ),
        ("parts of a message", CHAT, all(size, &format!("{chat}["), r#"{"type":"text","text":"a"}"#, "]}]}")),
        ("texts of a message", CHAT, all(size, &format!("{chat}["), r#""ab""#, "]}]}")),
        (
            "tiny messages",
            CHAT,
            filled(size, r#"{"model":"sim-8b","messages":["#, r#"{"role":"user","content":"a"}"#, "]}", 10_000),
        ),
        (
            "arguments of a call",
            CHAT,
            all(
                size,
                r#"{"model":"sim-8b","messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{\"a\":["#,
                "10",
                r#"]}"}}]}]}"#,
            ),
        ),
        (
            "numbers in a tool of the Messages API",
            MESSAGES,
            all(
                size,
                r#"{"model":"sim-8b","max_tokens":5,"messages":[{"role":"user","content":"hi"}],"tools":[{"name":"f","input_schema":{"enum":["#,
                "10",
                "]}}]}",
            ),
        ),
        (
            "numbers in a tool of the Responses API",
            RESPONSES,
            all(
                size,
                r#"{"model":"sim-8b","input":"hi","tools":[{"type":"function","name":"f","parameters":{"enum":["#,
                "10",
                "]}}]}",
            ),
        ),
        (
            "calls in the Responses API",
            RESPONSES,
            filled(
                size,
                r#"{"model":"sim-8b","input":["#,
                r#"{"type":"function_call","call_id":"c","name":"f","arguments":"{}"}"#,
                "]}",
                10_000,
            ),
        ),
        (
            "prompts of a batch",
            COMPLETIONS,
            filled(size, r#"{"model":"sim-8b","prompt":["#, &format!("\"{}\"", "a ".repeat(240)), "]}", 2_048),
        ),
    ]
}

/// Bodies with long texts.
fn long_texts(size: usize) -> Vec<Attack> {
    let room = size - 200;
    let completion = |unit: &str| {
        let text = &unit.repeat(room / unit.len() + 1)[..room];
        Bytes::from(format!(r#"{{"model":"sim-8b","prompt":"{text}"}}"#))
    };
    let words: String = (0..size / 7 + 1).map(|i| format!("{:06x} ", i * 7_919 % 0xff_ffff)).collect();
    let message = format!(r#"{{"model":"sim-8b","messages":[{{"role":"user","content":"{}"}}]}}"#, &words[..room]);
    vec![
        ("words", COMPLETIONS, completion(&words)),
        ("no spaces", COMPLETIONS, completion("a1,b2;")),
        ("words of 60 KiB", COMPLETIONS, completion(&("a1,b2;".repeat(10_000) + " "))),
        ("one letter", COMPLETIONS, completion("a")),
        ("spaces", COMPLETIONS, completion(" ")),
        ("a long message", CHAT, Bytes::from(message)),
    ]
}

/// Sends the same request `count` times concurrently. Each must be served.
async fn attack(to: SocketAddr, (name, target, body): &Attack, count: usize) {
    let mut requests = JoinSet::new();
    for _ in 0..count {
        let (target, body) = (format!("{target}?kind=json&size=300"), body.clone());
        requests.spawn(async move { client::post(to, &target, body).await });
    }
    for reply in requests.join_all().await {
        let reply = reply.expect("a response");
        assert_eq!(reply.status, 200, "{name}: {}", String::from_utf8_lossy(&reply.body));
    }
}

/// Sends each of `attacks` several times while honest clients send requests. Checks the picker's memory, and that its
/// work has ended.
async fn assert_memory_is_bounded(model: &Path, attacks: Vec<Attack>) -> AttacheProcess {
    let echo = Echo::start().await;
    let picker = picker(&echo, model).await;
    let envoy = EnvoyProcess::alone(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let honest = Honest::new(to);
    let quiet = honest.quiet().await;
    let (report, excess) = honest
        .during(async {
            let mut excess = Vec::new();
            for one in &attacks {
                let before = memory(picker.process.id(), "VmRSS");
                reset_peak(&picker);
                attack(to, one, REQUESTS).await;
                let took = memory(picker.process.id(), "VmHWM").saturating_sub(before);
                let allowed = REQUESTS as u64 * (4 * one.2.len() as u64 + EXTRA_MEMORY);
                let figures = format!("{}: {} MiB, {} MiB are allowed", one.0, took >> 20, allowed >> 20);
                eprintln!("{figures}");
                excess.extend((took > allowed).then_some(figures));
            }
            excess
        })
        .await;
    assert!(excess.is_empty(), "the picker takes too much memory: {excess:#?}");
    assert!(report.failures.is_empty(), "honest requests failed: {:?}", report.failures);
    if !cfg!(debug_assertions) {
        report.assert_unharmed(&quiet);
    }
    assert_cpu_is_idle(&picker).await;
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
    picker
}

/// The picker is idle a few seconds after the last response: cancelled work ends after its current step.
async fn assert_cpu_is_idle(picker: &AttacheProcess) {
    let mut burnt = Vec::new();
    for _ in 0..LAST_STEP_SECONDS {
        let before = cpu(picker);
        // The second in which CPU time is measured.
        tokio::time::sleep(Duration::from_secs(1)).await;
        burnt.push(cpu(picker) - before);
        if burnt.last() <= Some(&IDLE_CPU) {
            return;
        }
    }
    panic!("CPU time in each second after all requests were served: {burnt:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn many_values_use_at_most_four_times_the_body_memory() {
    assert_memory_is_bounded(&model(), many_values(BODY_BYTES)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn long_texts_use_at_most_four_times_the_body_memory() {
    assert_memory_is_bounded(&model(), long_texts(BODY_BYTES)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn expensive_prompts_do_not_slow_down_honest_requests() {
    let echo = Echo::start().await;
    let picker = picker(&echo, &model()).await;
    let envoy = EnvoyProcess::alone(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let honest = Honest::new(to);
    let quiet = honest.quiet().await;
    let attacks = [many_values(TIMED_BODY_BYTES), long_texts(TIMED_BODY_BYTES)].concat();
    let (report, ()) = honest
        .during(async {
            for one in &attacks {
                attack(to, one, TIMED_REQUESTS).await;
            }
        })
        .await;
    report.assert_unharmed(&quiet);
    picker.assert_settled().await;
}

/// A template that reads every value of the tools twice and prints them with indentation.
#[tokio::test(flavor = "multi_thread")]
async fn template_reading_every_value_uses_at_most_four_times_the_body() {
    let files = scratch("model");
    std::fs::copy(model().join("tokenizer.json"), files.path().join("tokenizer.json")).expect("a copy");
    let values = "{% for t in tools %}{% for v in t.function.parameters.enum %}{{ v }}{% endfor %}{% endfor %}";
    let printed = "{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}";
    let messages = "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}";
    let template = format!("{{% if tools %}}{values}{values}{printed}{{% endif %}}{messages}");
    std::fs::write(files.path().join("chat_template.jinja"), template).expect("a file");
    let size = BODY_BYTES;
    let attacks = vec![
        ("numbers", CHAT, tool(size, "10")),
        ("objects", CHAT, tool(size, r#"{"a":1}"#)),
        ("nested lists", CHAT, tool(size, &nested())),
        // Read in time by an unoptimised build, too. Work that is late is dropped before it reaches its bound.
        ("few numbers", CHAT, tool(size / 16, "10")),
    ];
    let picker = assert_memory_is_bounded(files.path(), attacks).await;
    assert!(picker.metric("attache_limit_hits_total").await > 0.0, "the bound is counted");
}

/// Clients that send long prompts and disconnect before they are served.
#[tokio::test(flavor = "multi_thread")]
async fn tokenization_for_disconnected_clients_is_cancelled() {
    let echo = Echo::start().await;
    let picker = picker(&echo, &model()).await;
    let envoy = EnvoyProcess::alone(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let honest = Honest::new(to);
    let quiet = honest.quiet().await;
    let attacks = long_texts(2 * TIMED_BODY_BYTES);
    let (report, ()) = honest
        .during(async {
            let mut clients = JoinSet::new();
            for (at, http) in [Http::H1, Http::H2].into_iter().cycle().take(LEAVING_CLIENTS).enumerate() {
                let (_, target, body) = attacks[at % attacks.len()].clone();
                clients.spawn(async move {
                    let mut request = client::request("POST", to, http, target, Payload::sized(body));
                    request.headers_mut().insert("content-type", HeaderValue::from_static("application/json"));
                    // Long enough to read the body, too short to serve the request.
                    drop(tokio::time::timeout(Duration::from_millis(150), client::send(to, http, request)).await);
                });
            }
            clients.join_all().await;
        })
        .await;
    report.assert_unharmed(&quiet);
    assert_cpu_is_idle(&picker).await;
    picker.assert_settled().await;
}
