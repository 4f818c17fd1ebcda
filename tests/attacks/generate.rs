//! APIs with token counts in other fields or none: SGLang's `/generate`, and unknown paths.

use super::honest::Honest;
use super::usage::{Forged, assert_honest_charge, configuration, served};
use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::client::Http;
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use serde_json::{Value, json};

/// One SGLang response of 100 tokens to a prompt of 900.
fn generated(completion: u64) -> Value {
    json!({"text": "\"meta_info\":{\"completion_tokens\":0}", "meta_info": {
        "id": "x", "finish_reason": {"type": "length", "length": 100}, "prompt_tokens": 900, "completion_tokens": completion, "cached_tokens": 1,
    }})
}

fn stream(answers: &[Value]) -> String {
    let text: String = answers.iter().map(|answer| format!("data: {answer}\n\n")).collect();
    text + "data: [DONE]\n\n"
}

fn forged(path: &'static str, sse: bool, reply: String, request: Value) -> Forged {
    Forged { path, sse, reply, request }
}

#[tokio::test(flavor = "multi_thread")]
async fn sglang_generate_is_charged_and_limited_like_other_apis() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::configured(&configuration(&echo, "")).await;
    let envoy = EnvoyProcess::alone(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let honest = Honest::new(to).with("x-tenant", "honest");
    let quiet = honest.quiet().await;
    let one = || json!({"text": "once upon a time", "sampling_params": {"max_new_tokens": 100}});
    let mut half = generated(50);
    half["meta_info"]["prompt_tokens"] = 450.into();
    let sampled = [generated(50), generated(50)];
    let cases = [
        ("one document", "/generate", false, generated(100).to_string(), one()),
        ("a stream", "/generate", true, stream(&[generated(1), generated(2), generated(100)]), one()),
        ("behind a prefix", "/pool/generate", false, generated(100).to_string(), one()),
        ("an encoded path", "/gener%61te", false, generated(100).to_string(), one()),
        (
            "a batch",
            "/generate",
            false,
            json!([half, half]).to_string(),
            json!({
                "text": ["a", "b"], "sampling_params": [{"max_new_tokens": 50}, {"max_new_tokens": "50"}],
            }),
        ),
        (
            "two answers",
            "/generate",
            false,
            json!(sampled).to_string(),
            json!({
                "input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 50, "n": 2},
            }),
        ),
    ];
    let (report, ()) = honest
        .during(async {
            for (number, (name, path, sse, reply, request)) in cases.into_iter().enumerate() {
                let http = if number % 2 == 0 { Http::H1 } else { Http::H2 };
                let count = served(&forged(path, sse, reply, request), to, http, &format!("attacker-{number}")).await;
                assert_eq!(count, 10, "{name}: 1,000 of 10,000 tokens each");
            }
        })
        .await;
    report.assert_unharmed(&quiet);
    picker.assert_settled().await;
    assert_honest_charge(&picker, quiet.latencies.len() + report.latencies.len()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_paths_cost_a_flat_estimate_or_are_rejected() {
    let echo = Echo::start().await;
    let estimates = AttacheProcess::configured(&configuration(&echo, "")).await;
    let envoy = EnvoyProcess::alone(&by_header("original-dst.yaml", &estimates)).await;
    let to = envoy.listener("inference");
    let honest = Honest::new(to).with("x-tenant", "honest");
    let quiet = honest.quiet().await;
    let body = || json!({"prompt": "x", "max_tokens": 4_000});
    let (report, ()) = honest
        .during(async {
            for (number, path) in
                ["/v9/generations", "/v2/models/m/generate", "/generate_stream"].into_iter().enumerate()
            {
                let unknown = forged(path, false, "{\"text\":\"x\"}".to_owned(), body());
                let count = served(&unknown, to, Http::H1, &format!("attacker-{number}")).await;
                assert_eq!(count, 9, "{path}: 1,024 of 10,000 tokens each");
            }
        })
        .await;
    report.assert_unharmed(&quiet);
    estimates.assert_settled().await;
    assert_honest_charge(&estimates, quiet.latencies.len() + report.latencies.len()).await;

    let rejects = AttacheProcess::configured(&configuration(&echo, "    unknownPaths: reject\n")).await;
    let envoy = envoy.beside(&by_header("original-dst.yaml", &rejects)).await;
    let before = echo.requests();
    let reply =
        forged("/v9/generations", false, String::new(), body()).send(envoy.listener("inference"), Http::H2, "a").await;
    assert_eq!((reply.status.as_u16(), reply.header("x-attache-reason")), (403, "unknown_path"));
    assert_eq!(echo.requests(), before);
}
