//! What the decision log says about requests that did not go as clients wanted.

use super::queueing::{One, flow, setup};
use super::*;
use attache_flow::Settings;

/// The end of a request whose response Envoy explains by these details.
fn end_by(details: &str, status: &str) -> &'static str {
    let world = Setup::default().build();
    let mut exchange = routed(&world, None);
    let value = Value { kind: Some(Kind::StringValue(details.to_owned())) };
    let fields = HashMap::from([("response.code_details".to_owned(), value)]);
    let attributes = HashMap::from([("envoy.filters.http.ext_proc".to_owned(), Struct { fields })]);
    let head = request(Message::ResponseHeaders(headers(&[(":status", status)], true)));
    send(&mut exchange, ProcessingRequest { attributes, ..head });
    drop(exchange);
    world.assert_books_closed(1);
    world.processor.decisions.snapshot().pop().unwrap().end
}

#[test]
fn response_of_the_gateway_is_no_complete_one() {
    for (details, status, end) in [
        ("upstream_reset_before_response_started{connection_failure}", "503", "connect_failure"),
        ("upstream_reset_before_response_started{overflow}", "503", "gateway"),
        ("no_healthy_upstream", "503", "gateway"),
        ("via_upstream", "500", "complete"),
        ("via_upstream", "200", "complete"),
    ] {
        assert_eq!(end_by(details, status), end, "{details} {status}");
    }
}

#[test]
fn rejected_requests_are_logged_with_pool_and_reason() {
    let world = setup(flow(Settings { queue: false, ..Settings::default() })).build();
    let _first = One::comes(&world, "");
    let extra = [("x-request-id", "r-7"), ("x-gateway-inference-objective", "batch")];
    assert_eq!(One::of(&world, &extra, BodySendMode::FullDuplexStreamed).refused(), (429, "shed"));
    let record = world.processor.decisions.snapshot().pop().unwrap();
    assert_eq!((record.end, record.reason, record.status), ("rejected", "shed", 429));
    assert_eq!((&*record.request_id, &*record.endpoint), ("r-7", ""));
    assert_eq!(&*record.pool, &*world.processor.picker.config().pools()[0].pool.name);
    // Before the pool is known.
    let mut bad = world.exchange();
    send(&mut bad, request(Message::RequestHeaders(headers(&[PATH, (":method", "POST")], false))));
    send(&mut bad, request(Message::RequestBody(body(b"{", true))));
    let record = world.processor.decisions.snapshot().pop().unwrap();
    assert_eq!((record.end, record.reason, &*record.pool), ("rejected", "invalid_json", ""));
}

#[test]
fn queued_requests_are_logged_with_their_wait() {
    let world = setup(flow(Settings::default())).build();
    let first = One::comes(&world, "");
    let (mut second, mut third) = (One::comes(&world, ""), One::comes(&world, ""));
    first.ends();
    let after = |seconds| NOW.after(Duration::from_secs(seconds));
    second.wakes(after(2));
    third.exchange.on(Event::Deadline, after(60), &mut Actions::new()).unwrap();
    second.ends();
    let records = world.processor.decisions.snapshot();
    let told: Vec<_> = records.iter().map(|r| (r.end, r.reason, r.queued_ms.map(|ms| ms.round() as u64))).collect();
    assert_eq!(told[0].2, None, "the pool was empty");
    assert!(told.iter().any(|(end, reason, _)| (*end, *reason) == ("rejected", "queue_timeout")), "{told:?}");
    assert!(told.iter().any(|(end, _, queued)| *end == "complete" && *queued == Some(2_000)), "{told:?}");
    assert!(records.iter().all(|record| !record.pool.is_empty()), "{told:?}");
}
