//! Single requests and chunks of a prefix index, as a peer of any behaviour may send them.

use super::cluster::{Cluster, ENDPOINTS, Member};
use super::snapshot::{DELAY, cluster, count, fill, state};
use crate::generated::v1;
use crate::pools::Pools;
use crate::serving::CHUNK_EVERY;
use crate::wire::encode;
use crate::{HEARTBEAT_EVERY, MemoryBusSettings, SnapshotState};
use attache_prefix::index::TenantId;
use attache_prefix::key::BlockKey;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use prost::Message as _;
use std::time::Duration;
use v1::message::Body;

/// A process that is no member of the cluster.
const STRANGER: u64 = 99;

/// Time passes with heartbeats of [`STRANGER`]. Returns the requests for chunks that it gets.
fn pass_with_stranger(cluster: &mut Cluster, heartbeats: u32) -> usize {
    let heartbeat = v1::Heartbeat { name: "stranger".into(), ..v1::Heartbeat::default() };
    let mut requests = 0;
    for _ in 0..heartbeats {
        let message = encode(STRANGER, None, Body::Heartbeat(heartbeat.clone()));
        cluster.members[0].replica.receive(Some(STRANGER), &message, cluster.now);
        for _ in 0..HEARTBEAT_EVERY.as_millis() {
            cluster.now = cluster.now.after(Duration::from_millis(1));
            let _ = cluster.members[0].replica.tick(cluster.now);
            let sent = std::mem::take(&mut *cluster.members[0].sent.0.lock());
            let read = |(_, message): &(Option<u64>, Vec<u8>)| v1::Message::decode(&message[..]).unwrap().body;
            requests += sent.iter().filter(|sent| matches!(read(sent), Some(Body::SnapshotRequest(_)))).count();
        }
    }
    requests
}

/// A cluster of one picker that waits for a chunk of [`STRANGER`].
fn asking() -> Cluster {
    let mut cluster = Cluster::new(1, MemoryBusSettings::default());
    // Without metrics, it asks after 2 s.
    assert_eq!(pass_with_stranger(&mut cluster, 5), 1);
    assert_eq!(state(&cluster, 0), SnapshotState::Importing);
    cluster
}

#[test]
fn peer_that_does_not_answer_is_asked_three_times_and_again_later() {
    let mut cluster = asking();
    assert_eq!(pass_with_stranger(&mut cluster, 6), 2);
    assert_eq!(state(&cluster, 0), SnapshotState::Waiting);
    assert_eq!(pass_with_stranger(&mut cluster, 18), 0);
    assert_eq!(pass_with_stranger(&mut cluster, 6), 3);
}

/// The last chunk of the pool: one run of three blocks on the first endpoint.
fn chunk(cluster: &Cluster) -> v1::SnapshotChunk {
    let member = &cluster.members[0];
    let snapshot = member.store.load();
    let endpoint = member.replica.key("pool", &snapshot.endpoints[0].endpoint.spec).0;
    let run = v1::SnapshotRun {
        keys: vec![1, 2, 3],
        holders: vec![0],
        holder_blocks: vec![3],
        holder_ages_ms: vec![10],
        ..v1::SnapshotRun::default()
    };
    let (pool, endpoints) = (Pools::key(7, "pool"), vec![endpoint]);
    v1::SnapshotChunk { pool, block_tokens: 16, endpoints, runs: vec![run], ..v1::SnapshotChunk::default() }
}

fn receive(cluster: &Cluster, chunk: v1::SnapshotChunk) {
    let message = encode(STRANGER, None, Body::SnapshotChunk(chunk));
    cluster.members[0].replica.receive(Some(STRANGER), &message, cluster.now);
}

fn depths(cluster: &Cluster) -> [u32; ENDPOINTS] {
    cluster.depths(&[1, 2, 3].map(BlockKey))[0]
}

