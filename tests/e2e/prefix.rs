//! The prefix index with engines that publish KV events, through real Envoy and real ZMQ.

use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::Payload;
use crate::support::client::{self, Http};
use crate::support::envoy::EnvoyProcess;
use crate::support::process::{eventually, scratch};
use crate::support::sim::SimProcess;
use attache_sim::tokenizer;
use bytes::Bytes;
use http::HeaderValue;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::net::SocketAddr;
use std::path::Path;
use tokio::task::JoinSet;

pub(crate) const SIM: &[&str] = &["--model", "sim-8b", "--kv-events-port", "0", "--kv-events-replay-port", "0"];

pub(crate) const BY_PREFIX: &str =
    "{name: pipeline, parameters: {scorers: [{type: prefix-cache-scorer}, {type: queue-scorer}]}}";

/// Load is ignored.
const BY_PREFIX_ALONE: &str = "{name: pipeline, parameters: {scorers: [{type: prefix-cache-scorer}]}}";

async fn get(to: SocketAddr, path: &str) -> Value {
    client::get(to, path).await.expect("an answer").json()
}

async fn post(to: SocketAddr, path: &str, body: &Value) -> Value {
    let reply = client::post(to, path, Bytes::from(body.to_string())).await.expect("an answer");
    assert_eq!(reply.status, 200, "{path}: {}", String::from_utf8_lossy(&reply.body));
    if reply.body.is_empty() { Value::Null } else { reply.json() }
}

/// The port at the end of `tcp://host:port`.
fn port(source: &Value) -> u16 {
    let text = source.as_str().expect("an endpoint");
    text.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).unwrap_or_else(|| panic!("no port in {text}"))
}

/// A configuration of a pool of `servers` whose KV events are read.
pub(crate) async fn config(strategy: &str, tokenizer: &str, servers: &[SocketAddr]) -> String {
    let mut text = format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  strategy: {strategy}\n  \
         prefixCache: {{tokenizer: {tokenizer}, kvEvents: {{}}}}\n  endpoints:\n"
    );
    for server in servers {
        let source = &get(*server, "/kv_event_sources").await["0"];
        let (events, replay) = (port(&source["endpoint"]), port(&source["replay_endpoint"]));
        let labels =
            format!("{{attache.dev/kv-events-port: \"{events}\", attache.dev/kv-events-replay-port: \"{replay}\"}}");
        writeln!(text, "  - {{address: \"{server}\", labels: {labels}}}").expect("text");
    }
    text
}

/// A prompt of token ids: one of three long prefixes, and a unique suffix.
fn prompt(i: u32) -> Vec<u32> {
    let head = (0..200 + 40 * (i % 3)).map(|t| 1_000 * (i % 3) + t);
    head.chain((0..30 + i % 50).map(|t| 100_000 + 1_000 * i + t)).collect()
}

/// Sends these requests, ten at a time. Returns how often each server served each prefix.
pub(crate) async fn load(to: SocketAddr, requests: std::ops::Range<u32>) -> BTreeMap<(u32, String), u32> {
    let mut served = BTreeMap::new();
    let mut open = JoinSet::new();
    for i in requests {
        if open.len() == 10 {
            let (head, server) = open.join_next().await.expect("one is open").expect("it did not panic");
            *served.entry((head, server)).or_default() += 1;
        }
        open.spawn(async move {
            let body = json!({"model": "sim-8b", "prompt": prompt(i), "max_tokens": 40});
            let reply = client::post(to, "/v1/completions", Bytes::from(body.to_string())).await.expect("an answer");
            assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
            (i % 3, reply.header("x-sim-server").to_owned())
        });
    }
    for (head, server) in open.join_all().await {
        *served.entry((head, server)).or_default() += 1;
    }
    served
}

/// Whether the picker has all events of a server. Requests at the same time may compute one prompt twice, and the
/// second copy has no origin.
fn is_complete(known: &Value) -> bool {
    known["trust"] == "exact" || known["trust"] == "uncounted"
}

