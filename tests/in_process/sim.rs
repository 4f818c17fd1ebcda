//! The simulated servers over real HTTP: response shapes, streams, errors, caching, adapters, faults, load.

use attache_sim::engine::EngineConfig;
use attache_sim::faults::Faults;
use attache_sim::latency::LatencyModel;
use attache_sim::{MetricsStyle, Quirks, ServerConfig, SimConfig, SimHandle, serve};
use bytes::Bytes;
use futures_util::future::join_all;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

mod kv_events;
mod pd;

/// Maximum size of a response body in these tests, bytes.
const MAX_BODY: usize = 4 << 20;
/// Timeout of each wait. A longer wait is a hang.
const PATIENCE: Duration = Duration::from_secs(30);

/// A fleet of `endpoints` servers on free ports, a hundred times faster than the default model.
fn fleet(endpoints: u16, change: impl FnOnce(&mut ServerConfig)) -> SimHandle {
    let mut server = ServerConfig::default();
    server.engine.latency.speed = 100.0;
    change(&mut server);
    serve(&SimConfig { endpoints, port: 0, server, ..SimConfig::default() }).expect("ports")
}

/// So slow that no request ends during a test.
fn slow() -> LatencyModel {
    LatencyModel { step_base: Duration::from_secs(600), ..LatencyModel::default() }
}

#[derive(Debug)]
struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    text: String,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    /// Name and data of all events, in order. Checks the framing.
    fn events(&self) -> Vec<(Option<String>, String)> {
        assert_eq!(self.headers["content-type"], "text/event-stream; charset=utf-8");
        let events = self.text.strip_suffix("\n\n").expect("a blank line at the end").split("\n\n");
        events
            .map(|event| {
                let (name, data) = match event.split_once('\n') {
                    Some((name, data)) => (Some(name.strip_prefix("event: ").expect("a name").to_owned()), data),
                    None => (None, event),
                };
                (name, data.strip_prefix("data: ").expect("data").to_owned())
            })
            .collect()
    }

    fn chunks(&self) -> Vec<Value> {
        let events = self.events();
        assert_eq!(events.last().unwrap().1, "[DONE]");
        events[..events.len() - 1].iter().map(|(_, data)| serde_json::from_str(data).unwrap()).collect()
    }
}

#[tokio::test]
async fn ranks_behind_one_port_have_separate_caches() {
    let fleet = fleet(1, |server| server.ranks = 3);
    let client = Client::new(&fleet, 0);
    let ask = |rank: Option<&'static str>| {
        let body = json!({"prompt": (0..64).collect::<Vec<u32>>(), "max_tokens": 2}).to_string();
        let mut request = client.request(&Method::POST, "/v1/completions", Some("application/json"), body.into_bytes());
        if let Some(rank) = rank {
            request.headers_mut().insert("x-data-parallel-rank", rank.parse().unwrap());
        }
        client.send(request)
    };
    let cached = |answer: &Answer| answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].clone();
    for (rank, known) in [("2", 0), ("2", 48), ("0", 0), ("0", 48), ("2", 48)] {
        let answer = ask(Some(rank)).await;
        assert_eq!((answer.status, &answer.headers["x-sim-rank"]), (StatusCode::OK, &rank.parse().unwrap()));
        assert_eq!(cached(&answer), known, "rank {rank}");
    }
    // The error message of a real vLLM.
    for (rank, said) in [("3", "3"), ("-1", "-1")] {
        let answer = ask(Some(rank)).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        let error = answer.json()["error"].clone();
        assert_eq!(error["message"], format!("data_parallel_rank {said} is out of range [0, 3)."));
        assert_eq!(error["type"], "BadRequestError");
    }
    // Without the header, idle ranks are used in rotation.
    let mut served = BTreeSet::new();
    for _ in 0..3 {
        served.insert(ask(None).await.headers["x-sim-rank"].to_str().unwrap().to_owned());
    }
    assert_eq!(served.len(), 3, "{served:?}");
    let page = client.get("/metrics").await.text;
    let queries = |rank: u32| format!("vllm:prefix_cache_queries_total{{engine=\"{rank}\",model_name=\"sim-8b\"}} ");
    let counts: Vec<&str> =
        (0..3).filter_map(|r| page.lines().find_map(|line| line.strip_prefix(&queries(r)))).collect();
    assert_eq!(counts, ["192.0", "64.0", "256.0"]);
    assert_eq!(page.matches("# TYPE vllm:prefix_cache_queries_total").count(), 1);
}

struct Client {
    http: HttpClient<HttpConnector, Full<Bytes>>,
    base: String,
}

