//! Single faults: what each does, and how it is repaired.

use super::cluster::{Cluster, Routed};
use crate::generated::v1;
use crate::{HEARTBEAT_EVERY, MemoryBusSettings, SILENT_AFTER, ServedFlow};
use attache_pool::EndpointState;
use attache_pool::health::{Availability, HealthOutcome, HealthPolicy};
use attache_prefix::key::BlockKey;
use attache_protocol::Usage;
use attache_types::ids::EndpointId;
use prost::Message as _;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use v1::message::Body;

const DELAY: Duration = Duration::from_millis(5);

fn cluster(pickers: usize) -> Cluster {
    Cluster::new(pickers, MemoryBusSettings { delay: DELAY, ..MemoryBusSettings::default() })
}

fn keys(blocks: u64) -> Vec<BlockKey> {
    (1..=blocks).map(BlockKey).collect()
}

fn in_flight(cluster: &Cluster) -> Vec<u32> {
    cluster.loads().iter().map(|load| load.iter().map(|(requests, _)| requests).sum()).collect()
}

/// Ends a request after its first byte.
fn finish(cluster: &Cluster, routed: Routed) {
    let Routed { mut booking, shared, .. } = routed;
    booking.first_byte(true, true, cluster.now);
    shared.first_byte(true, true, cluster.now);
    booking.end(true, &Usage::default(), |_| false, cluster.now);
    shared.ended(true, &Usage::default(), Vec::new(), cluster.now);
}

#[test]
fn booking_reaches_peers_within_the_delay_of_the_bus() {
    let mut cluster = cluster(3);
    let routed = cluster.route(0, 1, &keys(40));
    assert_eq!(in_flight(&cluster), [1, 0, 0]);
    cluster.pass(DELAY);
    assert_eq!(in_flight(&cluster), [1, 1, 1]);
    assert_eq!(cluster.loads()[2][1], (1, 640), "the prompt is not cached anywhere");
    assert_eq!(cluster.depths(&keys(40)), [[0, 40, 0]; 3], "speculative entries");
    let ranks = |cluster: &Cluster| cluster.members[1].store.load().endpoints[1].endpoint.ranks.under_way();
    assert_eq!(ranks(&cluster), [0, 1]);
    finish(&cluster, routed);
    cluster.pass(2 * DELAY);
    assert_eq!(in_flight(&cluster), [0; 3]);
    assert_eq!(cluster.depths(&keys(40)), [[0, 40, 0]; 3], "recorded blocks");
    assert!(ranks(&cluster).is_empty());
}

#[test]
fn disconnect_is_reported_without_a_heartbeat() {
    let mut cluster = cluster(2);
    let routed = cluster.route(0, 0, &keys(3));
    cluster.pass(DELAY);
    assert_eq!(in_flight(&cluster), [1, 1]);
    drop(routed);
    cluster.pass(2 * DELAY);
    assert_eq!(in_flight(&cluster), [0, 0]);
}

#[test]
fn pressure_counts_each_diversion_once_in_the_whole_cluster() {
    let mut cluster = cluster(3);
    let divert = |cluster: &Cluster, picker: usize| {
        cluster.members[picker].pressure.divert(&"pool".into(), &"m".into(), cluster.now);
    };
    [0, 0, 1].into_iter().for_each(|picker| divert(&cluster, picker));
    cluster.pass(2 * DELAY);
    assert_eq!(cluster.pressures(), [3; 3]);
    // Two reconcilers read the same count at two pickers.
    divert(&cluster, 2);
    assert_eq!([0, 1].map(|picker| cluster.members[picker].pressure.consume("m", None, 3, cluster.now)), [3, 3]);
    cluster.pass(2 * DELAY);
    assert_eq!(cluster.pressures(), [1; 3]);
    // A picker that joins later knows no more than the others.
    cluster.pass(Duration::from_secs(61));
    divert(&cluster, 0);
    cluster.restart(2);
    cluster.pass(2 * HEARTBEAT_EVERY);
    assert_eq!(cluster.pressures(), [1; 3]);
}

