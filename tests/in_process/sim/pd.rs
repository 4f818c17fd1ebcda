//! Prefill and decode requests of the simulated servers, over real HTTP.

use super::*;
use attache_sim::pd::{Connector, ExpiryClock, LoadFailure, PdConfig, ServerRole};

/// A prefill worker (0) and a decode worker (1).
fn pair(pd: PdConfig) -> SimHandle {
    roles(&[ServerRole::Prefill, ServerRole::Decode], pd)
}

fn roles(roles: &[ServerRole], pd: PdConfig) -> SimHandle {
    let mut server = ServerConfig { pd, ..ServerConfig::default() };
    server.engine.latency.speed = 100.0;
    let endpoints = u16::try_from(roles.len()).unwrap();
    serve(&SimConfig { endpoints, port: 0, roles: roles.to_vec(), server, ..SimConfig::default() }).expect("ports")
}

/// `n` tokens that are unique to `seed`.
fn prompt(seed: u32, n: u32) -> Vec<u32> {
    (0..n).map(|i| seed * 10_000 + i).collect()
}

fn completion(prompt: &[u32], max_tokens: u32) -> Value {
    json!({"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": true})
}

fn prefill(prompt: &[u32]) -> Value {
    with(completion(prompt, 1), "kv_transfer_params", json!({"do_remote_decode": true}))
}

fn decode(prompt: &[u32], params: &Value) -> Value {
    with(completion(prompt, 6), "kv_transfer_params", params.clone())
}

async fn params(server: &Client, body: Value) -> Value {
    let answer = server.post("/v1/completions", body).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    answer.json()["kv_transfer_params"].clone()
}

impl Client {
    async fn pd(&self) -> Value {
        self.get("/sim/pd").await.json()
    }

