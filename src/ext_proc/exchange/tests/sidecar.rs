//! Requests that the sidecar of a decode worker splits: its headers, and what its responses show about both workers.

use super::splitting::{answer, asked, asked_for, splitting};
use super::*;
use attache_disagg::Mode;
use attache_picker::split::PREFILL_HEADER;
use attache_pool::health::{Availability, HealthOutcome};
use attache_scheduling::Decider;

#[test]
fn sidecar_gets_the_prefill_worker() {
    let world = splitting(Mode::Header { source_tokens: None }, Decider::Always);
    let (mut exchange, out, asks) = asked(&world, &[("x-prefiller-host-port", "10.6.6.6:1")]);
    assert!(asks.is_empty());
    let all = Answered::of(&out);
    let named = &all.set["x-prefiller-host-port"];
    assert!(["192.168.1.1:8000", "192.168.1.2:8000"].contains(&&**named));
    assert!(["192.168.1.3:8000", "192.168.1.4:8000"].contains(&&*all.set[DESTINATION]));
    assert!(!all.removed.iter().any(|name| name == "x-prefiller-host-port"), "what is set is not removed again");
    let booked: u32 = world.snapshot.load().endpoints.iter().map(|s| s.endpoint.ledger.in_flight()).sum();
    assert_eq!(booked, 2);
    assert_eq!(answer(&mut exchange).set[PREFILL_HEADER], *named);
    drop(exchange);
    world.assert_books_closed(1);
}

#[test]
fn request_that_sidecar_cannot_split_is_served_whole() {
    let world = splitting(Mode::Header { source_tokens: None }, Decider::Always);
    let bodies = [
        (r#"{"model":"m","prompt":"p"}"#, true),
        (r#"{"model":"m","prompt":"p","use_beam_search":true}"#, false),
        (r#"{"model":"m","prompt":"p","truncate_prompt_tokens":-1}"#, false),
    ];
    for (sent, split) in bodies {
        let (mut exchange, out, _) = asked_for(&world, sent, &[("x-prefiller-host-port", "10.6.6.6:1")]);
        let out = Answered::of(&out);
        assert_eq!(out.set.contains_key("x-prefiller-host-port"), split, "{sent}");
        assert_eq!(
            out.removed.iter().any(|name| name == "x-prefiller-host-port"),
            !split,
            "nor does a client name one"
        );
        let booked: u32 = world.snapshot.load().endpoints.iter().map(|s| s.endpoint.ledger.in_flight()).sum();
        assert_eq!(booked, 1 + u32::from(split), "{sent}");
        assert_eq!(answer(&mut exchange).set.contains_key(PREFILL_HEADER), split, "{sent}");
    }
    world.assert_books_closed(3);
}

/// A sidecar's response with this status.
fn ended(exchange: &mut Exchange, status: &str) {
    send(exchange, request(Message::ResponseHeaders(headers(&[(":status", status)], false))));
    send(exchange, request(Message::ResponseBody(body(b"{}", true))));
}

#[test]
fn sidecar_response_counts_for_both_workers() {
    let header = || splitting(Mode::Header { source_tokens: None }, Decider::Always);
    let world = header();
    let (mut split, mut whole) = (0, 0);
    for _ in 0..40 {
        let (mut exchange, out, _) = asked(&world, &[]);
        let named = Answered::of(&out).set.contains_key("x-prefiller-host-port");
        // Not split: the decode worker prefills the prompt itself.
        ended(&mut exchange, if named { "500" } else { "200" });
        *(if named { &mut split } else { &mut whole }) += 1;
    }
    assert_eq!(split + whole, 40);
    // A failure counts for one worker if that ejects it, otherwise for both.
    let failures = HealthPolicy::default().consecutive_failures;
    assert!(
        (2 * failures..=4 * failures).contains(&split),
        "{split} until no request goes to the prefill workers any more"
    );
    world.assert_books_closed(40);
    // A failing decode worker does not cause the ejection of a prefill worker.
    let world = header();
    for _ in 0..40 {
        let (mut exchange, out, _) = asked(&world, &[]);
        let sick = Answered::of(&out).set[DESTINATION] == "192.168.1.3:8000";
        ended(&mut exchange, if sick { "503" } else { "200" });
    }
    let snapshot = world.snapshot.load();
    let open = |at: usize| snapshot.endpoints[at].endpoint.health.availability(NOW, &HealthPolicy::default());
    assert_eq!(
        [0, 1, 2, 3].map(open),
        [Availability::Open, Availability::Open, Availability::Ejected, Availability::Open]
    );
    // Nor if many requests in flight fail at once.
    let world = header();
    let mut under_way: Vec<_> = (0..80).map(|_| asked(&world, &[])).collect();
    for (exchange, out, _) in &mut under_way {
        let sick = Answered::of(out).set[DESTINATION] == "192.168.1.3:8000";
        if sick {
            ended(exchange, "502");
        }
    }
    let snapshot = world.snapshot.load();
    let open = |at: usize| snapshot.endpoints[at].endpoint.health.availability(NOW, &HealthPolicy::default());
    assert_eq!(
        [0, 1, 2, 3].map(open),
        [Availability::Open, Availability::Open, Availability::Ejected, Availability::Open]
    );
    drop(under_way);
    // A failing worker is distinguished from its partners.
    let world = header();
    let mut failed = 0;
    for _ in 0..40 {
        let (mut exchange, out, _) = asked(&world, &[]);
        let fails = Answered::of(&out).set["x-prefiller-host-port"] == "192.168.1.1:8000";
        failed += u32::from(fails);
        ended(&mut exchange, if fails { "500" } else { "200" });
    }
    assert_eq!(failed, HealthPolicy::default().consecutive_failures);
    let snapshot = world.snapshot.load();
    let open = |at: usize| snapshot.endpoints[at].endpoint.health.availability(NOW, &HealthPolicy::default());
    assert_eq!([1, 2, 3].map(open), [Availability::Open; 3], "the others are not blamed for it");
}

#[test]
fn unanswered_sidecar_probe_is_released() {
    let world = splitting(Mode::Header { source_tokens: None }, Decider::Always);
    let long_ago = Timestamp(1);
    for state in &world.snapshot.load().endpoints[..2] {
        for _ in 0..2 {
            state.endpoint.health.record(HealthOutcome::ConnectFailure, long_ago, &HealthPolicy::default());
        }
    }
    let probed = || {
        let (exchange, out, _) = asked(&world, &[]);
        (exchange, Answered::of(&out).set.get("x-prefiller-host-port").cloned())
    };
    let (first, second) = (probed(), probed());
    assert!(first.1.is_some() && second.1.is_some() && first.1 != second.1);
    assert_eq!(probed().1, None, "both are being probed");
    let named = first.1.clone();
    drop(first);
    let (mut again, named_again) = probed();
    assert_eq!(named_again, named, "the client has left before its answer");
    ended(&mut again, "200");
    assert!((0..20).all(|_| probed().1 == named), "it is back, and the other is still being probed");
}