impl Client {
    fn new(fleet: &SimHandle, index: usize) -> Self {
        Self {
            http: HttpClient::builder(TokioExecutor::new()).build_http(),
            base: format!("http://{}", fleet.addresses()[index]),
        }
    }

    fn h2(fleet: &SimHandle, index: usize) -> Self {
        let http = HttpClient::builder(TokioExecutor::new()).http2_only(true).build_http();
        Self { http, ..Self::new(fleet, index) }
    }

    fn request(&self, method: &Method, path: &str, content_type: Option<&str>, body: Vec<u8>) -> Request<Full<Bytes>> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.base));
        if let Some(content_type) = content_type {
            request = request.header("content-type", content_type);
        }
        request.body(Full::from(body)).unwrap()
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> Answer {
        let answer = async {
            let (head, body) = self.http.request(request).await.expect("an answer").into_parts();
            let body = Limited::new(body, MAX_BODY).collect().await.expect("a whole body").to_bytes();
            Answer { status: head.status, headers: head.headers, text: String::from_utf8_lossy(&body).into_owned() }
        };
        tokio::time::timeout(PATIENCE, answer).await.expect("an answer in time")
    }

    async fn post(&self, path: &str, body: Value) -> Answer {
        self.send(self.request(&Method::POST, path, Some("application/json"), body.to_string().into_bytes())).await
    }

    async fn get(&self, path: &str) -> Answer {
        self.send(self.request(&Method::GET, path, None, vec![])).await
    }

    /// Polls `/stats` until `holds` is true.
    async fn until(&self, what: &str, holds: impl Fn(&Value) -> bool) {
        let waiting = async {
            while !holds(&self.get("/stats").await.json()) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, waiting).await.unwrap_or_else(|_| panic!("{what} never came"));
    }
}

fn chat(text: &str, max_tokens: u32) -> Value {
    json!({"model": "sim-8b", "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens})
}

fn with(mut body: Value, key: &str, value: Value) -> Value {
    body[key] = value;
    body
}

/// All paths of object keys. Items of a list share one path.
fn paths(value: &Value, at: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                found.insert(format!("{at}.{key}"));
                paths(value, &format!("{at}.{key}"), found);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| paths(item, &format!("{at}[]"), found)),
        _ => {}
    }
}

fn captures() -> BTreeMap<String, Value> {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/sim/vllm");
    std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| !path.ends_with("metrics_shape.json"))
        .map(|path| {
            let capture = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            (path.file_stem().unwrap().to_string_lossy().into_owned(), capture)
        })
        .collect()
}

#[tokio::test]
async fn responses_have_the_statuses_and_fields_of_vllm() {
    let fleet = fleet(1, |server| {
        server.models = vec!["tiny".into(), "tiny-alias".into()];
        server.loras = vec!["sql".into()];
    });
    let client = Client::new(&fleet, 0);
    let captures = captures();
    assert!(captures.len() > 25);
    // These are last, so that the adapter is loaded twice and then unloaded twice.
    let last = ["lora_load", "lora_load_again", "lora_unload", "lora_unload_again"];
    let order = captures.keys().filter(|name| !last.contains(&name.as_str())).map(String::as_str).chain(last);
    for name in order {
        let capture = &captures[name];
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let method: Method = capture["method"].as_str().unwrap().parse().unwrap();
        let body = if capture["request"].is_null() { String::new() } else { text(&capture["request"]) };
        let path = capture["path"].as_str().unwrap();
        let answer =
            client.send(client.request(&method, path, capture["content_type"].as_str(), body.into_bytes())).await;
        assert_eq!(u64::from(answer.status.as_u16()), capture["status"], "{name}: {}", answer.text);
        // A wrong method gets the simulator's usual error object instead of FastAPI's detail.
        if let (Value::Object(_), true) = (&capture["response"], name != "err_405") {
            let (mut expected, mut got) = (BTreeSet::new(), BTreeSet::new());
            paths(&capture["response"], "", &mut expected);
            paths(&answer.json(), "", &mut got);
            if name == "messages" {
                // Anthropic documents this field, and vLLM omits it.
                expected.insert(".stop_sequence".to_owned());
            }
            assert_eq!(got, expected, "{name}");
        } else if capture["response"].is_string() {
            assert_eq!(answer.text, capture["response"], "{name}");
        }
        if let Some(model) = capture["response"]["model"].as_str() {
            assert_eq!(answer.json()["model"], model, "{name}");
        }
    }
}