#[test]
fn chunk_that_breaks_the_rules_changes_nothing_and_is_counted() {
    type Change = fn(&mut v1::SnapshotChunk);
    let invalid: [Change; 9] = [
        |chunk| chunk.runs[0].holders = vec![1],
        |chunk| chunk.runs[0].holder_blocks = vec![4],
        |chunk| chunk.runs[0].holder_ages_ms = vec![],
        |chunk| chunk.runs[0].keys.clear(),
        |chunk| chunk.runs[0].keys = vec![1; 5_000],
        |chunk| chunk.runs[0].parent = Some(0),
        |chunk| chunk.runs[0].offset = 1,
        |chunk| chunk.next = Some(0),
        |chunk| chunk.block_tokens = 0,
    ];
    for (at, change) in invalid.into_iter().enumerate() {
        let mut cluster = asking();
        let mut chunk = chunk(&cluster);
        change(&mut chunk);
        receive(&cluster, chunk);
        let member = &cluster.members[0];
        assert_eq!((depths(&cluster), count(member, |s| &s.invalid_chunks)), ([0; ENDPOINTS], 1), "{at}");
        // Its sender is not asked again, and there is no other one.
        cluster.pass(2 * HEARTBEAT_EVERY + DELAY);
        assert_eq!(state(&cluster, 0), SnapshotState::Done);
    }
}

#[test]
fn chunk_with_blocks_of_another_size_changes_nothing_and_is_counted() {
    for (tokens, bytes) in [(32, 0), (0, 16), (16, 64)] {
        let cluster = asking();
        receive(&cluster, v1::SnapshotChunk { block_tokens: tokens, block_bytes: bytes, ..chunk(&cluster) });
        let member = &cluster.members[0];
        assert_eq!((depths(&cluster), count(member, |s| &s.block_mismatches)), ([0; ENDPOINTS], 1));
    }
}

#[test]
fn request_with_blocks_of_another_size_gets_no_blocks() {
    let cluster = cluster(1);
    fill(&cluster, 0);
    let request = |block_tokens, pool| v1::SnapshotRequest { pool, block_tokens, ..v1::SnapshotRequest::default() };
    let requests = [request(32, Pools::key(7, "pool")), request(16, Pools::key(7, "another pool"))];
    for (request, number) in requests.into_iter().zip(1..) {
        let chunk = ask(&cluster, request, cluster.now.after(CHUNK_EVERY * number)).unwrap();
        assert!(chunk.unavailable && chunk.runs.is_empty());
    }
    assert_eq!(count(&cluster.members[0], |s| &s.block_mismatches), 1);
}

#[test]
fn chunk_that_was_not_requested_is_ignored() {
    let cluster = asking();
    let requested = chunk(&cluster);
    receive(&cluster, v1::SnapshotChunk { cursor: 5, ..requested.clone() });
    receive(&cluster, v1::SnapshotChunk { pool: 5, ..requested.clone() });
    let message = encode(98, None, Body::SnapshotChunk(requested.clone()));
    cluster.members[0].replica.receive(Some(98), &message, cluster.now);
    assert_eq!((depths(&cluster), state(&cluster, 0)), ([0; ENDPOINTS], SnapshotState::Importing));
    receive(&cluster, requested);
    assert_eq!((depths(&cluster), state(&cluster, 0)), ([3, 0, 0], SnapshotState::Done));
}

#[test]
fn blocks_of_unknown_endpoints_are_skipped() {
    let cluster = asking();
    let mut chunk = chunk(&cluster);
    chunk.endpoints.insert(0, 12_345);
    let run = &mut chunk.runs[0];
    (run.holders, run.holder_blocks, run.holder_ages_ms) = (vec![0, 1], vec![3, 2], vec![1, 2]);
    receive(&cluster, chunk);
    assert_eq!(depths(&cluster), [2, 0, 0]);
    assert_eq!(count(&cluster.members[0], |s| &s.imported_blocks), 2);
}

