//! Every KV connector with every API of its servers, streamed and not, through real Envoy. Responses equal those of one
//! server, and decode workers fetch the prefilled blocks.

use crate::disagg::{COURSE, Stack};
use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::sha256;
use crate::support::client::{self, Reply};
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::sim::SimProcess;
use serde_json::{Value, json};

const OPENAI: &[&str] = &["/v1/completions", "/v1/chat/completions"];
const ALL: &[&str] =
    &["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/inference/v1/generate"];

/// Requests of every API for six tokens. Each has its own prompt, so that no server has cached it.
fn requests() -> Vec<(&'static str, Value)> {
    let mut number = 0;
    let mut long = || {
        number += 1;
        format!("Story {number}: the quick brown fox jumps over the lazy dog ").repeat(30)
    };
    let ids: Vec<u32> = (0..600).collect();
    let mut requests =
        vec![("/inference/v1/generate", json!({"token_ids": ids, "sampling_params": {"max_tokens": 6}}))];
    for stream in [false, true] {
        let mut user = || json!([{"role": "user", "content": long()}]);
        requests.extend([
            (
                "/v1/chat/completions",
                json!({"model": "sim-8b", "stream": stream, "messages": user(), "max_tokens": 6, "n": 1, "temperature": 0}),
            ),
            (
                "/v1/chat/completions",
                json!({"model": "sim-8b", "stream": stream, "messages": user(), "max_completion_tokens": 6}),
            ),
            ("/v1/messages", json!({"model": "sim-8b", "stream": stream, "messages": user(), "max_tokens": 6})),
            ("/v1/completions", json!({"model": "sim-8b", "stream": stream, "prompt": long(), "max_tokens": 6})),
            ("/v1/responses", json!({"model": "sim-8b", "stream": stream, "input": long(), "max_output_tokens": 6})),
        ]);
    }
    requests
}

#[tokio::test(flavor = "multi_thread")]
async fn split_responses_equal_those_of_one_server_in_every_api() {
    let alone = SimProcess::start(1, &["--speed", "20"]).await;
    // The connector, the flag of the simulated servers, the APIs that are split, and whether servers pin blocks.
    for (connector, sim, apis, pins) in [
        ("nixl", "nixl", ALL, true),
        ("shfs", "nixl", ALL, true),
        ("shared-storage", "shared-storage", ALL, false),
        ("trtllm", "trtllm", OPENAI, false),
        ("sglang", "sglang", OPENAI, false),
    ] {
        let stack = Stack::start(
            &["--kv-connector", sim, "--bootstrap-timeout", "60000ms"],
            &format!("decider: always, connector: {connector}"),
        )
        .await;
        let (mut split, mut received) = (0, 0);
        for (path, body) in requests() {
            let shares = apis.contains(&path);
            let ask = |to| client::post(to, path, body.to_string().into());
            let shared = ask(stack.to()).await.expect("an answer");
            let course = shared.header(COURSE).to_owned();
            if !shares && connector == "sglang" {
                // SGLang decode workers do not serve whole requests.
                assert_eq!((shared.status.as_u16(), shared.header("x-attache-reason")), (503, "no_whole_endpoint"));
                continue;
            }
            assert_eq!(shared.status, 200, "{connector} {body}: {}", String::from_utf8_lossy(&shared.body));
            assert_eq!(course, if shares { "split" } else { "" }, "{connector} {path}");
            assert_eq!(
                generated_text(&shared),
                generated_text(&ask(alone.servers[0]).await.expect("an answer")),
                "{connector} {body}"
            );
            split += u64::from(shares);
            let before = std::mem::replace(&mut received, stack.count(stack.decode(), "/received_tokens").await);
            assert_eq!(received > before, shares, "{connector} {path}: {received} tokens fetched, {before} before");
        }
        if pins {
            assert_eq!(stack.count(stack.prefill(), "/prefills").await, split, "{connector}");
            stack.assert_nothing_pinned().await;
        }
        assert_eq!(stack.failed_loads().await, 0, "{connector}");
        stack.picker.assert_settled().await;
    }
}

/// vLLM on Neuron: the decode worker gets the prefill worker's response unchanged, besides the client's body.
#[tokio::test(flavor = "multi_thread")]
async fn neuron_decode_worker_gets_the_whole_prefill_response() {
    let (prefill, decode) = (Echo::start().await, Echo::start().await);
    let text = format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  disaggregation: {{decider: always, connector: \
         neuron-nixl}}\n  endpoints:\n  - {{address: \"{}\", role: prefill}}\n  - {{address: \"{}\", role: decode}}\n",
        prefill.address, decode.address
    );
    let picker = AttacheProcess::configured(&text).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    for (path, body) in [
        ("/v1/completions", r#"{"model":"m", "prompt":"a long one","max_tokens":7,"stream":true}"#),
        ("/v1/chat/completions", r#"{"model":"m","messages":[{"role":"user","content":"hi"}], "n":1}"#),
    ] {
        let prefill_response = client::post(prefill.address, path, body.into()).await.expect("an answer").body;
        let prefills_before = prefill.requests();
        let reply = client::post(envoy.listener("inference"), path, body.into()).await.expect("an answer");
        assert_eq!((reply.status.as_u16(), reply.header(COURSE)), (200, "split"), "{path}");
        assert_eq!(prefill.requests(), prefills_before + 1);
        let prefill_response = String::from_utf8(prefill_response).expect("JSON");
        let sent =
            format!("{},\"disagg_prefill_resp\":{prefill_response}}}", body.strip_suffix('}').expect("an object"));
        assert_eq!(reply.header("x-echo-sha256"), sha256(sent.as_bytes()), "{path}: {sent}");
    }
    picker.assert_settled().await;
}

/// The generated text of a response, or its tokens, for any API.
fn generated_text(reply: &Reply) -> Vec<String> {
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    let events: Vec<Value> = match reply.json() {
        Value::Null => text.lines().filter_map(|l| serde_json::from_str(l.strip_prefix("data: ")?).ok()).collect(),
        whole => vec![whole],
    };
    let mut found = Vec::new();
    for event in &events {
        collect(event, &mut found);
    }
    assert!(!found.is_empty(), "{text}");
    found
}

fn collect(value: &Value, into: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            for (key, inner) in map {
                match (key.as_str(), inner) {
                    ("text" | "content" | "delta", Value::String(text)) if !text.is_empty() => into.push(text.clone()),
                    ("token_ids", Value::Array(ids)) => into.extend(ids.iter().map(Value::to_string)),
                    _ => collect(inner, into),
                }
            }
        }
        Value::Array(list) => list.iter().for_each(|inner| collect(inner, into)),
        _ => {}
    }
}
