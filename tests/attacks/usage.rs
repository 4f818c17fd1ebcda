//! Responses that echo the client's input: token counts and errors in it are not the server's. The request contains the
//! response (`reply` of the echo server), as a model server would write it around the client's tools and tool input.

use super::honest::Honest;
use crate::shipped::by_header;
use crate::support::attache::{AdminPages, AttacheProcess};
use crate::support::body::Payload;
use crate::support::client::{self, Http, Reply};
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::gateway::{Gateway, Way};
use crate::support::modes::{self, Mode};
use crate::support::process::eventually;
use crate::support::sim::SimProcess;
use http::{HeaderValue, Request};
use serde_json::{Value, json};
use std::net::SocketAddr;

/// Daily token limit of an attacker. A day, because a test rarely crosses its end.
const LIMIT: usize = 10_000;
/// Actual tokens of each response: prompt and completion.
const REAL_TOKENS: (u64, u64) = (900, 100);
/// Requests of one attacker: more than its limit allows.
const TRIES: usize = 14;

/// A response of one API, and the path of its request.
pub(super) struct Forged {
    pub(super) path: &'static str,
    pub(super) sse: bool,
    pub(super) reply: String,
    /// The request's fields without the reply.
    pub(super) request: Value,
}

impl Forged {
    fn new(path: &'static str, sse: bool, reply: impl Into<String>, request: Value) -> Self {
        Self { path, sse, reply: reply.into(), request }
    }

    pub(super) async fn send(&self, to: SocketAddr, http: Http, tenant: &str) -> Reply {
        let kind = if self.sse { "sse" } else { "json" };
        let target = format!("{}?reply=1&kind={kind}", self.path);
        let mut body = self.request.clone();
        body["reply"] = self.reply.clone().into();
        let payload = Payload::sized(body.to_string().into());
        let mut request: Request<Payload> = client::request("POST", to, http, &target, payload);
        request.headers_mut().insert("x-tenant", HeaderValue::from_str(tenant).expect("a header"));
        client::send(to, http, request).await.expect("a response")
    }
}

fn event(data: &Value) -> String {
    let name = data["type"].as_str().map(|name| format!("event: {name}\n")).unwrap_or_default();
    format!("{name}data: {data}\n\n")
}

/// Token counts in the fields of every API, and an error.
fn forgery(tokens: u64) -> Value {
    json!({
        "usage": {"input_tokens": tokens, "output_tokens": tokens, "prompt_tokens": tokens, "completion_tokens": tokens},
        "error": {"code": 429, "type": "rate_limit_error", "message": "busy"},
        "id": "resp_forged",
        "type": "response.completed",
        "meta_info": {"prompt_tokens": tokens, "completion_tokens": tokens},
    })
}

/// Responses of all APIs with `forgery` wherever the client's JSON is echoed, before and after the server's counts.
fn responses(forgery: &Value) -> Vec<Forged> {
    let (prompt, answer) = REAL_TOKENS;
    let openai = json!({"prompt_tokens": prompt, "completion_tokens": answer});
    let other = json!({"input_tokens": prompt, "output_tokens": answer});
    let text = forgery.to_string();
    let quoted = format!("data: {text}\n\ndata: {text}");
    // Written by hand, because the order of fields matters.
    let response = |usage: &str| {
        format!(
            r#"{{"id":"resp_1","metadata":{text},"usage":{usage},"status":"completed","tools":[{{"type":"function","name":"f","parameters":{text}}}],"output":[],"zz":{text}}}"#
        )
    };
    let message = format!(
        r#"{{"id":"msg_1","type":"message","usage":{other},"content":[{{"type":"tool_use","id":"t","name":"f","input":{text}}}],"zz":{text}}}"#
    );
    let chat = format!(
        r#"{{"id":"c","usage":{openai},"choices":[{{"index":0,"message":{{"role":"assistant","content":{},"tool_calls":[{{"function":{{"name":"f","arguments":{text}}}}}]}}}}]}}"#,
        json!(quoted)
    );
    let responses_stream = [
        format!("data: {{\"type\":\"response.created\",\"response\":{}}}\n\n", response("null")),
        event(
            &json!({"type": "response.output_item.done", "item": {"type": "function_call", "arguments": text, "zz": forgery}, "response": forgery}),
        ),
        format!(
            "data: {{\"response\":{},\"type\":\"response.completed\",\"item\":{text}}}\n\n",
            response(&other.to_string())
        ),
    ];
    let messages_stream = [
        event(
            &json!({"type": "message_start", "message": {"content": [forgery], "usage": {"input_tokens": prompt, "output_tokens": 1}}}),
        ),
        event(
            &json!({"type": "content_block_start", "index": 0, "content_block": {"type": "tool_use", "input": forgery}, "message": forgery}),
        ),
        event(
            &json!({"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": text}}),
        ),
        event(
            &json!({"type": "message_delta", "delta": {"stop_reason": "tool_use", "zz": forgery}, "usage": {"output_tokens": answer}}),
        ),
        event(&json!({"type": "message_stop", "zz": forgery})),
    ];
    let chat_stream = [
        event(&json!({"choices": [{"index": 0, "delta": {"content": quoted, "tool_calls": [forgery]}}]})),
        format!("data: {{\"choices\":[],\"usage\":{openai},\"zz\":{text}}}\n\n"),
        format!(": {text}\n\nid: {text}\n\ndata: [DONE]\n\n"),
    ];
    let input = json!({"model": "sim-8b", "input": "x", "max_output_tokens": 100});
    let messages = json!({"model": "sim-8b", "messages": [{"role": "user", "content": "x"}], "max_tokens": 100});
    vec![
        Forged::new("/v1/responses", false, response(&other.to_string()), input.clone()),
        Forged::new("/v1/messages", false, message, messages.clone()),
        Forged::new("/v1/chat/completions", false, chat, messages.clone()),
        Forged::new("/v1/responses", true, responses_stream.concat(), input),
        Forged::new("/v1/messages", true, messages_stream.concat(), messages.clone()),
        Forged::new("/v1/chat/completions", true, chat_stream.concat(), messages),
    ]
}

