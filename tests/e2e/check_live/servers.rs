//! Planted mistakes of model servers: one file with a pool for each, and one check of all.

use super::{Checked, closed, fake};
use crate::support::client;
use crate::support::process::scratch;
use crate::support::sim::SimProcess;
use bytes::Bytes;
use serde_json::{Value, json};
use std::fmt::Write;
use std::net::SocketAddr;

/// A time that is long past.
const PAST: &str = "Sun, 06 Nov 1994 08:49:37 GMT";

/// What is planted: the endpoints and other keys of a pool, and what is to be found.
struct Row {
    /// Name of the pool.
    planted: &'static str,
    endpoints: Vec<String>,
    keys: String,
    /// Id of the check, and a word of its fix. No id: nothing is wrong.
    wanted: &'static [(&'static str, &'static str)],
}

fn row(planted: &'static str, endpoints: &[SocketAddr], keys: &str, wanted: &'static [(&str, &str)]) -> Row {
    let endpoints = endpoints.iter().map(|endpoint| format!("{{address: \"{endpoint}\"}}")).collect();
    Row { planted, endpoints, keys: keys.to_owned(), wanted }
}

/// The configuration with a pool for each row.
fn file_of(rows: &[Row]) -> String {
    let mut text = "apiVersion: attache.dev/v1\nkind: Attache\npools:\n".to_owned();
    for (number, Row { planted, endpoints, keys, .. }) in rows.iter().enumerate() {
        let matches = format!("match: {{header: {{name: x-pool, value: \"{number}\"}}}}");
        let endpoints = endpoints.join(", ");
        writeln!(text, "- {{name: {planted}, {matches}, endpoints: [{endpoints}]{keys}}}").expect("text");
    }
    text
}

/// Checks that the faults of each row are exactly the wanted ones.
fn assert_rows(checked: &Checked, rows: &[Row]) {
    let faults = checked.faults("");
    for Row { planted, wanted, .. } in rows {
        let is_own = |fault: &&&Value| {
            let subject = fault["subject"].as_str().unwrap_or_default();
            subject == format!("pool {planted}") || subject.ends_with(&format!(", pool {planted}"))
        };
        let own: Vec<&&Value> = faults.iter().filter(is_own).collect();
        let mut ids: Vec<&str> = own.iter().filter_map(|fault| fault["id"].as_str()).collect();
        ids.sort_unstable();
        ids.dedup();
        let mut expected: Vec<&str> = wanted.iter().map(|(id, _)| *id).collect();
        expected.sort_unstable();
        assert_eq!(ids, expected, "{planted}: {own:#?}");
        for (id, word) in *wanted {
            let names =
                |fault: &&&&Value| fault["id"] == *id && fault["fix"].as_str().is_some_and(|f| f.contains(word));
            assert!(own.iter().any(|fault| names(&fault)), "{planted}: no fix of {id} with {word:?}: {own:#?}");
        }
    }
}

/// The ports of a simulated server's KV events and replays.
pub(super) async fn event_ports(server: SocketAddr) -> (u16, u16) {
    let source = client::get(server, "/kv_event_sources").await.expect("its sources").json()["0"].clone();
    let port = |key: &str| source[key].as_str().and_then(|s| s.rsplit_once(':')?.1.parse().ok()).expect("a port");
    (port("endpoint"), port("replay_endpoint"))
}

pub(super) fn with_events(server: SocketAddr, (events, replay): (u16, u16)) -> String {
    format!(
        "{{address: \"{server}\", labels: {{attache.dev/kv-events-port: \"{events}\", \
         attache.dev/kv-events-replay-port: \"{replay}\"}}}}"
    )
}

/// Sends requests, so that a server has metrics of adapters and of times.
async fn complete(server: SocketAddr, model: &str) {
    let body = json!({"model": model, "prompt": "a long time ago", "max_tokens": 3});
    let reply = client::post(server, "/v1/completions", Bytes::from(body.to_string())).await.expect("an answer");
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
}

