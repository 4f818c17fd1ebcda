//! Room that becomes free before an answer begins or ends, or of which the queues hear by nothing else: whoever waits hears of it at once.

use super::parking::{One, flow, setup};
use super::splitting::{direct, good, reply, told};
use super::*;
use crate::flow::Settings;
use crate::flow::registry::{DETECTORS, find};
use crate::scheduling::Decider;
use serde_json::json;

const WAITS: BodySendMode = BodySendMode::FullDuplexStreamed;

/// Prompts of about so many tokens.
fn comes(world: &World, tokens: usize) -> One {
    One::sends(world, &[], WAITS, completion("m", &"four".repeat(tokens)).as_bytes(), None)
}

/// One prompt at a time, and two answers.
fn splitting(connector: &str) -> World {
    let policy = SplitPolicy { decider: Decider::Always, together: Vec::new() };
    Setup {
        servers: vec![(0, 0.0, &[]); 3],
        roles: &["prefill", "decode", "decode"],
        disagg: Some((policy, disagg::Mode::Direct(direct(connector)))),
        strategy: "predicted-latency",
        parameters: serde_json::Value::Null,
        ..setup(flow(Settings::default()))
    }
    .build()
}

#[test]
fn a_prompt_that_is_computed_makes_room_for_the_next_one() {
    for (connector, answer) in [("nixl", good()), ("nixl", reply(500, "{}")), ("sglang", reply(200, "{}"))] {
        let world = splitting(connector);
        let mut first = comes(&world, 9);
        assert_eq!(first.exchange.asks().len(), 1, "{connector}");
        let mut second = comes(&world, 9);
        second.wakes(NOW);
        assert!(second.exchange.asks().is_empty() && !second.goes(), "{connector}: the prefill server is busy");
        told(&mut first.exchange, 0, answer.clone(), 0);
        second.wakes(NOW);
        assert_eq!(second.exchange.asks().len(), 1, "{connector}: it is not, though no answer has begun");
        first.ends();
        told(&mut second.exchange, 0, answer, 0);
        second.ends();
        world.assert_books_closed(2);
    }
}

#[test]
fn the_end_of_what_can_not_be_read_is_told_to_those_who_wait() {
    for leaves in [false, true] {
        let world = setup(flow(Settings::default())).build();
        let first = One::sends(&world, &[("content-encoding", "gzip")], WAITS, b"\x1f\x8b\x08", None);
        let mut second = comes(&world, 9);
        assert!(first.goes() && !second.goes(), "leaves: {leaves}");
        if leaves {
            drop(first);
        } else {
            first.ends();
        }
        second.wakes(NOW);
        assert!(second.goes(), "leaves: {leaves}");
        second.ends();
        world.assert_books_closed(2);
    }
}

#[test]
fn who_leaves_the_head_of_the_queue_lets_those_through_who_have_room() {
    let detector = (find(DETECTORS, "backlog-detector").unwrap().build)(&json!({})).unwrap().into();
    let world = setup(PoolFlow { detector, ..flow(Settings::default()) }).build();
    // As long as nothing is learned 1,000 tokens take 40 ms: the server has 20 ms to do, and a prompt of 40 ms waits until it has less than 10.
    let first = comes(&world, 500);
    let long = comes(&world, 1_000);
    let mut short = comes(&world, 9);
    short.wakes(NOW);
    assert!(first.goes() && !long.goes() && !short.goes());
    drop(long);
    short.wakes(NOW);
    assert!(short.goes(), "it has room, and nobody is before it");
    drop((first, short));
    world.assert_books_closed(3);
}
