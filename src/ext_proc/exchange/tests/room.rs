//! Capacity that is freed before a response begins or ends, or without any event: queued requests are dequeued at once.

use super::queueing::{One, flow, setup};
use super::splitting::{direct, give_leg_result, good, reply};
use super::*;
use attache_flow::registry::{DETECTORS, find};
use attache_flow::{Queueing, Settings};
use attache_pool::Published;
use attache_scheduling::Decider;
use serde_json::json;

pub(super) const WAITS: BodySendMode = BodySendMode::FullDuplexStreamed;

/// Prompts of about this many tokens.
fn comes(world: &World, tokens: usize) -> One {
    One::sends(world, &[], WAITS, completion("m", &"four".repeat(tokens)).as_bytes(), None)
}

/// Capacity for one prefill and two responses.
fn splitting(connector: &str) -> World {
    let policy = SplitPolicy { decider: Decider::Always, together: Vec::new(), whole: true, required: false };
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
fn finished_prefill_frees_capacity() {
    for (connector, answer) in [("nixl", good()), ("nixl", reply(500, "{}")), ("sglang", reply(200, "{}"))] {
        let world = splitting(connector);
        let mut first = comes(&world, 9);
        assert_eq!(first.exchange.leg_calls().len(), 1, "{connector}");
        let mut second = comes(&world, 9);
        second.wakes(NOW);
        assert!(second.exchange.leg_calls().is_empty() && !second.goes(), "{connector}: the prefill server is busy");
        give_leg_result(&mut first.exchange, 0, answer.clone(), 0);
        second.wakes(NOW);
        assert_eq!(second.exchange.leg_calls().len(), 1, "{connector}: it is not, though no answer has begun");
        first.ends();
        give_leg_result(&mut second.exchange, 0, answer, 0);
        second.ends();
        world.assert_books_closed(2);
    }
}

#[test]
fn end_of_unparsed_request_dequeues_others() {
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
fn request_to_empty_pool_waits_for_empty_ttl() {
    let settings = Settings { empty_ttl: Duration::from_secs(300), ..Settings::default() };
    let world = Setup { servers: Vec::new(), ..setup(flow(settings)) }.build();
    let mut one = comes(&world, 9);
    assert_eq!(one.exchange.deadline(), Some(NOW.after(Duration::from_secs(300))));
    one.has_waited(Duration::from_secs(300));
    assert_eq!(one.refused(), (503, "no_ready_endpoint"));
    drop(one);
    world.assert_books_closed(1);
}

#[tokio::test]
async fn without_ttl_only_an_empty_pool_limits_the_wait() {
    let without_ttl = |empty_ttl| {
        let flow = flow(Settings::default());
        PoolFlow { settings: Settings { ttl: None, empty_ttl, ..flow.settings }, ..flow }
    };
    let world = setup(without_ttl(Duration::from_millis(1))).build();
    let first = comes(&world, 9);
    let second = comes(&world, 9);
    assert!(!second.goes() && second.exchange.deadline().is_none(), "its age is no reason to reject it");
    drop((first, second));
    // No snapshot arrives and no stream has a timer: the task of the queues must notice that the time limit has passed.
    let stale_after = Duration::from_secs(3_600);
    let setup = Setup { servers: Vec::new(), stale_after, ..setup(without_ttl(Duration::from_millis(20))) };
    let world = setup.build();
    let (clock, _follower) = follow(&world).await;
    let mut one = at(&world, 9, clock.now());
    assert!(one.deadline().is_none());
    let turn = tokio::time::timeout(Duration::from_secs(60), one.waiting().expect("it waits")).await;
    let mut out = Actions::new();
    one.on(Event::Dequeued(turn.expect("a verdict")), clock.now(), &mut out).unwrap();
    let told = Answered::of(&Vec::from(out));
    assert_eq!((told.refused.unwrap().0, &*told.set["x-attache-reason"]), (503, "no_ready_endpoint"));
    drop(one);
    world.assert_books_closed(1);
}

#[test]
fn queued_headers_count_towards_the_byte_limit() {
    let world = setup(flow(Settings { max_bytes: 1_000, ..Settings::default() })).build();
    let first = comes(&world, 9);
    let second = One::of(&world, &[("x-long", &"x".repeat(1_000))], WAITS);
    assert_eq!(second.refused(), (429, "queue_full"));
    let mut third = comes(&world, 9);
    first.ends();
    third.wakes(NOW);
    assert!(third.goes(), "its headers are short");
    third.ends();
    drop(second);
    world.assert_books_closed(3);
}

#[test]
fn disconnect_at_queue_head_dequeues_requests_that_fit() {
    let detector = (find(DETECTORS, "backlog-detector").unwrap().build)(&json!({})).unwrap().into();
    let world = setup(PoolFlow { queueing: Some(Queueing::Saturated(detector)), ..flow(Settings::default()) }).build();
    // With the default speed, 1,000 tokens take 40 ms. The endpoint has 20 ms of work, and a prompt of 40 ms is queued
    // until less than 5 ms are left.
    let first = comes(&world, 500);
    let long = comes(&world, 1_000);
    let mut short = comes(&world, 9);
    short.wakes(NOW);
    assert!(first.goes() && !long.goes() && !short.goes());
    drop(long);
    short.wakes(NOW);
    assert!(short.goes(), "it fits, and the queue is empty");
    drop((first, short));
    world.assert_books_closed(3);
}

#[tokio::test]
async fn predicted_prefill_end_frees_capacity_without_events() {
    let detector = (find(DETECTORS, "backlog-detector").unwrap().build)(&json!({})).unwrap().into();
    let setup = setup(PoolFlow { queueing: Some(Queueing::Saturated(detector)), ..flow(Settings::default()) });
    let world = Setup { stale_after: Duration::from_secs(3_600), ..setup }.build();
    let endpoint = world.snapshot.load().endpoints[0].endpoint.clone();
    world.snapshot.publish(PoolSnapshot::new(2, true, vec![EndpointState::new(endpoint, None)]));
    let (clock, _follower) = follow(&world).await;
    // 400 ms of prompts without streaming: no first token shows the end of their prefill.
    let (first, mut second) = (at(&world, 10_000, clock.now()), at(&world, 9, clock.now()));
    assert!(first.is_routed() && !second.is_routed());
    let turn = tokio::time::timeout(Duration::from_secs(60), second.waiting().expect("it waits")).await;
    assert!(turn.expect("it is told").unwrap().is_ok());
}

/// Keeps the queue's timer running until it is dropped. No new snapshot arrives.
pub(super) type Follower = (tokio::task::JoinSet<()>, tokio::sync::watch::Sender<Published>);

/// Starts the queue's timer with this clock.
pub(super) async fn follow(world: &World) -> (attache_types::clock::Clock, Follower) {
    let clock = attache_types::clock::Clock::start();
    let (publisher, published) = tokio::sync::watch::channel(Published::default());
    let queues = Arc::downgrade(world.processor.picker.config().pools()[0].queue.as_ref().unwrap());
    let mut follower = tokio::task::JoinSet::new();
    follower.spawn(world.timer.clone().follow(queues, published, clock));
    tokio::task::yield_now().await;
    (clock, (follower, publisher))
}

/// Like [`comes`], at a time of the clock.
pub(super) fn at(world: &World, tokens: usize, now: Timestamp) -> Exchange {
    let mut exchange = world.exchange();
    for message in [
        Message::RequestHeaders(headers(&[PATH, (":method", "POST")], false)),
        Message::RequestBody(body(completion("m", &"four".repeat(tokens)).as_bytes(), true)),
    ] {
        let protocol_config = Some(config(WAITS, WAITS, false));
        let message = ProcessingRequest { protocol_config, ..request(message) };
        exchange.on(Event::Message(Box::new(message)), now, &mut Actions::new()).unwrap();
    }
    exchange
}

/// A reload replaces the queue while a request is in the old one.
#[test]
fn queues_before_and_after_reload_notify_each_other() {
    let world = setup(flow(Settings::default())).build();
    let metrics = &world.processor.metrics;
    let old = world.processor.picker.config().pools()[0].queue.as_ref().unwrap().clone();
    let first = comes(&world, 9);
    let mut before = comes(&world, 9);
    let (health, stale_after, rng) =
        (HealthPolicy::default(), Duration::from_secs(2), attache_types::rng::for_request(8, 0));
    let said = flow(Settings::default());
    let observer = Box::new(metrics.queues("pool"));
    let new = Queues::new(said, world.snapshot.clone(), health, None, stale_after, observer, rng, world.timer.waker())
        .unwrap();
    new.replace(&old);
    let config = world.processor.picker.config();
    let runtime = PoolRuntime { queue: Some(new), ..(*config.pools()[0]).clone() };
    let next = ActiveConfig::new(vec![Arc::new(runtime)], config.limits.clone(), config.settings.clone());
    world.processor.picker.reload(next, || serde_json::Value::Null);
    let mut after = comes(&world, 9);
    assert!(first.goes() && !before.goes() && !after.goes());
    first.ends();
    before.wakes(NOW);
    after.wakes(NOW);
    assert!(before.goes() && !after.goes(), "one seat");
    before.ends();
    after.wakes(NOW);
    assert!(after.goes(), "who was let through by the old settings has ended");
    after.ends();
    drop((old, config));
    world.assert_books_closed(3);
}
