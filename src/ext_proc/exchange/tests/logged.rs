//! What the decision log says about requests that did not go as clients wanted.

use super::queueing::{One, flow, setup, without_queue};
use super::*;
use attache_flow::Settings;
use attache_picker::event::DecisionRecord;

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
    let world = setup(without_queue(flow(Settings::default()))).build();
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

/// The record of a streamed response of a pool with two servers, whose first token comes after 40 ms.
fn streamed(world: &World, id: &str) -> DecisionRecord {
    let mut exchange = world.exchange();
    let head = [PATH, (":method", "POST"), ("x-request-id", id)];
    send(&mut exchange, request(Message::RequestHeaders(headers(&head, false))));
    let sent = br#"{"model": "m", "stream": true, "prompt": "hello"}"#;
    send(&mut exchange, request(Message::RequestBody(body(sent, true))));
    if let Some(warming) = exchange.warming() {
        compute(warming);
        exchange.on(Event::Warmed, NOW, &mut Actions::new()).unwrap();
    }
    let event = [(":status", "200"), ("content-type", "text/event-stream")];
    send(&mut exchange, request(Message::ResponseHeaders(headers(&event, false))));
    let (mut out, later) = (Actions::new(), NOW.after(Duration::from_millis(40)));
    for (bytes, end) in [(&b"data: {}\n\n"[..], false), (b"", true)] {
        let chunk = Event::Message(Box::new(request(Message::ResponseBody(body(bytes, end)))));
        exchange.on(chunk, later, &mut out).unwrap();
    }
    drop(exchange);
    let record = world.processor.decisions.snapshot().pop().unwrap();
    assert_eq!((record.end, record.status), ("complete", 200), "{record:?}");
    record
}

#[test]
fn record_has_the_runner_up_in_the_unit_of_the_strategy() {
    for (strategy, in_ms) in [("predicted-latency", Some(true)), ("least-request", Some(false)), ("random", None)] {
        let servers = vec![(7, 0.1, &[][..]), (0, 0.1, &[])];
        let parameters = serde_json::Value::Null;
        let record = streamed(&Setup { servers, strategy, parameters, ..Setup::default() }.build(), "r-1");
        let runner_up = record.runner_up.as_ref();
        let units = runner_up.map(|r| (r.margin_ms.is_some_and(|ms| ms > 0.0), r.margin_score == Some(7.0)));
        assert_eq!(units, in_ms.map(|in_ms| (in_ms, !in_ms)), "{strategy}: {runner_up:?}");
        if let Some(runner_up) = runner_up {
            assert_eq!((&*record.endpoint, &*runner_up.endpoint), ("192.168.1.2:8000", "192.168.1.1:8000"));
        }
    }
    let alone = streamed(
        &Setup { strategy: "least-request", parameters: serde_json::Value::Null, ..Setup::default() }.build(),
        "r-1",
    );
    assert!(alone.runner_up.is_none(), "{alone:?}");
}

#[test]
fn record_has_the_predicted_first_token_once_the_speed_is_learned() {
    let (strategy, parameters) = ("predicted-latency", serde_json::Value::Null);
    let world = Setup { strategy, parameters, ..Setup::default() }.build();
    let records: Vec<_> = (0..50).map(|id| streamed(&world, &format!("r-{id}"))).collect();
    assert_eq!((records[0].predicted_ttft_ms, records[0].ttft_ms), (None, Some(40.0)));
    let last = records[49].predicted_ttft_ms.unwrap();
    assert!((30.0..50.0).contains(&last), "{last} ms");
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

#[test]
fn rejected_requests_are_logged_with_their_agent() {
    let header = [("x-session-affinity", "c-1"), ("x-parent-session-id", "p-1")];
    let in_body = br#"{"model": "m", "prompt": "p", "session_id": "p-2"}"#;
    let last = |world: &World| {
        let record = world.processor.decisions.snapshot().pop().unwrap();
        let agent = record.agent.as_deref().map(|agent| format!("{} {} {}", agent.program, agent.chain, agent.field));
        (record.reason, agent.unwrap_or_default())
    };
    let by_header = "p-1 c-1 x-session-affinity".to_owned();

    let sheds = setup(without_queue(flow(Settings::default()))).build();
    let _first = One::comes(&sheds, "");
    let batch = [("x-gateway-inference-objective", "batch")];
    One::of(&sheds, &[&header[..], &batch[..]].concat(), BodySendMode::FullDuplexStreamed);
    assert_eq!(last(&sheds), ("shed", by_header.clone()));
    One::sends(&sheds, &batch, BodySendMode::FullDuplexStreamed, in_body, None);
    assert_eq!(last(&sheds), ("shed", "p-2 p-2 session_id".to_owned()));
    One::sends(&sheds, &header, BodySendMode::FullDuplexStreamed, b"{", None);
    assert_eq!(last(&sheds), ("invalid_json", by_header.clone()), "its body can't be read");
    One::of(&sheds, &batch, BodySendMode::FullDuplexStreamed);
    assert_eq!(last(&sheds), ("shed", String::new()), "it names no agent");

    let queues = setup(flow(Settings::default())).build();
    let _first = One::comes(&queues, "");
    for (extra, agent) in [(&header[..], by_header), (&[][..], "p-2 p-2 session_id".to_owned())] {
        let mut one = One::sends(&queues, extra, BodySendMode::FullDuplexStreamed, in_body, None);
        one.has_waited(Duration::from_secs(60));
        assert_eq!(last(&queues), ("queue_timeout", agent));
    }
}
