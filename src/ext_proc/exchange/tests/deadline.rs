//! Requests with deadlines: which are dispatched, queued or rejected.

use super::queueing::{One, flow};
use super::*;
use attache_flow::registry::{ORDERINGS, find};
use attache_flow::{BandSettings, Settings};
use attache_pool::speed::{Reservation, Work};

/// The measured speed of the endpoints: a short prompt takes about a second.
const SHOWN: Duration = Duration::from_secs(1);

fn world(flow: Option<PoolFlow>, deadline_admission: bool, learned: bool) -> World {
    let world = Setup { flow, deadline_admission, ..Setup::default() }.build();
    if learned { shown(world) } else { world }
}

/// A world whose endpoints have a measured speed.
fn shown(world: World) -> World {
    for state in &world.snapshot.load().endpoints {
        for i in 0..50u64 {
            let work = Work { prompt_tokens: 10, uncached_tokens: 10, adapter_cold: false };
            let begun = Timestamp(NOW.0 - 5_000_000_000 + i * 80_000_000);
            let mut reservation = Reservation::begin(state.endpoint.clone(), None, work, true, begun);
            reservation.first_token(true, begun.after(SHOWN));
        }
    }
    world
}

fn with_deadline(world: &World, name: &str, ms: &str) -> One {
    One::of(world, &[(name, ms)], BodySendMode::FullDuplexStreamed)
}

/// The number of the pool's requests with each outcome.
fn judged(world: &World) -> Vec<(&'static str, u64)> {
    let metrics = world.processor.metrics.pool("pool");
    metrics.deadlines.occurred()
}

#[test]
fn deadline_that_no_endpoint_meets_is_rejected_at_once() {
    let world = world(None, true, true);
    for (name, ms, goes) in [
        ("x-slo-ttft-ms", "200", false),
        ("x-llm-d-slo-ttft-ms", "200", false),
        ("x-slo-ttft-ms", "60000", true),
        ("x-slo-tpot-ms", "0.001", false),
        ("x-llm-d-slo-tpot-ms", "60000", true),
        ("x-slo-ttft-ms", "soon", true),
        ("x-other", "1", true),
    ] {
        let one = with_deadline(&world, name, ms);
        assert_eq!(one.goes(), goes, "{name}: {ms}");
        if !goes {
            assert_eq!(one.refused(), (429, "deadline_unmet"));
            let retry: u64 = one.told.set["retry-after"].parse().unwrap();
            assert!(retry >= 60, "an idle server that is too slow is so until nothing is known of it: {retry}");
        } else {
            one.ends();
        }
    }
    assert_eq!(judged(&world), [("fits", 2), ("late", 3)]);
}

#[test]
fn deadline_is_ignored_if_disabled_or_speed_unknown() {
    for (on, learned) in [(false, true), (true, false)] {
        let world = world(None, on, learned);
        assert!(with_deadline(&world, "x-slo-ttft-ms", "1").goes(), "{on} {learned}");
        assert_eq!(judged(&world).is_empty(), !on, "{on} {learned}");
    }
}

#[test]
fn queued_request_expires_at_its_deadline() {
    let world = world(Some(flow(Settings::default())), true, true);
    let first = with_deadline(&world, "x-slo-ttft-ms", "3000");
    assert!(first.goes());
    // It would miss its deadline even without queueing.
    assert_eq!(with_deadline(&world, "x-slo-ttft-ms", "200").refused(), (429, "deadline_unmet"));
    let mut second = with_deadline(&world, "x-slo-ttft-ms", "3000");
    assert!(!second.goes() && second.waiting.is_some());
    let until = second.exchange.deadline().unwrap();
    let within = until.since(NOW).as_secs_f64();
    assert!((1.0..2.5).contains(&within), "3 s less what its first token takes: {within}");
    let mut out = Actions::new();
    second.exchange.on(Event::Deadline, until, &mut out).unwrap();
    second.told = Answered::of(&Vec::from(out));
    assert_eq!(second.refused(), (503, "deadline_passed"));
    // A request without a deadline is queued as usual.
    let third = with_deadline(&world, "x-other", "1");
    assert_eq!(third.exchange.deadline(), Some(NOW.after(Duration::from_secs(10))));
    assert_eq!(judged(&world), [("fits", 1), ("waits", 1), ("late", 1), ("passed", 1)]);
    drop((second, third));
    first.ends();
    world.assert_books_closed(4);
}

#[test]
fn request_dequeued_before_its_deadline_is_served() {
    let world = world(Some(flow(Settings::default())), true, true);
    let first = with_deadline(&world, "x-other", "1");
    let mut second = with_deadline(&world, "x-slo-ttft-ms", "3000");
    first.ends();
    second.wakes(NOW);
    assert!(second.goes(), "{:?}", second.told);
    second.ends();
    assert_eq!(judged(&world), [("waits", 1)]);
    world.assert_books_closed(2);
}

#[test]
fn untrusted_deadline_does_not_improve_queue_order() {
    for ordering in ["slo-deadline", "edf", "slo-urgency"] {
        for (trusts, tenant, goes_before) in [(false, false, false), (true, false, true), (false, true, true)] {
            let ordering_of = find(ORDERINGS, ordering).unwrap();
            let default_band = BandSettings {
                ordering: (ordering_of.build)(&serde_json::Value::Null).unwrap().into(),
                ..BandSettings::default()
            };
            let exchange = if tenant { limits::by_header() } else { ExchangeSettings::default() };
            let exchange = ExchangeSettings { trust_client_headers: trusts, ..exchange };
            let flow = Some(flow(Settings { default_band, ..Settings::default() }));
            let world = shown(Setup { flow, exchange, deadline_admission: true, ..Setup::default() }.build());
            let with_ttft =
                |ms| One::of(&world, &[("x-slo-ttft-ms", ms), ("x-tenant", "a")], BodySendMode::FullDuplexStreamed);
            let (first, mut calm, mut hasty) = (with_ttft("0"), with_ttft("0"), with_ttft("3000"));
            first.ends();
            calm.wakes(NOW);
            hasty.wakes(NOW);
            assert_eq!((calm.goes(), hasty.goes()), (!goes_before, goes_before), "{ordering} {trusts} {tenant}");
            drop((calm, hasty));
            world.assert_books_closed(3);
        }
    }
}

#[test]
fn request_dequeued_after_its_deadline_is_rejected() {
    let world = world(Some(flow(Settings::default())), true, true);
    let first = with_deadline(&world, "x-other", "1");
    let mut second = with_deadline(&world, "x-slo-ttft-ms", "3000");
    first.ends();
    second.wakes(NOW.after(Duration::from_millis(2_500)));
    assert_eq!(second.refused(), (503, "deadline_passed"));
    assert_eq!(
        second.told.set["retry-after"], "1",
        "it has all of its time when it comes again, and the server is idle"
    );
    drop(second);
    world.assert_books_closed(2);
}