/// Waits until the picker's blocks of every server equal the server's own.
async fn assert_equal(picker: &AttacheProcess, servers: &[SocketAddr], when: &str) {
    for server in servers {
        let what = format!("{when}: the index to equal the page table of {server}");
        let held = eventually(&what, async || {
            let known = get(picker.metrics, &format!("/kv_blocks?endpoint={server}")).await;
            let table = get(*server, "/sim/kv_blocks").await;
            let blocks = table["blocks"].as_array().expect("blocks");
            let hashes: Vec<&Value> = blocks.iter().map(|b| &b["hash"]).collect();
            let equal = is_complete(&known) && known["gpu"].as_array()?.iter().eq(hashes.iter().copied());
            equal.then_some(hashes.len())
        })
        .await;
        assert!(held > 0, "{when}: {server} holds nothing, the comparison says nothing");
    }
}

/// Waits until the index has all events of all servers. Until then the picker learns from routed requests.
pub(crate) async fn until_exact(picker: &AttacheProcess, servers: &[SocketAddr]) {
    for server in servers {
        eventually("an exact index", async || {
            let known = get(picker.metrics, &format!("/kv_blocks?endpoint={server}")).await;
            is_complete(&known).then_some(())
        })
        .await;
    }
}

/// Estimated and reported cached tokens of all responses that report them.
async fn estimated_and_reported(picker: &AttacheProcess) -> (f64, f64) {
    let reply = client::get(picker.metrics, "/metrics").await.expect("metrics");
    let metrics = String::from_utf8(reply.body).expect("text");
    let total = |name: &str| -> f64 {
        let line = metrics.lines().find(|l| l.starts_with(&format!("attache_{name}_total{{")));
        line.and_then(|l| l.rsplit(' ').next()?.parse().ok()).unwrap_or_else(|| panic!("no {name} in {metrics}"))
    };
    (total("prefix_foretold_tokens"), total("prefix_reported_tokens"))
}