#[tokio::test]
async fn metrics_have_the_names_types_and_labels_of_vllm() {
    let fleet = fleet(1, |server| server.loras = vec!["sql".into()]);
    let client = Client::new(&fleet, 0);
    client.post("/v1/chat/completions", with(chat("hello", 5), "model", json!("sql"))).await;
    let page = client.get("/metrics").await;
    let shape: BTreeMap<String, Value> =
        serde_json::from_str(include_str!("../data/sim/vllm/metrics_shape.json")).unwrap();
    let mut types = BTreeMap::new();
    let mut seen = BTreeSet::new();
    for line in page.text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(types.insert(name.to_owned(), kind.to_owned()).is_none(), "{name} twice");
        } else if !line.starts_with('#') {
            let (series, value) = line.rsplit_once(' ').unwrap();
            value.parse::<f64>().unwrap();
            let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
            let expected = shape.get(name).unwrap_or_else(|| panic!("vLLM has no {name}"));
            let family = ["_bucket", "_count", "_sum"].iter().find_map(|suffix| {
                name.strip_suffix(suffix).filter(|family| types.get(*family).is_some_and(|kind| kind == "histogram"))
            });
            assert_eq!(types[family.unwrap_or(name)], expected["type"], "{name}");
            for label in labels.trim_end_matches('}').split("\",").filter_map(|label| label.split_once('=')) {
                let known = expected["labels"].as_array().unwrap().contains(&json!(label.0));
                assert!(known, "{name} has no label {}", label.0);
            }
            seen.insert(name.to_owned());
        }
    }
    for name in [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
        "vllm:lora_requests_info",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:request_success_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_sum",
        "process_start_time_seconds",
    ] {
        assert!(seen.contains(name), "{name} is missing");
    }
    assert!(page.text.contains(r#"running_lora_adapters="sql""#), "an older set stays on the page");
}

#[tokio::test]
async fn every_metrics_style_has_the_five_required_values() {
    let styles: [(MetricsStyle, &str, &[&str]); 3] = [
        (
            MetricsStyle::Sglang,
            "/metrics",
            &[
                "sglang:num_queue_reqs{",
                "sglang:num_running_reqs{",
                "sglang:token_usage{",
                "page_size=\"16\"",
                "num_pages=\"4096\"",
            ],
        ),
        (
            MetricsStyle::Trtllm,
            "/prometheus/metrics",
            &[
                "trtllm_num_requests_waiting{",
                "trtllm_num_requests_running{",
                "trtllm_kv_cache_utilization{",
                "trtllm_kv_cache_tokens_per_block{",
                "trtllm_kv_cache_max_blocks{",
            ],
        ),
        (
            MetricsStyle::Triton,
            "/metrics",
            &[
                "request_type=\"waiting\"",
                "request_type=\"scheduled\"",
                "kv_cache_block_type=\"fraction\"",
                "kv_cache_block_type=\"tokens_per\"",
                "kv_cache_block_type=\"max\"",
            ],
        ),
    ];
    for (style, path, facts) in styles {
        let fleet = fleet(1, |server| server.metrics_style = style);
        let page = Client::new(&fleet, 0).get(path).await;
        assert_eq!(page.status, 200);
        assert!(!page.text.contains("vllm:"));
        for fact in facts {
            assert!(page.text.contains(fact), "{style:?} lacks {fact}");
        }
    }
}

#[tokio::test]
async fn openai_stream_has_role_tokens_usage_and_done() {
    let fleet = fleet(1, |_| ());
    let client = Client::new(&fleet, 0);
    let body = with(chat("Hello", 3), "stream", json!(true));
    let chunks = client.post("/v1/chat/completions", body.clone()).await.chunks();
    assert_eq!(chunks.len(), 5);
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    let text: String =
        chunks[1..4].iter().map(|chunk| chunk["choices"][0]["delta"]["content"].as_str().unwrap()).collect();
    let last = &chunks[4];
    assert_eq!(last["choices"][0]["delta"], json!({}));
    assert_eq!(last["choices"][0]["finish_reason"], "length");
    assert_eq!(last["usage"]["completion_tokens"], 3);
    assert!(chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"] && chunk["object"] == "chat.completion.chunk"));

    let whole = client.post("/v1/chat/completions", chat("Hello", 3)).await.json();
    assert_eq!(whole["choices"][0]["message"]["content"], text.as_str(), "equal requests, equal answers");

    let asked = with(body.clone(), "stream_options", json!({"include_usage": true}));
    let chunks = client.post("/v1/chat/completions", asked).await.chunks();
    assert_eq!(chunks[5]["choices"], json!([]));
    assert_eq!(chunks[5]["usage"]["completion_tokens"], 3);
    assert!(chunks[4].get("usage").is_none());

    let declined = with(body, "stream_options", json!({"include_usage": false}));
    let chunks = client.post("/v1/chat/completions", declined).await.chunks();
    assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()));
}

