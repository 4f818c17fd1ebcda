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
fn column_that_never_ends_is_dropped() {
    let cluster = cluster();
    let member = &cluster.members[0];
    // A digest that the batches so far do not have makes the picker ask for the column.
    send(&cluster, Body::Heartbeat(v1::Heartbeat { digest: 1, ..v1::Heartbeat::default() }));
    for part in 0..8 {
        let requests = (0..20_000).map(|request| booked(member, request)).collect();
        send(&cluster, Body::Column(v1::Column { at_batch: 1, part, parts: 4_096, requests }));
    }
    // Three parts fit.
    assert_eq!(member.replica.stats().excess_requests.load(Relaxed), 2);
    assert_eq!(requests(&cluster), 0);
}

#[test]
fn large_column_that_never_ends_is_dropped() {
    let mut cluster = cluster();
    send(&cluster, Body::Heartbeat(v1::Heartbeat { digest: 1, ..v1::Heartbeat::default() }));
    for part in 0..70 {
        cluster.now = cluster.now.after(Duration::from_millis(100));
        let blocks = Some(v1::Blocks { keys: vec![u64::MAX; 130_000], ..v1::Blocks::default() });
        let requests = vec![v1::Booked { blocks, ..booked(&cluster.members[0], part.into()) }];
        send(&cluster, Body::Column(v1::Column { at_batch: 1, part, parts: 4_096, requests }));
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
fn batches_behind_thousands_of_gaps_wait_for_the_column() {
    let cluster = cluster();
    let member = &cluster.members[0];
    for number in 1..=10_000 {
        send(&cluster, batch(2 * number, [Kind::Booked(booked(member, number))]));
    }
    assert_eq!(requests(&cluster), 4_097);
    send(&cluster, Body::Column(v1::Column { at_batch: 20_000, part: 0, parts: 1, requests: vec![booked(member, 7)] }));
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
