//! Every body mode, and limits and failures of a single request.

use super::queueing::{self, One};
use super::*;
use attache_flow::Settings;
use attache_pool::health::HealthOutcome;

#[test]
fn conformance_headers_require_configuration() {
    let settings = ExchangeSettings { conformance_headers: true, ..ExchangeSettings::default() };
    let servers = vec![(0, 0.1, &[] as &[&str]); 3];
    let world =
        Setup { servers: servers.clone(), exchange: settings, destination: Destination::List, ..Setup::default() }
            .build();
    let mut exchange = world.exchange();
    let named = [
        PATH,
        ("test-epp-endpoint-selection", "192.168.1.3,192.168.1.1:8000"),
        ("test-epp-endpoint-selection", "192.168.1.1:9"),
    ];
    send(&mut exchange, request(Message::RequestHeaders(headers(&named, false))));
    let sent = completion("m", "p");
    let got = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(sent.as_bytes(), true)))));
    assert_eq!(got.set[DESTINATION], "192.168.1.3:8000,192.168.1.1:8000");
    assert_eq!(got.removed, ["test-epp-endpoint-selection"]);
    let got = Answered::of(&send(&mut exchange, answered_by("192.168.1.1:8000", true)));
    assert_eq!(got.set["x-conformance-test-served-endpoint"], "192.168.1.1:8000");
    assert_eq!(got.set["x-went-into-resp-headers"], "true");
    let record = world.processor.decisions.snapshot().pop().unwrap();
    assert_eq!((&*record.endpoint, record.served.as_deref()), ("192.168.1.3:8000", Some("192.168.1.1:8000")));

    // An empty header selects all pods. A gateway that does not report the served endpoint fails the conformance test.
    let mut exchange = world.exchange();
    let empty = [PATH, ("test-epp-endpoint-selection", ""), ("test-epp-endpoint-selection", " , ")];
    send(&mut exchange, request(Message::RequestHeaders(headers(&empty, false))));
    let got = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(sent.as_bytes(), true)))));
    assert!(got.set.contains_key(DESTINATION));
    let response = request(Message::ResponseHeaders(headers(&[(":status", "200")], true)));
    let got = Answered::of(&send(&mut exchange, response));
    assert_eq!(got.set["x-conformance-test-served-endpoint"], "fail: missing envoy lb metadata");

    let world = Setup { servers, ..Setup::default() }.build();
    let mut exchange = world.exchange();
    send(
        &mut exchange,
        request(Message::RequestHeaders(headers(&[PATH, ("test-epp-endpoint-selection", "192.168.1.99")], false))),
    );
    let got = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(sent.as_bytes(), true)))));
    assert_eq!(got.refused, None);
}

#[test]
fn each_body_mode_gets_its_replies() {
    use BodySendMode::{Buffered, BufferedPartial, FullDuplexStreamed, None as Off, Streamed};
    let sent = completion("m", "p");
    let cases: &[(BodySendMode, bool, &[&[&str]])] = &[
        (FullDuplexStreamed, false, &[&[], &[], &["request_headers", "request_body"]]),
        (Streamed, true, &[&[], &[], &["request_headers", "request_body", "request_body"]]),
        (Streamed, false, &[&["request_headers"], &["request_body"], &["request_body"]]),
        (Buffered, false, &[&["request_headers"], &["request_body"]]),
        (BufferedPartial, false, &[&["request_headers"], &["request_body"]]),
        (Off, false, &[&["request_headers"]]),
    ];
    for (mode, nowait, expected) in cases {
        let world = Setup::default().build();
        let mut exchange = world.exchange();
        let protocol_config = Some(config(*mode, Off, *nowait));
        let first = request(Message::RequestHeaders(headers(&[PATH], false)));
        let mut got = vec![send(&mut exchange, ProcessingRequest { protocol_config, ..first })];
        let whole = matches!(mode, Buffered | BufferedPartial);
        let pieces: Vec<(&str, bool)> = match expected.len() {
            1 => vec![],
            _ if whole => vec![(&sent, true)],
            _ => vec![(&sent[..10], false), (&sent[10..], true)],
        };
        for (piece, end) in pieces {
            got.push(send(&mut exchange, request(Message::RequestBody(body(piece.as_bytes(), end)))));
        }
        let kinds: Vec<Vec<&str>> = got.iter().map(|g| Answered::of(g).kinds).collect();
        assert_eq!(kinds, *expected, "{mode:?} nowait={nowait}");
        let all = Answered::of(&got.concat());
        assert_eq!(all.set[DESTINATION], "192.168.1.1:8000", "{mode:?}");
        assert_eq!(all.metadata.as_deref(), Some("192.168.1.1:8000"), "{mode:?}");
        if *mode == FullDuplexStreamed {
            assert_eq!((all.text(), all.ended), (sent.as_str(), 1));
        } else {
            assert_eq!((all.text(), all.ended), ("", 0), "{mode:?}: nothing is changed, so nothing is sent back");
        }
        // The response mode is NONE: the headers are the last message.
        send(&mut exchange, request(Message::ResponseHeaders(headers(&[(":status", "200")], false))));
        world.assert_books_closed_but_open_stream();
        drop(exchange);
        world.assert_books_closed(1);
    }
}