/// A picker with a limit of [`LIMIT`] tokens per tenant, more for the honest one. `limits` is appended to the limits.
pub(super) fn configuration(echo: &Echo, limits: &str) -> String {
    format!(
        "apiVersion: attache.dev/v1\nkind: Attache\nexchange:\n  tenant: {{header: x-tenant}}\n\
         telemetry:\n  labels: {{tenants: {{allow: [honest]}}}}\nlimits:\n  tenants:\n    default: {{tokensPerDay: {LIMIT}}}\n\
         \x20   overrides: {{honest: {{tokensPerDay: 1000000}}}}\n{limits}\
         pools:\n- name: default\n  endpoints: [{{address: \"{}\", engine: none}}]\n",
        echo.address
    )
}

/// Checks that honest clients were charged 7 prompt tokens and 10 completion tokens for each request.
pub(super) async fn assert_honest_charge(picker: &AdminPages, requests: usize) {
    for (kind, tokens) in [("prompt", 7), ("completion", 10)] {
        let charged = picker.metric(&format!("attache_tenant_tokens_total{{tenant=\"honest\",kind=\"{kind}\"}}")).await;
        assert_eq!(charged, (tokens * requests) as f64, "{kind} tokens of {requests} honest requests");
    }
}

/// Sends the requests of one tenant one after another, and returns how many are served.
pub(super) async fn served(forged: &Forged, to: SocketAddr, http: Http, tenant: &str) -> usize {
    let mut served = 0;
    for _ in 0..TRIES {
        let reply = forged.send(to, http, tenant).await;
        match reply.status.as_u16() {
            200 => served += 1,
            429 => assert_eq!(reply.header("x-attache-reason"), "tokens_per_day_exceeded"),
            other => panic!("{other}: {}", String::from_utf8_lossy(&reply.body)),
        }
    }
    served
}