#[test]
fn records_of_other_parts_reach_peers_once() {
    let mut cluster = cluster(2);
    let mut routed = cluster.route(0, 1, &keys(10));
    let served = cluster.members[0].store.load().endpoints[2].endpoint.clone();
    let recorded = |cluster: &Cluster, member: usize| std::mem::take(&mut *cluster.members[member].records.0.lock());
    cluster.pass(2 * DELAY);
    assert_eq!(recorded(&cluster, 1), ["s: 160 tokens for 5", "s: m [1, 2] at 1"]);
    routed.booking.move_to(&served, cluster.now);
    routed.shared.moved(&served, cluster.now);
    cluster.members[0].replica.stored("pool", &served.spec, 77, cluster.now);
    cluster.pass(2 * DELAY);
    assert_eq!(recorded(&cluster, 1), ["moved from 1 to 2", "freed"]);
    assert_eq!(*cluster.members[1].responses.0.lock(), [(77, EndpointId(2))]);
    let service = ServedFlow { priority: -3, flow: 9, prompt_tokens: 100, completion_tokens: 20 };
    cluster.members[0].replica.served("pool", service, cluster.now);
    cluster.members[0].replica.served("unknown", service, cluster.now);
    cluster.pass(2 * DELAY);
    assert_eq!(recorded(&cluster, 1), [format!("{service:?}")]);
    // The full state brings the request back, and nothing is recorded again.
    cluster.bus.part(0, 1, true);
    cluster.pass(SILENT_AFTER + HEARTBEAT_EVERY);
    assert_eq!((in_flight(&cluster), recorded(&cluster, 1)), (vec![1, 0], vec!["freed".to_owned()]));
    cluster.bus.part(0, 1, false);
    cluster.pass(2 * HEARTBEAT_EVERY);
    assert_eq!((in_flight(&cluster), recorded(&cluster, 1)), (vec![1, 1], Vec::new()));
    assert!(recorded(&cluster, 0).is_empty() && cluster.members[0].responses.0.lock().is_empty());
}

#[test]
fn ejection_of_a_peer_makes_the_next_failure_eject_until_a_success() {
    let mut cluster = cluster(2);
    let policy = HealthPolicy::default();
    let fail = |cluster: &Cluster, member: usize| {
        let snapshot = cluster.members[member].store.load();
        snapshot.endpoints[1].endpoint.health.record(HealthOutcome::ConnectFailure, cluster.now, &policy)
    };
    assert_eq!([fail(&cluster, 0), fail(&cluster, 0)], [false, true]);
    cluster.pass(HEARTBEAT_EVERY + DELAY);
    let availability = |cluster: &Cluster, member: usize| {
        let snapshot = cluster.members[member].store.load();
        snapshot.endpoints[1].endpoint.health.availability(cluster.now, &policy)
    };
    assert_eq!([0, 1].map(|member| availability(&cluster, member)), [Availability::Ejected, Availability::Open]);
    assert!(fail(&cluster, 1), "the first failure");
    // A success shows that this picker reaches it. The same ejection is not passed on twice.
    cluster.members[1].store.load().endpoints[1].endpoint.health.record(HealthOutcome::Success, cluster.now, &policy);
    cluster.pass(2 * HEARTBEAT_EVERY);
    assert!(!fail(&cluster, 1));
}

#[test]
fn silent_picker_loses_its_full_state_and_gets_it_back() {
    let mut cluster = cluster(2);
    let _routed = cluster.route(0, 0, &keys(3));
    cluster.pass(DELAY);
    cluster.bus.part(0, 1, true);
    cluster.pass(SILENT_AFTER + HEARTBEAT_EVERY);
    assert_eq!(in_flight(&cluster), [1, 0]);
    cluster.bus.part(0, 1, false);
    cluster.pass(2 * HEARTBEAT_EVERY);
    assert_eq!(in_flight(&cluster), [1, 1]);
}

#[test]
fn prompt_of_a_request_whose_booking_was_lost_survives_a_silence() {
    let mut cluster = cluster(2);
    cluster.pass(HEARTBEAT_EVERY);
    cluster.bus.part(0, 1, true);
    let routed = cluster.route(0, 1, &keys(40));
    cluster.pass(2 * DELAY);
    // The end arrives before the lost booking can be requested.
    cluster.bus.part(0, 1, false);
    finish(&cluster, routed);
    cluster.pass(DELAY);
    cluster.bus.part(0, 1, true);
    assert_eq!(cluster.depths(&keys(40))[1], [0; 3]);
    cluster.pass(SILENT_AFTER + HEARTBEAT_EVERY);
    cluster.bus.part(0, 1, false);
    cluster.pass(4 * HEARTBEAT_EVERY);
    assert_eq!(cluster.depths(&keys(40)), [[0, 40, 0]; 2]);
    assert_eq!(in_flight(&cluster), [0, 0]);
}

