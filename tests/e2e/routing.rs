//! Routing: several pools, the gateway's subset hint, and model rewrites.

use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::{Payload, chat, completion, events, sha256};
use crate::support::client::{self, Http, Reply};
use crate::support::echo::{Echo, RESPONSE_SEED};
use crate::support::envoy::EnvoyProcess;
use crate::support::modes::{Mode, bootstrap};
use bytes::Bytes;
use envoy_types::pb::google::protobuf::{ListValue, Value, value::Kind};
use http::{HeaderName, HeaderValue};
use prost::Message;
use std::net::SocketAddr;

const CHAT: &str = "/v1/chat/completions";

type Header<'a> = (&'static str, &'a str);

async fn post(to: SocketAddr, target: &str, body: impl Into<Bytes>, headers: &[Header<'_>]) -> Reply {
    let mut request = client::request("POST", to, Http::H1, target, Payload::sized(body.into()));
    for (name, value) in headers {
        let value = HeaderValue::from_str(value).expect("a header value");
        request.headers_mut().append(HeaderName::from_static(name), value);
    }
    client::send(to, Http::H1, request).await.expect("an answer")
}

#[tokio::test(flavor = "multi_thread")]
async fn one_picker_serves_pools_by_model_header_and_authority() {
    let (by_model, canary, tenant, rest) =
        (Echo::start().await, Echo::start().await, Echo::start().await, Echo::start().await);
    let config = format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n\
         - {{name: canary, match: {{header: {{name: x-canary, value: yes-please}}}}, endpoints: [\"{}\"]}}\n\
         - {{name: large, match: {{models: [llama-70b, llama-405b]}}, endpoints: [\"{}\"]}}\n\
         - {{name: tenant, match: {{authority: tenant.example.com}}, endpoints: [\"{}\"]}}\n\
         - {{name: rest, endpoints: [\"{}\"]}}\n",
        canary.address, by_model.address, tenant.address, rest.address
    );
    let picker = AttacheProcess::configured(&config).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let body = |model: &str| format!(r#"{{"model":"{model}","messages":[{{"role":"user","content":"hello"}}]}}"#);
    let cases: [(&str, &[Header<'_>], &Echo); 7] = [
        ("llama-70b", &[], &by_model),
        ("llama-405b", &[], &by_model),
        ("llama-7b", &[], &rest),
        ("llama-7b", &[("x-canary", "yes-please")], &canary),
        ("llama-70b", &[("x-canary", "yes-please")], &canary),
        ("llama-7b", &[("x-canary", "no")], &rest),
        ("llama-70b", &[("x-other", "yes-please")], &by_model),
    ];
    for (model, headers, server) in cases {
        let reply = post(to, CHAT, body(model), headers).await;
        assert_eq!(reply.header("x-echo-server"), server.address.to_string(), "{model} {headers:?}");
    }
    let mut request = client::request("POST", to, Http::H1, CHAT, Payload::sized(Bytes::from(body("llama-7b"))));
    request.headers_mut().insert("host", HeaderValue::from_static("tenant.example.com"));
    let reply = client::send(to, Http::H1, request).await.expect("an answer");
    assert_eq!(reply.header("x-echo-server"), tenant.address.to_string(), "by authority");
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

/// A gateway selects the pool by the authority of its ext-proc call. Envoy's default is the name of the cluster.
#[tokio::test(flavor = "multi_thread")]
async fn authority_of_the_ext_proc_call_selects_the_pool() {
    let (mine, other) = (Echo::start().await, Echo::start().await);
    let config = format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n\
         - {{name: other, match: {{service: llama-epp}}, endpoints: [\"{}\"]}}\n\
         - {{name: mine, match: {{service: picker.default}}, endpoints: [\"{}\"]}}\n",
        other.address, mine.address
    );
    let picker = AttacheProcess::configured(&config).await;
    let by_cluster = by_header("original-dst.yaml", &picker);
    let by_name = "envoy_grpc: {cluster_name: picker, authority: 'llama-epp.default.svc:9002'}";
    let by_authority = by_cluster.replace("envoy_grpc: {cluster_name: picker}", by_name);
    assert_ne!(by_cluster, by_authority);
    // Istio's name, which is no valid authority.
    let istio = "name: 'outbound|9002||llama-epp.default.svc.cluster.local'";
    let by_istio = by_cluster.replace("name: picker", istio);
    let lines = by_istio.lines().filter(|line| !line.trim_start().starts_with('#'));
    assert_eq!(lines.filter(|line| line.contains(istio)).count(), 3);
    for (bootstrap, server) in [(by_cluster, &mine), (by_authority, &other), (by_istio, &other)] {
        let envoy = EnvoyProcess::start(&bootstrap).await;
        let to = envoy.listener("inference");
        let body = r#"{"model":"m","messages":[{"role":"user","content":"hello"}]}"#;
        // More than once on a connection, because HPACK then refers to the name in a table.
        for n in 0..20 {
            // Headers of the client have no effect.
            let reply = post(to, CHAT, body, &[("x-forwarded-host", "llama-epp.default.svc")]).await;
            assert_eq!(reply.header("x-echo-server"), server.address.to_string(), "request {n}");
        }
        envoy.assert_picker_was_correct().await;
    }
    picker.assert_settled().await;
}

/// The client's name for the model that the echo server calls `sim-8b`. Its length differs, so a stale length is
/// detected.
const ALIAS: &str = "the-house-model";

fn renamed(bytes: &[u8]) -> Vec<u8> {
    let text = std::str::from_utf8(bytes).expect("text");
    text.replace("\"model\":\"sim-8b\"", &format!("\"model\":\"{ALIAS}\"")).into_bytes()
}

async fn check_rewrite(to: SocketAddr, http: Http, query: &str, expected: &[u8]) -> Result<(), String> {
    let sent = renamed(&chat(600, query.contains("sse"), 1));
    let arrives = chat(600, query.contains("sse"), 1);
    let request = client::request("POST", to, http, &format!("{CHAT}?{query}"), Payload::sized(sent.into()));
    let reply = client::send(to, http, request).await.map_err(|error| format!("{http:?} {query}: {error}"))?;
    let differences = [
        (reply.status.as_str().to_owned(), "200".to_owned(), "status"),
        (reply.header("x-echo-length").to_owned(), arrives.len().to_string(), "request length"),
        (reply.header("x-echo-sha256").to_owned(), sha256(&arrives), "request digest"),
        (reply.body.len().to_string(), expected.len().to_string(), "response length"),
        (reply.sha256, sha256(expected), "response digest"),
    ];
    match differences.iter().find(|(got, wanted, _)| got != wanted) {
        Some((got, wanted, what)) => Err(format!("{http:?} {query}: {what}: got {got}, expected {wanted}")),
        None => Ok(()),
    }
}

/// The server gets its own model name and the client the one it used, however the response is split.
#[tokio::test(flavor = "multi_thread")]
async fn model_name_is_rewritten_in_request_and_response() {
    let echo = Echo::start().await;
    let config = format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  endpoints: [\"{}\"]\n  \
         modelRewrites: [{{model: {ALIAS}, targets: [{{model: sim-8b}}]}}]\n",
        echo.address
    );
    let picker = AttacheProcess::configured(&config).await;
    let modes = [Mode::FullDuplex, Mode::Buffered, Mode::BufferedBoth, Mode::StreamedNoWait];
    let envoy = EnvoyProcess::start(&bootstrap(&modes, picker.grpc)).await;
    let json = completion(400, RESPONSE_SEED);
    let sse = Vec::from(events(700, 4, RESPONSE_SEED)).concat();
    let (json_query, sse_query) = ("kind=json&size=400", "kind=sse&size=700&events=4");
    let mut wrong = Vec::new();
    for mode in modes {
        let to = envoy.listener(&mode.name());
        for http in [Http::H1, Http::H2] {
            for framing in ["", "&chunked=1", "&chunked=1&trailers=1", "&chunked=1&piece=1"] {
                wrong.extend(check_rewrite(to, http, &format!("{json_query}{framing}"), &renamed(&json)).await.err());
                wrong.extend(check_rewrite(to, http, &format!("{sse_query}{framing}"), &renamed(&sse)).await.err());
            }
        }
    }
    // Split at every byte of the first name, paced so that Envoy forwards the chunks one by one.
    let to = envoy.listener(&Mode::FullDuplex.name());
    for (query, body) in [(json_query, &json[..]), (sse_query, &sse)] {
        let key = body.windows(7).position(|window| window == b"\"model\"").expect("a model");
        for cut in key..key + "\"model\":\"sim-8b\",".len() {
            let query = format!("{query}&cut={cut}&pace_ms=5");
            wrong.extend(check_rewrite(to, Http::H1, &query, &renamed(body)).await.err());
        }
    }
    wrong.extend(
        check_rewrite(to, Http::H1, "kind=sse&size=700&events=4&piece=1&pace_ms=1", &renamed(&sse)).await.err(),
    );
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

/// Copies two client headers into the subset hint, so that a test can use any form: `x-hint-text` as a string,
/// `x-hint-value` as a protobuf value in base64.
pub(crate) const HINT_FROM_HEADERS: &str = r#"          - name: envoy.filters.http.header_to_metadata
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config
              request_rules:
              - header: x-hint-text
                on_header_present: {metadata_namespace: envoy.lb.subset_hint, key: x-gateway-destination-endpoint-subset}
                remove: true
              - header: x-hint-value
                on_header_present: {metadata_namespace: envoy.lb.subset_hint, key: x-gateway-destination-endpoint-subset,
                  type: PROTOBUF_VALUE, encode: BASE64}
                remove: true
"#;

fn value(kind: Kind) -> String {
    base64(&Value { kind: Some(kind) }.encode_to_vec())
}

/// A subset hint with these entries, for the header `x-hint-value`.
pub(crate) fn hint_list(entries: &[String]) -> String {
    let values = entries.iter().map(|entry| Value { kind: Some(Kind::StringValue(entry.clone())) }).collect();
    value(Kind::ListValue(ListValue { values }))
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    bytes.chunks(3).fold(String::new(), |mut text, chunk| {
        let bits = chunk.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for digit in 0..4 {
            let sextet = (bits >> (18 - 6 * digit)) as usize & 63;
            text.push(if digit > chunk.len() { '=' } else { char::from(DIGITS[sextet]) });
        }
        text
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn gateway_subset_hint_is_obeyed_in_every_form() {
    let (a, b, outside) = (Echo::start().await, Echo::start().await, Echo::start().await);
    let picker = AttacheProcess::start(&[a.address, b.address], &["--strategy", "round-robin"]).await;
    let modes = [Mode::FullDuplex, Mode::Buffered, Mode::None];
    let filter = "          - name: envoy.filters.http.ext_proc\n";
    let text = bootstrap(&modes, picker.grpc).replace(filter, &format!("{HINT_FROM_HEADERS}{filter}"));
    let envoy = EnvoyProcess::start(&text).await;
    let (at_b, out, port) = (b.address.to_string(), outside.address.to_string(), b.address.port());
    let text = |text: &str| ("x-hint-text", text.to_owned());
    let entries = |entries: &[&str]| {
        let entries: Vec<String> = entries.iter().map(|entry| (*entry).to_owned()).collect();
        ("x-hint-value", hint_list(&entries))
    };
    let to_b = [
        text(&at_b),
        text(&format!(" {at_b} ,nonsense,,")),
        text(&format!("{out},{at_b}")),
        entries(&[&at_b]),
        entries(&["nonsense", "127.0.0.1:70000", ":80", "", &at_b]),
        entries(&[&format!("[::ffff:127.0.0.1]:{port}")]),
        entries(&[&out, &at_b, "[2001:db8::1]:80", "2001:db8::1"]),
    ];
    let to_any =
        [text("127.0.0.1"), entries(&["127.0.0.1"]), entries(&["::ffff:127.0.0.1"]), entries(&["[::ffff:127.0.0.1]"])];
    let to_none = [
        text(&out),
        text("nonsense"),
        entries(&[]),
        entries(&["nonsense"]),
        entries(&[&out, "10.0.0.9", "[2001:db8::1]:80"]),
        ("x-hint-value", value(Kind::NumberValue(1.0))),
    ];
    for mode in modes {
        let to = envoy.listener(&mode.name());
        let ask = async |(header, hint): &(&'static str, String)| {
            post(to, CHAT, chat(300, false, 1), &[(header, hint)]).await
        };
        for hint in &to_b {
            for _ in 0..3 {
                let reply = ask(hint).await;
                assert_eq!((reply.status.as_u16(), reply.header("x-echo-server")), (200, &*at_b), "{mode:?} {hint:?}");
            }
        }
        for hint in &to_any {
            assert_eq!(ask(hint).await.status, 200, "{mode:?} {hint:?}");
        }
        for hint in &to_none {
            let reply = ask(hint).await;
            assert_eq!(
                (reply.status.as_u16(), reply.header("x-attache-reason")),
                (503, "subset_empty"),
                "{mode:?} {hint:?}"
            );
        }
    }
    assert!(a.requests() > 0, "without a port, every endpoint of the address is allowed");
    assert_eq!(outside.requests(), 0, "never an endpoint outside of the pool");
    assert!(picker.metric("attache_subset_entries_malformed_total").await > 0.0, "malformed entries are counted");
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}
