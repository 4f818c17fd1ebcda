//! What a faulty or hostile picker can make the others hold.

use super::cluster::{Cluster, Member};
use crate::generated::v1;
use crate::wire::encode;
use crate::{EndpointKey, MemoryBusSettings};
use attache_prefix::key::BlockKey;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use v1::event::Kind;
use v1::message::Body;

/// The identity of the hostile picker.
const SENDER: u64 = 99;

fn cluster() -> Cluster {
    Cluster::new(1, MemoryBusSettings::default())
}

/// The only picker receives a message of the hostile one.
fn send(cluster: &Cluster, body: Body) {
    cluster.members[0].replica.receive(Some(SENDER), &encode(SENDER, None, body), cluster.now);
}

fn batch(number: u64, kinds: impl IntoIterator<Item = Kind>) -> Body {
    let events = kinds.into_iter().map(|kind| v1::Event { kind: Some(kind) }).collect();
    Body::Batch(v1::Batch { number, events })
}

/// A booking on the first endpoint of the picker.
fn booked(member: &Member, request: u64) -> v1::Booked {
    let endpoint = &member.store.load().endpoints[0].endpoint.spec;
    let EndpointKey(endpoint) = member.replica.key("pool", endpoint);
    v1::Booked { request, endpoint, ..v1::Booked::default() }
}

/// Requests in flight of the hostile picker.
fn requests(cluster: &Cluster) -> usize {
    cluster.members[0].replica.peers(cluster.now).iter().map(|peer| peer.requests).sum()
}

#[test]
fn requests_of_one_picker_are_bounded() {
    let cluster = cluster();
    let member = &cluster.members[0];
    for number in 1..=7u64 {
        let first = number * 10_000;
        send(&cluster, batch(number, (first..first + 10_000).map(|request| Kind::Booked(booked(member, request)))));
    }
    assert_eq!(requests(&cluster), 65_536);
    assert_eq!(member.replica.stats().excess_requests.load(Relaxed), 70_000 - 65_536);
}

#[test]
fn full_state_that_never_ends_is_dropped() {
    let cluster = cluster();
    let member = &cluster.members[0];
    // A digest that the batches so far do not have makes the picker ask for the full state.
    send(&cluster, Body::Heartbeat(v1::Heartbeat { digest: 1, ..v1::Heartbeat::default() }));
    for part in 0..8 {
        let requests = (0..20_000).map(|request| booked(member, request)).collect();
        send(&cluster, Body::Column(v1::Column { at_batch: 1, part, parts: 4_096, requests, first_kept: 0 }));
    }
    // Three parts fit.
    assert_eq!(member.replica.stats().excess_requests.load(Relaxed), 2);
    assert_eq!(requests(&cluster), 0);
}

#[test]
fn large_full_state_that_never_ends_is_dropped() {
    let mut cluster = cluster();
    send(&cluster, Body::Heartbeat(v1::Heartbeat { digest: 1, ..v1::Heartbeat::default() }));
    for part in 0..70 {
        cluster.now = cluster.now.after(Duration::from_millis(100));
        let blocks = Some(v1::Blocks { keys: vec![u64::MAX; 130_000], ..v1::Blocks::default() });
        let requests = vec![v1::Booked { blocks, ..booked(&cluster.members[0], part.into()) }];
        send(&cluster, Body::Column(v1::Column { at_batch: 1, part, parts: 4_096, requests, first_kept: 0 }));
    }
    // 64 parts of 1 MiB fit.
    assert_eq!(cluster.members[0].replica.stats().excess_requests.load(Relaxed), 1);
}

#[test]
fn requests_for_missed_messages_get_bounded_answers() {
    let mut cluster = cluster();
    let keys: Vec<BlockKey> = (1..=8_000).map(BlockKey).collect();
    let _routed = cluster.route(0, 0, &keys);
    let answers = |cluster: &Cluster, asked: v1::Resend| {
        cluster.members[0].sent.0.lock().clear();
        send(cluster, Body::Resend(asked));
        cluster.members[0].sent.0.lock().iter().filter(|(to, _)| *to == Some(SENDER)).count()
    };
    let asked = v1::Resend {
        batches: vec![v1::Range { first: 1, last: u64::MAX }; 1_000],
        requests: vec![1; 1_000],
        ..v1::Resend::default()
    };
    assert_eq!(answers(&cluster, asked.clone()), 2, "each batch and each prompt once");
    assert_eq!(answers(&cluster, asked.clone()), 0, "too soon");
    cluster.now = cluster.now.after(Duration::from_millis(100));
    assert_eq!(answers(&cluster, asked), 2);
    // 64 KB each.
    let more: Vec<_> = (0..200).map(|_| cluster.route(0, 0, &keys)).collect();
    cluster.now = cluster.now.after(Duration::from_millis(100));
    assert_eq!(
        answers(&cluster, v1::Resend { requests: (1..=more.len() as u64).collect(), ..v1::Resend::default() }),
        65
    );
}

