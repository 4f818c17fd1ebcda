//! Client headers that could override the picker's decision, and server addresses in responses.

use crate::coming_from::aibrix::MANIFEST;
use crate::disagg::{COURSE, PREFILL, request};
use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::{Payload, chat};
use crate::support::client::{self, Http, Reply};
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::modes::{Mode, bootstrap};
use crate::support::sim::SimProcess;
use bytes::Bytes;
use http::HeaderValue;
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Headers that servers, sidecars and routers in front of servers act on.
const STEERING: [&str; 12] = [
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
];

/// Requests with readable and unreadable bodies: method, path, content type, content encoding, body.
const REQUESTS: [(&str, &str, &str, &str, &[u8]); 6] = [
    (
        "POST",
        "/v1/chat/completions",
        "application/json",
        "",
        br#"{"model":"m","messages":[{"role":"user","content":"a"}]}"#,
    ),
    ("POST", "/v1/chat/completions", "application/json", "gzip", b"\x1f\x8b\x08\x00not really"),
    ("POST", "/v1/unknown", "application/octet-stream", "", b"anything"),
    ("POST", "/v1/audio/transcriptions", "multipart/form-data; boundary=b", "", FORM),
    ("GET", "/v1/models", "application/json", "", b""),
    ("DELETE", "/v1/responses/resp_1", "application/json", "", b""),
];

const FORM: &[u8] = b"--b\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\nm\r\n--b\r\ncontent-disposition: form-data; name=\"file\"; \
                      filename=\"a\"\r\n\r\nsound\r\n--b--\r\n";

/// The names of the steering headers and the session header that reach the server.
async fn steering_headers_at_the_server(
    to: SocketAddr,
    http: Http,
    what: (&str, &str, &str, &'static str, &'static [u8]),
) -> Vec<String> {
    let (method, path, content_type, encoding, body) = what;
    let target = format!("{path}?tell=x-session-id,{}", STEERING.join(","));
    let mut request = client::request(method, to, http, &target, Payload::sized(Bytes::from_static(body)));
    let headers = request.headers_mut();
    headers.insert("content-type", HeaderValue::from_str(content_type).expect("a header value"));
    if !encoding.is_empty() {
        headers.insert("content-encoding", HeaderValue::from_static(encoding));
    }
    for name in STEERING.iter().chain(&["x-session-id"]) {
        headers.append(*name, HeaderValue::from_static("1"));
        headers.append(*name, HeaderValue::from_static("2"));
    }
    let reply = client::send(to, http, request).await.expect("a response");
    assert_eq!(reply.status, 200, "{what:?}: {}", String::from_utf8_lossy(&reply.body));
    names(reply.header("x-echo-told"))
}

fn names(received: &str) -> Vec<String> {
    let mut names: Vec<String> =
        received.split(';').filter_map(|pair| Some(pair.split_once('=')?.0.to_owned())).collect();
    names.sort();
    names.dedup();
    names
}

#[tokio::test(flavor = "multi_thread")]
async fn server_steering_headers_pass_from_trusted_clients_only() {
    let echo = Echo::start().await;
    let modes = [Mode::FullDuplex, Mode::Streamed, Mode::Buffered, Mode::None];
    let passes = |name: &&&str| **name != "target-pod";
    let mut all: Vec<String> =
        STEERING.iter().filter(passes).chain(&["x-session-id"]).map(|name| (*name).to_owned()).collect();
    all.sort();
    for (trusted, expected) in [(false, vec!["x-session-id".to_owned()]), (true, all)] {
        let picker = AttacheProcess::configured(&format!(
            "apiVersion: attache.dev/v1\nkind: Attache\nexchange: {{trustClientHeaders: {trusted}}}\npools:\n- name: default\n  \
             endpoints: [\"{}\"]\n",
            echo.address
        ))
        .await;
        let envoy = EnvoyProcess::alone(&bootstrap(&modes, picker.grpc)).await;
        for mode in modes {
            let to = envoy.listener(&mode.name());
            for http in [Http::H1, Http::H2] {
                for what in REQUESTS {
                    let arrived = steering_headers_at_the_server(to, http, what).await;
                    assert_eq!(arrived, expected, "{mode:?} {http:?} {} {} trusted: {trusted}", what.0, what.1);
                }
            }
            // Envoy waits for the end of a buffered body, and an upgrade has none.
            if mode != Mode::Buffered {
                assert_eq!(steering_headers_of_an_upgrade(to).await, expected, "{mode:?} upgrade, trusted: {trusted}");
            }
        }
        envoy.assert_picker_was_correct().await;
        picker.assert_settled().await;
    }
}

