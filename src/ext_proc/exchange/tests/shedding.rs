//! Pools without a queue: sheddable requests are shed while the pool is saturated, and none is queued.

use super::queueing::{One, flow, setup, without_queue};
use super::*;
use attache_flow::Settings;

fn shedding() -> PoolFlow {
    without_queue(flow(Settings::default()))
}

#[test]
fn sheddable_requests_are_shed_while_the_pool_is_saturated() {
    let world = setup(shedding()).build();
    let alone = One::comes(&world, "batch");
    assert!(alone.goes(), "the pool was empty");
    let batch = One::comes(&world, "batch");
    assert_eq!(batch.refused(), (429, "shed"));
    assert!(batch.told.set["retry-after"].parse::<u64>().unwrap() >= 1);
    let others = ["", "urgent", ""].map(|objective| One::comes(&world, objective));
    for other in &others {
        assert!(other.goes() && other.waiting.is_none());
    }
    for buffered in [BodySendMode::Buffered, BodySendMode::FullDuplexStreamed] {
        let batch = One::of(&world, &[("x-gateway-inference-objective", "batch")], buffered);
        assert_eq!(batch.refused(), (429, "shed"), "{buffered:?}");
    }
    drop(batch);
    alone.ends();
    others.into_iter().for_each(One::ends);
    let again = One::comes(&world, "batch");
    assert!(again.goes());
    again.ends();
    world.assert_books_closed(8);
}

#[test]
fn untrusted_client_may_lower_but_not_raise_its_priority() {
    let objectives = [("batch".to_owned(), -1), ("urgent".to_owned(), 5)].into();
    let exchange = ExchangeSettings { objectives, ..ExchangeSettings::default() };
    let priorities = [("shed".to_owned(), -5)].into();
    let world = Setup { flow: Some(shedding()), exchange, ..Setup::default() }.build();
    let rules = attache_scheduling::router::PoolRules { priorities, ..Default::default() };
    world.processor.picker.config().router.pools()[0].rules.store(rules);
    let first = One::comes(&world, "");
    let refused = |objective: &str, model: &str| {
        let named = [("x-gateway-inference-objective", objective)];
        let sent = completion(model, "p");
        let one = One::sends(&world, &named, BodySendMode::FullDuplexStreamed, sent.as_bytes(), None);
        one.told.refused.is_some()
    };
    assert!(refused("batch", "m"), "its own priority is lowered");
    assert!(!refused("urgent", "m"));
    assert!(refused("urgent", "shed"), "the model's priority stays");
    assert!(refused("batch", "shed"));
    first.ends();
    world.assert_books_closed(5);
}