#[test]
fn moves_of_a_request_are_bounded() {
    let cluster = cluster();
    let member = &cluster.members[0];
    send(&cluster, batch(1, [Kind::Booked(booked(member, 1))]));
    let snapshot = member.store.load();
    let [here, there] = [0, 1].map(|at| member.replica.key("pool", &snapshot.endpoints[at].endpoint.spec).0);
    let moves = (0..17).map(|at| if at % 2 == 0 { there } else { here });
    send(&cluster, batch(2, moves.map(|endpoint| Kind::Moved(v1::Moved { request: 1, endpoint }))));
    let loads: Vec<u32> = cluster.loads()[0].iter().map(|(requests, _)| *requests).collect();
    assert_eq!(loads, [1, 0, 0], "the last move does not count");
}

#[test]
fn short_messages_that_name_long_prompts_count_as_long_ones() {
    let cluster = cluster();
    let member = &cluster.members[0];
    // Each prompt extends the one before by a chunk, so that its base is known. 0.8 MB of keys are the first base.
    let keys: Vec<u64> = (1..=100_000).collect();
    let mut book = crate::paths::PathBook::default();
    let _ = book.extend(0, 0, &keys);
    let path: Vec<_> = keys.iter().copied().map(BlockKey).collect();
    let base = book.shorten(&path);
    let prompt = |blocks| Kind::Booked(v1::Booked { blocks: Some(blocks), ..booked(member, 0) });
    send(&cluster, batch(1, [prompt(v1::Blocks { keys, whole: true, ..v1::Blocks::default() })]));
    for number in 2..=1_000 {
        let blocks =
            v1::Blocks { base: base.base, base_blocks: base.base_blocks, whole: true, ..v1::Blocks::default() };
        let booking = v1::Booked { blocks: Some(blocks), ..booked(member, number) };
        send(&cluster, batch(number, [Kind::Booked(booking)]));
    }
    // 64 MiB per second are 82 of them.
    assert_eq!(requests(&cluster), 83);
    assert_eq!(member.replica.stats().excess_messages.load(Relaxed), 1_000 - 83);
}

#[test]
fn message_of_empty_events_stops_its_sender_for_a_second() {
    let mut cluster = cluster();
    let received = |cluster: &Cluster| cluster.members[0].replica.stats().received_messages.load(Relaxed);
    send(&cluster, Body::Batch(v1::Batch { number: 1, events: vec![v1::Event { kind: None }; 524_200] }));
    for number in 2..100 {
        send(&cluster, batch(number, []));
    }
    assert!(received(&cluster) < 10, "{} messages", received(&cluster));
    let before = received(&cluster);
    cluster.now = cluster.now.after(Duration::from_secs(1));
    send(&cluster, batch(100, []));
    assert_eq!(received(&cluster), before + 1);
}

#[test]
fn losses_of_unknown_endpoints_are_not_remembered() {
    let cluster = cluster();
    send(&cluster, batch(1, (1..=10_000).map(|endpoint| Kind::Lost(v1::Lost { endpoint }))));
    let replica = &cluster.members[0].replica;
    assert_eq!(replica.stats().unknown_endpoints.load(Relaxed), 10_000);
    assert!(replica.peers.lock().losses.is_empty());
}

#[test]
fn batches_behind_thousands_of_gaps_wait_for_the_full_state() {
    let cluster = cluster();
    let member = &cluster.members[0];
    for number in 1..=10_000 {
        send(&cluster, batch(2 * number, [Kind::Booked(booked(member, number))]));
    }
    assert_eq!(requests(&cluster), 4_097);
    send(
        &cluster,
        Body::Column(v1::Column {
            at_batch: 20_000,
            part: 0,
            parts: 1,
            requests: vec![booked(member, 7)],
            first_kept: 0,
        }),
    );
    assert_eq!(requests(&cluster), 1);
    send(&cluster, batch(20_001, [Kind::Booked(booked(member, 10_001))]));
    assert_eq!(requests(&cluster), 2);
}

#[test]
fn long_name_of_a_picker_is_cut() {
    let cluster = cluster();
    let name = "é".repeat(100_000);
    send(&cluster, Body::Heartbeat(v1::Heartbeat { name, ..v1::Heartbeat::default() }));
    assert_eq!(cluster.members[0].replica.peers(cluster.now)[0].name, "é".repeat(256));
}

/// A heartbeat of `sender` arrives at the only picker.
fn heartbeat(cluster: &Cluster, sender: u64, last_batch: u64) {
    let name = format!("p{sender:x}");
    let body = Body::Heartbeat(v1::Heartbeat { name, last_batch, ..v1::Heartbeat::default() });
    cluster.members[0].replica.receive(Some(sender), &encode(sender, None, body), cluster.now);
}

fn knows(cluster: &Cluster, sender: u64) -> bool {
    cluster.members[0].replica.peers(cluster.now).iter().any(|peer| peer.sender == sender)
}

