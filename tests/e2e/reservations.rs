//! Reservations: an endpoint is chosen and booked on the admin port, and the request follows through real Envoy.

use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::Payload;
use crate::support::client::{self, Http, Reply};
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::process::eventually;
use bytes::Bytes;
use http::HeaderValue;
use serde_json::{Value, json};
use std::net::SocketAddr;

const HEADER: &str = "x-attache-reservation";

fn body(text: &str) -> Bytes {
    json!({"model": "m", "messages": [{"role": "user", "content": text}], "stream": true}).to_string().into()
}

/// Reserves for a request with this text.
async fn reserve(picker: &AttacheProcess, text: &str, query: &str) -> Value {
    let reply = client::post(picker.metrics, &format!("/reservations{query}"), body(text)).await.expect("a response");
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    reply.json()
}

/// Sends a request with this text and id, whose response lasts about `ms`.
async fn ask(to: SocketAddr, text: &str, reservation: &str, ms: u64) -> Reply {
    let target = format!("/v1/chat/completions?kind=sse&size=400&events=4&pace_ms={}&tell={HEADER}", ms / 4);
    let mut request = client::request("POST", to, Http::H1, &target, Payload::sized(body(text)));
    request.headers_mut().insert(HEADER, HeaderValue::from_str(reservation).expect("a value"));
    request.headers_mut().insert("x-request-id", HeaderValue::from_static("reserved-1"));
    let reply = client::send(to, Http::H1, request).await.expect("a response");
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    reply
}

async fn in_flight(picker: &AttacheProcess) -> f64 {
    picker.metric("attache_endpoint_in_flight").await
}

async fn outcomes(picker: &AttacheProcess, outcome: &str) -> f64 {
    picker.metric(&format!("attache_reservations_total{{outcome=\"{outcome}\"}}")).await
}

async fn open(picker: &AttacheProcess) -> Vec<Value> {
    let list = client::get(picker.metrics, "/reservations").await.expect("the page").json();
    list.as_array().expect("a list").clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn reserved_request_gets_its_endpoint_and_is_counted_once() {
    let servers = [Echo::start().await, Echo::start().await];
    let addresses = servers.each_ref().map(|echo| echo.address);
    let picker = AttacheProcess::start(&addresses, &["--engine=none", "--strategy=least-request"]).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");

    // The fewest requests in flight decide, so the second reservation is on the other server.
    let (first, second) = (reserve(&picker, "a", "").await, reserve(&picker, "a", "?timeout=300").await);
    let of = |reserved: &Value, key: &str| reserved[key].as_str().expect("a string").to_owned();
    let (id, endpoint) = (of(&first, "reservation"), of(&first, "endpoint"));
    assert_ne!(endpoint, of(&second, "endpoint"), "the first one is booked");
    assert_eq!((of(&first, "header").as_str(), in_flight(&picker).await), (HEADER, 2.0));
    let shown = open(&picker).await;
    assert!(shown.len() == 2 && !json!(shown).to_string().contains(&id), "{shown:?}");

    let explained =
        client::send(picker.metrics, Http::H1, explain_request(&picker, &id)).await.expect("a response").json();
    assert_eq!(explained["picks"][0], endpoint.as_str(), "{explained}");

    let running = tokio::spawn({
        let id = id.clone();
        async move { ask(to, "a", &id, 2_000).await }
    });
    eventually("the request to take its reservation over", || async {
        (outcomes(&picker, "used").await == 1.0).then_some(())
    })
    .await;
    assert_eq!(in_flight(&picker).await, 2.0, "the reservation and its request are one");
    let reply = running.await.expect("a client");
    assert_eq!(reply.header("x-echo-server"), endpoint);
    assert_eq!(reply.header("x-echo-told"), "", "the server does not get the id");
    picker.until_metric("attache_endpoint_in_flight", 1.0).await;
    let record = eventually("the record", || async {
        let page = client::get(picker.metrics, "/decisions?request_id=reserved-1").await.expect("the page").json();
        page.as_array().and_then(|list| list.first().cloned())
    })
    .await;
    assert_eq!((&record["endpoint"], &record["end"]), (&json!(endpoint), &json!("complete")), "{record}");
    assert_eq!(record["reason"], "reserved for this request before", "{record}");

    // The id is used up. The other server has the second reservation, so this request goes to the first one.
    assert_eq!(ask(to, "a", &id, 0).await.header("x-echo-server"), endpoint);
    assert_eq!(outcomes(&picker, "unknown").await, 1.0);

    let reply = client::send(
        picker.metrics,
        Http::H1,
        client::request(
            "DELETE",
            picker.metrics,
            Http::H1,
            &format!("/reservations/{}", of(&second, "reservation")),
            Payload::sized(Bytes::new()),
        ),
    )
    .await
    .expect("a response");
    assert_eq!((reply.status.as_u16(), open(&picker).await.len()), (204, 0));
    picker.until_metric("attache_endpoint_in_flight", 0.0).await;
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

/// A request to explain, which names the reservation `id`.
fn explain_request(picker: &AttacheProcess, id: &str) -> http::Request<Payload> {
    let target = format!("/explain?header={HEADER}:{id}");
    client::request("POST", picker.metrics, Http::H1, &target, Payload::sized(body("a")))
}

#[tokio::test(flavor = "multi_thread")]
async fn reservation_that_is_not_used_ends_and_a_request_of_another_size_is_decided_as_usual() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &["--engine=none"]).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    reserve(&picker, "a", "?timeout=0.2").await;
    picker.until_metric("attache_reservations_total{outcome=\"expired\"}", 1.0).await;
    assert_eq!((in_flight(&picker).await, open(&picker).await.len()), (0.0, 0));
    let page = client::get(picker.metrics, "/decisions").await.expect("the page").json();
    let record = &page[0];
    let address = echo.address.to_string();
    assert_eq!((&record["end"], &record["endpoint"]), (&json!("unsent"), &json!(address)), "{record}");

    let reserved = reserve(&picker, "a", "").await;
    let id = reserved["reservation"].as_str().expect("an id");
    ask(to, "a text that is longer than the reserved one", id, 0).await;
    assert_eq!((outcomes(&picker, "mismatched").await, open(&picker).await.len()), (1.0, 0));
    let reply = client::post(picker.metrics, "/reservations?timeout=301", body("a")).await.expect("a response");
    let said = String::from_utf8_lossy(&reply.body).into_owned();
    assert_eq!(reply.status, 400);
    assert_eq!(said, "`timeout` is `301`; allowed are more than 0 and at most 300 seconds\n");
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}
