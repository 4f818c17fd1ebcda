//! Requests whose decode worker is removed, drained or ejected during the prefill.

use super::splitting::{ROLES, among, answer, asked, direct, give_leg_result, good, reply};
use super::*;
use attache_disagg::{Direct, Failure, Fallback, Mode};
use attache_picker::split::{DISAGGREGATION_HEADER, LegResult};
use attache_pool::Roles;
use attache_pool::health::HealthOutcome;
use attache_scheduling::Decider;

fn nixl() -> Mode {
    Mode::Direct(direct("nixl"))
}

/// The decode workers with a request in flight.
fn booked(world: &World) -> Vec<usize> {
    let snapshot = world.snapshot.load();
    let has = |at: &usize| snapshot.endpoints[*at].endpoint.ledger.in_flight() > 0;
    (0..snapshot.endpoints.len())
        .filter(|at| snapshot.endpoints[*at].endpoint.roles.has(Roles::DECODE))
        .filter(has)
        .collect()
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Removed,
    Draining,
    Ejected,
}

fn befalls(world: &World, at: usize, fate: Fate) {
    let before = world.snapshot.load_full();
    let mut endpoints = before.endpoints.to_vec();
    match fate {
        Fate::Removed => drop(endpoints.remove(at)),
        Fate::Draining => {
            let spec = EndpointSpec { draining: true, ..(*endpoints[at].endpoint.spec).clone() };
            endpoints[at] = endpoints[at].clone().respecified(spec);
        }
        Fate::Ejected => {
            for _ in 0..2 {
                let health = &endpoints[at].endpoint.health;
                health.record(HealthOutcome::ConnectFailure, NOW, &HealthPolicy::default());
            }
        }
    }
    world.snapshot.publish(PoolSnapshot::new(before.generation + 1, true, endpoints));
}

#[test]
fn another_decode_worker_replaces_a_lost_one() {
    for fate in [Fate::Removed, Fate::Draining, Fate::Ejected] {
        for computed in [true, false] {
            let world = among(ROLES, nixl(), Decider::Always);
            let (mut exchange, ..) = asked(&world, &[]);
            let [named] = booked(&world)[..] else { panic!("one is to answer") };
            let gone = world.snapshot.load().endpoints[named].endpoint.clone();
            befalls(&world, named, fate);
            let all = if computed {
                give_leg_result(&mut exchange, 0, good(), 40)
            } else {
                give_leg_result(&mut exchange, 0, reply(400, ""), 40)
            };
            let other = if named == 2 { "192.168.1.4:8000" } else { "192.168.1.3:8000" };
            assert_eq!(all.set[DESTINATION], other, "{fate:?} {computed}");
            assert_eq!(all.text().contains("new_in_2027"), computed);
            assert_eq!((gone.ledger.in_flight(), booked(&world).len()), (0, 1), "the books follow");
            let prefill_outcome = if computed { "split" } else { "local; reason=prefill_declined" };
            assert_eq!(answer(&mut exchange).set[DISAGGREGATION_HEADER], prefill_outcome);
            drop(exchange);
            world.assert_books_closed(1);
        }
    }
}

#[test]
fn last_decode_worker_serves_unless_removed() {
    for (fate, answers) in [(Fate::Removed, false), (Fate::Draining, true), (Fate::Ejected, true)] {
        let world = among(&["prefill", "decode"], nixl(), Decider::Always);
        let (mut exchange, ..) = asked(&world, &[]);
        let named = world.snapshot.load().endpoints[1].endpoint.clone();
        befalls(&world, 1, fate);
        let all = give_leg_result(&mut exchange, 0, good(), 40);
        assert_eq!(all.set.contains_key(DESTINATION), answers, "{fate:?}");
        if let Some((status, text)) = &all.refused {
            assert_eq!((*status, all.set["x-attache-reason"].as_str()), (503, "no_ready_endpoint"));
            assert!(text.contains("has left the pool while the prompt was computed"), "{text}");
        }
        drop(exchange);
        assert_eq!(named.ledger.in_flight(), 0);
        world.assert_books_closed(1);
    }
}

#[test]
fn unpaired_decode_worker_does_not_replace_a_lost_one() {
    let world = among(&["prefill", "decode", "decode"], nixl(), Decider::Always);
    let before = world.snapshot.load_full();
    let labelled = before.endpoints.iter().zip(["a", "a", "b"]).map(|(state, set)| {
        let mut spec = (*state.endpoint.spec).clone();
        spec.labels.insert("roleset-name".into(), set.into());
        state.clone().respecified(spec)
    });
    world.snapshot.publish(PoolSnapshot::new(2, true, labelled.collect()));
    for (prompt, answers) in [(good(), false), (reply(400, ""), true)] {
        let (mut exchange, ..) = asked(&world, &[]);
        let kept = world.snapshot.load_full();
        befalls(&world, 1, Fate::Removed);
        assert_eq!(give_leg_result(&mut exchange, 0, prompt, 40).set.contains_key(DESTINATION), answers);
        world.snapshot.publish(PoolSnapshot::new(9, true, kept.endpoints.to_vec()));
    }
}

/// A half-open worker is probed by one request at a time. If that request ends before it is sent, the next one probes.
#[test]
fn next_request_probes_decode_worker_if_first_was_not_sent() {
    let mode = Mode::Direct(Direct { fallback: Fallback::Fail, ..direct("nixl") });
    let world = among(&["prefill", "decode", "decode"], mode, Decider::Always);
    let half_open = world.snapshot.load().endpoints[1].endpoint.clone();
    for _ in 0..2 {
        half_open.health.record(HealthOutcome::ConnectFailure, Timestamp(1), &HealthPolicy::default());
    }
    let mut probes = 0;
    for _ in 0..60 {
        let (mut exchange, ..) = asked(&world, &[]);
        probes += half_open.ledger.in_flight();
        give_leg_result(&mut exchange, 0, LegResult::Failed(Failure::Refused), 5);
        // The prefill worker must not be ejected for it.
        let prefill = world.snapshot.load().endpoints[0].endpoint.clone();
        prefill.health.record(HealthOutcome::Success, NOW, &HealthPolicy::default());
    }
    assert!(probes > 1, "{probes}");
}