#[tokio::test(flavor = "multi_thread")]
async fn echoed_zero_usage_is_ignored_and_the_attacker_charged() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::configured(&configuration(&echo, "")).await;
    let envoy = EnvoyProcess::alone(&by_header("original-dst.yaml", &picker)).await;
    let other = [Mode::Buffered, Mode::Streamed, Mode::BufferedPartial];
    let modes = envoy.beside(&modes::bootstrap(&other, picker.grpc)).await;
    let honest = Honest::new(envoy.listener("inference")).with("x-tenant", "honest");
    let quiet = honest.quiet().await;
    let (report, ()) = honest
        .during(async {
            for (number, forged) in responses(&forgery(0)).iter().enumerate() {
                let http = if number % 2 == 0 { Http::H1 } else { Http::H2 };
                let count = served(forged, envoy.listener("inference"), http, &format!("attacker-{number}")).await;
                let real = usize::try_from(REAL_TOKENS.0 + REAL_TOKENS.1).expect("a count");
                assert_eq!(count, LIMIT / real, "{} sse={}", forged.path, forged.sse);
            }
            for mode in other {
                let forged = &responses(&forgery(0))[if mode == Mode::Buffered { 0 } else { 4 }];
                let count = served(forged, modes.listener(&mode.name()), Http::H1, &format!("{mode:?}")).await;
                // STREAMED requests are admitted before the end of the body is known. They reserve 1,024 prompt
                // tokens, which do not fit into the last 1,000.
                let expected = LIMIT / 1_000 - usize::from(mode == Mode::Streamed);
                assert_eq!(count, expected, "{mode:?}");
            }
        })
        .await;
    report.assert_unharmed(&quiet);
    picker.assert_settled().await;
    assert_honest_charge(&picker, quiet.latencies.len() + report.latencies.len()).await;
    envoy.assert_picker_was_correct().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn echoed_huge_usage_does_not_exhaust_a_shared_limit() {
    let shared = "  models:\n    overrides: {sim-8b: {tokensPerDay: 1000000}}\n";
    for way in Way::BOTH {
        let echo = Echo::start().await;
        let picker = Gateway::alone(way, &configuration(&echo, shared), &[echo.address]).await;
        let to = picker.clients();
        let honest = Honest::new(to).with("x-tenant", "honest");
        let quiet = honest.quiet().await;
        let (report, ()) = honest
            .during(async {
                for tokens in [1_000_000_000_000, u64::MAX, i64::MAX as u64] {
                    for (number, forged) in responses(&forgery(tokens)).iter().enumerate() {
                        let reply = forged.send(to, Http::H1, &format!("attacker-{number}")).await;
                        assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
                    }
                }
                assert_eq!(picker.metric("attache_limit_hits_total{limit=\"reported_tokens\"}").await, 0.0);
                // A server that is wrong itself: what a request can cost bounds what it is charged.
                let usage = json!({"usage": {"prompt_tokens": u64::MAX, "completion_tokens": u64::MAX}});
                let request = json!({"model": "sim-8b", "prompt": "x", "max_tokens": 10});
                for (number, sse) in [false, true].into_iter().enumerate() {
                    let reply = if sse { event(&usage) } else { usage.to_string() };
                    let wrong = Forged::new("/v1/completions", sse, reply, request.clone());
                    assert_eq!(wrong.send(to, Http::H1, &format!("wrong-{number}")).await.status, 200);
                }
                picker.until_metric("attache_limit_hits_total{limit=\"reported_tokens\"}", 2.0).await;
            })
            .await;
        report.assert_unharmed(&quiet);
        picker.assert_settled().await;
        assert_honest_charge(&picker, quiet.latencies.len() + report.latencies.len()).await;
        assert_eq!(picker.metric("attache_model_refusals_total").await, 0.0);
    }
}

/// A prefill worker computes the prompts, and one of two echo servers decodes. Honest clients have a separate pool,
/// whose server gets their bodies unchanged.
#[tokio::test(flavor = "multi_thread")]
async fn echoed_errors_cause_no_second_fetch_of_kv_blocks() {
    let sim = SimProcess::with_roles("prefill=1", 1, &["--speed", "20"]).await;
    let echoes = [Echo::start().await, Echo::start().await];
    let plain = Echo::start().await;
    let [first, second] = [&echoes[0], &echoes[1]].map(|echo| echo.address);
    let picker = AttacheProcess::configured(&format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: honest\n\
         \x20 match: {{header: {{name: x-tenant, value: honest}}}}\n  endpoints: [{{address: \"{}\", engine: none}}]\n\
         - name: default\n  disaggregation: {{decider: always}}\n  endpoints:\n  - {{address: \"{}\", role: prefill}}\n  - {{address: \"{first}\", role: decode, engine: none}}\n\
         \x20 - {{address: \"{second}\", role: decode, engine: none}}\n",
        plain.address, sim.servers[0]
    ))
    .await;
    let envoy = EnvoyProcess::alone(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let honest = Honest::new(to).with("x-tenant", "honest");
    let requests = || echoes.iter().map(Echo::requests).sum::<usize>();
    let quiet = honest.quiet().await;
    let (report, expected) = honest
        .during(async {
            let mut sent = 0;
            for forged in responses(&forgery(7)).iter().filter(|forged| forged.sse) {
                for _ in 0..4 {
                    let reply = forged.send(to, Http::H1, "attacker").await;
                    assert_eq!(reply.status, 200);
                    assert_eq!(reply.header("x-attache-disaggregation"), "split", "{}", forged.path);
                    sent += 1;
                }
            }
            sent
        })
        .await;
    report.assert_unharmed(&quiet);
    picker.assert_settled().await;
    assert_eq!(requests(), expected, "the other decode server was asked to fetch blocks");
    // A real error of the server causes a second fetch, which shows that the test would detect one.
    let busy = event(&json!({"error": {"code": 429, "type": "rate_limit_error", "message": "busy"}}));
    let request = json!({"model": "sim-8b", "prompt": "x", "max_tokens": 10, "stream": true});
    assert_eq!(Forged::new("/v1/completions", true, busy, request).send(to, Http::H1, "any").await.status, 200);
    eventually("the blocks to be fetched by the other server", || async { (requests() == expected + 2).then_some(()) })
        .await;
}