#[tokio::test(flavor = "multi_thread")]
async fn planted_mistakes_of_model_servers_are_found_with_their_fix() {
    let events = ["--kv-events-port", "0", "--kv-events-replay-port", "0"];
    let good = SimProcess::start(2, &events).await;
    let sglang = SimProcess::start(1, &["--metrics-style", "sglang"]).await;
    let large_blocks = SimProcess::start(1, &[&events[..], &["--block-size", "32"]].concat()).await;
    let uncached = SimProcess::start(1, &["--no-prefix-caching"]).await;
    let short = SimProcess::start(1, &[&events[..], &["--max-model-len", "4096"]].concat()).await;
    let refusing = SimProcess::start(1, &["--faults", r#"{"refuse": true}"#]).await;
    let garbage = SimProcess::start(1, &["--faults", r#"{"metrics": "garbage"}"#]).await;
    let failing = SimProcess::start(1, &["--faults", r#"{"metrics": "error"}"#]).await;
    let other = SimProcess::start(1, &[&events[..], &["--model", "other"]].concat()).await;
    let adapters = SimProcess::start(1, &["--lora", "sql,chat"]).await;
    let split = SimProcess::with_roles("prefill=1,decode=1", 2, &[]).await;
    let [a, b] = good.servers[..] else { panic!("two servers") };
    complete(a, "sim-8b").await;
    complete(adapters.servers[0], "sql").await;
    let alias = fake::alias(a).await;
    let late = fake::pages(PAST, &[("/health", "")]).await;
    let old = fake::pages(PAST, &[("/health", ""), ("/version", r#"{"version": "0.11.0"}"#)]).await;
    let new = fake::pages(PAST, &[("/health", ""), ("/version", r#"{"version": "0.32.0"}"#)]).await;
    let producer = fake::pages(PAST, &[("/health", ""), ("/get_server_info", r#"{"disaggregation_mode": "prefill"}"#)]);
    let producer = producer.await;
    let (of_a, of_b) = (event_ports(a).await, event_ports(b).await);
    let tokenizer = crate::support::process::repository().join("tests/data/chat_vectors");
    let tokenizer = format!(", prefixCache: {{tokenizer: {{type: huggingface, directory: {}}}}}", tokenizer.display());
    let reads = ", prefixCache: {kvEvents: {replayPort: 5657}}";
    let nothing = closed();
    let with =
        |planted, endpoints: Vec<String>, keys: &str, wanted| Row { planted, endpoints, keys: keys.into(), wanted };
    let engine = |server: SocketAddr, engine: &str| format!("{{address: \"{server}\", engine: {engine}}}");
    let role = |server: SocketAddr, role: &str| format!("{{address: \"{server}\", role: {role}}}");
    let rows = [
        row("good", &[a, b], "", &[]),
        with("good-events", vec![with_events(a, of_a), with_events(b, of_b)], reads, &[]),
        with(
            "good-split",
            vec![role(split.servers[0], "prefill"), role(split.servers[1], "decode")],
            ", disaggregation: {connector: nixl}",
            &[],
        ),
        row("closed", &[nothing], "", &[("server-reachable", "endpoints")]),
        row("refusing", &refusing.servers, "", &[("server-health", "log"), ("server-metrics", "metrics.port")]),
        row("other-engine", &sglang.servers, "", &[("server-engine", "engine: sglang")]),
        row("garbage", &garbage.servers, "", &[("server-metrics", "metrics.path")]),
        row("failing", &failing.servers, "", &[("server-metrics", "metrics.path")]),
        with(
            "block-size",
            vec![with_events(large_blocks.servers[0], event_ports(large_blocks.servers[0]).await)],
            ", prefixCache: {blockSize: 16, kvEvents: {replayPort: 5657}}",
            &[("server-block-size", "--block-size 16")],
        ),
        row("two-sizes", &[b, large_blocks.servers[0]], "", &[("pool-same-block-size", "--block-size")]),
        row("uncached", &uncached.servers, "", &[("server-prefix-caching", "--enable-prefix-caching")]),
        row("two-lengths", &[b, short.servers[0]], "", &[("pool-same-length", "--max-model-len")]),
        row("two-models", &[b, other.servers[0]], "", &[("pool-same-models", "/v1/load_lora_adapter")]),
        row(
            "no-model",
            &[b],
            ", modelRewrites: [{model: gpt, targets: [{model: llama}]}]",
            &[("pool-models", "--served-model-name llama")],
        ),
        row("many-adapters", &adapters.servers, "", &[("server-adapters", "--max-loras")]),
        row("twice", &[a, alias.address], "", &[("server-same-process", "remove")]),
        with(
            "no-events",
            vec![with_events(a, (nothing.port(), of_a.1))],
            reads,
            &[("server-kv-events", "kvEvents.port"), ("server-kv-port", "kvEvents.port")],
        ),
        with(
            "no-replay",
            vec![with_events(a, (of_a.0, nothing.port()))],
            reads,
            &[("server-kv-replay", "replay_endpoint"), ("server-kv-port", "kvEvents.replayPort")],
        ),
        with("events-of-another", vec![with_events(a, of_b)], reads, &[("server-kv-port", "kvEvents.port")]),
        with(
            "topic",
            vec![with_events(a, of_a)],
            ", prefixCache: {kvEvents: {replayPort: 5657, topic: kv-events}}",
            &[("server-kv-topic", "kvEvents.topic")],
        ),
        row("tokenizer", &[b], &tokenizer, &[("server-tokenizer", "prefixCache.tokenizer.directory")]),
        with(
            "no-prefill",
            vec![role(split.servers[1], "decode")],
            ", disaggregation: {connector: nixl}",
            &[("pool-roles", "role: prefill")],
        ),
        with(
            "no-connector",
            vec![role(a, "prefill"), role(b, "decode")],
            ", disaggregation: {connector: nixl}",
            &[("server-connector", "NixlConnector")],
        ),
        with(
            "wrong-role",
            vec![format!("{{address: \"{}\", engine: sglang, role: decode}}", producer.address)],
            ", disaggregation: {connector: sglang}",
            &[
                ("clock-difference", "NTP"),
                ("pool-roles", "role: prefill"),
                ("server-metrics", "--enable-metrics"),
                ("server-role", "--disaggregation-mode"),
            ],
        ),
        with("clock", vec![engine(late.address, "none")], "", &[("clock-difference", "NTP")]),
        with(
            "two-versions",
            vec![engine(old.address, "none"), engine(new.address, "none")],
            "",
            &[("clock-difference", "NTP"), ("pool-same-version", "version")],
        ),
    ];
    let directory = scratch("check-servers");
    let file = directory.path().join("attache.yaml");
    std::fs::write(&file, file_of(&rows)).expect("writing");
    let file = file.to_str().expect("a path");
    let checked = Checked::run(&[file, "--admin", &closed().to_string()]);
    assert_eq!(checked.code, 1);
    assert_rows(&checked, &rows);
    let picker: Vec<&str> = checked.faults("picker").iter().filter_map(|fault| fault["id"].as_str()).collect();
    assert_eq!(picker, ["picker-reachable"]);
}
