//! Requests whose body can't be parsed: they are queued like others and count as load.

use super::queueing::{One, flow, setup};
use super::*;
use attache_flow::Settings;
use attache_picker::UNREAD_PROMPT_TOKENS;

const ANY: &str = "/v1/anything";
const DUPLEX: BodySendMode = BodySendMode::FullDuplexStreamed;

fn world() -> World {
    let limits = Limits { max_body_bytes: 1_000, max_multipart_sniff_bytes: 500, ..Limits::default() };
    Setup { limits, ..setup(flow(Settings::default())) }.build()
}

/// A request whose headers were sent, and the replies.
fn opened(world: &World, path: &str, more: &[(&str, &str)], ends: bool) -> (Exchange, Answered) {
    let mut exchange = world.exchange();
    let pairs: Vec<(&str, &str)> = [(":path", path), (":method", "POST")].iter().chain(more).copied().collect();
    let first = Message::RequestHeaders(headers(&pairs, ends));
    let protocol_config = Some(config(DUPLEX, DUPLEX, false));
    let out = send(&mut exchange, ProcessingRequest { protocol_config, ..request(first) });
    (exchange, Answered::of(&out))
}

fn chunk(exchange: &mut Exchange, bytes: &[u8], ends: bool) -> Answered {
    Answered::of(&send(exchange, request(Message::RequestBody(body(bytes, ends)))))
}

/// A request that fills the pool.
fn first(world: &World) -> One {
    let one = One::of(world, &[], DUPLEX);
    assert!(one.goes());
    one
}

#[test]
fn unparsed_request_is_queued_and_counts_as_load() {
    for more in [&[("content-encoding", "gzip")][..], &[]] {
        let world = world();
        let path = if more.is_empty() { ANY } else { "/v1/completions" };
        let one = first(&world);
        let (mut exchange, _) = opened(&world, path, more, false);
        assert!(chunk(&mut exchange, b"\x1f\x8b", false).kinds.is_empty());
        assert!(chunk(&mut exchange, b"\x08", true).kinds.is_empty(), "it waits");
        let mut two = One::sent(exchange);
        assert!(!two.goes());
        one.ends();
        two.wakes(NOW);
        assert!(two.goes());
        assert_eq!((two.told.body.as_slice(), two.told.ended), (&b"\x1f\x8b\x08"[..], 1));
        let ledger = world.snapshot.load().endpoints[0].endpoint.clone();
        assert_eq!(ledger.ledger.prefill_tokens(), u64::from(UNREAD_PROMPT_TOKENS));
        two.ends();
        world.assert_books_closed(2);
    }
}

#[test]
fn bodyless_request_is_not_queued() {
    let world = world();
    let one = first(&world);
    let prefill_tokens = || world.snapshot.load().endpoints[0].endpoint.ledger.prefill_tokens();
    let before = prefill_tokens();
    let (exchange, told) = opened(&world, ANY, &[], true);
    assert!(exchange.is_routed() && told.set.contains_key(DESTINATION));
    assert_eq!(prefill_tokens(), before);
    drop((one, exchange));
    world.assert_books_closed(2);
}

#[test]
fn upgrade_is_queued_at_headers_and_later_bytes_follow() {
    for ends in [false, true] {
        let world = world();
        let one = first(&world);
        let (mut exchange, told) = opened(&world, ANY, &[("upgrade", "websocket")], false);
        assert!(told.kinds.is_empty(), "it waits");
        assert!(chunk(&mut exchange, b"early ", false).kinds.is_empty());
        assert!(chunk(&mut exchange, b"birds", ends).kinds.is_empty());
        let mut two = One::sent(exchange);
        one.ends();
        two.wakes(NOW);
        assert_eq!(two.told.kinds[0], "request_headers");
        assert_eq!((two.told.body.as_slice(), two.told.ended), (&b"early birds"[..], u32::from(ends)));
        if !ends {
            let more = chunk(&mut two.exchange, b"more", false);
            assert_eq!(more.body, b"more");
        }
        two.ends();
        world.assert_books_closed(2);
    }
}

#[test]
fn form_is_queued_before_its_first_byte_passes() {
    let form = b"--b\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\nm\r\n\
                 --b\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\n";
    let kind = [("content-type", "multipart/form-data; boundary=b")];
    for (end, trailers) in [(false, false), (true, false), (false, true)] {
        let world = world();
        let one = first(&world);
        let (mut exchange, _) = opened(&world, "/v1/audio/transcriptions", &kind, false);
        assert!(chunk(&mut exchange, form, false).kinds.is_empty(), "it waits");
        assert!(chunk(&mut exchange, b"sound", end).kinds.is_empty());
        if trailers {
            assert!(send(&mut exchange, request(Message::RequestTrailers(HttpTrailers::default()))).is_empty());
        }
        let mut two = One::sent(exchange);
        one.ends();
        two.wakes(NOW);
        assert_eq!(two.told.body, [&form[..], b"sound"].concat());
        assert_eq!((two.told.ended, two.told.kinds.last() == Some(&"request_trailers")), (u32::from(end), trailers));
        two.ends();
        world.assert_books_closed(2);
    }
}

/// The body of a queued request is an upload like others: it can be evicted, and is rejected at the memory limit.
#[test]
fn uploads_of_queued_requests_are_evicted_or_rejected() {
    for (event, reason) in [
        (Event::UploadEvicted(crate::uploads::Evicted::Full), "upload_evicted"),
        (Event::TooLarge(1 << 30), "body_too_large"),
    ] {
        let world = world();
        let one = first(&world);
        let (mut exchange, _) = opened(&world, ANY, &[("upgrade", "websocket")], false);
        assert!(exchange.upload(0, NOW).is_none(), "nothing has come");
        assert!(chunk(&mut exchange, &[7; 100], false).kinds.is_empty());
        assert!(exchange.upload(0, NOW).is_some_and(|standing| standing.bytes == 100));
        let mut out = Actions::new();
        exchange.on(event, NOW, &mut out).unwrap();
        assert_eq!(Answered::of(out.make_contiguous()).set["x-attache-reason"], reason);
        assert_eq!(world.processor.picker.buffered.bytes(), 0);
        drop(exchange);
        one.ends();
        world.assert_books_closed(2);
    }
}

#[test]
fn oversized_body_of_queued_request_is_rejected() {
    let world = world();
    let one = first(&world);
    let (mut exchange, _) = opened(&world, ANY, &[("upgrade", "websocket")], false);
    assert!(chunk(&mut exchange, &[7; 900], false).kinds.is_empty());
    let told = chunk(&mut exchange, &[7; 200], false);
    assert_eq!(told.refused.as_ref().map(|(status, _)| *status), Some(503));
    assert_eq!(told.set["x-attache-reason"], "overloaded");
    assert_eq!(world.processor.picker.buffered.bytes(), 0);
    drop(exchange);
    one.ends();
    world.assert_books_closed(2);
}
