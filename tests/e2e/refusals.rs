//! Rejections by the picker, which the client gets as errors of its API, through the real Envoy.

use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::{Payload, chat, cut};
use crate::support::client::{self, Http, Reply};
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::modes::{Mode, bootstrap};
use crate::support::process::eventually;
use bytes::Bytes;
use http::HeaderValue;

fn assert_rejected(reply: &Reply, status: u16, reason: &str) {
    let text = String::from_utf8_lossy(&reply.body);
    assert_eq!(reply.status, status, "{text}");
    assert_eq!(reply.header("x-attache-reason"), reason, "{text}");
    assert!(reply.header("content-type").starts_with("application/json"), "{:?}", reply.headers);
    assert_eq!(reply.json()["error"]["code"], reason, "{text}");
    assert!(reply.json()["error"]["message"].as_str().is_some_and(|m| !m.is_empty()), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_json_gets_400_in_every_mode_with_a_body() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let modes = Mode::ALL.map(|mode| mode).into_iter().filter(|mode| mode.shows_body()).collect::<Vec<_>>();
    let envoy = EnvoyProcess::start(&bootstrap(&modes, picker.grpc)).await;
    for mode in modes {
        let to = envoy.listener(&mode.name());
        for (body, reason) in [(&b"{\"model\": \"m\", \"mess"[..], "invalid_json"), (b"", "empty_body")] {
            let reply = client::post(to, "/v1/chat/completions", Bytes::from_static(body)).await.expect("an answer");
            assert_rejected(&reply, 400, reason);
        }
    }
    assert_eq!(echo.requests(), 0, "a refused request never reaches a server");
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

/// By default tonic rejects messages over 4 MiB, and Envoy then sends the request on without the picker.
#[tokio::test(flavor = "multi_thread")]
async fn large_buffered_body_does_not_bypass_the_picker() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let envoy = EnvoyProcess::start(&by_header("buffered.yaml", &picker)).await;
    let body = chat(5_000_000, false, 1);
    let broken = body.slice(..body.len() - 1);
    let reply = client::post(envoy.listener("inference"), "/v1/chat/completions", broken).await.expect("an answer");
    assert_rejected(&reply, 400, "invalid_json");
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn body_over_the_limit_gets_413_with_and_without_length() {
    let echo = Echo::start().await;
    let config = format!(
        "apiVersion: attache.dev/v1\nkind: Attache\nlimits: {{maxBodyBytes: 64KiB}}\npools:\n- name: default\n  \
         endpoints: [\"{}\"]\n",
        echo.address
    );
    let picker = AttacheProcess::configured(&config).await;
    let modes = [Mode::FullDuplex, Mode::Buffered];
    let envoy = EnvoyProcess::start(&bootstrap(&modes, picker.grpc)).await;
    for mode in modes {
        let to = envoy.listener(&mode.name());
        let fits = client::post(to, "/v1/chat/completions", chat(64 << 10, false, 1)).await.expect("an answer");
        assert_eq!(fits.status, 200, "{mode:?}: a body at the limit");
        // HTTP/2, where an early response and a partly sent body do not interfere.
        for body in [chat((64 << 10) + 1, false, 1), chat(2 << 20, false, 1)] {
            for payload in [Payload::sized(body.clone()), Payload::chunked(cut(body.clone(), 16 << 10, 1))] {
                let request = client::request("POST", to, Http::H2, "/v1/chat/completions", payload);
                let reply = client::send(to, Http::H2, request).await.expect("an answer");
                assert_rejected(&reply, 413, "body_too_large");
            }
        }
    }
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pool_without_ready_endpoint_gets_503_with_retry_after() {
    let config = "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  endpoints: \
                  [{address: \"127.0.0.1:9\", draining: true}]\n";
    let picker = AttacheProcess::configured(config).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let reply = client::post(to, "/v1/chat/completions", chat(300, false, 1)).await.expect("an answer");
    assert_rejected(&reply, 503, "no_ready_endpoint");
    assert!(reply.header("retry-after").parse::<u32>().is_ok(), "{:?}", reply.headers);
    picker.assert_settled().await;
}

/// Envoy connects to the address in the destination header, so only the picker may set it. These listeners do not
/// remove it themselves.
#[tokio::test(flavor = "multi_thread")]
async fn client_headers_cannot_choose_the_server() {
    let (echo, decoy) = (Echo::start().await, Echo::start().await);
    let picker = AttacheProcess::start(&[echo.address], &[]).await;
    let envoy = EnvoyProcess::start(&bootstrap(&Mode::ALL, picker.grpc)).await;
    for mode in Mode::ALL {
        let to = envoy.listener(&mode.name());
        for (method, body) in [("POST", chat(300, false, 1)), ("GET", Bytes::new())] {
            for http in [Http::H1, Http::H2] {
                let mut request =
                    client::request(method, to, http, "/v1/chat/completions", Payload::sized(body.clone()));
                let spoof = HeaderValue::from_str(&decoy.address.to_string()).expect("a header value");
                // Twice: overwriting only the first would leave the second.
                request.headers_mut().append("x-gateway-destination-endpoint", spoof.clone());
                request.headers_mut().append("x-gateway-destination-endpoint", spoof);
                let reply = client::send(to, http, request).await.expect("an answer");
                assert_eq!(reply.status, 200, "{mode:?} {method} {http:?}");
                assert_eq!(reply.header("x-echo-server"), echo.address.to_string(), "{mode:?} {method} {http:?}");
                assert_eq!(reply.header("x-echo-destination"), echo.address.to_string(), "{mode:?} {method} {http:?}");
            }
        }
    }
    assert_eq!(decoy.requests(), 0);
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

/// An ext-proc filter without `processing_mode` shows no bodies, so no model decides about the pool.
#[tokio::test(flavor = "multi_thread")]
async fn envoy_without_processing_mode_sends_no_request_to_a_wrong_pool() {
    let (a, other) = (Echo::start().await, Echo::start().await);
    let config = format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- {{name: a, match: {{models: [a]}}, endpoints: [\"{}\"]}}\n\
         - {{name: other, endpoints: [\"{}\"]}}\n",
        a.address, other.address
    );
    let picker = AttacheProcess::configured(&config).await;
    let shipped = by_header("original-dst.yaml", &picker);
    let (before, rest) = shipped.split_once("              processing_mode:\n").expect("a mode");
    let modes: usize = rest.lines().take_while(|line| line.starts_with("                ")).map(|l| l.len() + 1).sum();
    let envoy = EnvoyProcess::start(&format!("{before}{}", &rest[modes..])).await;
    let body = Bytes::from_static(br#"{"model":"a","messages":[{"role":"user","content":"Hello"}]}"#);
    let reply = client::post(envoy.listener("inference"), "/v1/chat/completions", body).await.expect("an answer");
    assert_rejected(&reply, 400, "invalid_model");
    assert_eq!((a.requests(), other.requests()), (0, 0));
    assert_eq!(picker.metric("attache_degraded_total{mode=\"no_body\"}").await, 1.0);
    let log = picker.process.stderr();
    assert!(log.contains("WARN") && log.contains("request decided without its body"), "{log}");
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn picker_is_not_ready_until_an_endpoint_accepts_connections() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("an address");
    drop(listener);
    let picker = AttacheProcess::unready(&["--endpoint".to_owned(), address.to_string()]).await;
    let page = eventually("a failed scrape", async || {
        let page = client::get(picker.metrics, "/endpoints").await.ok()?.json();
        (page["pools"][0]["endpoints"][0]["status"] == "unreachable").then_some(page)
    })
    .await;
    assert!(!picker.is_ready().await);
    assert_eq!(page["missing"], serde_json::json!(["pool `default`: an endpoint that accepts connections"]));
    let error = page["pools"][0]["endpoints"][0]["scrape_error"].as_str().expect("an error").to_owned();
    assert!(error.starts_with(&format!("http://{address}/metrics")) && error.contains("`--engine none`"), "{error}");
    let _server = Echo::on(tokio::net::TcpListener::bind(address).await.expect("the same port"));
    picker.until_ready().await;
    assert_eq!(picker.endpoints().await[0]["status"], "ready");
}
