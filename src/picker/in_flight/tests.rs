//! All concerns of a request in flight together: their order, what they release, what they leave for later requests.

use super::*;
use crate::decide::Seen;
use crate::decide::tests::fixture::{Fixture, NOW, Parts, chat, head, view};
use serde_json::json;

const HEAD: ResponseHead<'static> = ResponseHead {
    status: 200,
    encoded: false,
    sse: true,
    origin: Origin::Server,
    served: None,
    reported: None,
    retried: None,
    shows_body: true,
    earlier: &[],
};

fn begin(fixture: &Fixture, mut plan: Box<Plan>) -> InFlight {
    let (booked, settings) = (plan.booked.take().unwrap(), ExchangeSettings::default());
    let request = OpenedRequest {
        api: Api::ChatCompletions,
        opened: NOW,
        request_id: "r1".to_owned(),
        tenant: &Tenant::Unconfigured,
        span: None,
        settings: &settings,
    };
    InFlight::begin(*plan, booked, request, NOW, &fixture.picker)
}

/// The names of the events since the last call.
fn events(fixture: &Fixture) -> Vec<String> {
    let name = |event: String| event.split([' ', '(']).next().unwrap_or_default().to_owned();
    fixture.events.take().into_iter().map(name).collect()
}

fn event(content: &str) -> Vec<u8> {
    let chunk = json!({"choices": [{"index": 0, "delta": {"content": content}}]});
    format!("data: {chunk}\n\n").into_bytes()
}

#[test]
fn events_of_a_request_have_an_order() {
    let fixture = Parts::default().build();
    let mut in_flight = begin(&fixture, fixture.chat("hello").unwrap());
    assert_eq!(events(&fixture), ["Matched", "Routed"]);
    in_flight.headers(&HEAD, NOW, &fixture.picker);
    assert_eq!(events(&fixture), ["Status", "Health"]);
    in_flight.chunk(&event("a"), false, NOW, &fixture.picker);
    in_flight.chunk(&event("b"), false, NOW, &fixture.picker);
    assert_eq!(events(&fixture), ["FirstByte"]);
    assert_eq!(fixture.in_flight(), [1, 0, 0]);
    in_flight.end(End::Complete, NOW, &fixture.picker);
    assert_eq!(events(&fixture), ["Ended", "Used", "DecisionRecord"]);
    assert_eq!(fixture.in_flight(), [0, 0, 0]);
}

#[test]
fn record_of_the_decision_log_has_times_and_tokens() {
    let fixture = Parts::default().build();
    let mut in_flight = begin(&fixture, fixture.chat("hello").unwrap());
    let after = |millis: u64| NOW.after(std::time::Duration::from_millis(millis));
    let served = fixture.snapshot.load().endpoints[1].endpoint.spec.address;
    in_flight.headers(&ResponseHead { served: Some(served), ..HEAD }, after(10), &fixture.picker);
    in_flight.chunk(&event("a"), false, after(20), &fixture.picker);
    let usage = b"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":1}}\n\n";
    in_flight.chunk(usage, true, after(30), &fixture.picker);
    in_flight.end(End::Complete, after(40), &fixture.picker);
    let record = fixture.events.take().pop().unwrap();
    for part in [
        "request_id: \"r1\"",
        "endpoint: \"10.0.0.1:8000\"",
        "served: Some(\"10.0.0.2:8000\")",
        "status: 200",
        "ttft_ms: Some(20.0)",
        "duration_ms: 40.0",
        "prompt_tokens: Some(3), cached_tokens: None, completion_tokens: Some(1)",
        "end: \"complete\"",
    ] {
        assert!(record.contains(part), "{part}: {record}");
    }
}

/// The body of a response that is not streamed arrives after its last token.
#[test]
fn response_that_is_not_streamed_has_no_time_to_first_token() {
    let fixture = Parts::default().build();
    let mut in_flight = begin(&fixture, fixture.chat("hello").unwrap());
    in_flight.headers(&ResponseHead { sse: false, ..HEAD }, NOW, &fixture.picker);
    events(&fixture);
    let body = br#"{"choices":[{"index":0,"message":{"role":"assistant","content":"a"}}]}"#;
    in_flight.chunk(body, true, NOW, &fixture.picker);
    assert!(in_flight.has_begun() && events(&fixture).is_empty());
    in_flight.end(End::Complete, NOW, &fixture.picker);
    let record = fixture.events.take().pop().unwrap();
    assert!(record.contains("status: 200, predicted_ttft_ms: None, ttft_ms: None, duration_ms: "), "{record}");
}

#[test]
fn request_that_is_dropped_in_flight_releases_its_bookings() {
    let fixture = Parts::default().build();
    let in_flight = begin(&fixture, fixture.chat("hello").unwrap());
    assert_eq!(fixture.in_flight(), [1, 0, 0]);
    drop(in_flight);
    assert_eq!(fixture.in_flight(), [0, 0, 0]);
}

#[test]
fn complete_response_extends_the_cached_prompt() {
    let answer = "an answer that fills some blocks as well ".repeat(20);
    let text = "a long text that fills some blocks ".repeat(20);
    let next = json!({"model": "m", "messages": [
        {"role": "user", "content": text},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "and then?"},
    ]});
    let next = next.to_string().into_bytes();
    let [complete, disconnected] = [End::Complete, End::ClientGone].map(|end| {
        let fixture = Parts::default().build();
        let plan = fixture.plan(&view(&head(&[]), Seen::Whole(&chat("m", &text)))).unwrap();
        let mut in_flight = begin(&fixture, plan);
        in_flight.headers(&HEAD, NOW, &fixture.picker);
        in_flight.chunk(&event(&answer), true, NOW, &fixture.picker);
        in_flight.end(end, NOW, &fixture.picker);
        fixture.plan(&view(&head(&[]), Seen::Whole(&next))).unwrap().matched_tokens
    });
    assert!(complete > disconnected + 100 && disconnected > 100, "{complete} {disconnected}");
}