#[tokio::test(flavor = "multi_thread")]
async fn index_equals_engine_page_tables_after_gaps_and_restarts() {
    // Few blocks, so that the engine evicts some.
    let sim = SimProcess::start(3, &[SIM, &["--blocks", "256"]].concat()).await;
    let config = config("round-robin", "tiktoken", &sim.servers).await;
    let picker = AttacheProcess::configured(&config).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    load(to, 0..150).await;
    assert_equal(&picker, &sim.servers, "at rest").await;

    for server in &sim.servers {
        post(*server, "/sim/faults", &json!({"kv_events": {"drop_next": 5}})).await;
    }
    load(to, 150..250).await;
    assert_equal(&picker, &sim.servers, "after gaps").await;

    post(sim.servers[1], "/sim/restart", &json!({})).await;
    load(to, 250..350).await;
    assert_equal(&picker, &sim.servers, "after a restart").await;

    let late = AttacheProcess::configured(&config).await;
    assert_equal(&late, &sim.servers, "a picker that came late").await;
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_with_a_common_prefix_go_to_the_server_that_caches_it() {
    let sim = SimProcess::start(3, SIM).await;
    let picker = AttacheProcess::configured(&config(BY_PREFIX_ALONE, "tiktoken", &sim.servers).await).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    until_exact(&picker, &sim.servers).await;
    load(to, 0..3).await;
    let served = load(to, 3..63).await;
    assert_eq!(served.len(), 3, "each head has its server: {served:?}");
    let explained = post(
        picker.metrics,
        "/explain?path=/v1/completions",
        &json!({"model": "sim-8b", "prompt": prompt(63), "max_tokens": 1}),
    )
    .await;
    let holds =
        |h: &Value| (h["address"].as_str().expect("an address").to_owned(), h["blocks"].as_u64().expect("blocks"));
    let held: BTreeMap<String, u64> = explained["endpoints"].as_array().expect("endpoints").iter().map(holds).collect();
    let deepest = held.values().max().expect("three endpoints");
    assert!((12..=13).contains(deepest), "the head of 200 tokens is held: {explained}");
    assert_eq!(held[explained["picks"][0].as_str().expect("a pick")], *deepest, "{explained}");
    assert!(explained["endpoints"].as_array().expect("endpoints").iter().all(|h| h["source"] == "engine"));
    let (estimated, reported) = estimated_and_reported(&picker).await;
    assert!(reported > 60.0 * 190.0, "the engines found the heads: {reported}");
    assert!((estimated / reported - 1.0).abs() < 0.02, "estimated {estimated}, reported {reported}");
    picker.assert_settled().await;
}

fn rules(topic: &str) -> String {
    (0..120).map(|i| format!("rule {i} about {topic}. ")).collect()
}

fn question(turn: usize, topic: &str) -> String {
    format!("question {turn} about {topic}, and why so?")
}

/// A conversation of several turns, one after another. Returns the servers of its turns.
async fn converse(to: SocketAddr, topic: &str, turns: usize) -> Vec<String> {
    let mut messages = vec![json!({"role": "system", "content": rules(topic)})];
    let mut served = Vec::new();
    for turn in 0..turns {
        messages.push(json!({"role": "user", "content": question(turn, topic)}));
        let body = json!({"model": "sim-8b", "messages": messages, "max_tokens": 60});
        let reply = client::post(to, "/v1/chat/completions", Bytes::from(body.to_string())).await.expect("an answer");
        assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
        served.push(reply.header("x-sim-server").to_owned());
        messages.push(reply.json()["choices"][0]["message"].clone());
    }
    served
}

#[tokio::test(flavor = "multi_thread")]
async fn conversations_stay_on_one_server_with_remote_tokenizer() {
    let sim = SimProcess::start(3, SIM).await;
    let picker = AttacheProcess::configured(&config(BY_PREFIX, "remote", &sim.servers).await).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    until_exact(&picker, &sim.servers).await;
    for topic in ["tides", "maps", "locks"] {
        let served = converse(to, topic, 6).await;
        assert!(served.iter().all(|s| *s == served[0]), "{topic}: {served:?}");
    }
    let (estimated, reported) = estimated_and_reported(&picker).await;
    assert!(reported > 3.0 * 5.0 * 400.0, "{reported}");
    assert!((estimated / reported - 1.0).abs() < 0.02, "estimated {estimated}, reported {reported}");
    picker.assert_settled().await;
}

/// Writes the simulated servers' tokenizer as model files, with the words of conversations on these topics.
fn write_model(to: &Path, topics: &[&str], turns: usize) {
    let answers = (0..64).flat_map(|seed| (0..64).map(move |i| tokenizer::answer_text(seed, i).to_owned()));
    let roles = ["system\n", "user\n", "assistant\n", "\n"].map(str::to_owned);
    let said = topics.iter().flat_map(|t| (0..turns).map(|turn| question(turn, t)).chain([rules(t)]));
    let mut vocabulary = BTreeMap::from([("<unk>".to_owned(), 0)]);
    for text in answers.chain(roles).chain(said) {
        let mut ids = Vec::new();
        tokenizer::encode(&text, &mut ids);
        vocabulary.extend(ids.into_iter().map(|id| (tokenizer::decode(&[id]), id)));
    }
    let marks = [("<|im_start|>", tokenizer::MESSAGE_START), ("<|im_end|>", tokenizer::MESSAGE_END)];
    let special = marks.map(|(text, id)| {
        vocabulary.insert(text.to_owned(), id);
        json!({"id": id, "content": text, "special": true, "normalized": false,
               "single_word": false, "lstrip": false, "rstrip": false})
    });
    let split =
        |regex: &str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
    // Split every four characters, from the start of each role and of each content.
    let cuts = [split(r"^(?:system|user|assistant)\n"), split(r"[\s\S]{1,4}")];
    let model = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": special, "normalizer": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": cuts}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    });
    let template = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}\
                    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
    std::fs::write(to.join("tokenizer.json"), model.to_string()).expect("a file");
    std::fs::write(to.join("chat_template.jinja"), template).expect("a file");
    std::fs::write(to.join("tokenizer_config.json"), "{}").expect("a file");
}

