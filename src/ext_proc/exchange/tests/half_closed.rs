//! Streams that the gateway half-closes after the request, as NGINX Gateway Fabric does. They live until the request is
//! answered.

use super::queueing::{One, flow, world};
use super::splitting::{asked, direct, give_leg_result, good, splitting};
use super::*;
use attache_disagg::Mode;
use attache_flow::Settings;
use attache_scheduling::Decider;

fn ends(world: &World) -> Vec<&'static str> {
    world.processor.decisions.snapshot().iter().map(|record| record.end).collect()
}

#[test]
fn half_closed_stream_is_queued_and_releases_its_bookings() {
    let world = world(flow(Settings::default()));
    let first = One::comes(&world, "");
    let mut second = One::comes(&world, "");
    assert!(second.exchange.half_closed(NOW), "it is queued");
    first.ends();
    second.wakes(NOW);
    assert!(second.goes());
    assert_eq!(second.told.ended, 1, "the gateway gets its answer");
    assert!(!second.exchange.half_closed(NOW), "nothing is left to wait for");
    assert_eq!(ends(&world), ["complete", "unwatched"]);
    let third = One::comes(&world, "");
    assert!(third.goes(), "the second has given its turn back");
    third.ends();
    drop(second);
    world.assert_books_closed(3);
}

#[test]
fn half_closed_stream_ends_after_rejection() {
    let world = world(flow(Settings::default()));
    let first = One::comes(&world, "");
    let mut late = One::comes(&world, "");
    assert!(late.exchange.half_closed(NOW));
    late.has_waited(Duration::from_secs(10));
    assert_eq!(late.refused(), (503, "queue_timeout"));
    assert!(!late.exchange.half_closed(NOW));
    let mut unfinished = world.exchange();
    send(&mut unfinished, request(Message::RequestHeaders(headers(&[PATH], false))));
    assert!(!unfinished.half_closed(NOW), "its body never comes");
    drop(unfinished);
    first.ends();
    drop(late);
    world.assert_books_closed(3);
}

/// Such gateways do not send `:path`.
#[test]
fn without_path_api_and_model_follow_from_body() {
    let world = Setup::default().build();
    let mut exchange = world.exchange();
    send(&mut exchange, request(Message::RequestHeaders(headers(&[("host", "llm.test")], false))));
    let sent = completion("m", "a prompt");
    let got = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(sent.as_bytes(), true)))));
    assert_eq!(got.set[DESTINATION], "192.168.1.1:8000");
    assert!(!exchange.half_closed(NOW));
    let record = world.processor.decisions.snapshot().pop().unwrap();
    assert_eq!((record.api, &*record.model, record.end), ("completions", "m", "unwatched"));
    assert!(record.estimated_prompt_tokens > 0);
    let mut broken = world.exchange();
    send(&mut broken, request(Message::RequestHeaders(headers(&[], false))));
    let got = Answered::of(&send(&mut broken, request(Message::RequestBody(body(b"no JSON", true)))));
    assert!(got.refused.is_none(), "what is not known is routed");
    drop((exchange, broken));
    world.assert_books_closed(2);
}

#[test]
fn half_closed_stream_waits_for_prefill() {
    let world = splitting(Mode::Direct(direct("nixl")), Decider::Always);
    let (mut exchange, out, asks) = asked(&world, &[]);
    assert!(out.is_empty() && asks.len() == 1);
    assert!(exchange.half_closed(NOW));
    let answered = give_leg_result(&mut exchange, 0, good(), 40);
    assert_eq!(answered.ended, 1);
    assert!(!exchange.half_closed(NOW));
    assert_eq!(ends(&world), ["unwatched"]);
    drop(exchange);
    world.assert_books_closed(1);
}

/// Both workers get the request at once, so the prefill still runs when the stream has ended.
#[test]
fn concurrent_prefill_outlives_half_closed_stream() {
    let world = splitting(Mode::Direct(direct("sglang")), Decider::Always);
    let (mut exchange, out, asks) = asked(&world, &[]);
    assert!(!out.is_empty() && asks.len() == 1);
    assert!(!exchange.half_closed(NOW));
    let stage = exchange.take_unwatched();
    assert!(stage.is_some());
    drop((exchange, stage));
    world.assert_books_closed(1);
}
