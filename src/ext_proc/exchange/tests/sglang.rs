//! SGLang: both workers get a request at once, and decode workers serve no whole requests.

use super::splitting::{ROLES, among, answer, asked, direct, give_leg_result, reply, setup, splitting};
use super::*;
use attache_disagg::{Failure, Mode};
use attache_picker::split::{DISAGGREGATION_HEADER, LegProgress, LegResult};
use attache_pool::health::{Availability, HealthOutcome};
use attache_scheduling::Decider;

fn sglang() -> Mode {
    Mode::Direct(direct("sglang"))
}

#[test]
fn sglang_workers_start_at_once_and_failed_prefill_aborts_decode() {
    let world = splitting(sglang(), Decider::Always);
    let (mut exchange, out, asks) = asked(&world, &[("x-request-id", "r-9")]);
    let all = Answered::of(&out);
    let decode: serde_json::Value = serde_json::from_str(all.text()).unwrap();
    let prefill: serde_json::Value = serde_json::from_slice(&asks[0].body).unwrap();
    assert_eq!(decode["bootstrap_room"], prefill["bootstrap_room"]);
    assert!(asks[0].url.contains(decode["bootstrap_host"].as_str().unwrap()));
    assert_eq!(decode["bootstrap_port"], 8998);
    // The prefill fails while the decode worker waits for it.
    let refused = give_leg_result(&mut exchange, 0, reply(500, "{}"), 5);
    assert_eq!(refused.refused.unwrap().0, 503);
    let aborts = exchange.leg_calls();
    assert_eq!(aborts.len(), 1, "no other server is asked: the decode server waits for this one");
    assert!(aborts[0].url.ends_with("/abort_request") && aborts[0].attempt.is_none());
    assert!(aborts[0].url.contains(&all.set[DESTINATION]));
    drop(exchange);
    world.assert_books_closed(1);

    // It fails after the response headers, which the decode worker sends before the prefill ends, or after a body
    // chunk.
    for begun in [false, true] {
        let world = splitting(sglang(), Decider::Always);
        let (mut exchange, ..) = asked(&world, &[]);
        let pairs = [(":status", "200"), ("content-type", "text/event-stream")];
        send(&mut exchange, request(Message::ResponseHeaders(headers(&pairs, false))));
        let some = if begun { &b"data: {}\n\n"[..] } else { b"" };
        send(&mut exchange, request(Message::ResponseBody(body(some, false))));
        assert!(give_leg_result(&mut exchange, 0, LegResult::Failed(Failure::Broken), 9).kinds.is_empty());
        assert_eq!(exchange.leg_calls().len(), usize::from(!begun), "begun: {begun}");
        assert_eq!(exchange.deadline().is_some(), !begun, "an answer that has not begun is not waited for without end");
        let end = send(&mut exchange, request(Message::ResponseBody(body(b"data: [DONE]\n\n", true))));
        assert_eq!(Answered::of(&end).text(), "data: [DONE]\n\n");
        drop(exchange);
        world.assert_books_closed(1);
    }

    // It succeeds before or after the response begins.
    for early in [true, false] {
        let world = splitting(sglang(), Decider::Always);
        let (mut exchange, ..) = asked(&world, &[]);
        if early {
            give_leg_result(&mut exchange, 0, reply(200, "{}"), 5);
        }
        assert_eq!(answer(&mut exchange).set[DISAGGREGATION_HEADER], "split");
        if !early {
            give_leg_result(&mut exchange, 0, reply(200, "{}"), 9);
        }
        assert!(exchange.deadline().is_none());
        drop(exchange);
        world.assert_books_closed(1);
    }
}

/// Response headers with status 200 from this decode worker, before the prefill has ended.
fn answers(exchange: &mut Exchange, server: &str) {
    let pairs = [(":status", "200"), ("content-type", "text/event-stream")];
    let fields = HashMap::from([("upstream.address".to_owned(), text(server))]);
    let attributes = HashMap::from([("envoy.filters.http.ext_proc".to_owned(), Struct { fields })]);
    let head = request(Message::ResponseHeaders(headers(&pairs, false)));
    send(exchange, ProcessingRequest { attributes, ..head });
}

fn text(value: &str) -> Value {
    Value { kind: Some(Kind::StringValue(value.to_owned())) }
}

