//! Request headers that choose the strategy, the profile and the endpoints, through real Envoy. Session affinity also
//! sets a response header.

use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::{Payload, chat};
use crate::support::client::{self, Http, Reply};
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use http::{HeaderName, HeaderValue};
use std::collections::BTreeSet;
use std::net::SocketAddr;

const CHAT: &str = "/v1/chat/completions";
const KEY: &str = "agent-session-42";

async fn ask(to: SocketAddr, headers: &[(&'static str, &str)]) -> Reply {
    let mut request = client::request("POST", to, Http::H1, CHAT, Payload::sized(chat(300, false, 1)));
    for (name, value) in headers {
        let value = HeaderValue::from_str(value).expect("a header value");
        request.headers_mut().append(HeaderName::from_static(name), value);
    }
    client::send(to, Http::H1, request).await.expect("an answer")
}

/// The servers that six identical requests reach.
async fn servers_reached(to: SocketAddr, headers: &[(&'static str, &str)]) -> BTreeSet<String> {
    let mut servers = BTreeSet::new();
    for _ in 0..6 {
        let reply = ask(to, headers).await;
        assert_eq!(reply.status, 200, "{headers:?}: {}", String::from_utf8_lossy(&reply.body));
        servers.insert(reply.header("x-echo-server").to_owned());
    }
    servers
}

fn config(a: &Echo, b: &Echo, more: &str) -> String {
    format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  strategy: round-robin\n  endpoints:\n  \
         - {{address: \"{}\", labels: {{zone: a}}}}\n  - {{address: \"{}\", labels: {{zone: b}}}}\n{more}",
        a.address, b.address
    )
}

const OPEN: &str = "  strategies:\n  - profiles: {sticky: {strategy: session-affinity}}\n  requestStrategy:\n    \
                    allow: [session-affinity, least-request]\n    filterHeader: external-filter\n";

#[tokio::test(flavor = "multi_thread")]
async fn session_stays_on_its_server_and_its_key_is_hidden() {
    let (a, b) = (Echo::start().await, Echo::start().await);
    let picker = AttacheProcess::configured(&config(&a, &b, OPEN)).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let (by_session, by_sum) =
        (("routing-strategy", "session-affinity"), ("routing-strategy", "session-affinity:10,least-request:1"));
    for server in [&a, &b] {
        let id = BASE64_STANDARD.encode(server.address.to_string());
        let expected = BTreeSet::from([server.address.to_string()]);
        assert_eq!(servers_reached(to, &[by_session, ("x-session-id", &id)]).await, expected);
        assert_eq!(servers_reached(to, &[by_sum, ("x-session-id", &id)]).await, expected);
        assert_eq!(servers_reached(to, &[("config-profile", "sticky"), ("x-session-id", &id)]).await, expected);
    }
    let first = ask(to, &[by_session]).await;
    let next = ask(to, &[by_session, ("x-session-id", first.header("x-session-id"))]).await;
    assert_eq!(next.header("x-echo-server"), first.header("x-echo-server"), "the answer's id leads back");
    assert_eq!(next.header("x-session-id"), BASE64_STANDARD.encode(next.header("x-echo-server")));

    let keyed = [by_session, ("x-aibrix-session-key", KEY)];
    assert_eq!(servers_reached(to, &keyed).await.len(), 1);
    let reply = ask(to, &keyed).await;
    let reveals_key =
        |value: &HeaderValue| value.to_str().is_ok_and(|v| v.contains(KEY) || v.contains(&BASE64_STANDARD.encode(KEY)));
    assert!(!reply.headers.values().any(reveals_key), "{:?}", reply.headers);
    assert_eq!(ask(to, &[]).await.header("x-session-id"), "", "round-robin knows no sessions");
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn request_headers_choose_allowed_strategies_and_others_get_400() {
    let (a, b) = (Echo::start().await, Echo::start().await);
    let picker = AttacheProcess::configured(&config(&a, &b, OPEN)).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    assert_eq!(servers_reached(to, &[]).await.len(), 2, "the pool's round-robin");
    let profile = ask(to, &[("config-profile", "sticky")]).await;
    assert_eq!(profile.header("x-aibrix-config-profile"), "sticky");
    assert_eq!(ask(to, &[]).await.header("x-aibrix-config-profile"), "");
    for (filter, server) in [("zone=a", &a), ("zone!=a", &b), ("zone in (b,c),!spot", &b)] {
        assert_eq!(
            servers_reached(to, &[("external-filter", filter)]).await,
            [server.address.to_string()].into(),
            "{filter}"
        );
    }
    let before = a.requests() + b.requests();
    for named in ["no-such", "round-robin", "session-affinity:0.5,least-request", "session-affinity,,least-request"] {
        let reply = ask(to, &[("routing-strategy", named)]).await;
        assert_eq!(
            (reply.status.as_u16(), reply.header("x-attache-reason")),
            (400, "invalid_routing_strategy"),
            "{named}"
        );
        assert_eq!(reply.header("x-error-invalid-routing-strategy"), named);
        assert_eq!(reply.json()["error"]["code"], "invalid_routing_strategy", "{named}");
    }
    for (filter, status, reason) in [("zone in (", 400, "invalid_endpoint_filter"), ("zone=c", 503, "subset_empty")] {
        let reply = ask(to, &[("external-filter", filter)]).await;
        assert_eq!((reply.status.as_u16(), reply.header("x-attache-reason")), (status, reason), "{filter}");
    }
    assert_eq!(a.requests() + b.requests(), before, "what is refused reaches no server");
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn request_strategy_headers_are_ignored_unless_configured() {
    let (a, b) = (Echo::start().await, Echo::start().await);
    let picker = AttacheProcess::configured(&config(&a, &b, "")).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let headers = [("routing-strategy", "no-such"), ("config-profile", "sticky"), ("external-filter", "zone=a")];
    assert_eq!(servers_reached(envoy.listener("inference"), &headers).await.len(), 2);
    picker.assert_settled().await;
}