#[tokio::test]
async fn several_prompts_and_choices_share_one_response() {
    let fleet = fleet(1, |_| ());
    let client = Client::new(&fleet, 0);
    let body = json!({"prompt": ["one prompt", [1, 2, 3]], "max_tokens": 4});
    assert_eq!(client.post("/v1/completions", body).await.status, 422, "text and ids can't be mixed");
    let body = json!({"prompt": ["one prompt", "another one"], "n": 2, "max_tokens": 4});
    let answer = client.post("/v1/completions", body.clone()).await.json();
    let texts: BTreeSet<&str> =
        answer["choices"].as_array().unwrap().iter().map(|c| c["text"].as_str().unwrap()).collect();
    assert_eq!(texts.len(), 4, "four different texts");
    assert_eq!(answer["usage"]["prompt_tokens"], 6);
    assert_eq!(answer["usage"]["completion_tokens"], 16);
    let chunks = client.post("/v1/completions", with(body, "stream", json!(true))).await.chunks();
    let finished = chunks.iter().filter(|chunk| chunk["choices"][0]["finish_reason"] == "length").count();
    assert_eq!(finished, 4);
    assert_eq!(chunks.iter().filter(|chunk| chunk.get("usage").is_some()).count(), 1);
}

#[tokio::test]
async fn anthropic_stream_has_its_six_event_types() {
    let fleet = fleet(1, |_| ());
    let client = Client::new(&fleet, 0);
    let body = with(chat("Hello", 2), "stream", json!(true));
    let answer = client.post("/v1/messages", body).await;
    let events = answer.events();
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_deref().unwrap()).collect();
    let expected =
        ["message_start", "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"];
    assert_eq!(names[..5], expected);
    assert_eq!(names[5..], ["message_delta", "message_stop"]);
    let data: Vec<Value> = events.iter().map(|(_, data)| serde_json::from_str(data).unwrap()).collect();
    assert!(names.iter().zip(&data).all(|(name, data)| data["type"] == *name));
    assert_eq!(data[0]["message"]["stop_reason"], Value::Null);
    assert_eq!(data[5]["delta"]["stop_reason"], "max_tokens");
    assert_eq!(data[5]["usage"]["output_tokens"], 2);
}