    async fn until_pd(&self, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let waiting = async {
            loop {
                let page = self.pd().await;
                if holds(&page) {
                    return page;
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(PATIENCE, waiting).await.unwrap_or_else(|_| panic!("never: {what}"))
    }
}

#[tokio::test]
async fn prefill_responses_have_the_fields_of_vllm() {
    let recorded: BTreeMap<String, Value> =
        serde_json::from_str(include_str!("../../data/sim/pd/replies.json")).unwrap();
    let fleet = pair(PdConfig::default());
    let server = Client::new(&fleet, 0);
    let ask = json!({"do_remote_decode": true});
    let text = "import os ".repeat(60);
    let message = json!([{"role": "user", "content": text}]);
    let bodies = [
        ("01_prefill", completion(&prompt(1, 200), 1)),
        ("03_chat_prefill", json!({"messages": message, "max_tokens": 1})),
        ("08_prefill_max5", completion(&prompt(2, 201), 5)),
        ("11_prefill_again", completion(&prompt(1, 200), 1)),
        ("14_responses_prefill", json!({"input": text, "max_output_tokens": 1})),
        ("15_messages_prefill", json!({"messages": message, "max_tokens": 1})),
        ("16_inference_generate_prefill", json!({"token_ids": prompt(3, 201), "sampling_params": {"max_tokens": 1}})),
    ];
    for (name, body) in bodies {
        let expected = &recorded[name];
        let path = expected["path"].as_str().unwrap();
        let answer = server.post(path, with(body, "kv_transfer_params", ask.clone())).await;
        assert_eq!(answer.status, 200, "{name}: {}", answer.text);
        let (theirs, ours) = (&expected["kv_transfer_params"], &answer.json()["kv_transfer_params"]);
        let fields = |params: &Value| params.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
        assert_eq!(fields(ours), fields(theirs), "{name}");
        for field in ["do_remote_prefill", "do_remote_decode", "tp_size", "dcp_size", "pp_size", "transfer_mode"] {
            assert_eq!(ours[field], theirs[field], "{name}: {field}");
        }
        if path == "/v1/completions" {
            for field in ["remote_num_tokens", "remote_prefill_cached_tokens", "remote_blocks_expiry_time"] {
                assert_eq!(ours[field], theirs[field], "{name}: {field}");
            }
            let blocks = |params: &Value| params["remote_block_ids"][0].as_array().unwrap().len();
            assert_eq!(blocks(ours), blocks(theirs), "{name}");
        }
        // The request id has the same shape as in the recording.
        let shape = |params: &Value| {
            let id = params["remote_request_id"].as_str().unwrap();
            id.chars().map(|c| if c.is_ascii_hexdigit() { 'h' } else { c }).collect::<String>()
        };
        if name != "15_messages_prefill" {
            assert_eq!(shape(ours), shape(theirs), "{name}");
        }
        if path == "/inference/v1/generate" {
            let names: BTreeSet<_> = answer.json().as_object().unwrap().keys().cloned().collect();
            assert_eq!(json!(names), expected["fields"], "{name}");
        }
    }
    let page = server.pd().await;
    assert_eq!(
        (page["role"].clone(), page["prefills"].clone(), page["whole"].clone()),
        (json!("prefill"), json!(7), json!(0))
    );
    assert_eq!(page["pinned"]["requests"], 7);
}

#[tokio::test]
async fn decode_fetches_prefilled_blocks_and_frees_them() {
    let fleet = pair(PdConfig::default());
    let (p, d) = (Client::new(&fleet, 0), Client::new(&fleet, 1));
    let tokens = prompt(1, 200);
    let whole = p.post("/v1/completions", with(completion(&tokens, 6), "cache_salt", json!("x"))).await.json();
    let said = params(&p, prefill(&tokens)).await;
    assert_eq!(said["remote_prefill_cached_tokens"], 0);
    let answer = d.post("/v1/completions", decode(&tokens, &said)).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let answer = answer.json();
    assert_eq!(answer["choices"][0]["text"], whole["choices"][0]["text"]);
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0, "what the prefill had cached");
    assert_eq!(answer["kv_transfer_params"], Value::Null);
    assert_eq!(p.pd().await["pinned"], json!({"requests": 0, "blocks": 0}));
    let page = d.pd().await;
    assert_eq!((&page["transfers"], &page["received_tokens"], &page["abandoned"]), (&json!(1), &json!(200), &json!(0)));
    // The second time, both servers have cached the prompt.
    let said = params(&p, prefill(&tokens)).await;
    assert_eq!(said["remote_prefill_cached_tokens"], 192);
    let again = d.post("/v1/completions", decode(&tokens, &said)).await.json();
    assert_eq!(again["usage"]["prompt_tokens_details"]["cached_tokens"], 192);
    assert_eq!(d.pd().await["received_tokens"], 208, "only the last block was fetched again");
    let metrics = d.get("/metrics").await.text;
    for line in [
        r#"vllm:external_prefix_cache_hits_total{engine="0",model_name="sim-8b"} 208.0"#,
        r#"vllm:nixl_xfer_time_seconds_count{engine="0",model_name="sim-8b"} 2.0"#,
        r#"vllm:nixl_num_failed_transfers_total{engine="0",model_name="sim-8b"} 0.0"#,
    ] {
        assert!(metrics.contains(line), "{line} is not in\n{metrics}");
    }
}

#[tokio::test]
async fn every_api_accepts_decode_requests_with_and_without_stream() {
    let fleet = pair(PdConfig::default());
    let (p, d) = (Client::new(&fleet, 0), Client::new(&fleet, 1));
    let text = "import os ".repeat(60);
    let apis = [
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": text}], "max_tokens": 3})),
        ("/v1/messages", json!({"messages": [{"role": "user", "content": text}], "max_tokens": 3})),
        ("/v1/responses", json!({"input": text, "max_output_tokens": 3})),
        ("/inference/v1/generate", json!({"token_ids": prompt(9, 90), "sampling_params": {"max_tokens": 3}})),
    ];
    let mut transfers = 0;
    for (path, body) in apis {
        for stream in [false, true] {
            if stream && path.starts_with("/inference") {
                continue;
            }
            let ask = with(body.clone(), "kv_transfer_params", json!({"do_remote_decode": true}));
            let said = p.post(path, ask).await.json()["kv_transfer_params"].clone();
            let body = with(body.clone(), "kv_transfer_params", said);
            let answer = d.post(path, with(body, "stream", json!(stream))).await;
            assert_eq!(answer.status, 200, "{path}: {}", answer.text);
            transfers += 1;
            assert_eq!(d.pd().await["transfers"], transfers, "{path}");
        }
    }
    assert_eq!(p.pd().await["pinned"]["requests"], 0);
}

#[tokio::test]
async fn decode_with_wrong_parameters_fails_as_in_vllm() {
    let fleet = roles(&[ServerRole::Prefill, ServerRole::Decode, ServerRole::Prefill], PdConfig::default());
    let (p, d, other) = (Client::new(&fleet, 0), Client::new(&fleet, 1), Client::new(&fleet, 2));
    let tokens = prompt(1, 200);
    let said = params(&p, prefill(&tokens)).await;
    let foreign = params(&other, prefill(&prompt(2, 200))).await;
    let recorded: Value = serde_json::from_str(include_str!("../../data/sim/pd/replies.json")).unwrap();
    let cases = [
        ("unknown_engine", with(said.clone(), "remote_engine_id", json!("00000000-0000-0000-0000-000000000000"))),
        ("wrong_address", with(said.clone(), "remote_port", json!(5_799))),
        ("wrong_address", with(said.clone(), "remote_host", json!("10.0.0.1"))),
        ("unknown_request", with(said.clone(), "remote_request_id", foreign["remote_request_id"].clone())),
        ("unknown_blocks", with(said.clone(), "remote_block_ids", json!([[1, 2, 3]]))),
        ("other_tokens", foreign),
    ];
    let mut expected: BTreeMap<&str, u64> = BTreeMap::new();
    for (cause, params) in cases {
        *expected.entry(cause).or_default() += 1;
        let answer = d.post("/v1/completions", decode(&tokens, &params)).await;
        assert_eq!(answer.status, 500, "{cause}");
        assert_eq!(answer.json()["error"], recorded["09_decode_bad_remote"]["error"], "{cause}");
        let failed = &d.pd().await["failed_loads"];
        for (cause, count) in &expected {
            assert_eq!(failed[cause], *count, "{cause}");
        }
    }
    let stream = with(decode(&tokens, &with(said.clone(), "remote_engine_id", json!("x"))), "stream", json!(true));
    let answer = d.post("/v1/completions", stream).await;
    assert_eq!(answer.status, 200);
    let first: Value = serde_json::from_str(&answer.events()[0].1).unwrap();
    assert_eq!(first["error"], recorded["09_decode_bad_remote"]["error"]);
    assert_eq!(p.pd().await["pinned"]["requests"], 1, "a wrong leg leaves the right one alone");
    assert_eq!(params(&d, decode(&tokens, &said)).await, Value::Null);
}

#[tokio::test]
async fn decode_with_a_missing_field_is_computed_locally() {
    let fleet = pair(PdConfig::default());
    let (p, d) = (Client::new(&fleet, 0), Client::new(&fleet, 1));
    let tokens = prompt(1, 200);
    let said = params(&p, prefill(&tokens)).await;
    for field in ["remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port"] {
        let answer = d.post("/v1/completions", decode(&tokens, &with(said.clone(), field, Value::Null))).await;
        assert_eq!(answer.status, 200, "{field}: {}", answer.text);
    }
    let page = d.pd().await;
    assert_eq!((&page["local_recomputes"], &page["transfers"]), (&json!(5), &json!(0)));
}

#[tokio::test]
async fn decode_without_parameters_is_a_whole_request() {
    let fleet = pair(PdConfig::default());
    let recorded: Value = serde_json::from_str(include_str!("../../data/sim/pd/replies.json")).unwrap();
    let expected = &recorded["10_decode_no_params"];
    let d = Client::new(&fleet, 1);
    let answer = d.post("/v1/completions", completion(&prompt(1, 201), 3)).await;
    let said = answer.json();
    assert_eq!(json!(answer.status.as_u16()), expected["status"]);
    assert_eq!(said["kv_transfer_params"], expected["kv_transfer_params"]);
    for count in ["prompt_tokens", "completion_tokens", "total_tokens"] {
        assert_eq!(said["usage"][count], expected["usage"][count], "{count}");
    }
    let cached = "/prompt_tokens_details/cached_tokens";
    assert_eq!(said["usage"].pointer(cached), expected["usage"].pointer(cached));
    let names: BTreeSet<&String> = said.as_object().unwrap().keys().collect();
    assert_eq!(json!(names), expected["fields"]);
    assert_eq!(d.pd().await["whole"], 1);
}

#[tokio::test]
async fn recompute_policy_computes_blocks_that_cannot_be_fetched() {
    let fleet = pair(PdConfig { load_failure: LoadFailure::Recompute, ..PdConfig::default() });
    let (p, d) = (Client::new(&fleet, 0), Client::new(&fleet, 1));
    let tokens = prompt(1, 200);
    let said = with(params(&p, prefill(&tokens)).await, "remote_engine_id", json!("x"));
    assert_eq!(d.post("/v1/completions", decode(&tokens, &said)).await.status, 200);
    assert_eq!(d.pd().await["local_recomputes"], 1);
}

#[tokio::test]
async fn streaming_prefill_returns_no_parameters_and_keeps_its_lease() {
    let fleet = pair(PdConfig { lease: Duration::from_millis(300), ..PdConfig::default() });
    let (p, d) = (Client::new(&fleet, 0), Client::new(&fleet, 1));
    let answer = p.post("/v1/completions", with(prefill(&prompt(1, 200)), "stream", json!(true))).await;
    assert!(!answer.text.contains("kv_transfer_params"), "{}", answer.text);
    let tokens = prompt(2, 200);
    let said = params(&p, prefill(&tokens)).await;
    let page = p.until_pd("the leases end", |page| page["leases_expired"] == 2).await;
    assert_eq!(page["pinned"], json!({"requests": 0, "blocks": 0}));
    assert_eq!(d.post("/v1/completions", decode(&tokens, &said)).await.status, 500);
    assert_eq!(d.pd().await["failed_loads"]["lease_expired"], 1);
    let metrics = p.get("/metrics").await.text;
    assert!(metrics.contains(r#"vllm:nixl_num_kv_expired_reqs_total{engine="0",model_name="sim-8b"} 2.0"#));
}

#[tokio::test]
async fn heartbeats_extend_the_lease_and_disconnect_frees_the_blocks() {
    let pd = PdConfig { lease: Duration::from_millis(200), ..PdConfig::default() };
    let mut server = ServerConfig { pd, ..ServerConfig::default() };
    server.engine.latency.speed = 100.0;
    // The transfer lasts longer than the test.
    server.engine.latency.transfer_setup = Duration::from_secs(60_000);
    let config = SimConfig { endpoints: 2, port: 0, server, ..SimConfig::default() };
    let fleet = serve(&config).unwrap();
    let (p, d) = (Client::new(&fleet, 0), Client::new(&fleet, 1));
    let tokens = prompt(1, 200);
    let said = params(&p, prefill(&tokens)).await;
    let request = d.request(
        &Method::POST,
        "/v1/completions",
        Some("application/json"),
        decode(&tokens, &said).to_string().into_bytes(),
    );
    let http = d.http.clone();
    let leg = tokio::spawn(async move { http.request(request).await.map(|_| ()) });
    d.until_pd("the leg has come", |page| page["decodes"] == 1).await;
    // Expiring leases of other requests show that time has passed.
    for seed in 2..5 {
        params(&p, prefill(&prompt(seed, 50))).await;
        p.until_pd("a lease ends", |page| page["leases_expired"] == seed - 1).await;
    }
    assert_eq!(p.pd().await["pinned"], json!({"requests": 1, "blocks": 13}));
    leg.abort();
    let page = p.until_pd("the blocks are free", |page| page["pinned"]["requests"] == 0).await;
    assert_eq!(page["leases_expired"], 3);
    assert_eq!(d.pd().await["abandoned"], 1);
}

#[tokio::test]
async fn prefill_faults_behave_as_configured() {
    let fleet = pair(PdConfig::default());
    let (p, d) = (Client::new(&fleet, 0), Client::new(&fleet, 1));
    let tokens = prompt(1, 200);
    p.post("/sim/faults", json!({"prefill": {"no_params": true}})).await;
    assert_eq!(params(&p, prefill(&tokens)).await, Value::Null);
    assert_eq!(p.pd().await["pinned"]["requests"], 1);

    p.post("/sim/faults", json!({"prefill": {"hang": true}})).await;
    let hanging = p.post("/v1/completions", prefill(&tokens));
    tokio::pin!(hanging);
    tokio::select! {
        answer = &mut hanging => panic!("an answer: {answer:?}"),
        _ = p.until_pd("the leg has come", |page| page["prefills"] == 2) => {}
    }
    p.post("/sim/faults", json!({})).await;
    assert_eq!(hanging.await.status, 200, "it goes on when the fault is over");

    p.post("/sim/faults", json!({"prefill": {"die_after_reply": true}})).await;
    let said = params(&p, prefill(&tokens)).await;
    assert!(said.is_object());
    assert_eq!(p.post("/v1/completions", prefill(&tokens)).await.status, 503);
    assert_eq!(d.post("/v1/completions", decode(&tokens, &said)).await.status, 500);
    assert_eq!(d.pd().await["failed_loads"]["unknown_engine"], 1);
    p.post("/sim/faults", json!({})).await;
    let back = params(&p, prefill(&tokens)).await;
    assert_ne!(back["remote_engine_id"], said["remote_engine_id"], "a new process");
    assert_eq!(back["remote_prefill_cached_tokens"], 0);
}

#[tokio::test]
async fn restart_loses_pinned_blocks() {
    let fleet = pair(PdConfig::default());
    let (p, d) = (Client::new(&fleet, 0), Client::new(&fleet, 1));
    let tokens = prompt(1, 200);
    let said = params(&p, prefill(&tokens)).await;
    p.post("/sim/restart", json!({})).await;
    assert_eq!(p.pd().await["pinned"]["requests"], 0);
    assert_eq!(d.post("/v1/completions", decode(&tokens, &said)).await.status, 500);
}

#[tokio::test]
async fn next_turn_prefill_fetches_blocks_from_the_decode_server() {
    let kept = |expiry_clock| pair(PdConfig { bidirectional: true, expiry_clock, ..PdConfig::default() });
    let fleet = kept(ExpiryClock::Monotonic);
    let (p, d) = (Client::new(&fleet, 0), Client::new(&fleet, 1));
    for (seed, stream) in [(1, false), (2, true)] {
        let first = prompt(seed, 200);
        let said = params(&p, prefill(&first)).await;
        let leg = with(decode(&first, &said), "stream", json!(stream));
        let answer = d.post("/v1/completions", leg).await;
        let (text, back) = if stream {
            let chunks = answer.chunks();
            let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
            (text, chunks.last().unwrap()["kv_transfer_params"].clone())
        } else {
            let answer = answer.json();
            (answer["choices"][0]["text"].as_str().unwrap().to_owned(), answer["kv_transfer_params"].clone())
        };
        assert_eq!((&back["do_remote_decode"], &back["do_remote_prefill"]), (&json!(true), &json!(false)));
        assert_eq!(back["remote_num_tokens"], 205, "all but the last token of the answer");
        let ends = back["remote_blocks_expiry_time"].as_f64();
        assert!(ends.is_some_and(|at| (480.0..1e9).contains(&at)), "a clock of the server's own: {back}");
        assert_eq!(d.pd().await["pinned"]["requests"], 1);

        let words = text.as_bytes().chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap()));
        let second: Vec<u32> = first.iter().copied().chain(words).chain(prompt(100 + seed, 40)).collect();
        let body = with(completion(&second, 1), "kv_transfer_params", back.clone());
        let next = params(&p, body).await;
        assert_eq!(next["remote_num_tokens"], 246);
        assert_eq!(next["remote_prefill_cached_tokens"], 205, "192 of its own, the rest from the decode server");
        assert_eq!(d.pd().await["pinned"]["requests"], 0);
        assert_eq!(p.pd().await["pulls"], seed);
        assert_eq!(d.post("/v1/completions", decode(&second, &next)).await.status, 200);
        // This decode has also kept its blocks.
        d.post("/sim/restart", json!({})).await;
    }
    let fleet = kept(ExpiryClock::Unix);
    let told = params(&Client::new(&fleet, 1), decode(&prompt(1, 200), &json!({"do_remote_prefill": true}))).await;
    assert!(told["remote_blocks_expiry_time"].as_f64().is_some_and(|at| at > 1.7e9), "{told}");
}

#[tokio::test]
async fn prefill_with_blocks_of_another_conversation_fails() {
    let fleet = pair(PdConfig { bidirectional: true, ..PdConfig::default() });
    let (p, d) = (Client::new(&fleet, 0), Client::new(&fleet, 1));
    let tokens = prompt(1, 200);
    let said = params(&p, prefill(&tokens)).await;
    let back = params(&d, decode(&tokens, &said)).await;
    for wrong in [prompt(2, 300), tokens] {
        let body = with(completion(&wrong, 1), "kv_transfer_params", back.clone());
        assert_eq!(p.post("/v1/completions", body).await.status, 500, "another prompt, then one that is shorter");
    }
    let failed = p.pd().await["failed_loads"].clone();
    assert_eq!((&failed["other_tokens"], &failed["unknown_request"]), (&json!(1), &json!(1)));
    assert_eq!(d.pd().await["pinned"]["requests"], 0, "what was refused is free");
}

#[tokio::test]
async fn transfer_parameters_without_a_connector_are_ignored() {
    let fleet = pair(PdConfig { connector: Connector::None, ..PdConfig::default() });
    let p = Client::new(&fleet, 0);
    assert_eq!(params(&p, prefill(&prompt(1, 200))).await, Value::Null);
    let page = p.pd().await;
    assert_eq!((&page["whole"], &page["pinned"]["requests"]), (&json!(1), &json!(0)));
}

fn bootstrap(prompt: &[u32], max_tokens: u32, room: u64) -> Value {
    let body = with(completion(prompt, max_tokens), "bootstrap_room", json!(room));
    with(with(body, "bootstrap_host", json!("127.0.0.1")), "rid", json!(format!("rid-{room}")))
}

#[tokio::test]
async fn sglang_prefill_and_decode_wait_for_each_other() {
    let fleet = pair(PdConfig { connector: Connector::Sglang, ..PdConfig::default() });
    let (p, d) = (Client::new(&fleet, 0), Client::new(&fleet, 1));
    let tokens = prompt(1, 200);
    let mut decoding = Box::pin(d.post("/v1/completions", bootstrap(&tokens, 6, 7)));
    tokio::select! {
        answer = &mut decoding => panic!("an answer without a prefill: {answer:?}"),
        _ = d.until_pd("the leg waits", |page| page["decodes"] == 1) => {}
    }
    let (prefilled, decoded) = tokio::join!(p.post("/v1/completions", bootstrap(&tokens, 1, 7)), decoding);
    assert_eq!((prefilled.status, decoded.status), (StatusCode::OK, StatusCode::OK), "{}", decoded.text);
    assert_eq!(decoded.json()["usage"]["completion_tokens"], 6);
    assert_eq!(p.pd().await["pinned"]["requests"], 0);
    assert_eq!(d.pd().await["transfers"], 1);
    assert_eq!(d.post("/v1/completions", completion(&tokens, 6)).await.status, 400, "no room");

    // After a failed prefill the decode request waits until it is aborted.
    p.post("/sim/faults", json!({"fail_next": {"count": 1, "status": 500}})).await;
    let mut decoding = Box::pin(d.post("/v1/completions", bootstrap(&tokens, 6, 8)));
    tokio::select! {
        answer = &mut decoding => panic!("an answer: {answer:?}"),
        _ = d.until_pd("the leg waits", |page| page["decodes"] == 2) => {}
    }
    assert_eq!(p.post("/v1/completions", bootstrap(&tokens, 1, 8)).await.status, 500);
    assert_eq!(d.post("/abort_request", json!({"rid": "rid-other"})).await.status, 200);
    assert_eq!(d.post("/abort_request", json!({"rid": "rid-8"})).await.status, 200);
    assert_eq!(decoding.await.status, 500);
}

#[tokio::test]
async fn sglang_request_without_its_counterpart_times_out() {
    let bootstrap_timeout = Duration::from_millis(100);
    let fleet = pair(PdConfig { connector: Connector::Sglang, bootstrap_timeout, ..PdConfig::default() });
    let (p, d) = (Client::new(&fleet, 0), Client::new(&fleet, 1));
    let tokens = prompt(1, 200);
    assert_eq!(d.post("/v1/completions", bootstrap(&tokens, 6, 7)).await.status, 500);
    assert_eq!(d.pd().await["failed_loads"]["no_bootstrap"], 1);
    assert_eq!(p.post("/v1/completions", bootstrap(&tokens, 1, 9)).await.status, 200, "nobody came for it");
    assert_eq!(p.pd().await["leases_expired"], 1);
}

#[tokio::test]
async fn trtllm_decode_uses_the_parameters_of_the_context_request() {
    let fleet = pair(PdConfig { connector: Connector::Trtllm, ..PdConfig::default() });
    let (p, d) = (Client::new(&fleet, 0), Client::new(&fleet, 1));
    let tokens = prompt(1, 200);
    let ask = json!({"request_type": "context_only"});
    let context = p.post("/v1/completions", with(completion(&tokens, 1), "disaggregated_params", ask)).await.json();
    assert_eq!(context["prompt_token_ids"], json!(tokens));
    let said = with(context["choices"][0]["disaggregated_params"].clone(), "request_type", json!("generation_only"));
    let leg = with(completion(&tokens, 6), "disaggregated_params", said);
    assert_eq!(d.post("/v1/completions", leg.clone()).await.status, 200);
    assert_eq!((&d.pd().await["transfers"], &p.pd().await["pinned"]["requests"]), (&json!(1), &json!(0)));
    assert_eq!(d.post("/v1/completions", leg).await.status, 500, "each context is read once");
    let odd = with(completion(&tokens, 6), "disaggregated_params", json!({"request_type": "both"}));
    assert_eq!(d.post("/v1/completions", odd).await.status, 400);
}

#[tokio::test]
async fn shared_storage_blocks_are_loaded_by_the_other_server() {
    let fleet = pair(PdConfig { connector: Connector::SharedStorage, ..PdConfig::default() });
    let (p, d) = (Client::new(&fleet, 0), Client::new(&fleet, 1));
    let tokens = prompt(1, 200);
    p.post("/v1/completions", completion(&tokens, 1)).await;
    d.post("/v1/completions", completion(&tokens, 6)).await;
    assert_eq!(d.pd().await["received_tokens"], 192);
    d.post("/v1/completions", with(completion(&tokens, 6), "cache_salt", json!("x"))).await;
    assert_eq!(d.pd().await["received_tokens"], 192, "another salt");
}

/// The response of a decode request whose prefill worker restarts during the transfer, and `/sim/pd` of the decode
/// worker.
async fn decode_with_prefill_restart(load_failure: LoadFailure) -> (Answer, Value) {
    let mut server = ServerConfig { pd: PdConfig { load_failure, ..PdConfig::default() }, ..ServerConfig::default() };
    server.engine.latency.speed = 100.0;
    // 3 s, so that the prefill worker restarts long before the transfer ends.
    server.engine.latency.transfer_setup = Duration::from_secs(300);
    let fleet = serve(&SimConfig { endpoints: 2, port: 0, server, ..SimConfig::default() }).unwrap();
    let (p, d) = (Client::new(&fleet, 0), Client::new(&fleet, 1));
    let tokens = prompt(1, 200);
    let said = params(&p, prefill(&tokens)).await;
    let restart = async {
        d.until_pd("the leg has come", |page| page["decodes"] == 1).await;
        p.post("/sim/restart", json!({})).await
    };
    let (answer, _) = tokio::join!(d.post("/v1/completions", decode(&tokens, &said)), restart);
    (answer, d.pd().await)
}

#[tokio::test]
async fn blocks_lost_during_transfer_fail_or_are_recomputed() {
    let (failed, computed) = tokio::join!(
        decode_with_prefill_restart(LoadFailure::Fail),
        decode_with_prefill_restart(LoadFailure::Recompute)
    );
    for ((answer, page), (status, recomputes)) in [(failed, (500, 0)), (computed, (200, 1))] {
        assert_eq!(answer.status, status, "{}", answer.text);
        let counts = (&page["failed_loads"]["lost"], &page["transfers"], &page["local_recomputes"]);
        assert_eq!(counts, (&json!(1), &json!(0), &json!(recomputes)));
    }
}
