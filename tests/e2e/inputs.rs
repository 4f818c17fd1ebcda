//! Unusual requests and responses, through the real Envoy to a server and back.

use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::{Payload, chat, sha256};
use crate::support::client::{self, Http, Reply};
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::modes::{Mode, bootstrap};
use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use std::net::SocketAddr;

const CHAT: &str = "/v1/chat/completions";

async fn ask(
    to: SocketAddr,
    method: &str,
    http: Http,
    target: &str,
    body: Bytes,
    headers: &[(&'static str, &[u8])],
) -> Reply {
    let mut request = client::request(method, to, http, target, Payload::sized(body));
    for (name, value) in headers {
        let value = HeaderValue::from_bytes(value).expect("a header value");
        request.headers_mut().append(HeaderName::from_static(name), value);
    }
    client::send(to, http, request).await.unwrap_or_else(|error| panic!("{method} {http:?} {target}: {error}"))
}

/// The picker can't read a compressed body, so it routes by load and counts the request in a metric.
#[tokio::test(flavor = "multi_thread")]
async fn compressed_bodies_are_forwarded_unchanged() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let envoy = EnvoyProcess::start(&bootstrap(&Mode::ALL, picker.grpc)).await;
    let body = Bytes::from_static(b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03not really gzip\xff\x00");
    for mode in Mode::ALL {
        for encoding in [&b"gzip"[..], b"br", b"GZIP, br", b"unheard-of"] {
            let to = envoy.listener(&mode.name());
            let reply = ask(to, "POST", Http::H1, CHAT, body.clone(), &[("content-encoding", encoding)]).await;
            assert_eq!(reply.status, 200, "{mode:?}");
            assert_eq!(reply.header("x-echo-sha256"), sha256(&body), "{mode:?}");
        }
        let to = envoy.listener(&mode.name());
        let plain = ask(to, "POST", Http::H1, CHAT, chat(300, false, 1), &[("content-encoding", b"identity")]).await;
        assert_eq!(plain.status, 200, "{mode:?}");
    }
    let shown = Mode::ALL.iter().filter(|mode| mode.shows_body()).count();
    let unread = picker.metric("attache_degraded_total{mode=\"encoded_body\"}").await;
    assert_eq!(unread, (4 * shown) as f64, "bodies that were not read");
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

/// These requests have no body that the picker could wait for.
#[tokio::test(flavor = "multi_thread")]
async fn requests_without_a_body_are_routed_at_their_headers() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let envoy = EnvoyProcess::start(&bootstrap(&Mode::ALL, picker.grpc)).await;
    for mode in Mode::ALL {
        let to = envoy.listener(&mode.name());
        for http in [Http::H1, Http::H2] {
            for (method, target) in [
                ("GET", "/v1/models"),
                ("GET", "/v1/models/sim-8b?verbose=1"),
                ("OPTIONS", CHAT),
                ("DELETE", "/v1/responses/resp_unknown"),
                ("POST", "/v1/load_lora_adapter"),
                ("PUT", "/anything/../else?x=%00"),
            ] {
                let reply = ask(to, method, http, target, Bytes::new(), &[]).await;
                assert_eq!(reply.status, 200, "{mode:?} {http:?} {method} {target}");
                assert_eq!(reply.header("x-echo-server"), echo.address.to_string(), "{mode:?} {method} {target}");
            }
        }
    }
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

/// Headers that the picker sets, or that only the picker reads.
const INTERNAL_HEADERS: [&str; 28] = [
    "x-gateway-destination-endpoint-served",
    "x-gateway-destination-endpoint-subset",
    "x-gateway-destination-endpoint-scores",
    "x-gateway-destination-endpoint-fallback",
    "x-gateway-inference-fairness-id",
    "x-gateway-inference-objective",
    "x-gateway-model-name-rewrite",
    "x-llm-d-inference-fairness-id",
    "x-llm-d-inference-objective",
    "x-llm-d-model-name-rewrite",
    "x-prefiller-host-port",
    "x-encoder-hosts-ports",
    "x-kv-cache-source-host-port",
    "x-data-parallel-host-port",
    "endpoint-load-metrics-format",
    "routing-strategy",
    "target-pod",
    "x-data-parallel-rank",
    "x-dp-rank",
    "x-dynamo-routing-mode",
    "x-prefill-dp-rank",
    "x-prefill-instance-id",
    "x-routing-strategy",
    "x-smg-target-worker",
    "x-vllm-priority",
    "x-worker-instance-id",
    "test-epp-endpoint-selection",
    "x-conformance-test-served-endpoint",
];

#[tokio::test(flavor = "multi_thread")]
async fn internal_headers_from_clients_never_reach_a_server() {
    let (echo, decoy) = (Echo::start().await, Echo::start().await);
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let envoy = EnvoyProcess::start(&bootstrap(&Mode::ALL, picker.grpc)).await;
    let spoof = decoy.address.to_string();
    let headers: Vec<(&str, &[u8])> = INTERNAL_HEADERS
        .iter()
        .chain(&INTERNAL_HEADERS)
        .chain(&["x-harmless"])
        .map(|name| (*name, spoof.as_bytes()))
        .collect();
    let target = format!("{CHAT}?tell=x-harmless,{}", INTERNAL_HEADERS.join(","));
    for mode in Mode::ALL {
        for (method, body) in [("POST", chat(300, false, 1)), ("GET", Bytes::new())] {
            let to = envoy.listener(&mode.name());
            let reply = ask(to, method, Http::H1, &target, body.clone(), &headers).await;
            assert_eq!(reply.status, 200, "{mode:?} {method}");
            assert_eq!(reply.header("x-echo-told"), format!("x-harmless={spoof}"), "{mode:?} {method}");
            assert_eq!(reply.header("x-echo-sha256"), sha256(&body), "no name is rewritten: {mode:?} {method}");
        }
    }
    assert_eq!(decoy.requests(), 0);
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn trusted_client_header_rewrites_the_model() {
    let echo = Echo::start().await;
    let config = format!(
        "apiVersion: attache.dev/v1\nkind: Attache\nexchange: {{trustClientHeaders: true}}\npools:\n- name: default\n  \
         endpoints: [\"{}\"]\n",
        echo.address
    );
    let picker = AttacheProcess::configured(&config).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let body = chat(300, false, 1);
    let text = std::str::from_utf8(&body).expect("text");
    let header: [(&str, &[u8]); 1] = [("x-gateway-model-name-rewrite", b"other")];
    let reply = ask(envoy.listener("inference"), "POST", Http::H1, CHAT, body.clone(), &header).await;
    assert_eq!(reply.header("x-echo-sha256"), sha256(text.replace("sim-8b", "other").as_bytes()));
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unusual_header_values_are_accepted() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let long = vec![b'x'; 30_000];
    let cases: [&[(&'static str, &[u8])]; 6] = [
        &[("x-odd", b"\xff\xfe\x80")],
        &[("x-odd", "\u{1f600}".as_bytes()), ("x-request-id", "\u{1f600}".as_bytes())],
        &[("x-request-id", b"first"), ("x-request-id", b"second")],
        &[("x-request-id", &long)],
        &[("traceparent", b"00-zz-zz-zz"), ("traceparent", b"")],
        &[("x-odd", b"")],
    ];
    for headers in cases {
        let body = chat(300, false, 1);
        let reply = ask(envoy.listener("inference"), "POST", Http::H1, CHAT, body.clone(), headers).await;
        assert_eq!((reply.status.as_u16(), reply.header("x-echo-sha256")), (200, &*sha256(&body)));
    }
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

/// The picker observes responses and never changes them. The last column is the number of completion tokens that it
/// counts.
#[tokio::test(flavor = "multi_thread")]
async fn malformed_streams_reach_the_client_unchanged() {
    let long = format!(
        "data: {{\"choices\":[{{\"delta\":{{\"content\":\"{}\"}}}}]}}\n\ndata: [DONE]\n\n",
        "a".repeat(3 << 20)
    );
    let usage = |tokens: u32| format!("data: {{\"usage\":{{\"prompt_tokens\":7,\"completion_tokens\":{tokens}}}}}\n\n");
    let cases: [(&str, Vec<u8>, f64); 9] = [
        ("broken UTF-8", b"data: {\"x\":\"\xff\xfe\xc3\"}\n\ndata: [DONE]\n\n".into(), 0.0),
        ("no usage", b"data: {\"choices\":[]}\n\ndata: [DONE]\n\n".into(), 0.0),
        ("a line of 3 MiB", long.into(), 0.0),
        (
            "a false end",
            format!("data: {{\"content\":\"data: [DONE]\\n\\n\"}}\n\n{}data: [DONE]\n\n", usage(5)).into(),
            5.0,
        ),
        ("two usages: the last one counts", format!("{}{}data: [DONE]\n\n", usage(3), usage(9)).into(), 9.0),
        ("no end", usage(4).into(), 4.0),
        ("other line ends", usage(6).replace('\n', "\r\n").into(), 6.0),
        (
            "usage that is no number",
            b"data: {\"usage\":{\"completion_tokens\":\"many\"}}\n\ndata: [DONE]\n\n".into(),
            0.0,
        ),
        ("nothing but comments", b": ping\n\n: ping\n\n".into(), 0.0),
    ];
    for (what, answer, tokens) in cases {
        let echo = Echo::answering(answer.clone()).await;
        let picker = AttacheProcess::start(&[echo.address], &[]).await;
        let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
        let target = format!("{CHAT}?hold=1&kind=sse&chunked=1");
        let reply = ask(envoy.listener("inference"), "POST", Http::H1, &target, chat(300, true, 1), &[]).await;
        assert_eq!((reply.body.len(), reply.sha256), (answer.len(), sha256(&answer)), "{what}");
        picker.assert_settled().await;
        assert_eq!(picker.metric("attache_completion_tokens_total").await, tokens, "{what}");
        envoy.assert_picker_was_correct().await;
    }
}

/// Errors of the client do not count against the server. Its own failures do.
#[tokio::test(flavor = "multi_thread")]
async fn client_errors_never_eject_a_server_but_500s_do() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::configured(&format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  health: {{errorPeriod: 0s}}\n  endpoints: [\"{}\"]\n",
        echo.address
    ))
    .await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    for (status, ejections) in [(400, 0.0), (404, 0.0), (429, 0.0), (501, 0.0), (500, 1.0)] {
        for early in [0, 1] {
            for _ in 0..5 {
                let target = format!("{CHAT}?status={status}&early={early}");
                let reply = ask(to, "POST", Http::H2, &target, chat(300, false, 1), &[]).await;
                assert_eq!(reply.status.as_u16(), status);
            }
        }
        picker.assert_settled().await;
        assert_eq!(picker.metric("attache_ejections_total").await, ejections, "after {status}");
    }
}