#[test]
fn invented_senders_of_one_picker_do_not_keep_another_one_out() {
    let cluster = cluster();
    let hostile = |process: u64| crate::sender_of("hostile", process);
    let honest: Vec<u64> = ["a", "b", "c"].map(|name| crate::sender_of(name, 1)).into();
    heartbeat(&cluster, honest[0], 0);
    (0..500).for_each(|process| heartbeat(&cluster, hostile(process), 0));
    let replica = &cluster.members[0].replica;
    assert_eq!(replica.peers(cluster.now).len(), 64);
    honest.iter().for_each(|sender| heartbeat(&cluster, *sender, 0));
    (500..1_000).for_each(|process| heartbeat(&cluster, hostile(process), 0));
    assert!(honest.iter().all(|sender| knows(&cluster, *sender)));
    assert_eq!(replica.peers(cluster.now).len(), 64);
    assert_eq!(replica.stats().refused_senders.load(Relaxed), 1_000 - 63);
}

#[test]
fn silent_senders_of_many_names_make_room_for_a_new_picker() {
    let mut cluster = cluster();
    let invented: Vec<u64> = (0..64).map(|n| crate::sender_of(&format!("p{n}"), 1)).collect();
    invented.iter().for_each(|sender| heartbeat(&cluster, *sender, 0));
    let new = crate::sender_of("new", 1);
    heartbeat(&cluster, new, 0);
    assert!(!knows(&cluster, new), "all others are heard");
    cluster.now = cluster.now.after(crate::SILENT_AFTER);
    invented.iter().skip(1).for_each(|sender| heartbeat(&cluster, *sender, 0));
    heartbeat(&cluster, new, 0);
    assert!(knows(&cluster, new) && !knows(&cluster, invented[0]));
}

#[test]
fn full_state_at_the_last_number_does_not_hide_its_sender() {
    let mut cluster = cluster();
    let book = |cluster: &Cluster, number: u64| {
        send(cluster, batch(number, [Kind::Booked(booked(&cluster.members[0], number))]));
    };
    let forged =
        Body::Column(v1::Column { at_batch: u64::MAX, part: 0, parts: 1, requests: Vec::new(), first_kept: 0 });
    heartbeat(&cluster, SENDER, 0);
    (1..=3).for_each(|number| book(&cluster, number));
    send(&cluster, forged.clone());
    book(&cluster, 4);
    assert_eq!(requests(&cluster), 4, "no picker has asked for a full state");
    let contradictions = |cluster: &Cluster| cluster.members[0].replica.stats().contradictions.load(Relaxed);
    assert_eq!(contradictions(&cluster), 1);
    // A heartbeat under the same sender announces the number, so that the full state is asked for and taken.
    heartbeat(&cluster, SENDER, u64::MAX);
    send(&cluster, forged);
    assert_eq!(requests(&cluster), 0);
    let mut number = 4;
    while requests(&cluster) == 0 {
        assert!(number < 12, "the sender stays hidden");
        number += 1;
        cluster.now = cluster.now.after(crate::HEARTBEAT_EVERY);
        book(&cluster, number);
        heartbeat(&cluster, SENDER, number);
        let all = (1..=number).map(|request| booked(&cluster.members[0], request)).collect();
        send(&cluster, Body::Column(v1::Column { at_batch: number, part: 0, parts: 1, requests: all, first_kept: 0 }));
    }
    assert_eq!(requests(&cluster) as u64, number);
    assert!(contradictions(&cluster) >= 2);
}

#[test]
fn batch_far_ahead_does_not_hide_those_before_it() {
    let mut cluster = cluster();
    heartbeat(&cluster, SENDER, 7);
    for number in [u64::MAX, 8 + (1 << 17)] {
        send(&cluster, batch(number, [Kind::Booked(booked(&cluster.members[0], 1))]));
    }
    assert_eq!((requests(&cluster), cluster.members[0].replica.stats().contradictions.load(Relaxed)), (0, 2));
    send(&cluster, batch(8, [Kind::Booked(booked(&cluster.members[0], 2))]));
    assert_eq!(requests(&cluster), 1);
    // As the first message of its sender, it is one of a picker that runs for long; heartbeats correct it.
    let other = 77;
    let first = batch(u64::MAX, [Kind::Booked(booked(&cluster.members[0], 3))]);
    cluster.members[0].replica.receive(Some(other), &encode(other, None, first), cluster.now);
    for last_batch in [0, 0, 0] {
        cluster.now = cluster.now.after(crate::HEARTBEAT_EVERY);
        heartbeat(&cluster, other, last_batch);
    }
    let peers = cluster.members[0].replica.peers(cluster.now);
    let other = peers.iter().find(|peer| peer.sender == other).expect("it is heard");
    assert_eq!(other.requests, 0, "nothing of it stays");
}

#[test]
fn loss_that_is_repeated_clears_a_cache_once() {
    let mut cluster = cluster();
    let endpoint = booked(&cluster.members[0], 1).endpoint;
    for number in 1..=10 {
        send(&cluster, batch(number, [Kind::Lost(v1::Lost { endpoint }), Kind::Lost(v1::Lost { endpoint })]));
    }
    assert_eq!(cluster.members[0].losses.0.lock().len(), 1);
    cluster.now = cluster.now.after(Duration::from_secs(5));
    send(&cluster, batch(11, [Kind::Lost(v1::Lost { endpoint })]));
    assert_eq!(cluster.members[0].losses.0.lock().len(), 2);
}