#[test]
fn model_name_is_rewritten_in_both_directions_in_every_mode() {
    use BodySendMode::{Buffered, FullDuplexStreamed, Streamed};
    for (mode, nowait) in [(FullDuplexStreamed, false), (Streamed, true), (Buffered, false)] {
        let target = RewriteTarget { model: "llama-3.3-70b-instruct".into(), weight: 1 };
        let rewrites = ModelRewrites { exact: [("gpt-4".to_owned(), vec![target])].into(), any: Vec::new() };
        let world = Setup { rewrites, ..Setup::default() }.build();
        let mut exchange = world.exchange();
        let protocol_config = Some(config(mode, mode, nowait));
        let first = request(Message::RequestHeaders(headers(&[PATH], false)));
        let mut got = send(&mut exchange, ProcessingRequest { protocol_config, ..first });
        let sent = r#"{ "prompt":"p" , "model" : "gpt-4" }"#;
        let cut = if mode == Buffered { 0 } else { 5 };
        if cut > 0 {
            got.extend(send(&mut exchange, request(Message::RequestBody(body(&sent.as_bytes()[..cut], false)))));
        }
        got.extend(send(&mut exchange, request(Message::RequestBody(body(&sent.as_bytes()[cut..], true)))));
        let all = Answered::of(&got);
        assert_eq!(all.text(), r#"{ "prompt":"p" , "model" : "llama-3.3-70b-instruct" }"#, "{mode:?}");
        assert_eq!(all.set["content-length"], all.body.len().to_string());

        let answer = r#"{"id":"1","model":"llama-3.3-70b-instruct","choices":[]}"#;
        let expected = r#"{"id":"1","model":"gpt-4","choices":[]}"#;
        let head = send(&mut exchange, request(Message::ResponseHeaders(headers(&[(":status", "200")], false))));
        assert_eq!(Answered::of(&head).removed, ["content-length"]);
        let cuts: &[usize] = if mode == Buffered { &[0] } else { &[0, 12, 30] };
        let mut bytes = Vec::new();
        for (at, start) in cuts.iter().enumerate() {
            let end = cuts.get(at + 1).copied().unwrap_or(answer.len());
            let piece = body(&answer.as_bytes()[*start..end], end == answer.len());
            let got = send(&mut exchange, request(Message::ResponseBody(piece.clone())));
            assert_eq!(got.len(), 1, "one answer for each message");
            bytes.extend(applied(&got[0], &piece.body));
        }
        assert_eq!(String::from_utf8(bytes).unwrap(), expected, "{mode:?}");
    }
}

#[test]
fn model_name_is_rewritten_despite_wrong_content_encoding() {
    let target = RewriteTarget { model: "llama".into(), weight: 1 };
    let rewrites = ModelRewrites { exact: [("gpt-4".to_owned(), vec![target])].into(), any: Vec::new() };
    let world = Setup { rewrites, ..Setup::default() }.build();
    let mut exchange = world.exchange();
    send(&mut exchange, request(Message::RequestHeaders(headers(&[PATH, ("content-encoding", "gzip")], false))));
    let sent = body(completion("gpt-4", "p").as_bytes(), true);
    let got = Answered::of(&send(&mut exchange, request(Message::RequestBody(sent))));
    assert_eq!(got.text(), completion("llama", "p"));
    assert_eq!(exchange.outcome(), Some(StreamOutcome::Routed), "it was understood");
}

#[test]
fn disconnect_is_dated_by_the_end_of_the_stream() {
    let world = Setup::default().build();
    let mut exchange = routed(&world, None);
    exchange.gone(NOW.after(Duration::from_secs(3)));
    drop(exchange);
    let record = world.processor.decisions.snapshot().pop().unwrap();
    assert_eq!((record.end, record.duration_ms), ("client_gone", 3_000.0));
}

#[test]
fn panic_rejects_only_undecided_requests() {
    let world = Setup::default().build();
    let fails = |exchange: &mut Exchange| {
        let mut out = Actions::new();
        let cut = exchange.fail(NOW, &mut out).is_err();
        (cut, Answered::of(out.make_contiguous()).refused.map(|(status, _)| status))
    };
    let mut exchange = world.exchange();
    send(&mut exchange, request(Message::RequestHeaders(headers(&[PATH], false))));
    assert_eq!(fails(&mut exchange), (false, Some(500)));
    assert_eq!(fails(&mut exchange), (true, None), "once");
    assert_eq!(fails(&mut routed(&world, None)), (true, None));
    let mut ended = routed(&world, None);
    send(&mut ended, request(Message::ResponseHeaders(headers(&[(":status", "200")], true))));
    assert!(!ended.is_routed(), "its books are closed");
    assert_eq!(fails(&mut ended), (true, None));
    drop((exchange, ended));
    assert_eq!(world.processor.metrics.outcomes.get(StreamOutcome::FailedInternal), 1);
    world.assert_books_closed(3);
}

#[test]
fn request_trailers_end_the_body() {
    let world = Setup::default().build();
    let mut exchange = world.exchange();
    let sent = completion("m", "p");
    send(&mut exchange, request(Message::RequestHeaders(headers(&[PATH], false))));
    assert!(send(&mut exchange, request(Message::RequestBody(body(sent.as_bytes(), false)))).is_empty());
    let got = Answered::of(&send(&mut exchange, request(Message::RequestTrailers(HttpTrailers::default()))));
    assert_eq!(got.kinds, ["request_headers", "request_body", "request_trailers"]);
    assert_eq!((got.text(), got.ended), (sent.as_str(), 0), "the trailers end the stream, not the body");
}

#[test]
fn request_with_trailers_is_queued_like_others() {
    let world = queueing::setup(queueing::flow(Settings::default())).build();
    let first = One::of(&world, &[], BodySendMode::FullDuplexStreamed);
    let mut second = world.exchange();
    let sent = completion("m", "p");
    let protocol_config = Some(config(BodySendMode::FullDuplexStreamed, BodySendMode::FullDuplexStreamed, true));
    let head = request(Message::RequestHeaders(headers(&[PATH, (":method", "POST")], false)));
    send(&mut second, ProcessingRequest { protocol_config, ..head });
    assert!(send(&mut second, request(Message::RequestBody(body(sent.as_bytes(), false)))).is_empty());
    assert!(send(&mut second, request(Message::RequestTrailers(HttpTrailers::default()))).is_empty());
    assert!(first.goes() && !second.is_routed());
    let mut second = One::sent(second);
    first.ends();
    second.wakes(NOW);
    assert!(second.goes());
    assert_eq!(second.told.kinds, ["request_headers", "request_body", "request_trailers"]);
    assert_eq!((second.told.text(), second.told.ended), (&*sent, 0), "the trailers end the stream, not the body");
    second.ends();
    world.assert_books_closed(2);
}

#[test]
fn streamed_body_is_decided_after_a_pause() {
    // Envoy holds trailers until the chunks before them are answered.
    let world = Setup::default().build();
    let mut exchange = world.exchange();
    let protocol_config = Some(config(BodySendMode::Streamed, BodySendMode::None, true));
    let first = request(Message::RequestHeaders(headers(&[PATH], false)));
    send(&mut exchange, ProcessingRequest { protocol_config, ..first });
    let sent = completion("m", "p");
    assert!(send(&mut exchange, request(Message::RequestBody(body(&sent.as_bytes()[..9], false)))).is_empty());
    assert_eq!(exchange.deadline(), Some(NOW.after(PAUSE)), "it can't be whole");
    assert!(send(&mut exchange, request(Message::RequestBody(body(&sent.as_bytes()[9..], false)))).is_empty());
    assert_eq!(exchange.deadline(), Some(NOW.after(PAUSE_AFTER_JSON)));
    let mut out = Actions::new();
    exchange.on(Event::Deadline, NOW.after(PAUSE_AFTER_JSON), &mut out).unwrap();
    let got = Answered::of(out.make_contiguous());
    assert_eq!(got.kinds, ["request_headers", "request_body", "request_body"]);
    assert_eq!(world.processor.metrics.outcomes.get(StreamOutcome::Routed), 0, "counted at the end");
    let got = Answered::of(&send(&mut exchange, request(Message::RequestTrailers(HttpTrailers::default()))));
    assert_eq!(got.kinds, ["request_trailers"]);
    drop(exchange);
    assert_eq!(world.processor.metrics.outcomes.get(StreamOutcome::Routed), 1);
    world.assert_books_closed(1);
}

#[test]
fn file_in_a_form_passes_unbuffered() {
    let limits = Limits { max_body_bytes: 1_000, max_multipart_sniff_bytes: 500, ..Limits::default() };
    let model = "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper\r\n";
    let file = "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\n";
    // One chunk over the limit of bodies.
    let noise = "x".repeat(2_000);
    let in_front = [model, file, &noise];
    let behind = [file, &noise, model];
    for (pieces, decided_at, understood) in [(in_front, 1, "whisper"), (behind, 1, "")] {
        let world = Setup { limits: limits.clone(), ..Setup::default() }.build();
        let mut exchange = world.exchange();
        let form = ("content-type", "multipart/form-data; boundary=b");
        let pairs = [(":path", "/v1/audio/transcriptions"), form, ("content-length", "5000")];
        assert!(send(&mut exchange, request(Message::RequestHeaders(headers(&pairs, false)))).is_empty(), "not a 413");
        let mut all = Vec::new();
        for (at, piece) in pieces.iter().enumerate() {
            all.extend(send(&mut exchange, request(Message::RequestBody(body(piece.as_bytes(), false)))));
            assert_eq!(exchange.is_routed(), at >= decided_at, "{at}");
        }
        assert_eq!(world.processor.picker.buffered.bytes(), 0);
        all.extend(send(&mut exchange, request(Message::RequestBody(body(b"--b--", true)))));
        let got = Answered::of(&all);
        assert_eq!((got.text(), got.ended), (&*[pieces.concat().as_str(), "--b--"].concat(), 1));
        send(&mut exchange, request(Message::ResponseHeaders(headers(&[(":status", "200")], true))));
        assert_eq!(&*world.processor.decisions.snapshot()[0].model, understood);
        drop(exchange);
        world.assert_books_closed(1);
    }
}

#[test]
fn upgrade_is_decided_at_its_headers() {
    let world = Setup::default().build();
    let mut exchange = world.exchange();
    let pairs = [(":path", "/v1/realtime"), (":method", "GET"), ("upgrade", "websocket"), ("connection", "Upgrade")];
    let got = Answered::of(&send(&mut exchange, request(Message::RequestHeaders(headers(&pairs, false)))));
    assert_eq!(got.kinds, ["request_headers"]);
    send(&mut exchange, request(Message::ResponseHeaders(headers(&[(":status", "101")], false))));
    let got = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(b"frame", false)))));
    assert_eq!((got.text(), got.ended), ("frame", 0));
    let got = Answered::of(&send(&mut exchange, request(Message::ResponseBody(body(b"frame back", false)))));
    assert_eq!(got.text(), "frame back");
}