#[test]
fn abort_goes_to_the_worker_that_responds_after_retries() {
    let world = splitting(sglang(), Decider::Always);
    for ends in [true, false] {
        let (mut exchange, out, _) = asked(&world, &[]);
        let named = Answered::of(&out).set[DESTINATION].clone();
        let other = if named == "192.168.1.3:8000" { "192.168.1.4:8000" } else { "192.168.1.3:8000" };
        answers(&mut exchange, other);
        give_leg_result(&mut exchange, 0, LegResult::Failed(Failure::Broken), 9);
        let abort = exchange.leg_calls().remove(0);
        assert_eq!(abort.url, format!("http://{other}/abort_request"));
        let due = exchange.deadline().unwrap();
        assert_eq!(due, NOW.after(Duration::from_millis(9) + Duration::from_secs(5)));
        if ends {
            send(&mut exchange, request(Message::ResponseBody(body(b"data: {}\n\n", false))));
            assert!(exchange.deadline().is_none());
            send(&mut exchange, request(Message::ResponseBody(body(b"", true))));
        } else {
            let mut out = Actions::new();
            exchange.on(Event::Deadline, due, &mut out).unwrap();
            let cut = matches!(out.front().unwrap().response, Some(Response::ImmediateResponse(_)));
            assert!(cut, "the gateway ends what has no end: {out:?}");
            assert!(exchange.deadline().is_none());
        }
        drop(exchange);
    }
    world.assert_books_closed(2);
}

/// If the gateway closes the stream at the response headers, the prefill is still running.
#[test]
fn prefill_is_watched_after_the_gateway_closes_the_stream() {
    use BodySendMode::{FullDuplexStreamed, None as Off};
    for (mode, status, stays) in [(Off, "200", true), (Off, "400", false), (FullDuplexStreamed, "200", false)] {
        let world = splitting(sglang(), Decider::Always);
        let mut exchange = world.exchange();
        let first = Message::RequestHeaders(headers(&[(":path", "/v1/chat/completions"), (":method", "POST")], false));
        let protocol_config = Some(config(FullDuplexStreamed, mode, false));
        send(&mut exchange, ProcessingRequest { protocol_config, ..request(first) });
        send(&mut exchange, request(Message::RequestBody(body(CHAT.as_bytes(), true))));
        assert_eq!(exchange.leg_calls().len(), 1);
        assert!(exchange.take_unwatched().is_none(), "no response has begun");
        send(&mut exchange, request(Message::ResponseHeaders(headers(&[(":status", status)], false))));
        let stage = exchange.take_unwatched();
        assert_eq!(stage.is_some(), stays, "{mode:?} {status}");
        drop(exchange);
        let Some(mut stage) = stage else { continue };
        let came = stage.on_leg_result(0, &reply(500, ""), NOW, &world.processor.picker);
        assert!(matches!(came, LegProgress::Refused(Failure::Status(500))), "{came:?}");
        assert!(stage.abort().unwrap().url.ends_with("/abort_request"));
        drop(stage);
        world.assert_books_closed(1);
    }
}

/// Which of two workers keeps the other waiting shows in their requests with other partners.
#[test]
fn prefill_worker_is_not_blamed_for_busy_decode_worker() {
    for (sick, at) in [("192.168.1.3:8000", 2), ("192.168.1.1:8000", 0)] {
        let world = Setup { strategy: "random", ..setup(ROLES, sglang(), Decider::Always) }.build();
        let open = || {
            let snapshot = world.snapshot.load();
            [0, 1, 2, 3].map(|at| {
                snapshot.endpoints[at].endpoint.health.availability(NOW, &HealthPolicy::default()) == Availability::Open
            })
        };
        for _ in 0..100 {
            let (mut exchange, out, asks) = asked(&world, &[]);
            if asks[0].url.contains(sick) || Answered::of(&out).set[DESTINATION] == sick {
                // The decode worker responds with 200 before the prefill has ended.
                let pairs = [(":status", "200"), ("content-type", "text/event-stream")];
                send(&mut exchange, request(Message::ResponseHeaders(headers(&pairs, false))));
                let due = exchange.deadline().unwrap();
                exchange.on(Event::Deadline, due, &mut Actions::new()).unwrap();
            } else {
                give_leg_result(&mut exchange, 0, reply(200, "{}"), 5);
                answer(&mut exchange);
            }
        }
        let mut expected = [true; 4];
        expected[at] = false;
        assert_eq!(open(), expected, "{sick}");
    }
}

/// If the gateway shows no response bodies, only the headers count.
#[test]
fn response_head_counts_if_the_body_is_not_shown() {
    use BodySendMode::{FullDuplexStreamed, None as Off};
    for (mode, counts) in [(Off, true), (FullDuplexStreamed, false)] {
        let world = among(&["prefill", "decode"], sglang(), Decider::Always);
        let decode = world.snapshot.load().endpoints[1].endpoint.clone();
        for _ in 0..2 {
            decode.health.record(HealthOutcome::ConnectFailure, Timestamp(1), &HealthPolicy::default());
        }
        let mut exchange = world.exchange();
        let first = Message::RequestHeaders(headers(&[(":path", "/v1/chat/completions"), (":method", "POST")], false));
        let protocol_config = Some(config(FullDuplexStreamed, mode, false));
        send(&mut exchange, ProcessingRequest { protocol_config, ..request(first) });
        send(&mut exchange, request(Message::RequestBody(body(CHAT.as_bytes(), true))));
        let pairs = [(":status", "200"), ("content-type", "text/event-stream")];
        send(&mut exchange, request(Message::ResponseHeaders(headers(&pairs, false))));
        let back = matches!(decode.health.availability(NOW, &HealthPolicy::default()), Availability::SlowStart(_));
        assert_eq!(back, counts, "{mode:?}");
        if mode == FullDuplexStreamed {
            send(&mut exchange, request(Message::ResponseBody(body(b"data: {}\n\n", false))));
            let back = decode.health.availability(NOW, &HealthPolicy::default());
            assert!(matches!(back, Availability::SlowStart(_)), "{back:?}");
        }
    }
}

