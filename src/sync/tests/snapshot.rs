//! A picker that joins imports the prefix index of a peer.

use super::cluster::{Cluster, ENDPOINTS, Member, Routed};
use crate::paths::mix;
use crate::{HEARTBEAT_EVERY, MemoryBusSettings, SnapshotState};
use attache_pool::PoolSnapshot;
use attache_prefix::index::TenantId;
use attache_prefix::key::BlockKey;
use attache_protocol::Usage;
use attache_types::ids::EndpointId;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

pub(super) const DELAY: Duration = Duration::from_millis(5);
/// Long enough to hear peers, to wait for metrics, and to import.
const JOIN: Duration = Duration::from_secs(4);
const PROMPTS: u64 = 500;

/// A cluster whose pickers have ended their own import.
pub(super) fn cluster(pickers: usize) -> Cluster {
    let mut cluster = Cluster::new(pickers, MemoryBusSettings { delay: DELAY, ..MemoryBusSettings::default() });
    cluster.pass(4 * HEARTBEAT_EVERY);
    cluster
}

/// The blocks of a prompt: a system prompt, and blocks of its own.
fn prompt(number: u64) -> Vec<BlockKey> {
    let key = |text: u64, block: u64| BlockKey(mix(text << 32 | block));
    (1..60).map(|block| key(number % 4, block)).chain((60..259).map(|block| key(10 + number, block))).collect()
}

/// Records prompts on a picker: 100,000 blocks, several chunks.
pub(super) fn fill(cluster: &Cluster, picker: usize) {
    for number in 0..PROMPTS {
        let endpoint = EndpointId((number % ENDPOINTS as u64) as u32);
        cluster.members[picker].cache.record(endpoint, &prompt(number), TenantId(1), cluster.now);
    }
}

fn assert_equal_lookups(cluster: &Cluster, pickers: [usize; 2]) {
    for number in 0..PROMPTS {
        let depths = cluster.depths(&prompt(number));
        assert!(depths[pickers[0]].contains(&258), "prompt {number} is held as a whole: {depths:?}");
        assert_eq!(depths[pickers[0]], depths[pickers[1]], "prompt {number}");
    }
}

pub(super) fn state(cluster: &Cluster, picker: usize) -> SnapshotState {
    cluster.members[picker].replica.snapshot().state
}

/// Lets time pass until `picker` has imported chunks. Returns the index of the peer that it asks.
fn pass_until_importing(cluster: &mut Cluster, picker: usize) -> usize {
    for _ in 0..5_000 {
        cluster.pass(Duration::from_millis(1));
        let progress = cluster.members[picker].replica.snapshot();
        if progress.state == SnapshotState::Importing && progress.chunks > 0 {
            return cluster.members.iter().position(|member| Some(member.replica.sender()) == progress.peer).unwrap();
        }
    }
    panic!("no chunk was imported: {:?}", cluster.members[picker].replica.snapshot());
}

pub(super) fn count(member: &Member, counter: impl Fn(&crate::SyncStats) -> &AtomicU64) -> u64 {
    counter(member.replica.stats()).load(Relaxed)
}

#[test]
fn joining_picker_finds_what_its_peer_finds() {
    let mut cluster = cluster(2);
    fill(&cluster, 0);
    cluster.restart(1);
    assert_eq!(state(&cluster, 1), SnapshotState::Waiting);
    cluster.pass(JOIN);
    assert_eq!(state(&cluster, 1), SnapshotState::Done);
    assert_equal_lookups(&cluster, [0, 1]);
    let (sent, received) =
        (count(&cluster.members[0], |s| &s.sent_chunks), count(&cluster.members[1], |s| &s.received_chunks));
    assert!(sent > 2 && sent == received, "{sent} {received}");
    assert_eq!(cluster.members[1].replica.snapshot().chunks, sent);
    let blocks = count(&cluster.members[1], |s| &s.imported_blocks);
    assert!(blocks >= PROMPTS * 199, "{blocks}");
}

#[test]
fn joining_picker_takes_over_the_learned_speed() {
    let mut cluster = cluster(2);
    for _ in 0..50 {
        let routed = cluster.route(0, 0, &prompt(1));
        cluster.pass(Duration::from_millis(700));
        let Routed { mut booking, shared, .. } = routed;
        booking.first_byte(true, true, cluster.now);
        shared.first_byte(true, true, cluster.now);
        booking.end(true, &Usage::default(), |_| false, cluster.now);
        shared.ended(true, &Usage::default(), Vec::new(), cluster.now);
    }
    cluster.restart(1);
    let speed = |cluster: &Cluster, picker: usize| {
        let snapshot = cluster.members[picker].store.load();
        snapshot.endpoints[0].endpoint.speed.pool().export()
    };
    assert_ne!(speed(&cluster, 0), speed(&cluster, 1));
    cluster.pass(JOIN);
    assert_eq!(speed(&cluster, 0), speed(&cluster, 1));
}

#[test]
fn lost_repeated_and_overtaken_chunks_are_repaired() {
    for seed in 0..6 {
        let mut cluster = cluster(3);
        (0..2).for_each(|picker| fill(&cluster, picker));
        let jitter = Duration::from_millis(1_200);
        cluster.bus.set(MemoryBusSettings { delay: DELAY, jitter, loss: 0.1, duplicates: 0.5, seed });
        cluster.restart(2);
        cluster.pass(Duration::from_secs(40));
        assert_eq!(state(&cluster, 2), SnapshotState::Done, "seed {seed}");
        assert_equal_lookups(&cluster, [0, 2]);
    }
}