#[tokio::test]
async fn stop_sequences_end_the_response_and_are_excluded() {
    let fleet = fleet(1, |server| server.output_tokens = 12);
    let client = Client::new(&fleet, 0);
    let body = json!({"messages": [{"role": "user", "content": "Hello"}]});
    let plain = client.post("/v1/messages", body.clone()).await.json();
    assert_eq!(plain["stop_reason"], "end_turn");
    let text = plain["content"][0]["text"].as_str().unwrap();
    assert_eq!(text.len(), 48);
    let stop = &text[21..27];
    let stopped = client.post("/v1/messages", with(body.clone(), "stop_sequences", json!([stop]))).await.json();
    assert_eq!(stopped["stop_reason"], "stop_sequence");
    assert_eq!(stopped["stop_sequence"], stop);
    assert_eq!(stopped["content"][0]["text"], text[..text.find(stop).unwrap()]);

    let streamed = with(with(body, "stop", json!(stop)), "stream", json!(true));
    let chunks = client.post("/v1/chat/completions", streamed).await.chunks();
    let said: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(said, text[..text.find(stop).unwrap()]);
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn previous_response_id_works_only_on_the_same_server() {
    let fleet = fleet(2, |_| ());
    let (one, other) = (Client::new(&fleet, 0), Client::new(&fleet, 1));
    let body = json!({"input": "Hello there, this is a first question", "max_output_tokens": 40});
    let first = one.post("/v1/responses", with(body, "stream", json!(true))).await;
    let last: Value = serde_json::from_str(&first.events().last().unwrap().1).unwrap();
    assert_eq!(last["type"], "response.completed");
    assert_eq!(last["sequence_number"], first.events().len() - 1);
    let next = json!({"input": "And then?", "max_output_tokens": 2, "previous_response_id": last["response"]["id"]});
    let second = one.post("/v1/responses", next.clone()).await.json();
    let used = last["response"]["usage"]["total_tokens"].as_u64().unwrap() - 1;
    assert_eq!(
        second["usage"]["input_tokens_details"]["cached_tokens"],
        used - used % 16,
        "question and answer are cached"
    );
    let missing = other.post("/v1/responses", next).await;
    assert_eq!((missing.status, &missing.json()["error"]["code"]), (StatusCode::NOT_FOUND, &json!(404)));
}

#[tokio::test]
async fn repeated_prompts_and_second_turns_hit_the_cache() {
    let fleet = fleet(2, |_| ());
    let client = Client::new(&fleet, 0);
    let cached = |answer: &Answer| answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    let question = "What is an event loop? ".repeat(20);
    let first = client.post("/v1/chat/completions", chat(&question, 33)).await;
    let prompt = first.json()["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(cached(&first), 0);
    let again = client.post("/v1/chat/completions", chat(&question, 33)).await;
    assert_eq!(cached(&again), (prompt - 1) / 16 * 16);
    let answer = first.json()["choices"][0]["message"]["content"].clone();
    let mut next = chat(&question, 1);
    let turns = next["messages"].as_array_mut().unwrap();
    turns.push(json!({"role": "assistant", "content": answer}));
    turns.push(json!({"role": "user", "content": "And a coroutine?"}));
    let second = client.post("/v1/chat/completions", next.clone()).await;
    assert_eq!(cached(&second), (prompt + 32) / 16 * 16, "the answer is cached too, but for its last token");
    let salted = client.post("/v1/chat/completions", with(chat(&question, 1), "cache_salt", json!("tenant"))).await;
    assert_eq!(cached(&salted), 0);
    assert_eq!(
        cached(&Client::new(&fleet, 1).post("/v1/chat/completions", next).await),
        0,
        "each server has its own cache"
    );
    let page = client.get("/metrics").await.text;
    let hits = cached(&again) + cached(&second);
    assert!(
        page.contains(&format!("vllm:prefix_cache_hits_total{{engine=\"0\",model_name=\"sim-8b\"}} {hits}.0")),
        "{page}"
    );
}

#[tokio::test]
async fn errors_have_one_shape_and_the_documented_statuses() {
    let fleet = fleet(1, |server| server.max_body_bytes = 4_096);
    let client = Client::new(&fleet, 0);
    let json_type = Some("application/json");
    let cases: [(Method, &str, &str, u16); 14] = [
        (Method::POST, "/v1/chat/completions", "{\"model\":", 400),
        (Method::POST, "/v1/chat/completions", "", 400),
        (Method::POST, "/v1/chat/completions", "{}", 400),
        (Method::POST, "/v1/chat/completions", r#"{"messages":[{"content":"no role"}]}"#, 400),
        (Method::POST, "/v1/chat/completions", r#"{"messages":"text"}"#, 422),
        (Method::POST, "/v1/chat/completions", r#"{"messages":[{"role":"user","content":"x"}],"stream":"true"}"#, 422),
        (Method::POST, "/v1/completions", r#"{"prompt":[-1]}"#, 422),
        (Method::POST, "/v1/completions", r#"{"prompt":"x","n":0}"#, 400),
        (Method::POST, "/v1/messages", r#"{"model":"nope","messages":[{"role":"user","content":"x"}]}"#, 404),
        (Method::POST, "/v1/embeddings", "{}", 400),
        (Method::GET, "/v1/messages", "", 405),
        (Method::DELETE, "/health", "", 405),
        (Method::POST, "/stats", "{}", 405),
        (Method::POST, "/no/such/path", "{}", 404),
    ];
    for (method, path, body, status) in cases {
        let answer = client.send(client.request(&method, path, json_type, body.into())).await;
        assert_eq!(answer.status.as_u16(), status, "{path} {body}: {}", answer.text);
        let error = &answer.json()["error"];
        assert_eq!(error["code"], status);
        assert!(error["message"].is_string() && error["type"].is_string());
        assert_eq!(answer.headers.contains_key("allow"), status == 405);
    }
    let large = client.post("/v1/completions", json!({"prompt": "x".repeat(5_000)})).await;
    assert_eq!(large.status, 413);
    let long = client.post("/v1/completions", json!({"prompt": vec![1; 10], "max_tokens": 0})).await;
    assert_eq!(long.status, 400, "max_tokens 0");
}

#[tokio::test]
async fn too_long_prompt_is_rejected_and_long_response_truncated() {
    let fleet = fleet(1, |server| server.engine = EngineConfig { max_model_len: 128, ..server.engine.clone() });
    let client = Client::new(&fleet, 0);
    let long = client.post("/v1/completions", json!({"prompt": vec![300; 140], "stream": true})).await;
    assert_eq!((long.status, &long.json()["error"]["param"]), (StatusCode::BAD_REQUEST, &json!("input_tokens")));
    let cut = client
        .post("/v1/completions", json!({"prompt": vec![300; 110], "max_tokens": 500, "ignore_eos": true}))
        .await
        .json();
    assert_eq!(cut["usage"]["total_tokens"], 128);
    assert_eq!(cut["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn pooling_requests_generate_no_tokens() {
    let fleet = fleet(1, |_| ());
    let client = Client::new(&fleet, 0);
    let embeddings = client.post("/v1/embeddings", json!({"input": ["four", "eight by"]})).await.json();
    assert_eq!(embeddings["data"].as_array().unwrap().len(), 2);
    assert_eq!(embeddings["usage"]["prompt_tokens"], 3);
    let rerank =
        client.post("/v1/rerank", json!({"query": "q", "documents": ["a", "b", "c"], "top_n": 2})).await.json();
    let scores: Vec<f64> =
        rerank["results"].as_array().unwrap().iter().map(|r| r["relevance_score"].as_f64().unwrap()).collect();
    assert!(scores.len() == 2 && scores[0] >= scores[1]);
    for body in [
        json!({"text_1": "a", "text_2": ["b", "c"]}),
        json!({"queries": ["a", "b"], "documents": ["c", "d"]}),
        json!({"data_1": "a", "data_2": ["c", "d"]}),
    ] {
        assert_eq!(client.post("/score", body).await.json()["data"].as_array().unwrap().len(), 2);
    }
    assert_eq!(client.get("/stats").await.json()["tokens_generated"], 0);
}

#[tokio::test]
async fn tokenize_and_count_tokens_agree_with_usage() {
    let fleet = fleet(1, |_| ());
    let client = Client::new(&fleet, 0);
    let tokens = client.post("/tokenize", json!({"prompt": "import os and sys"})).await.json();
    let text = client.post("/detokenize", json!({"tokens": tokens["tokens"]})).await.json();
    assert_eq!(text["prompt"], "import os and sys");
    let rendered = client.post("/v1/completions/render", json!({"prompt": "import os and sys"})).await.json();
    assert_eq!(rendered[0]["token_ids"], tokens["tokens"]);
    let body = chat("How long is this?", 1);
    let count = client.post("/v1/messages/count_tokens", body.clone()).await.json()["input_tokens"].clone();
    let rendered = client.post("/v1/chat/completions/render", body.clone()).await.json();
    assert_eq!(rendered["token_ids"].as_array().map(Vec::len), count.as_u64().map(|count| count as usize));
    assert_eq!(client.post("/tokenize", body.clone()).await.json()["count"], count);
    assert_eq!(client.post("/v1/chat/completions", body).await.json()["usage"]["prompt_tokens"], count);
}

#[tokio::test]
async fn lora_adapters_can_be_loaded_and_unloaded() {
    let fleet = fleet(1, |_| ());
    let client = Client::new(&fleet, 0);
    let body = with(chat("hello", 2), "model", json!("fresh"));
    assert_eq!(client.post("/v1/chat/completions", body.clone()).await.status, 404);
    let adapter = json!({"lora_name": "fresh", "lora_path": "somewhere"});
    assert_eq!(client.post("/v1/load_lora_adapter", json!({"lora_name": "fresh"})).await.status, 400);
    assert_eq!(client.post("/v1/load_lora_adapter", adapter.clone()).await.status, 200);
    let answer = client.post("/v1/chat/completions", body.clone()).await.json();
    assert_eq!(answer["model"], "fresh");
    let base = client.post("/v1/chat/completions", chat("hello", 2)).await.json();
    assert_ne!(answer["choices"][0]["message"]["content"], base["choices"][0]["message"]["content"]);
    let models = client.get("/v1/models").await.json();
    assert_eq!((&models["data"][1]["id"], &models["data"][1]["parent"]), (&json!("fresh"), &json!("sim-8b")));
    assert_eq!(client.post("/v1/unload_lora_adapter", adapter).await.status, 200);
    assert_eq!(client.post("/v1/chat/completions", body).await.status, 404);
}

#[tokio::test]
async fn headers_have_server_body_digest_and_request_id() {
    let fleet = fleet(2, |server| server.echo_body_sha256 = true);
    let client = Client::new(&fleet, 1);
    let body = format!(" {}\n", chat("bytes matter", 1));
    let mut request =
        client.request(&Method::POST, "/v1/chat/completions", Some("application/json"), body.clone().into());
    request.headers_mut().insert("x-request-id", "req-abc".parse().unwrap());
    let answer = client.send(request).await;
    assert_eq!(answer.headers["x-sim-server"], fleet.addresses()[1].port().to_string());
    let digest: String = Sha256::digest(&body).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(answer.headers["x-sim-body-sha256"], digest);
    assert_eq!(answer.headers["x-request-id"], "req-abc");
    assert_eq!(answer.json()["id"], "chatcmpl-req-abc");
    let health = client.get("/health").await;
    assert_eq!(health.json(), json!({"status": "ok", "model_loaded": true}));
    let stats = client.get("/stats").await.json();
    let keys: Vec<&String> = stats.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["active_requests", "cache_usage", "tokens_generated", "total_requests", "waiting_requests"]);
}

#[tokio::test]
async fn client_disconnect_frees_the_engine() {
    for h2 in [false, true] {
        for stream in [false, true] {
            let fleet = fleet(1, |server| server.engine.latency = slow());
            let observer = Client::new(&fleet, 0);
            let leaver = if h2 { Client::h2(&fleet, 0) } else { Client::new(&fleet, 0) };
            let body = with(chat("never answered", 100), "stream", json!(stream));
            let task = tokio::spawn(async move { leaver.post("/v1/chat/completions", body).await.status });
            observer.until("the job", |stats| stats["active_requests"] == 1).await;
            assert!(observer.get("/stats").await.json()["cache_usage"].as_f64().unwrap() > 0.0);
            task.abort();
            observer.until("its end", |stats| stats["active_requests"] == 0 && stats["cache_usage"] == 0.0).await;
        }
    }
}

#[tokio::test]
async fn full_queue_gives_503_or_an_error_event_in_a_stream() {
    let fleet = fleet(1, |server| {
        server.engine =
            EngineConfig { max_num_seqs: 1, max_num_queued: Some(1), latency: slow(), ..server.engine.clone() };
    });
    let client = Client::new(&fleet, 0);
    let occupied: Vec<_> = (0..2)
        .map(|_| {
            let client = Client::new(&fleet, 0);
            tokio::spawn(async move { client.post("/v1/chat/completions", chat("x", 10)).await.status })
        })
        .collect();
    client.until("a full queue", |stats| stats["active_requests"] == 1 && stats["waiting_requests"] == 1).await;
    let refused = client.post("/v1/chat/completions", chat("x", 1)).await;
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (StatusCode::SERVICE_UNAVAILABLE, &json!(503)));
    let streamed = client.post("/v1/chat/completions", with(chat("x", 1), "stream", json!(true))).await;
    assert_eq!(streamed.status, 200);
    assert_eq!(streamed.chunks()[0]["error"]["code"], 503);
    let page = client.get("/metrics").await.text;
    assert!(
        page.contains(r#"vllm:admission_rejections_total{model_name="sim-8b",reason="max_num_queued_reqs"} 2.0"#),
        "{page}"
    );
    assert!(page.contains(r#"vllm:num_requests_waiting{engine="0",model_name="sim-8b"} 1.0"#));
    occupied.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn faults_can_be_changed_at_run_time() {
    let fleet = fleet(1, |server| server.faults = Faults::parse(br#"{"refuse":true}"#).unwrap());
    let client = Client::new(&fleet, 0);
    let body = || with(chat("hello", 8), "stream", json!(true));
    assert_eq!(client.get("/health").await.status, 503);
    assert_eq!(client.post("/v1/chat/completions", body()).await.status, 503);
    assert_eq!(client.post("/sim/faults", json!({"refuse": "yes"})).await.status, 400);
    assert_eq!(client.post("/sim/faults", json!({"fail_next": {"count": 2, "status": 429}})).await.status, 200);
    let mut statuses = vec![];
    for _ in 0..3 {
        statuses.push(client.post("/v1/chat/completions", body()).await.status.as_u16());
    }
    assert_eq!(statuses, [429, 429, 200]);
    assert_eq!(client.get("/sim/faults").await.json()["fail_next"]["count"], 0);

    client.post("/sim/faults", json!({"error_after_tokens": 3})).await;
    let chunks = client.post("/v1/chat/completions", body()).await.chunks();
    assert_eq!(chunks.last().unwrap()["error"]["code"], 500);
    assert_eq!(chunks.len(), 5, "role, three tokens, error");

    client.post("/sim/faults", json!({"cut_after_tokens": 3})).await;
    let request =
        client.request(&Method::POST, "/v1/chat/completions", Some("application/json"), body().to_string().into());
    let mut cut = client.http.request(request).await.unwrap().into_body();
    let mut text = String::new();
    let end = loop {
        match cut.frame().await {
            Some(Ok(frame)) => text.push_str(&String::from_utf8_lossy(&frame.into_data().unwrap_or_default())),
            other => break other,
        }
    };
    assert!(matches!(end, Some(Err(_))), "the connection breaks");
    assert_eq!(text.matches("\"content\"").count(), 4, "what was said before arrives: {text}");
    client.until("the end of cut jobs", |stats| stats["active_requests"] == 0).await;

    client.post("/sim/faults", json!({"first_byte_delay_ms": 60})).await;
    let before = tokio::time::Instant::now();
    assert_eq!(client.post("/v1/chat/completions", body()).await.status, 200);
    assert!(before.elapsed() >= Duration::from_millis(60));
}

#[tokio::test]
async fn metrics_faults_hang_corrupt_fail_or_inflate_the_page() {
    let fleet = fleet(1, |_| ());
    let client = Client::new(&fleet, 0);
    client.post("/sim/faults", json!({"metrics": "garbage"})).await;
    assert!(client.get("/metrics").await.text.contains("not a metric"));
    client.post("/sim/faults", json!({"metrics": "error"})).await;
    assert_eq!(client.get("/metrics").await.status, 500);
    client.post("/sim/faults", json!({"metrics": "hang"})).await;
    let page = tokio::time::timeout(Duration::from_millis(100), client.get("/metrics")).await;
    assert!(page.is_err());
    client.post("/sim/faults", json!({"metrics": "huge"})).await;
    let request = client.request(&Method::GET, "/metrics", None, vec![]);
    let body = client.http.request(request).await.unwrap().into_body();
    assert!(Limited::new(body, MAX_BODY).collect().await.is_err(), "the page is larger than the cap");
    client.post("/sim/faults", json!({})).await;
    assert!(client.get("/metrics").await.text.contains("vllm:num_requests_running"));
}

#[tokio::test]
async fn astrai_quirks_match_astrai() {
    let fleet = fleet(1, |server| server.quirks = Quirks::Astrai);
    let client = Client::new(&fleet, 0);
    let chat_stream = client.post("/v1/chat/completions", with(chat("hello", 2), "stream", json!(true))).await.text;
    assert_eq!(chat_stream.matches("\n\n").count(), 1, "events are not separated: {chat_stream}");
    let lines: Vec<&str> = chat_stream.lines().filter(|line| !line.is_empty()).collect();
    assert_eq!(lines.last(), Some(&"data: [DONE]"));
    let usage: Value = serde_json::from_str(lines[lines.len() - 2].strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!(usage["completion_tokens"], 2);
    assert!(usage.get("choices").is_none());
    let token: Value = serde_json::from_str(lines[1].strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!(token["created"], 0);
    let messages = client.post("/v1/messages", with(chat("hello", 2), "stream", json!(true))).await.text;
    assert!(messages.ends_with("data: {\"type\":\"message_stop\"}\ndata: [DONE]\n\n"), "{messages}");
    assert_eq!(client.get("/stats").await.json()["total_tasks"], 2);
    let invalid = client.post("/v1/messages", json!({})).await;
    assert_eq!((invalid.status.as_u16(), invalid.json()["detail"].is_array()), (422, true));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_hundred_streams_run_concurrently() {
    let fleet = fleet(2, |server| {
        server.engine.max_num_seqs = 250;
        server.engine.num_blocks = 8_192;
        // One token every 50 ms, so that all streams are open at once.
        server.engine.latency = LatencyModel { step_base: Duration::from_millis(50), ..LatencyModel::default() };
    });
    let clients: Vec<Client> =
        vec![Client::h2(&fleet, 0), Client::h2(&fleet, 1), Client::new(&fleet, 0), Client::new(&fleet, 1)];
    let streams = (0..500_usize).map(|i| {
        let client = &clients[i % clients.len()];
        let body = with(chat(&format!("stream {i}"), 10), "stream", json!(true));
        async move { client.post("/v1/chat/completions", body).await.chunks() }
    });
    let answers = join_all(streams).await;
    for chunks in &answers {
        assert_eq!(chunks.len(), 12);
        assert_eq!(chunks[11]["usage"]["completion_tokens"], 10);
    }
    for client in &clients[..2] {
        let stats = client.get("/stats").await.json();
        assert_eq!((&stats["total_requests"], &stats["tokens_generated"]), (&json!(250), &json!(2500)));
        assert_eq!(stats["active_requests"], 0);
    }
}

#[tokio::test]
async fn shutdown_finishes_requests_and_accepts_no_new_ones() {
    let fleet = fleet(1, |server| server.engine.latency.speed = 1.0);
    let address = fleet.addresses()[0];
    let client = Client::new(&fleet, 0);
    let observer = Client::new(&fleet, 0);
    let task =
        tokio::spawn(
            async move { client.post("/v1/chat/completions", with(chat("x", 30), "stream", json!(true))).await },
        );
    observer.until("the job", |stats| stats["active_requests"] == 1).await;
    drop(observer);
    fleet.shutdown(PATIENCE).await;
    assert_eq!(task.await.unwrap().chunks().len(), 32);
    assert!(tokio::net::TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn fleet_start_fails_without_all_ports() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = serve(&SimConfig { endpoints: 1, port, ..SimConfig::default() }).unwrap_err().to_string();
    assert!(error.contains(&format!("127.0.0.1:{port}")), "{error}");
    let error = serve(&SimConfig { endpoints: 4, port: 65_534, ..SimConfig::default() }).unwrap_err().to_string();
    assert!(error.contains("65535"), "{error}");
}