/// A request of this path, method and body, in this mode.
fn sent(world: &World, path: &str, text: &str, mode: BodySendMode) -> (Exchange, Answered) {
    let mut exchange = world.exchange();
    let method = if text.is_empty() { "GET" } else { "POST" };
    let first = Message::RequestHeaders(headers(&[(":path", path), (":method", method)], text.is_empty()));
    let mut out =
        send(&mut exchange, ProcessingRequest { protocol_config: Some(config(mode, mode, false)), ..request(first) });
    if !text.is_empty() {
        out.extend(send(&mut exchange, request(Message::RequestBody(body(text.as_bytes(), true)))));
    }
    (exchange, Answered::of(&out))
}

const CHAT: &str = r#"{"model":"m","messages":[{"role":"user","content":"p"}],"max_tokens":9}"#;

#[test]
fn decode_only_worker_never_gets_a_whole_request() {
    use BodySendMode::{Buffered, FullDuplexStreamed};
    let unwilling = Decider::PrefixBased { non_cached_tokens: 1 << 20, prompt_tokens: 0 };
    for (path, text, mode) in [
        ("/v1/completions", r#"{"model":"m","prompt":"p"}"#, FullDuplexStreamed),
        ("/v1/chat/completions", CHAT, FullDuplexStreamed),
        // Nothing is awaited, so Envoy's timeout does not matter.
        ("/v1/chat/completions", CHAT, Buffered),
        ("/v1/completions", r#"{"model":"m","prompt":["p","q"],"n":2}"#, FullDuplexStreamed),
    ] {
        for decider in [Decider::Predicted, unwilling] {
            let world = splitting(sglang(), decider);
            let (mut exchange, all) = sent(&world, path, text, mode);
            let prefill: serde_json::Value = serde_json::from_slice(&exchange.leg_calls()[0].body).unwrap();
            let decode: serde_json::Value = serde_json::from_str(all.text()).unwrap();
            assert!(decode["bootstrap_room"].is_u64(), "{path}: {decode}");
            assert_eq!(prefill["bootstrap_room"], decode["bootstrap_room"]);
            drop(exchange);
            world.assert_books_closed(1);
        }
    }
}

#[test]
fn unsplittable_request_is_rejected_with_a_hint() {
    let pair = || among(&["prefill", "decode"], sglang(), Decider::Predicted);
    let logprobs = r#"{"model":"m","prompt":"p","prompt_logprobs":1}"#;
    for (world, path, text, reason) in [
        (
            among(&["decode", "decode"], sglang(), Decider::Predicted),
            "/v1/chat/completions",
            CHAT,
            "no_prefill_endpoint",
        ),
        (pair(), "/v1/messages", CHAT, "no_whole_endpoint"),
        (pair(), "/v1/completions", logprobs, "no_whole_endpoint"),
    ] {
        let (mut exchange, all) = sent(&world, path, text, BodySendMode::FullDuplexStreamed);
        let (status, text) = all.refused.clone().unwrap();
        assert_eq!((status, all.set["x-attache-reason"].as_str()), (503, reason), "{path}");
        assert!(text.contains("prefill server") && text.contains("`role: both`"), "{text}");
        assert!(exchange.leg_calls().is_empty());
        drop(exchange);
        world.assert_books_closed(1);
    }
    // Any worker serves a request that generates nothing.
    assert!(sent(&pair(), "/v1/models", "", BodySendMode::FullDuplexStreamed).1.set.contains_key(DESTINATION));
}

#[test]
fn combined_worker_serves_whole_requests_and_joins_no_pair() {
    for seed in 0..8 {
        let world = among(&["prefill", "decode", "both"], sglang(), Decider::Always);
        let mode = BodySendMode::FullDuplexStreamed;
        assert_eq!(sent(&world, "/v1/messages", CHAT, mode).1.set[DESTINATION], "192.168.1.3:8000", "{seed}");
        let (mut exchange, all) = sent(&world, "/v1/chat/completions", CHAT, mode);
        match &*all.set[DESTINATION] {
            "192.168.1.2:8000" => assert!(exchange.leg_calls()[0].url.contains("192.168.1.1:8000")),
            whole => assert_eq!((whole, exchange.leg_calls().len(), all.text()), ("192.168.1.3:8000", 0, CHAT)),
        }
    }
}