#[test]
fn restarted_picker_replaces_its_earlier_process() {
    let mut cluster = cluster(2);
    let lost = cluster.route(0, 0, &keys(3));
    cluster.pass(HEARTBEAT_EVERY);
    std::mem::forget(lost.shared);
    cluster.restart(0);
    cluster.pass(SILENT_AFTER);
    assert_eq!(in_flight(&cluster), [0, 0]);
    let named: Vec<_> = cluster.members[1].replica.peers(cluster.now).into_iter().map(|peer| peer.name).collect();
    assert_eq!(named, ["picker-1"], "the earlier process is forgotten");
    let _routed = cluster.route(1, 2, &keys(3));
    cluster.pass(DELAY);
    assert_eq!(in_flight(&cluster), [1, 1]);
}

#[test]
fn joining_picker_learns_all_requests_in_flight() {
    let mut cluster = cluster(2);
    cluster.bus.part(0, 1, true);
    // More than the batches that are kept, so that only the full state can tell.
    let routed: Vec<Routed> = (0..1_500).map(|i| cluster.route(0, i % 3, &keys(1 + i as u64 % 50))).collect();
    for _ in 0..60 {
        drop(cluster.route(0, 0, &(0..40_000).map(BlockKey).collect::<Vec<_>>()));
    }
    cluster.pass(SILENT_AFTER);
    cluster.bus.part(0, 1, false);
    cluster.pass(Duration::from_secs(2));
    assert_eq!(in_flight(&cluster), [1_500, 1_500]);
    assert!(!cluster.members[1].replica.peers(cluster.now)[0].behind);
    drop(routed);
    cluster.pass(2 * DELAY);
    assert_eq!(in_flight(&cluster), [0, 0]);
}

#[test]
fn late_batches_change_no_learned_speeds() {
    let mut cluster = cluster(3);
    // The last picker gets all batches long after the responses, when it can reach the first one again.
    cluster.bus.part(0, 2, true);
    for i in 0..200 {
        let routed = cluster.route(0, i % 3, &[keys(20), vec![BlockKey(1_000 + i as u64)]].concat());
        cluster.pass(Duration::from_millis(20));
        finish(&cluster, routed);
    }
    cluster.bus.part(0, 2, false);
    cluster.pass(4 * HEARTBEAT_EVERY);
    let learned = |member: usize| {
        let snapshot = cluster.members[member].store.load();
        snapshot.endpoints.iter().filter(|state| state.endpoint.speed.last_answer().is_some()).count()
    };
    assert_eq!([learned(0), learned(1), learned(2)], [3, 3, 0]);
    assert_eq!(cluster.depths(&keys(20)), [[20; 3]; 3], "but prompts are recorded");
}

#[test]
fn unreadable_messages_change_nothing_and_are_counted() {
    let mut cluster = cluster(2);
    let replica = &cluster.members[1].replica;
    let booked = v1::Booked { request: 1, endpoint: 1, ..v1::Booked::default() };
    let event = v1::Event { kind: Some(v1::event::Kind::Booked(booked)) };
    let body = Some(Body::Batch(v1::Batch { number: 1, events: vec![event] }));
    let message = v1::Message { version: 1, sender: 99, receiver: 0, body };
    let newer = v1::Message { version: 2, ..message.clone() };
    for (from, bytes) in [
        (None, vec![0xff; 64]),
        (None, vec![0; 100 << 20]),
        (None, newer.encode_to_vec()),
        // The transport vouches for another sender.
        (Some(98), message.encode_to_vec()),
        (None, v1::Message { sender: 0, ..message.clone() }.encode_to_vec()),
    ] {
        replica.receive(from, &bytes, cluster.now);
    }
    assert_eq!(replica.stats().invalid_messages.load(Relaxed), 5);
    assert!(replica.peers(cluster.now).is_empty());
    // A readable one names an endpoint that does not exist here: the peer is known, and nothing is booked.
    replica.receive(Some(99), &message.encode_to_vec(), cluster.now);
    assert_eq!(replica.stats().unknown_endpoints.load(Relaxed), 1);
    cluster.pass(DELAY);
    assert_eq!(in_flight(&cluster), [0, 0]);
}

