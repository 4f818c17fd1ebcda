//! The end of an agent's session, through real Envoy and on the admin port.

use crate::replicas::{Pair, picker, pool, until_peer};
use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::Payload;
use crate::support::client::{self, Http, Reply};
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::nats::NatsProcess;
use crate::support::process::eventually;
use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use serde_json::{Value, json};
use std::net::SocketAddr;

const CHAT: &str = "/v1/chat/completions?kind=sse&size=200&events=2";

/// Sends a request with these headers, and returns the response after its end.
async fn ask(to: SocketAddr, headers: &[(&'static str, &str)]) -> Reply {
    ask_with(to, headers, &json!([{"role": "user", "content": "a"}])).await
}

/// Sends a request with these headers and these messages, and returns the response after its end.
async fn ask_with(to: SocketAddr, headers: &[(&'static str, &str)], messages: &Value) -> Reply {
    let body = json!({"model": "m", "messages": messages, "stream": true}).to_string();
    let mut request = client::request("POST", to, Http::H1, CHAT, Payload::sized(body.into()));
    for (name, value) in headers {
        let value = HeaderValue::from_str(value).expect("a value");
        request.headers_mut().insert(HeaderName::from_static(name), value);
    }
    let reply = client::send(to, Http::H1, request).await.expect("a response");
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    reply
}

/// Ends a session by a call to the gateway or to the admin port.
async fn finish(to: SocketAddr, query: &str) -> (u16, Value) {
    let reply = client::post(to, &format!("/finish_session{query}"), Bytes::new()).await.expect("a response");
    (reply.status.as_u16(), reply.json())
}

/// The program of the request with this id.
async fn program_of(picker: &AttacheProcess, id: &str) -> String {
    let page = format!("/decisions?request_id={id}");
    eventually("the record", || async {
        let list = client::get(picker.metrics, &page).await.expect("the page").json();
        list[0]["agent"]["program"].as_str().map(str::to_owned)
    })
    .await
}

const ROOT: (&str, &str) = ("x-dynamo-session-id", "root");
const CHILD: [(&str, &str); 2] = [("x-dynamo-session-id", "child"), ("x-dynamo-parent-session-id", "root")];
const GRANDCHILD: [(&str, &str); 2] = [("x-dynamo-session-id", "leaf"), ("x-dynamo-parent-session-id", "child")];

#[tokio::test(flavor = "multi_thread")]
async fn session_ends_by_the_gateway_by_the_admin_port_and_by_the_header_of_its_last_request() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &["--engine=none"]).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");

    let begin = async || {
        ask(to, &[ROOT]).await;
        ask(to, &CHILD).await;
    };
    let grandchild = async |id: &str| {
        ask(to, &[&GRANDCHILD[..], &[("x-request-id", id)]].concat()).await;
        program_of(&picker, id).await
    };
    begin().await;
    assert_eq!(grandchild("r1").await, "root");
    let before = echo.requests();
    let (status, said) = finish(to, "?session_id=root").await;
    assert_eq!((status, &said["known"], &said["requests"]), (200, &json!(true), &json!(3)), "{said}");
    assert_eq!(said.get("endpoints"), None, "clients do not see the addresses of servers");
    assert_eq!(echo.requests(), before, "no server gets the call");
    assert_eq!(grandchild("r2").await, "child", "the chains of the program are forgotten");
    let (status, said) = finish(to, "?session_id=root").await;
    assert_eq!((status, &said["known"], &said["requests"]), (200, &json!(false), &json!(0)), "{said}");
    let (status, said) = finish(to, "").await;
    assert_eq!((status, &said["error"]["code"]), (400, &json!("invalid_session_id")), "{said}");

    begin().await;
    let (status, said) = finish(picker.metrics, "?session_id=root").await;
    let endpoints = json!({echo.address.to_string(): 2});
    assert_eq!((status, &said["known"], &said["endpoints"]), (200, &json!(true), &endpoints), "{said}");
    let other = finish(picker.metrics, "?session_id=child&tenant=acme").await;
    assert_eq!((other.0, &other.1["known"]), (200, &json!(false)), "another tenant has no such session");

    begin().await;
    ask(to, &[ROOT, ("x-dynamo-session-final", "true")]).await;
    picker.until_metric("attache_sessions_ended_total{by=\"header\"}", 1.0).await;
    let (_, said) = finish(to, "?session_id=root").await;
    assert_eq!(said["known"], false, "the header has ended it: {said}");
    assert_eq!(grandchild("r3").await, "child");
    for (by, ends) in [("gateway", 3.0), ("admin", 2.0)] {
        assert_eq!(picker.metric(&format!("attache_sessions_ended_total{{by=\"{by}\"}}")).await, ends, "{by}");
    }
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn session_that_ends_on_one_picker_ends_on_the_others() {
    let (nats, echo) = (NatsProcess::start().await, Echo::start().await);
    let config = pool("least-request", &[echo.address]) + "exchange: {tenant: {header: x-tenant}}\n";
    let pair = Pair::of([picker(&config, "a", &nats.url()).await, picker(&config, "b", &nats.url()).await]).await;
    let [a, b] = &pair.pickers;
    until_peer(b, "a").await;
    // Both pickers know the program of two tenants.
    for tenant in ["acme", "other"] {
        for to in pair.to {
            ask(to, &[ROOT, ("x-tenant", tenant)]).await;
            ask(to, &[&CHILD[..], &[("x-tenant", tenant)]].concat()).await;
        }
    }
    let (_, said) = finish(a.metrics, "?session_id=root&tenant=acme").await;
    assert_eq!((&said["known"], &said["requests"]), (&json!(true), &json!(2)), "{said}");
    b.until_metric("attache_sessions_ended_total{by=\"peer\"}", 1.0).await;
    let known = async |tenant: &str| finish(b.metrics, &format!("?session_id=root&tenant={tenant}")).await.1;
    let acme = known("acme").await;
    assert_eq!(acme["known"], false, "it has ended there: {acme}");
    let other = known("other").await;
    assert_eq!((&other["known"], &other["requests"]), (&json!(true), &json!(2)), "the other tenant's has not: {other}");
    a.until_metric("attache_sessions_ended_total{by=\"peer\"}", 1.0).await;
    pair.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_after_a_tool_call_belong_to_one_program_without_an_id_of_the_client() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &["--engine=none"]).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let mut messages = vec![json!({"role": "user", "content": "Mend the test"})];
    for (turn, call) in ["call_4f9d2c71", "call_0b8e6a35"].into_iter().enumerate() {
        let function = json!({"name": "read", "arguments": "{}"});
        let calls = json!([{"id": call, "type": "function", "function": function}]);
        messages.push(json!({"role": "assistant", "content": null, "tool_calls": calls}));
        messages.push(json!({"role": "tool", "tool_call_id": call, "content": "ok"}));
        let id = format!("turn-{turn}");
        ask_with(to, &[("x-request-id", &id)], &messages.clone().into()).await;
        assert_eq!(program_of(&picker, &id).await, "call_4f9d2c71");
    }
    let (_, said) = finish(picker.metrics, "?session_id=call_4f9d2c71").await;
    assert_eq!((&said["known"], &said["requests"]), (&json!(true), &json!(2)), "{said}");
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}