#[tokio::test(flavor = "multi_thread")]
async fn conversations_stay_on_one_server_with_model_tokenizer_files() {
    const TOPICS: [&str; 3] = ["tides", "maps", "locks"];
    let files = scratch("model");
    write_model(files.path(), &TOPICS, 6);
    let sim = SimProcess::start(3, &[SIM, &["--block-size", "32"]].concat()).await;
    let tokenizer = format!("{{type: huggingface, directory: {}}}", files.path().display());
    let picker = AttacheProcess::configured(&config(BY_PREFIX, &tokenizer, &sim.servers).await).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    until_exact(&picker, &sim.servers).await;
    for topic in TOPICS {
        let served = converse(to, topic, 6).await;
        assert!(served.iter().all(|s| *s == served[0]), "{topic}: {served:?}");
    }
    until_exact(&picker, &sim.servers).await;
    let asked = json!({"model": "sim-8b", "messages": [{"role": "system", "content": rules(TOPICS[0])}]});
    let explained = post(picker.metrics, "/explain?path=/v1/chat/completions", &asked).await;
    assert_eq!((&explained["tokenizer"], &explained["block"]), (&json!("huggingface"), &json!("32 tokens")));
    let endpoints = explained["endpoints"].as_array().expect("endpoints");
    assert!(endpoints.iter().all(|h| h["source"] == "engine"), "{explained}");
    assert!(endpoints.iter().any(|h| h["blocks"].as_u64() >= Some(19)), "{explained}");
    let (estimated, reported) = estimated_and_reported(&picker).await;
    assert!(reported > 3.0 * 5.0 * 400.0, "{reported}");
    assert!((estimated / reported - 1.0).abs() < 0.02, "estimated {estimated}, reported {reported}");
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn differing_block_sizes_are_logged_with_both_sizes() {
    let sim = SimProcess::start(1, &[SIM, &["--block-size", "32"]].concat()).await;
    let config = config(BY_PREFIX, "tiktoken", &sim.servers).await;
    let picker = AttacheProcess::configured(&config.replace("kvEvents: {}", "blockSize: 16, kvEvents: {}")).await;
    until_exact(&picker, &sim.servers).await;
    post(sim.servers[0], "/v1/completions", &json!({"model": "sim-8b", "prompt": prompt(1), "max_tokens": 1})).await;
    let log = eventually("both sizes in the log", async || {
        let log = picker.process.stderr();
        log.contains("block size of the server differs").then_some(log)
    })
    .await;
    let line = log.lines().find(|l| l.contains("block size of the server differs")).expect("a line");
    for part in ["\"block_size_of_server\":32", "\"block_size\":16", "set `prefixCache.blockSize` to the engines' size"]
    {
        assert!(line.contains(part), "{line}");
    }
    let known = get(picker.metrics, &format!("/kv_blocks?endpoint={}", sim.servers[0])).await;
    assert_ne!(known["trust"], "exact");
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn conversations_stay_on_one_server_without_kv_events() {
    let sim = SimProcess::start(3, &["--model", "sim-8b"]).await;
    let endpoints: Vec<String> = sim.servers.iter().map(|s| format!("\"{s}\"")).collect();
    let text = format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  strategy: {BY_PREFIX}\n  \
         endpoints: [{}]\n",
        endpoints.join(", ")
    );
    let picker = AttacheProcess::configured(&text).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    for topic in ["tides", "maps", "locks"] {
        let served = converse(to, topic, 6).await;
        assert!(served.iter().all(|s| *s == served[0]), "{topic}: {served:?}");
    }
    let (estimated, reported) = estimated_and_reported(&picker).await;
    assert!(reported > 3.0 * 5.0 * 400.0, "{reported}");
    assert!((estimated / reported - 1.0).abs() < 0.05, "estimated {estimated}, reported {reported}");
    picker.assert_settled().await;
}

/// The first of `count` consecutive ports that were free a moment ago.
async fn ports_in_a_row(count: u16) -> u16 {
    let at = |port: u16| tokio::net::TcpListener::bind(("127.0.0.1", port));
    loop {
        let first = at(0).await.expect("a free port");
        let from = first.local_addr().expect("a bound address").port();
        let mut held = vec![first];
        for port in from.saturating_add(1)..from.saturating_add(count) {
            held.extend(at(port).await);
        }
        if held.len() == usize::from(count) {
            return from;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_go_to_the_rank_that_caches_their_prefix() {
    const RANKS: u16 = 4;
    const PROMPTS: u32 = 12;
    let events = ports_in_a_row(2 * RANKS).await;
    let (ranks, port, replay) = (RANKS.to_string(), events.to_string(), (events + RANKS).to_string());
    let sim = SimProcess::start(
        1,
        &["--data-parallel-size", &ranks, "--kv-events-port", &port, "--kv-events-replay-port", &replay],
    )
    .await;
    let server = sim.servers[0];
    let text = format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  strategy: {BY_PREFIX}\n  prefixCache: {{tokenizer: tiktoken, \
         kvEvents: {{port: {port}, replayPort: {replay}, ranks: {RANKS}}}, chooseRank: true}}\n  endpoints: [\"{server}\"]\n"
    );
    let picker = AttacheProcess::configured(&text).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    until_exact(&picker, &sim.servers).await;

    // Each prompt has a new suffix every time. The rank that the client names does not exist.
    let ask = move |number: u32, turn: u32| async move {
        let head = (0..320).map(|t| 1_000 * (number + 1) + t);
        let prompt: Vec<u32> = head.chain((0..20).map(|t| 50_000 + 100 * turn + t)).collect();
        let body = Bytes::from(json!({"model": "sim-8b", "prompt": prompt, "max_tokens": 20}).to_string());
        let mut request = client::request("POST", to, Http::H1, "/v1/completions", Payload::sized(body));
        request.headers_mut().insert("x-data-parallel-rank", HeaderValue::from_static("77"));
        let reply = client::send(to, Http::H1, request).await.expect("an answer");
        assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
        let cached = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        (reply.header("x-sim-rank").to_owned(), cached.expect("a count"))
    };
    let mut first = JoinSet::new();
    (0..PROMPTS).for_each(|number| drop(first.spawn(async move { (number, ask(number, 0).await) })));
    let first: BTreeMap<u32, (String, u64)> = first.join_all().await.into_iter().collect();
    let used: BTreeSet<&String> = first.values().map(|(rank, _)| rank).collect();
    assert_eq!(used.len(), usize::from(RANKS), "what comes at once is spread: {first:?}");
    for number in 0..PROMPTS {
        let head: Vec<u32> = (0..320).map(|t| 1_000 * (number + 1) + t).collect();
        let asked = json!({"model": "sim-8b", "prompt": head, "max_tokens": 1});
        eventually("the picker to know who holds the prompt", async || {
            let explained = post(picker.metrics, "/explain?path=/v1/completions", &asked).await;
            (explained["endpoints"][0]["blocks"] == 20).then_some(())
        })
        .await;
    }
    for turn in 1..4 {
        for number in 0..PROMPTS {
            let (rank, cached) = ask(number, turn).await;
            assert_eq!((&rank, cached), (&first[&number].0, 320), "prompt {number}, turn {turn}");
        }
    }
    let page = client::get(server, "/metrics").await.expect("a page");
    let page = String::from_utf8_lossy(&page.body).into_owned();
    for rank in 0..RANKS {
        let hits = format!("vllm:prefix_cache_hits_total{{engine=\"{rank}\",model_name=\"sim-8b\"}} ");
        let count =
            page.lines().find_map(|line| line.strip_prefix(&hits)).unwrap_or_else(|| panic!("no {hits}: {page}"));
        assert_ne!(count, "0.0", "rank {rank}");
    }
    picker.assert_settled().await;
}

/// Without KV events, the metrics show how busy each rank is, including requests of other clients.
#[tokio::test(flavor = "multi_thread")]
async fn requests_go_to_the_idle_rank_without_kv_events() {
    let sim = SimProcess::start(1, &["--data-parallel-size", "3"]).await;
    let server = sim.servers[0];
    let text = format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  strategy: least-request\n  prefixCache: {{chooseRank: true}}\n  \
         endpoints: [\"{server}\"]\n"
    );
    let picker = AttacheProcess::configured(&text).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let ask = async |to: SocketAddr, rank: &'static str, tokens: u32| {
        let body =
            json!({"model": "sim-8b", "prompt": "tides", "max_tokens": tokens, "ignore_eos": true, "stream": true});
        let body = Payload::sized(Bytes::from(body.to_string()));
        let mut request = client::request("POST", to, Http::H1, "/v1/completions", body);
        request.headers_mut().insert("x-data-parallel-rank", HeaderValue::from_static(rank));
        let mut open = client::open(to, Http::H1, request).await.expect("an answer");
        assert!(open.next().await.expect("a first event").is_some());
        open
    };
    for idle in ["0", "1", "2"] {
        let mut others = Vec::new();
        for busy in ["0", "1", "2"].into_iter().filter(|rank| *rank != idle) {
            others.push(ask(server, busy, 4_000).await);
            others.push(ask(server, busy, 4_000).await);
        }
        eventually("the picker to read of those", async || {
            (picker.endpoints().await[0]["metrics"]["running"] == 4).then_some(())
        })
        .await;
        for _ in 0..3 {
            let served = ask(envoy.listener("inference"), "1", 4).await;
            assert_eq!(served.response.headers()["x-sim-rank"], idle);
            served.finish().await.expect("a whole answer");
        }
        drop(others);
        eventually("the server to be idle", async || {
            (picker.endpoints().await[0]["metrics"]["running"] == 0).then_some(())
        })
        .await;
    }
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_tokenizer_falls_back_to_text_comparison() {
    let sim = SimProcess::start(2, &["--model", "sim-8b"]).await;
    let text = format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  strategy: {BY_PREFIX}\n  \
         prefixCache: {{tokenizer: {{type: huggingface, directory: /nowhere}}}}\n  endpoints: [\"{}\", \"{}\"]\n",
        sim.servers[0], sim.servers[1]
    );
    let picker = AttacheProcess::configured(&text).await;
    assert!(picker.process.stderr().contains("there is no tokenizer.json in /nowhere"), "{}", picker.process.stderr());
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let served = converse(envoy.listener("inference"), "tides", 4).await;
    assert!(served.iter().all(|s| *s == served[0]), "{served:?}");
    let pools = get(picker.metrics, "/endpoints").await;
    assert_eq!(pools["pools"][0]["tokenizer"], "characters");
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reload_reads_the_tokenizer_files_again() {
    let sim = SimProcess::start(1, &["--model", "sim-8b"]).await;
    let files = scratch("tokenizer");
    let (vocabulary, configuration) = (files.path().join("tokenizer.json"), files.path().join("attache.yaml"));
    let given = include_str!("../data/chat_vectors/tokenizer.json");
    let written = |round: u32| {
        format!(
            "# round {round}\napiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  strategy: {BY_PREFIX}\n  \
             prefixCache: {{blockSize: 1, tokenizer: {{type: huggingface, directory: {}}}}}\n  endpoints: [\"{}\"]\n",
            files.path().display(),
            sim.servers[0]
        )
    };
    std::fs::write(&configuration, written(0)).expect("a file");
    let picker = AttacheProcess::with_file(&configuration, &[]).await;
    let tokens = async || {
        let body = json!({"model": "sim-8b", "prompt": "Which server holds it?"});
        let explained = post(picker.metrics, "/explain?path=/v1/completions", &body).await;
        let blocks = explained["blocks"].as_array().expect("blocks").len();
        (explained["tokenizer"].as_str().expect("a name").to_owned(), blocks)
    };
    assert_eq!(tokens().await.0, "characters", "there is no file yet");

    std::fs::write(&vocabulary, given).expect("a file");
    std::fs::write(&configuration, written(1)).expect("a file");
    picker.until_metric("attache_config_reloads_total", 1.0).await;
    let (name, words) = tokens().await;
    assert_eq!(name, "huggingface");

    let mut without_merges: Value = serde_json::from_str(given).expect("JSON");
    without_merges["model"]["merges"] = json!([]);
    std::fs::write(&vocabulary, without_merges.to_string()).expect("a file");
    std::fs::write(&configuration, written(2)).expect("a file");
    picker.until_metric("attache_config_reloads_total", 2.0).await;
    let (_, bytes) = tokens().await;
    assert!(bytes >= 22 && words < bytes / 2, "{words} tokens, then {bytes}");
    picker.assert_settled().await;
}