#[test]
fn unknown_events_and_bodies_of_newer_pickers_are_ignored() {
    let mut cluster = cluster(2);
    let replica = &cluster.members[1].replica;
    let empty = v1::Event { kind: None };
    let body = |body| v1::Message { version: 1, sender: 99, receiver: 0, body }.encode_to_vec();
    let mut batch = body(Some(Body::Batch(v1::Batch { number: 1, events: vec![empty] })));
    // Field 100 of the message, a varint, of which this version knows nothing.
    batch.extend([0xa0, 0x06, 0x01]);
    replica.receive(Some(99), &batch, cluster.now);
    replica.receive(Some(99), &body(None), cluster.now);
    assert_eq!(replica.stats().invalid_messages.load(Relaxed), 0);
    assert_eq!(replica.peers(cluster.now).len(), 1);
    cluster.pass(DELAY);
}

#[test]
fn senders_beyond_the_limit_are_dropped() {
    let cluster = cluster(2);
    let replica = &cluster.members[1].replica;
    for sender in 100..300 {
        let heartbeat = v1::Heartbeat { name: format!("p{sender}"), ..v1::Heartbeat::default() };
        let body = Some(Body::Heartbeat(heartbeat));
        let message = v1::Message { version: 1, sender, receiver: 0, body };
        replica.receive(Some(sender), &message.encode_to_vec(), cluster.now);
    }
    assert_eq!(replica.peers(cluster.now).len(), 64);
    assert_eq!(replica.stats().refused_senders.load(Relaxed), 136);
}

#[test]
fn loss_is_announced_once_and_only_for_caches_with_content() {
    let mut cluster = cluster(3);
    let routed = cluster.route(0, 1, &keys(8));
    finish(&cluster, routed);
    cluster.pass(2 * DELAY);
    let lost: Vec<EndpointId> = [0, 1].map(EndpointId).into();
    cluster.members[0].replica.announce_losses("pool", &lost, cluster.now);
    cluster.pass(2 * DELAY);
    // Endpoint 0 has nothing.
    let told = |cluster: &Cluster| cluster.members.iter().map(|m| m.losses.0.lock().clone()).collect::<Vec<_>>();
    assert_eq!(told(&cluster), [vec![], vec![EndpointId(1)], vec![EndpointId(1)]]);
    // The peers drop their records, too, which is no news for anyone.
    cluster.members[1].replica.announce_losses("pool", &lost, cluster.now);
    cluster.pass(2 * DELAY);
    assert_eq!(told(&cluster), [vec![], vec![EndpointId(1)], vec![EndpointId(1)]]);
}

#[test]
fn booking_of_an_earlier_pod_at_the_same_address_is_not_counted() {
    let mut cluster = cluster(2);
    let member = &cluster.members[1];
    let before = member.store.load_full();
    let renewed = before.endpoints.iter().map(|state| {
        let mut spec = (*state.endpoint.spec).clone();
        spec.uid = Some("new".into());
        EndpointState::new(Arc::new(attache_pool::Endpoint::new(state.endpoint.id, spec)), None)
    });
    member.store.publish(attache_pool::PoolSnapshot::new(2, true, renewed.collect()));
    let _routed = cluster.route(0, 0, &keys(3));
    cluster.pass(DELAY);
    assert_eq!(in_flight(&cluster), [1, 0]);
    assert_eq!(cluster.members[1].replica.stats().unknown_endpoints.load(Relaxed), 1);
}