#[test]
fn peer_that_dies_in_the_middle_is_replaced_by_another_one() {
    let mut cluster = cluster(3);
    (0..2).for_each(|picker| fill(&cluster, picker));
    cluster.restart(2);
    let peer = pass_until_importing(&mut cluster, 2);
    cluster.bus.part(2, peer, true);
    let other = 1 - peer;
    let sent = count(&cluster.members[other], |s| &s.sent_chunks);
    cluster.pass(2 * JOIN);
    assert_eq!(state(&cluster, 2), SnapshotState::Done);
    assert!(count(&cluster.members[other], |s| &s.sent_chunks) > sent + 2, "from the first chunk on");
    assert_equal_lookups(&cluster, [other, 2]);
}

#[test]
fn peer_that_restarts_is_replaced_by_another_one() {
    let mut cluster = cluster(3);
    (0..2).for_each(|picker| fill(&cluster, picker));
    cluster.restart(2);
    let peer = pass_until_importing(&mut cluster, 2);
    cluster.restart(peer);
    cluster.pass(2 * JOIN);
    for joined in [2, peer] {
        assert_eq!(state(&cluster, joined), SnapshotState::Done);
        assert_equal_lookups(&cluster, [1 - peer, joined]);
    }
}

#[test]
fn pickers_that_join_together_ask_the_one_that_was_there() {
    let mut cluster = cluster(4);
    fill(&cluster, 0);
    (1..4).for_each(|picker| cluster.restart(picker));
    cluster.pass(2 * JOIN);
    for joined in 1..4 {
        assert_equal_lookups(&cluster, [0, joined]);
        assert_eq!(count(&cluster.members[joined], |s| &s.sent_chunks), 0);
    }
}

#[test]
fn pickers_of_a_new_cluster_do_not_wait_for_each_other() {
    let mut cluster = Cluster::new(3, MemoryBusSettings { delay: DELAY, ..MemoryBusSettings::default() });
    cluster.pass(3 * HEARTBEAT_EVERY);
    assert!((0..3).all(|picker| state(&cluster, picker) == SnapshotState::Done));
    assert!(cluster.members.iter().all(|member| count(member, |s| &s.sent_chunks) == 0));
}

#[test]
fn picker_without_peers_waits_and_gives_its_index_to_the_first_one() {
    let mut cluster = Cluster::new(2, MemoryBusSettings { delay: DELAY, ..MemoryBusSettings::default() });
    cluster.bus.part(0, 1, true);
    fill(&cluster, 0);
    cluster.pass(Duration::from_secs(60));
    assert_eq!(state(&cluster, 0), SnapshotState::Waiting);
    cluster.restart(1);
    cluster.bus.part(0, 1, false);
    cluster.pass(JOIN);
    assert_equal_lookups(&cluster, [0, 1]);
    assert!((0..2).all(|picker| state(&cluster, picker) == SnapshotState::Done));
}

#[test]
fn request_routed_during_the_transfer_keeps_its_blocks() {
    let mut cluster = cluster(2);
    fill(&cluster, 0);
    cluster.restart(1);
    let _ = pass_until_importing(&mut cluster, 1);
    let keys: Vec<BlockKey> = prompt(0).into_iter().chain((1..50).map(|block| BlockKey(7 << 50 | block))).collect();
    let mut routed = [cluster.route(1, 2, &keys), cluster.route(0, 1, &keys)];
    for routed in &mut routed {
        routed.booking.first_byte(true, true, cluster.now);
        routed.shared.first_byte(true, true, cluster.now);
    }
    drop(routed);
    cluster.pass(JOIN);
    assert_eq!(cluster.depths(&keys), [[258, 307, 307]; 2]);
    assert_equal_lookups(&cluster, [0, 1]);
}

/// Gives a picker a second pool, which comes first. Returns the parts of the pool.
fn add_pool(cluster: &mut Cluster, picker: usize) -> Member {
    let parts = cluster.member();
    let member = &cluster.members[picker];
    member.replica.set_pools(vec![parts.view("added"), member.view("pool")]);
    parts
}

#[test]
fn pool_that_is_added_is_imported_and_the_others_are_not_again() {
    let mut cluster = cluster(2);
    let theirs = add_pool(&mut cluster, 0);
    theirs.cache.record(EndpointId(1), &prompt(0), TenantId(1), cluster.now);
    cluster.pass(JOIN);
    let imported = cluster.members[1].replica.snapshot().chunks;
    let ours = add_pool(&mut cluster, 1);
    assert_eq!(state(&cluster, 1), SnapshotState::Waiting);
    cluster.pass(JOIN);
    assert_eq!(state(&cluster, 1), SnapshotState::Done);
    assert_eq!(cluster.members[1].replica.snapshot().chunks, imported + 1);
    let keys = prompt(0);
    assert_eq!(ours.cache.lookup(&mut &keys[..], cluster.now).depth(EndpointId(1)).any, 258);
}

#[test]
fn pool_without_endpoints_does_not_hold_up_the_others() {
    let mut cluster = cluster(2);
    fill(&cluster, 0);
    cluster.restart(1);
    let undiscovered = add_pool(&mut cluster, 1);
    undiscovered.store.publish(PoolSnapshot::new(2, false, Vec::new()));
    let _theirs = add_pool(&mut cluster, 0);
    cluster.pass(JOIN);
    assert_equal_lookups(&cluster, [0, 1]);
    assert_ne!(state(&cluster, 1), SnapshotState::Done);
    undiscovered.store.publish(PoolSnapshot::new(3, true, Vec::new()));
    cluster.pass(JOIN);
    assert_eq!(state(&cluster, 1), SnapshotState::Done);
}