#[test]
fn second_end_of_stream_is_ignored() {
    let world = Setup::default().build();
    let mut exchange = routed(&world, None);
    assert!(send(&mut exchange, request(Message::RequestBody(body(b"", true)))).is_empty());
}

#[test]
fn response_may_begin_before_the_request_ends() {
    let world = Setup::default().build();
    let mut exchange = world.exchange();
    let protocol_config = Some(config(BodySendMode::Streamed, BodySendMode::FullDuplexStreamed, false));
    let first = request(Message::RequestHeaders(headers(&[PATH], false)));
    send(&mut exchange, ProcessingRequest { protocol_config, ..first });
    send(&mut exchange, request(Message::RequestBody(body(b"{", false))));
    send(&mut exchange, request(Message::ResponseHeaders(headers(&[(":status", "400")], false))));
    let got = Answered::of(&send(&mut exchange, request(Message::ResponseBody(body(b"early", true)))));
    assert_eq!((got.text(), got.ended), ("early", 1));
    let got = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(b"}", true)))));
    assert_eq!(got.kinds, ["request_body"]);
    drop(exchange);
    world.assert_books_closed(1);
}

#[test]
fn oversized_body_is_rejected_by_length_or_at_the_exceeding_byte() {
    let limits = Limits { max_body_bytes: 10, ..Limits::default() };
    let world = Setup { limits: limits.clone(), ..Setup::default() }.build();
    let mut exchange = world.exchange();
    let got = send(&mut exchange, request(Message::RequestHeaders(headers(&[PATH, ("content-length", "11")], false))));
    assert_eq!(Answered::of(&got).refused.unwrap().0, 413);
    // Envoy continues to send for a while.
    assert!(send(&mut exchange, request(Message::RequestBody(body(b"12345678901", false)))).is_empty());
    drop(exchange);

    let mut exchange = world.exchange();
    send(&mut exchange, request(Message::RequestHeaders(headers(&[PATH], false))));
    assert!(send(&mut exchange, request(Message::RequestBody(body(b"1234567890", false)))).is_empty());
    let got = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(b"1", false)))));
    assert_eq!(got.set["x-attache-reason"], "body_too_large");
    assert_eq!(world.processor.picker.buffered.bytes(), 0, "the buffer is given back at once");
    drop(exchange);
    world.assert_books_closed(2);
}