#[test]
fn cache_that_is_lost_after_the_request_is_not_imported() {
    let cluster = asking();
    let chunk = chunk(&cluster);
    let lost = v1::event::Kind::Lost(v1::Lost { endpoint: chunk.endpoints[0] });
    let batch = v1::Batch { number: 1, events: vec![v1::Event { kind: Some(lost) }] };
    let message = encode(STRANGER, None, Body::Batch(batch));
    cluster.members[0].replica.receive(Some(STRANGER), &message, cluster.now);
    receive(&cluster, chunk);
    assert_eq!((depths(&cluster), state(&cluster, 0)), ([0; ENDPOINTS], SnapshotState::Done));
}

/// Hands a request of [`STRANGER`] to the only picker at `now`. Returns the chunk, if it was sent.
fn ask(cluster: &Cluster, request: v1::SnapshotRequest, now: Timestamp) -> Option<v1::SnapshotChunk> {
    let member = &cluster.members[0];
    member.sent.0.lock().clear();
    member.replica.receive(Some(STRANGER), &encode(STRANGER, None, Body::SnapshotRequest(request)), now);
    sent_chunk(member)
}

fn sent_chunk(member: &Member) -> Option<v1::SnapshotChunk> {
    let sent = std::mem::take(&mut *member.sent.0.lock());
    sent.into_iter().find_map(|(to, message)| {
        let Some(Body::SnapshotChunk(chunk)) = v1::Message::decode(&message[..]).unwrap().body else { return None };
        assert_eq!(to, Some(STRANGER));
        assert!(message.len() <= 256 << 10, "{} bytes", message.len());
        Some(chunk)
    })
}

#[test]
fn peer_that_asks_too_often_gets_one_chunk_each_five_milliseconds() {
    let cluster = cluster(1);
    fill(&cluster, 0);
    let request = v1::SnapshotRequest { pool: Pools::key(7, "pool"), block_tokens: 16, ..Default::default() };
    let now = cluster.now;
    assert!(ask(&cluster, request, now).is_some());
    assert!(ask(&cluster, request, now).is_none());
    let member = &cluster.members[0];
    assert!(member.replica.tick(now) <= now.after(CHUNK_EVERY), "the next call is early enough");
    assert!(sent_chunk(member).is_none());
    let _ = member.replica.tick(now.after(CHUNK_EVERY));
    assert!(sent_chunk(member).is_some());
}

#[test]
fn messages_stay_below_the_limit_whatever_the_index_holds() {
    let cluster = cluster(1);
    let cache = &cluster.members[0].cache;
    // One prompt of more than a chunk, and prompts of one block.
    cache.record(EndpointId(0), &(1..100_000).map(BlockKey).collect::<Vec<_>>(), TenantId(u32::MAX), cluster.now);
    for key in 1..30_000_u64 {
        cache.record(EndpointId((key % 3) as u32), &[BlockKey(key << 32)], TenantId(u32::MAX), cluster.now);
    }
    let (mut next, mut now, mut runs) = (Some(0), cluster.now, 0);
    while let Some(cursor) = next {
        now = now.after(Duration::from_secs(3_600));
        let request = v1::SnapshotRequest { pool: Pools::key(7, "pool"), cursor, block_tokens: 16, block_bytes: 0 };
        let chunk = ask(&cluster, request, now).unwrap();
        assert!(chunk.next.is_none_or(|next| next > cursor));
        runs += chunk.runs.len();
        next = chunk.next;
    }
    assert!(runs >= 29_999, "{runs}");
}

#[test]
fn import_without_an_end_stops_after_two_minutes() {
    let mut cluster = asking();
    let mut cursor = 0;
    while state(&cluster, 0) != SnapshotState::Done {
        assert!(cursor < 400, "it goes on and on");
        let endless = v1::SnapshotChunk { cursor, next: Some(cursor + 1), ..chunk(&cluster) };
        let message = encode(STRANGER, None, Body::SnapshotChunk(endless));
        cluster.members[0].replica.receive(Some(STRANGER), &message, cluster.now);
        pass_with_stranger(&mut cluster, 1);
        cursor += 1;
    }
    assert!(cursor > 200, "an import may take two minutes: {cursor}");
    let stats = cluster.members[0].replica.stats();
    assert_eq!(stats.unfinished_imports.load(std::sync::atomic::Ordering::Relaxed), 1);
}