/// The names of the steering headers and the session header that reach the server with a websocket upgrade.
async fn steering_headers_of_an_upgrade(to: SocketAddr) -> Vec<String> {
    let steering: String = STEERING.iter().map(|name| format!("{name}: 1\r\n")).collect();
    let head = format!(
        "GET /v1/realtime?tell=x-session-id,{} HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
         sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nx-session-id: 1\r\n{steering}\r\n",
        STEERING.join(",")
    );
    let mut stream = TcpStream::connect(to).await.expect("a connection");
    stream.write_all(head.as_bytes()).await.expect("sending the upgrade");
    let mut got = Vec::new();
    while !got.ends_with(b"\r\n\r\n") {
        let count = stream.read_buf(&mut got).await.expect("reading");
        assert!(count > 0, "cut after {:?}", String::from_utf8_lossy(&got));
    }
    let text = String::from_utf8_lossy(&got).into_owned();
    assert!(text.starts_with("HTTP/1.1 101"), "{text}");
    let received = text.lines().find_map(|line| line.strip_prefix("x-echo-told: "));
    names(received.unwrap_or_else(|| panic!("no x-echo-told in {text}")))
}

/// The response headers that contain the address of a server.
fn headers_with_addresses(reply: &Reply, servers: &[SocketAddr]) -> Vec<String> {
    let shows = |value: &HeaderValue| {
        let value = String::from_utf8_lossy(value.as_bytes()).into_owned();
        servers.iter().any(|server| value.contains(&server.to_string()))
    };
    reply.headers.iter().filter(|(_, value)| shows(value)).map(|(name, _)| name.as_str().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn split_responses_hide_server_addresses_unless_configured() {
    let sim = SimProcess::with_roles("prefill=1,decode=1", 2, &["--speed", "20"]).await;
    let [prefill, decode] = [sim.servers[0], sim.servers[1]];
    for (exchange, shown) in [("{}", vec![]), ("{prefillEndpointHeader: true}", vec![PREFILL.to_owned()])] {
        let picker = AttacheProcess::configured(&format!(
            "apiVersion: attache.dev/v1\nkind: Attache\nexchange: {exchange}\npools:\n- name: default\n  \
             disaggregation: {{decider: always}}\n  endpoints:\n  - {{address: \"{prefill}\", role: prefill}}\n  \
             - {{address: \"{decode}\", role: decode}}\n"
        ))
        .await;
        for file in ["original-dst.yaml", "buffered.yaml"] {
            let envoy = EnvoyProcess::alone(&by_header(file, &picker)).await;
            let to = envoy.listener("inference");
            for stream in [false, true] {
                let reply = client::post(to, "/v1/completions", request(1, stream)).await.expect("a response");
                assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
                let expected = if reply.header(COURSE).starts_with("split") { shown.clone() } else { vec![] };
                assert_eq!(headers_with_addresses(&reply, &sim.servers), expected, "{file}, stream {stream}");
                assert!(file == "buffered.yaml" || reply.header(COURSE).starts_with("split"), "{:?}", reply.headers);
            }
            let refused = client::post(to, "/v1/completions", chat(20, false, 1)).await.expect("a response");
            assert_eq!(headers_with_addresses(&refused, &sim.servers), Vec::<String>::new(), "{file}");
        }
        picker.assert_settled().await;
    }
}

/// Sends every kind of request with headers that name `other`, and returns the server and the headers that it got.
async fn naming(to: SocketAddr, http: Http, other: SocketAddr) -> Vec<(u16, String, String)> {
    let mut replies = Vec::new();
    for (method, path, content_type, encoding, body) in REQUESTS {
        let target = format!("{path}?tell=target-pod,x-my-server");
        let mut request = client::request(method, to, http, &target, Payload::sized(Bytes::from_static(body)));
        let headers = request.headers_mut();
        headers.insert("content-type", HeaderValue::from_static(content_type));
        if !encoding.is_empty() {
            headers.insert("content-encoding", HeaderValue::from_static(encoding));
        }
        headers.insert("routing-strategy", HeaderValue::from_static("random"));
        let other = HeaderValue::from_str(&other.to_string()).expect("a header value");
        for name in ["target-pod", "x-my-server", "x-gateway-destination-endpoint"] {
            headers.append(name, other.clone());
            headers.append(name, other.clone());
        }
        let reply = client::send(to, http, request).await.expect("a response");
        let told = reply.header("x-echo-told").to_owned();
        replies.push((reply.status.as_u16(), reply.header("x-echo-server").to_owned(), told));
    }
    replies
}

#[tokio::test(flavor = "multi_thread")]
async fn target_pod_of_a_client_never_steers() {
    for trusted in [false, true] {
        let (pool, named) = (Echo::start().await, Echo::start().await);
        let text = format!(
            "apiVersion: attache.dev/v1\nkind: Attache\nexchange: {{trustClientHeaders: {trusted}}}\n\
             pools: [{{name: default, endpoints: ['{}']}}]\n",
            pool.address
        );
        let picker = AttacheProcess::configured_with(&text, &MANIFEST).await;
        let envoy = EnvoyProcess::alone(&by_header("target-pod.yaml", &picker)).await;
        let server = pool.address.to_string();
        for http in [Http::H1, Http::H2] {
            for (status, served, told) in naming(envoy.listener("inference"), http, named.address).await {
                let destinations: Vec<&str> = told.split(';').filter_map(|t| t.strip_prefix("target-pod=")).collect();
                assert_eq!((status, &served, destinations.as_slice()), (200, &server, [server.as_str()].as_slice()));
            }
        }
        assert_eq!(named.requests(), 0, "trusted: {trusted}");
        picker.assert_settled().await;
    }
}

/// Envoy fails open, and no picker removes what the client sent.
#[tokio::test(flavor = "multi_thread")]
async fn target_pod_of_a_client_never_steers_without_a_picker() {
    let (pool, named) = (Echo::start().await, Echo::start().await);
    let picker = AttacheProcess::start(&[pool.address], &[]).await;
    let bootstrap = by_header("target-pod.yaml", &picker);
    assert_eq!(bootstrap.matches("failure_mode_allow: false").count(), 1);
    let open = bootstrap.replace("failure_mode_allow: false", "failure_mode_allow: true");
    let envoy = EnvoyProcess::alone(&open).await;
    drop(picker);
    for http in [Http::H1, Http::H2] {
        for (status, server, _) in naming(envoy.listener("inference"), http, named.address).await {
            assert_eq!((status, server.as_str()), (503, ""), "no server is named");
        }
    }
    assert_eq!((pool.requests(), named.requests()), (0, 0));
}

/// A pool sends a header that another pool does not: through the other pool, a client's own must not pass.
#[tokio::test(flavor = "multi_thread")]
async fn destination_header_of_one_pool_never_passes_through_another() {
    let (pool, named) = (Echo::start().await, Echo::start().await);
    let text = format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- {{name: default, endpoints: ['{server}']}}\n\
         - {{name: other, match: {{header: {{name: x-pool, value: other}}}}, endpoints: ['{server}'], \
         destination: {{headers: [x-gateway-destination-endpoint, x-my-server], strategyHeader: x-my-strategy}}}}\n",
        server = pool.address
    );
    let picker = AttacheProcess::configured(&text).await;
    let modes = [Mode::FullDuplex, Mode::Streamed, Mode::Buffered, Mode::None];
    let envoy = EnvoyProcess::alone(&bootstrap(&modes, picker.grpc)).await;
    for mode in modes {
        for reply in naming(envoy.listener(&mode.name()), Http::H1, named.address).await {
            assert_eq!(reply, (200, pool.address.to_string(), String::new()), "{mode:?}");
        }
    }
    assert_eq!(named.requests(), 0);
    picker.assert_settled().await;
}