#[test]
fn buffered_body_memory_is_limited() {
    let limits = Limits { max_buffered_bytes: 150, ..Limits::default() };
    let world = Setup { limits, ..Setup::default() }.build();
    let mut holding = world.exchange();
    send(&mut holding, request(Message::RequestHeaders(headers(&[PATH], false))));
    send(&mut holding, request(Message::RequestBody(body(&[b' '; 80], false))));
    let mut refused = world.exchange();
    send(&mut refused, request(Message::RequestHeaders(headers(&[PATH], false))));
    let got = Answered::of(&send(&mut refused, request(Message::RequestBody(body(&[b' '; 80], false)))));
    assert_eq!(got.refused.as_ref().unwrap().0, 503);
    assert_eq!(got.set["retry-after"], "1");
    drop((holding, refused));
    world.assert_books_closed(2);
}

#[test]
fn slow_upload_is_rejected_after_its_grace_period() {
    let limits = Limits { min_upload_rate: 100, upload_grace: Duration::from_secs(5), ..Limits::default() };
    let after = |seconds| NOW.after(Duration::from_secs(seconds));
    let world = Setup { limits, ..Setup::default() }.build();
    let mut exchange = world.exchange();
    send(&mut exchange, request(Message::RequestHeaders(headers(&[PATH], false))));
    let mut at = |event: Event, now| {
        let mut out = Actions::new();
        exchange.on(event, now, &mut out).unwrap();
        (Answered::of(out.make_contiguous()), exchange.deadline())
    };
    let part = |bytes: usize| Event::Message(Box::new(request(Message::RequestBody(body(&vec![b' '; bytes], false)))));
    assert_eq!(at(part(10), after(30)).1, Some(after(35)), "from the first byte on");
    assert_eq!(at(part(400), after(34)).1, Some(after(39)), "it has kept up");
    assert_eq!(at(part(200), after(38)).1, Some(after(39)), "a trickle");
    let (got, _) = at(Event::Deadline, after(39));
    assert_eq!((got.refused.unwrap().0, got.set["x-attache-reason"].as_str()), (408, "upload_too_slow"));
    drop(exchange);
    world.assert_books_closed(1);
}