#[test]
fn full_state_of_long_prompts_has_parts_that_receivers_accept() {
    let mut cluster = cluster(2);
    cluster.bus.part(0, 1, true);
    // 400 prompts of 600 different blocks: 2 MiB of keys. The paths that peers could know are replaced meanwhile.
    let long = |prompt: u64| (0..600).map(|at| BlockKey(prompt * 1_000 + at)).collect::<Vec<_>>();
    let _routed: Vec<Routed> = (1..=400).map(|prompt| cluster.route(0, 0, &long(prompt))).collect();
    for prompt in 1_000..2_000 {
        drop(cluster.route(0, 0, &long(prompt)));
    }
    cluster.pass(SILENT_AFTER);
    cluster.bus.part(0, 1, false);
    cluster.pass(Duration::from_secs(2));
    assert_eq!(in_flight(&cluster), [400, 400]);
    assert_eq!(cluster.members[1].replica.stats().invalid_messages.load(Relaxed), 0);
}

#[test]
fn prompt_of_an_ended_request_is_recorded_although_its_end_was_lost() {
    let mut cluster = cluster(2);
    let reliable = MemoryBusSettings { delay: DELAY, ..MemoryBusSettings::default() };
    let lossy = MemoryBusSettings { loss: 1.0, ..reliable };
    // The peer does not know the path that the second booking refers to, and asks for its keys.
    cluster.bus.set(lossy);
    let first = cluster.route(0, 0, &keys(20));
    cluster.pass(DELAY);
    cluster.bus.set(reliable);
    let Routed { mut booking, shared, .. } = cluster.route(0, 0, &keys(20));
    cluster.pass(DELAY + Duration::from_millis(1));
    // The request ends before the question arrives, and the news is lost.
    booking.first_byte(true, true, cluster.now);
    shared.first_byte(true, true, cluster.now);
    let extend = |keys: &mut Vec<BlockKey>| {
        keys.extend([21, 22].map(BlockKey));
        true
    };
    booking.end(true, &Usage::default(), extend, cluster.now);
    shared.ended(true, &Usage::default(), vec![21, 22], cluster.now);
    cluster.bus.set(lossy);
    cluster.pass(Duration::from_millis(3));
    cluster.bus.set(reliable);
    cluster.pass(2 * HEARTBEAT_EVERY);
    assert_eq!(cluster.depths(&keys(22)), [[22, 0, 0]; 2]);
    finish(&cluster, first);
    cluster.pass(2 * DELAY);
    assert_eq!(in_flight(&cluster), [0, 0]);
}

#[test]
fn earlier_move_that_arrives_later_changes_nothing() {
    let mut cluster = cluster(2);
    let reliable = MemoryBusSettings { delay: DELAY, ..MemoryBusSettings::default() };
    let mut routed = cluster.route(0, 0, &keys(20));
    cluster.pass(DELAY);
    for (endpoint, loss) in [(1, 1.0), (2, 0.0)] {
        cluster.bus.set(MemoryBusSettings { loss, ..reliable });
        let to = cluster.members[0].store.load().endpoints[endpoint].endpoint.clone();
        routed.booking.move_to(&to, cluster.now);
        routed.shared.moved(&to, cluster.now);
        cluster.pass(Duration::from_millis(3));
    }
    cluster.pass(2 * HEARTBEAT_EVERY);
    let loads = cluster.loads();
    assert_eq!(loads[1], loads[0]);
    assert_eq!(cluster.members[1].replica.stats().digest_mismatches.load(Relaxed), 0);
    finish(&cluster, routed);
    cluster.pass(2 * DELAY);
    assert_eq!(cluster.depths(&keys(20)), [[0, 0, 20]; 2]);
}

#[test]
fn end_of_a_session_reaches_each_peer_once() {
    let mut cluster = cluster(3);
    cluster.bus.set(MemoryBusSettings { delay: DELAY, loss: 0.5, duplicates: 0.5, seed: 3, ..Default::default() });
    for session in 1..=20 {
        cluster.members[0].replica.session_ended(session, cluster.now);
        cluster.pass(Duration::from_millis(3));
    }
    cluster.bus.set(MemoryBusSettings { delay: DELAY, ..MemoryBusSettings::default() });
    cluster.pass(2 * HEARTBEAT_EVERY);
    let mut told: Vec<Vec<String>> = cluster.members.iter().map(|member| member.records.0.lock().clone()).collect();
    told.iter_mut().for_each(|told| told.sort());
    let mut all: Vec<String> = (1..=20).map(|session| format!("session {session} ended")).collect();
    all.sort();
    assert_eq!(told, [Vec::new(), all.clone(), all], "those of this picker are no news to it");
}
