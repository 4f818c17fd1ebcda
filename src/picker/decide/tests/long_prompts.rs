//! Pools that hold back long prompts and queue nothing else.

use super::*;
use crate::queues::{DequeueResult, QueueSignal};
use attache_pool::PoolSnapshot;
use attache_pool::ledger::Ticket;
use attache_pool::speed::{PoolSpeed, SpeedExport};

/// Each of the three servers has two requests, and half of what they compute was computed before.
fn busy(parts: Parts) -> (Fixture, Vec<Ticket>) {
    let fixture = parts.build();
    let endpoints = fixture.snapshot.load().endpoints.clone();
    let tickets = endpoints.iter().flat_map(|e| [e, e]).map(|e| Ticket::book(e.endpoint.clone(), 0)).collect();
    let speed: &PoolSpeed = endpoints[0].endpoint.speed.pool();
    speed.import(&SpeedExport { response_tokens: 200.0, ..speed.export() });
    speed.set_recomputed(0.5);
    (fixture, tickets)
}

fn holding() -> Parts {
    Parts { holds: Some(1 << 30), ..Parts::default() }
}

/// 100,000 tokens, which take seconds.
fn long() -> Vec<u8> {
    chat("m", &"word ".repeat(80_000))
}

/// Whether the request stays in the queue. One that goes before a held one enters the queue and leaves it at once.
fn is_held(fixture: &Fixture, q: &RequestView<'_>) -> bool {
    match fixture.step(q) {
        Ok(Step::Queue(mut queued)) => poll(&mut queued.waiting().unwrap()).is_pending(),
        Ok(Step::Decided(_)) => false,
        other => panic!("{other:?}"),
    }
}

fn poll(signal: &mut QueueSignal) -> std::task::Poll<Option<DequeueResult>> {
    std::pin::Pin::new(signal).poll(&mut std::task::Context::from_waker(Waker::noop()))
}

#[test]
fn long_prompts_wait_until_others_end_and_short_ones_do_not() {
    let (fixture, tickets) = busy(holding());
    let (head, long, short) = (head(&[]), long(), chat("m", "hello"));
    let q = view(&head, Seen::Whole(&long));
    let Step::Queue(mut queued) = fixture.step(&q).unwrap() else { panic!("it goes at once") };
    assert!(!is_held(&fixture, &view(&head, Seen::Whole(&short))), "a short prompt proceeds");
    let mut signal = queued.waiting().unwrap();
    let queues = fixture.picker.config().pools()[0].queue.clone().unwrap();
    queues.freed(NOW);
    assert!(poll(&mut signal).is_pending());
    drop(tickets);
    queues.freed(NOW);
    assert!(matches!(poll(&mut signal), std::task::Poll::Ready(Some(Ok(_)))));
    queued.settle();
    assert!(fixture.events.take().iter().all(|event| !event.contains("Passed")), "others are not counted");
}

#[test]
fn nothing_is_held_where_it_would_do_harm() {
    let (head, long) = (head(&[]), long());
    let objectives = [("urgent".to_owned(), 1), ("batch".to_owned(), -1)].into();
    let exchange = ExchangeSettings { objectives, trust_client_headers: true, ..ExchangeSettings::default() };
    let (fixture, _tickets) = busy(Parts { exchange, ..holding() });
    let q = view(&head, Seen::Whole(&long));
    let of = |pairs: &[(&str, &str)]| {
        let head = super::head(pairs);
        is_held(&fixture, &RequestView { head: &head, ..q })
    };
    assert!(of(&[]) && of(&[("x-gateway-inference-objective", "batch")]));
    assert!(!of(&[("x-gateway-inference-objective", "urgent")]), "urgent");
    assert!(!of(&[("x-slo-ttft-ms", "500")]), "it has a target");
    assert!(!is_held(&fixture, &RequestView { may_wait: false, ..q }), "the gateway leaves no time");
    let endpoint = fixture.snapshot.load().endpoints[0].endpoint.clone();
    endpoint.speed.pool().set_recomputed(0.01);
    assert!(!of(&[]), "nothing is computed again");
    endpoint.speed.pool().set_recomputed(0.5);
    fixture.snapshot.publish(PoolSnapshot::new(2, true, Vec::new()));
    assert_eq!(fixture.step(&q).unwrap_err().reason, Reason::NoReadyEndpoint, "it does not wait for servers");
}

#[test]
fn no_request_is_rejected_for_a_full_queue() {
    let (fixture, _tickets) = busy(Parts { holds: Some(500_000), ..Parts::default() });
    let (head, long) = (head(&[]), long());
    let q = view(&head, Seen::Whole(&long));
    let first = fixture.step(&q).unwrap();
    assert!(matches!(first, Step::Queue(_)));
    assert!(!is_held(&fixture, &q), "it finds no room, and proceeds");
    drop(first);
    assert!(is_held(&fixture, &q));
}

#[test]
fn pools_that_shed_hold_long_prompts_too() {
    let objectives = [("batch".to_owned(), -1)].into();
    let exchange = ExchangeSettings { objectives, ..ExchangeSettings::default() };
    let (fixture, tickets) = busy(Parts { exchange, full_at: Some(1), ..holding() });
    let (usual, batch) = (head(&[]), head(&[("x-gateway-inference-objective", "batch")]));
    let (short, long) = (chat("m", "hello"), long());
    let refused = fixture.step(&view(&batch, Seen::Whole(&short))).unwrap_err();
    assert_eq!(refused.reason, Reason::Shed);
    assert!(is_held(&fixture, &view(&usual, Seen::Whole(&long))));
    assert!(!is_held(&fixture, &view(&usual, Seen::Whole(&short))));
    drop(tickets);
    assert!(!is_held(&fixture, &view(&batch, Seen::Whole(&long))), "the pool is idle");
}