#[test]
fn slow_upload_that_catches_up_is_not_rejected() {
    let limits = Limits { min_upload_rate: 100, upload_grace: Duration::from_secs(5), ..Limits::default() };
    let world = Setup { limits, ..Setup::default() }.build();
    let mut exchange = world.exchange();
    send(&mut exchange, request(Message::RequestHeaders(headers(&[PATH], false))));
    send(&mut exchange, request(Message::RequestBody(body(&[b' '; 600], false))));
    let mut out = Actions::new();
    exchange.on(Event::Deadline, NOW.after(Duration::from_secs(5)), &mut out).unwrap();
    assert!(out.is_empty());
    assert_eq!(exchange.deadline(), Some(NOW.after(Duration::from_secs(10))));
}

#[test]
fn oversized_message_is_rejected_as_oversized_body() {
    use crate::uploads::Evicted;
    let world = Setup::default().build();
    let refused = |event: Event, begin: bool| {
        let mut exchange = world.exchange();
        if begin {
            send(&mut exchange, request(Message::RequestHeaders(headers(&[PATH], false))));
        }
        let mut out = Actions::new();
        let result = exchange.on(event, NOW, &mut out);
        let got = Answered::of(out.make_contiguous());
        result.map(|()| (got.refused.unwrap().0, got.set["x-attache-reason"].clone()))
    };
    assert_eq!(refused(Event::TooLarge(60 << 20), true), Ok((413, "body_too_large".to_owned())));
    assert_eq!(refused(Event::UploadEvicted(Evicted::Full), true), Ok((503, "upload_evicted".to_owned())));
    assert_eq!(refused(Event::UploadEvicted(Evicted::Share), true), Ok((503, "upload_evicted".to_owned())));
    assert!(refused(Event::TooLarge(60 << 20), false).is_err(), "there is no request to refuse");
    assert!(refused(Event::UploadEvicted(Evicted::Full), false).is_err());
    world.assert_books_closed(5);
}

