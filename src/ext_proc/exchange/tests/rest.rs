//! Measurements of the pool by the queue's timer. A large full pool is not measured at every event.

use super::queueing::{One, flow, setup};
use super::room::{WAITS, at, follow};
use super::*;
use attache_flow::registry::{CEILINGS, DETECTORS, find};
use attache_flow::saturation::{Detector, Gauge, View};
use attache_flow::{Queueing, Settings};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Counts how often the pool is measured.
#[derive(Debug)]
struct Counting {
    queueing: Queueing,
    looks: AtomicU32,
}

impl Detector for Counting {
    fn gauge(&self, view: &View<'_>) -> Gauge {
        self.looks.fetch_add(1, Relaxed);
        self.queueing.gauge(view)
    }
}

/// This many endpoints, each with a capacity of one request and one request in flight.
fn full(servers: usize) -> (World, Arc<Counting>) {
    let flow = flow(Settings::default());
    let counting = Arc::new(Counting { queueing: flow.queueing.clone().unwrap(), looks: AtomicU32::new(0) });
    let setup = setup(PoolFlow { queueing: Some(Queueing::Saturated(counting.clone())), ..flow });
    let servers = vec![(0, 0.1, &[] as &'static [&'static str]); servers];
    // Each request goes to an idle endpoint.
    let (strategy, parameters) = ("least-request", serde_json::Value::Null);
    let stale_after = Duration::from_secs(3_600);
    (Setup { servers, strategy, parameters, stale_after, ..setup }.build(), counting)
}

#[tokio::test]
async fn large_full_pool_is_measured_rarely_and_capacity_is_still_found() {
    for (servers, at_each) in [(127, true), (128, false)] {
        let (world, counting) = full(servers);
        let (clock, _follower) = follow(&world).await;
        // The clock stands still, so the duration of the test does not matter.
        let now = clock.now();
        let mut goes: Vec<Exchange> = (0..servers).map(|_| at(&world, 1, now)).collect();
        assert!(goes.iter().all(Exchange::is_routed), "{servers}: there is room, and each finds it by a look");
        let before = counting.looks.load(Relaxed);
        let mut waits: Vec<Exchange> = (0..20).map(|_| at(&world, 1, now)).collect();
        assert!(!waits.iter().any(Exchange::is_routed), "{servers}");
        drop(goes.pop());
        let looks = counting.looks.load(Relaxed) - before;
        assert_eq!(looks > 20, at_each, "{servers}: {looks} looks");
        // No other event occurs: the timer knows that an event was missed.
        let turn = waits.first_mut().and_then(Exchange::waiting).expect("it waits");
        let turn = tokio::time::timeout(Duration::from_secs(60), turn).await;
        assert!(turn.expect("it is told").unwrap().is_ok(), "{servers}");
        drop((goes, waits));
        world.assert_books_closed(servers as u64 + 20);
    }
}

#[tokio::test]
async fn bands_with_turns_are_dequeued_without_events() {
    let mut waited = 0;
    // The number of earlier checks decides which band's turn it is.
    for before in 0..4 {
        let four = find(DETECTORS, "concurrency-detector").unwrap();
        let flow = PoolFlow {
            queueing: Some(Queueing::Saturated(
                (four.build)(&serde_json::json!({"maxConcurrency": 4})).unwrap().into(),
            )),
            ceiling: (find(CEILINGS, "soft-reflective-ceiling-policy").unwrap(), serde_json::Value::Null),
            ..flow(Settings::default())
        };
        let world = Setup { stale_after: Duration::from_secs(3_600), ..setup(flow) }.build();
        let (_, _follower) = follow(&world).await;
        let urgent = || One::of(&world, &[("x-gateway-inference-objective", "urgent")], WAITS);
        let running: Vec<One> = (0..3 + before).map(|_| urgent()).skip(before).collect();
        let mut usual = One::of(&world, &[], WAITS);
        if let Some(turn) = usual.waiting.take() {
            waited += 1;
            let turn = tokio::time::timeout(Duration::from_secs(60), turn).await;
            assert!(turn.expect("it is told").unwrap().is_ok(), "{before}");
        }
        drop((running, usual));
        world.assert_books_closed(4 + before as u64);
    }
    assert!(waited > 0, "each came in its turn");
}
