//! What servers do wrong is judged inside Envoy as by ext-proc: the end of the request in `/decisions`, and the health
//! of the endpoint in `/endpoints`.

use super::{CHAT, addresses, four, post};
use crate::shipped::{by_list, list_pool};
use crate::support::attache::{AdminPages, AttacheProcess};
use crate::support::body::{Payload, chat};
use crate::support::client::{self, Http};
use crate::support::envoy::EnvoyProcess;
use crate::support::inside::Inside;
use crate::support::process::eventually;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Longest time of a request on the route.
const TIMEOUT: &str = "0.6s";
/// Time between a part of a response and the end of its connection.
const PAUSE: Duration = Duration::from_millis(200);

/// A server that fails as the query says: it closes the connection `before` the response or `within` it, sends the
/// `headers` alone, or `hangs`. A number is the status of a whole response.
async fn faulty() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(fail(stream));
        }
    });
    address
}

async fn fail(mut stream: TcpStream) {
    let mut request = Vec::new();
    // By ext-proc, the body has chunks.
    let is_whole = |request: &[u8]| {
        let text = String::from_utf8_lossy(request).to_ascii_lowercase();
        let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
        length.map_or_else(|| body.ends_with("0\r\n\r\n"), |length: usize| body.len() >= length)
    };
    while !is_whole(&request) {
        if stream.read_buf(&mut request).await.unwrap_or_default() == 0 {
            return;
        }
    }
    let text = String::from_utf8_lossy(&request).into_owned();
    let fault = text.split("fault=").nth(1).and_then(|rest| rest.split([' ', '&']).next()).unwrap_or_default();
    let answer = match fault {
        "before" => return,
        "within" => {
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{\"id\"".to_owned()
        }
        "headers" => "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n".to_owned(),
        "hangs" => String::new(),
        status => format!("HTTP/1.1 {status} Status\r\ncontent-length: 2\r\n\r\n{{}}"),
    };
    // The other end may be gone already.
    drop(stream.write_all(answer.as_bytes()).await);
    match fault {
        "headers" | "hangs" => drop(stream.read_to_end(&mut request).await),
        // A server that is slow on purpose. Else Envoy finds the end of the connection together with the headers, before
        // ext-proc has answered to them. The server does not see that answer.
        "within" => tokio::time::sleep(PAUSE).await,
        _ => {}
    }
}

/// The latest decision and its endpoint, as far as both ways must agree. `count` decisions have ended.
async fn judged(pages: &AdminPages, count: u64) -> Value {
    let decision = eventually("the end of the request", || async {
        let page = client::get(pages.metrics, "/decisions").await.ok()?.json();
        let latest = page.as_array()?.iter().max_by_key(|decision| decision["sequence"].as_u64())?.clone();
        (latest["sequence"].as_u64()? + 1 >= count).then_some(latest)
    })
    .await;
    let endpoint = pages.endpoints().await.into_iter().next().expect("the endpoint");
    let of = |value: &Value, keys: &[&str]| keys.iter().map(|key| value[*key].clone()).collect::<Vec<_>>();
    json!([of(&decision, &["status", "end", "reason", "endpoint", "served"]), of(&endpoint, &["ejections", "status"])])
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_of_servers_are_judged_as_by_ext_proc() {
    let echoes = four().await;
    let mut servers = addresses(&echoes);
    servers[0] = faulty().await;
    let text = list_pool(&servers[..1], "random")
        .replace(&format!("\"{}\"", servers[0]), &format!("{{address: \"{}\", engine: none}}", servers[0]));
    let picker = AttacheProcess::configured(&text).await;
    let timed = |bootstrap: String| {
        let route = "                  timeout: 0s\n";
        assert!(bootstrap.contains(route), "{bootstrap}");
        bootstrap.replace(route, &route.replace("0s", TIMEOUT))
    };
    let envoy = EnvoyProcess::start(&timed(by_list("override-host.yaml", &picker, servers))).await;
    let inside = Inside::beside_edited(&envoy, &text, servers, timed).await;
    let faults = ["200", "500", "502", "503", "429", "404", "before", "within", "headers", "hangs", "200", "before"];
    let (mut count, mut ends) = (0, BTreeSet::new());
    for fault in faults.into_iter().cycle().take(2 * faults.len()) {
        count += 1;
        let target = format!("{CHAT}?fault={fault}");
        let [theirs, ours] = [envoy.listener("inference"), inside.clients()].map(|to| {
            let target = target.clone();
            async move { client::post(to, &target, chat(300, false, 1)).await.ok().map(|reply| reply.status.as_u16()) }
        });
        let (theirs, ours) = (theirs.await, ours.await);
        assert_eq!(ours, theirs, "{fault}");
        let (theirs, ours) = (judged(&picker, count).await, judged(&inside, count).await);
        assert_eq!(ours, theirs, "{fault}, request {count}");
        ends.insert(ours[0].to_string());
    }
    assert!(ends.len() >= 7, "{ends:?}");
    inside.assert_settled().await;
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_must_not_pass_without_a_decision_are_rejected() {
    let echoes = four().await;
    let servers = addresses(&echoes);
    let text = list_pool(&servers, "random") + "  requestStrategy: {filterHeader: external-filter}\n";
    let refused = async |inside: &Inside, headers: &[(&'static str, &str)], expected: (u16, &str)| {
        for http in [Http::H1, Http::H2] {
            let payload = Payload::sized(chat(5_000, false, 1));
            let reply = post(inside.clients(), http, CHAT, payload, headers).await;
            assert_eq!((reply.status.as_u16(), reply.header("x-attache-reason")), expected, "{headers:?}");
        }
    };
    let inside = Inside::start(&text, servers).await;
    let nowhere = ("external-filter", "zone=nowhere");
    refused(&inside, &[nowhere], (503, "subset_empty")).await;
    refused(&inside, &[nowhere, ("x-attache-fault", "request_body")], (500, "internal_error")).await;
    inside.assert_settled().await;
    drop(inside);
    let closed = |bootstrap: String| bootstrap.replace("fail_open: true", "fail_open: false");
    let inside = Inside::edited(&text, servers, closed).await;
    for hook in ["request_headers", "request_body"] {
        refused(&inside, &[("x-attache-fault", hook)], (500, "internal_error")).await;
    }
    assert!(inside.metric("attache_panics_total").await >= 4.0);
    inside.assert_settled().await;
    assert_eq!(echoes.iter().map(|echo| echo.requests()).sum::<usize>(), 0, "no server gets a request");
}

/// The upstream filter of a cluster, as the page about Attaché inside Envoy shows it.
const UPSTREAM_FILTER: &str = r#"
        http_filters:
        - name: attempt
          typed_config:
            "@type": type.googleapis.com/envoy.extensions.filters.http.dynamic_modules.v3.DynamicModuleFilter
            dynamic_module_config: *library
            filter_name: attempt
        - name: envoy.filters.http.upstream_codec
          typed_config:
            "@type": type.googleapis.com/envoy.extensions.filters.http.upstream_codec.v3.UpstreamCodec
"#;

#[tokio::test(flavor = "multi_thread")]
async fn each_attempt_is_judged_with_the_upstream_filter() {
    let echoes = four().await;
    let mut servers = addresses(&echoes);
    let refuses = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    (servers[0], servers[1]) = (faulty().await, refuses.local_addr().expect("an address"));
    drop(refuses);
    let text = servers[..3].iter().fold(list_pool(&servers[..3], "round-robin"), |text, server| {
        text.replace(&format!("\"{server}\""), &format!("{{address: \"{server}\", engine: none}}"))
    });
    let edit = |bootstrap: String| {
        let (codec, retries) = ("        explicit_http_config: {http_protocol_options: {}}\n", "retry_on: ");
        assert!(bootstrap.contains(codec) && bootstrap.contains(retries), "{bootstrap}");
        let with_filter = bootstrap.replace(codec, &format!("{codec}{}", UPSTREAM_FILTER.trim_start_matches('\n')));
        with_filter.replace(retries, "retry_on: 5xx,")
    };
    let inside = Inside::edited(&text, servers, edit).await;
    // The lists of servers begin with the one that responds 503, and then with the one that refuses connections.
    for _ in 0..2 {
        let reply = client::post(inside.clients(), &format!("{CHAT}?fault=503"), chat(300, false, 1)).await;
        let reply = reply.expect("a response");
        assert_eq!((reply.status.as_u16(), reply.header("x-echo-server")), (200, &*servers[2].to_string()));
    }
    inside.assert_settled().await;
    let endpoints = inside.endpoints().await;
    let cause = |server: SocketAddr| {
        let found = endpoints.iter().find(|endpoint| endpoint["address"] == server.to_string());
        found.unwrap_or_else(|| panic!("no {server}")).get("ejection").map(|ejection| ejection["cause"].clone())
    };
    assert_eq!(cause(servers[1]), Some(json!("connect_failure")), "it refused twice, once as the second server");
    assert_eq!(cause(servers[0]), Some(Value::Null), "it responded 503 once");
    assert_eq!(cause(servers[2]), Some(Value::Null));
}