#[test]
fn oversized_buffered_response_passes_unscanned() {
    let world = Setup::default().build();
    let mut exchange = world.exchange();
    let protocol_config = Some(config(BodySendMode::Buffered, BodySendMode::Buffered, false));
    let first = request(Message::RequestHeaders(headers(&[PATH], false)));
    send(&mut exchange, ProcessingRequest { protocol_config, ..first });
    send(&mut exchange, request(Message::RequestBody(body(completion("m", "p").as_bytes(), true))));
    send(&mut exchange, request(Message::ResponseHeaders(headers(&[(":status", "200")], false))));
    let mut out = Actions::new();
    exchange.on(Event::TooLarge(60 << 20), NOW, &mut out).unwrap();
    let got = Answered::of(out.make_contiguous());
    assert_eq!(got.text(), "");
    assert_eq!(got.kinds, ["response_body"]);
    drop(exchange);
    world.assert_books_closed(1);
}

#[test]
fn streamed_body_in_too_many_messages_is_rejected() {
    let world = Setup::default().build();
    let mut exchange = world.exchange();
    let protocol_config = Some(config(BodySendMode::Streamed, BodySendMode::None, true));
    let first = request(Message::RequestHeaders(headers(&[PATH], false)));
    send(&mut exchange, ProcessingRequest { protocol_config, ..first });
    let part = || request(Message::RequestBody(body(b" ", false)));
    for _ in 0..65_536 {
        assert!(send(&mut exchange, part()).is_empty());
    }
    assert_eq!(Answered::of(&send(&mut exchange, part())).refused.unwrap().0, 413);
}

#[test]
fn oversized_headers_are_rejected() {
    let world = Setup::default().build();
    let big = "x".repeat(70_000);
    let got = send(&mut world.exchange(), request(Message::RequestHeaders(headers(&[PATH, ("a", &big)], false))));
    assert_eq!(Answered::of(&got).refused.unwrap().0, 431);
}

#[test]
fn request_and_idle_timeouts_are_enforced() {
    let world = Setup::default().build();
    let limits = Limits::default();
    let mut exchange = world.exchange();
    assert_eq!(exchange.deadline(), Some(NOW.after(limits.idle_timeout)));
    assert!(exchange.on(Event::Deadline, NOW, &mut Actions::new()).is_err(), "an empty stream is closed");
    let mut exchange = world.exchange();
    send(&mut exchange, request(Message::RequestHeaders(headers(&[PATH], false))));
    assert_eq!(exchange.deadline(), Some(NOW.after(limits.request_timeout)));
    let mut out = Actions::new();
    exchange.on(Event::Deadline, NOW.after(limits.request_timeout), &mut out).unwrap();
    assert_eq!(Answered::of(out.make_contiguous()).refused.unwrap().0, 408);
    assert_eq!(exchange.deadline(), None);
    assert_eq!(routed(&world, None).deadline(), None, "an answer may take as long as it takes");
}

#[test]
fn messages_out_of_order_are_protocol_errors() {
    let world = Setup::default().build();
    let cases = [
        vec![Message::RequestBody(body(b"x", true))],
        vec![Message::RequestTrailers(HttpTrailers::default())],
        vec![Message::ResponseBody(body(b"x", true))],
        vec![Message::RequestHeaders(headers(&[PATH], false)), Message::RequestHeaders(headers(&[PATH], false))],
    ];
    let count = cases.len() as u64;
    for case in cases {
        let mut exchange = world.exchange();
        let results: Vec<_> = case
            .into_iter()
            .map(|m| exchange.on(Event::Message(Box::new(request(m))), NOW, &mut Actions::new()))
            .collect();
        assert!(results.last().unwrap().is_err());
    }
    let mut exchange = world.exchange();
    assert!(exchange.on(Event::Message(Box::default()), NOW, &mut Actions::new()).is_err(), "unknown oneof");
    drop(exchange);
    world.assert_books_closed(count + 1);
}

#[test]
fn continued_response_goes_to_the_endpoint_that_stores_it() {
    let world = Setup { servers: vec![(0, 0.1, &[]); 8], ..Setup::default() }.build();
    let ask = |body_text: &str| {
        let mut exchange = world.exchange();
        send(&mut exchange, request(Message::RequestHeaders(headers(&[(":path", "/v1/responses")], false))));
        let got = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(body_text.as_bytes(), true)))));
        (exchange, got.set[DESTINATION].clone())
    };
    let (mut exchange, owner) = ask(r#"{"model":"m","input":"hello"}"#);
    send(&mut exchange, request(Message::ResponseHeaders(headers(&[(":status", "200")], false))));
    let answer = br#"{"id":"resp_123","object":"response","output":[]}"#;
    send(&mut exchange, request(Message::ResponseBody(body(answer, true))));
    for _ in 0..8 {
        let (_, destination) = ask(r#"{"model":"m","input":"more","previous_response_id":"resp_123"}"#);
        assert_eq!(destination, owner);
        let path = (":path", "/v1/responses/resp_123/cancel");
        let get = request(Message::RequestHeaders(headers(&[path, (":method", "POST")], true)));
        assert_eq!(Answered::of(&send(&mut world.exchange(), get)).set[DESTINATION], owner);
    }
}

#[test]
fn retry_moves_the_booking_and_blames_the_first_endpoint() {
    let world = Setup { servers: vec![(0, 0.1, &[]); 2], ..Setup::default() }.build();
    let snapshot = world.snapshot.load_full();
    let in_flight = || [0, 1].map(|i| snapshot.endpoints[i].endpoint.ledger.in_flight());
    for passed_over in 1..=2u64 {
        let mut exchange = world.exchange();
        let metadata_context = Some(subset(&["192.168.1.1:8000"]));
        let first = request(Message::RequestHeaders(headers(&[PATH], false)));
        send(&mut exchange, ProcessingRequest { metadata_context, ..first });
        send(&mut exchange, request(Message::RequestBody(body(completion("m", "p").as_bytes(), true))));
        assert_eq!(in_flight(), [1, 0]);
        send(&mut exchange, answered_by("192.168.1.2:8000", false));
        assert_eq!(in_flight(), [0, 1], "the booking follows");
        let ejections = snapshot.endpoints[0].endpoint.health.ejection_counts();
        let ejected = ejections.filter(|(cause, _)| *cause == HealthOutcome::ConnectFailure).map(|(_, count)| count);
        assert_eq!(ejected.sum::<u64>(), passed_over / 2, "twice unreachable ejects");
    }
    world.assert_books_closed(2);
}

#[test]
fn only_endpoint_is_used_although_ejected() {
    let world = Setup { servers: vec![(0, 0.1, &[])], ..Setup::default() }.build();
    for _ in 0..5 {
        let mut exchange = routed(&world, None);
        send(&mut exchange, request(Message::ResponseHeaders(headers(&[(":status", "503")], true))));
    }
    let snapshot = world.snapshot.load_full();
    let ejections: Vec<_> = snapshot.endpoints[0].endpoint.health.ejection_counts().collect();
    let causes = [HealthOutcome::ConnectFailure, HealthOutcome::Failure, HealthOutcome::ErrorResponse];
    assert_eq!(ejections, causes.into_iter().zip([0, 0, 1]).collect::<Vec<_>>());
    drop(routed(&world, None));
    world.assert_books_closed(6);
}

#[test]
fn early_deadline_event_has_no_effect() {
    let world = Setup::default().build();
    let mut exchange = world.exchange();
    send(&mut exchange, request(Message::RequestHeaders(headers(&[PATH], false))));
    send(&mut exchange, request(Message::RequestBody(body(b"{", false))));
    let mut out = Actions::new();
    exchange.on(Event::Deadline, NOW, &mut out).unwrap();
    assert!(out.is_empty() && !exchange.is_routed(), "a held body waits for its end");
}
