//! Cost of sharing a prefix index with a replica that joins: a cache of 1,000,000 blocks is exported in chunks of 1 MiB
//! and imported into an empty one. Beside each half, another thread looks prompts up and records them, as decisions do.
//!
//! Prints seconds of the export and of the import, bytes of the chunks for each block, and the 99th percentile of a
//! lookup and of a record, beside the transfer and without it. Medians of five rounds.
//!
//! The transfer between two replicas has the same index in their messages: exported, encoded, decoded and imported by
//! one thread. It does not include the network, nor the 5 ms between two chunks.
//!
//! `cargo bench --bench prefix_transfer`

use attache_pool::health::HealthPolicy;
use attache_pool::{Endpoint, EndpointSpec, EndpointState, PoolSnapshot, SnapshotStore};
use attache_prefix::BlockKey;
use attache_prefix::ExportChunk;
use attache_prefix::cache::{BlockUnit, CacheConfig, DEFAULT_MAX_BYTES, DEFAULT_TENANT_SHARE, PrefixCache};
use attache_scheduling::digest::Digest;
use attache_scheduling::plugin::UserCharge;
use attache_sync::{
    CacheLossSink, Outbox, PeerRecord, PoolView, Replica, ReplicaSettings, SnapshotState, StrategyRecords,
};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use attache_types::rng::for_request;
use rand::RngExt;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64_with_seed;

const ROUNDS: usize = 5;
/// Transfers of a round, so that enough lookups are measured beside them.
const TRANSFERS: u32 = 20;
const BLOCKS: usize = 1_000_000;
const ENDPOINTS: u32 = 64;
const CHUNK_BYTES: usize = 1 << 20;
/// Conversations that are open at the same time, whose requests alternate.
const OPEN: usize = 200;
/// System prompts, each of 50 to 150 blocks.
const SYSTEM_PROMPTS: u64 = 16;
/// Blocks of a prompt.
const SHORTEST: usize = 200;
const LONGEST: usize = 1_000;
/// Times without a transfer are measured over as many lookups.
const LOOKUPS: usize = 50_000;
/// One record for each of so many lookups: most blocks of a prompt are recorded when its response begins.
const LOOKUPS_A_RECORD: usize = 2;

#[expect(clippy::disallowed_methods, reason = "a benchmark is a shell: it may ask for the time")]
fn now() -> Instant {
    Instant::now()
}

fn cache() -> PrefixCache {
    let cache = PrefixCache::new(&CacheConfig {
        claim_every_block: false,
        unit: BlockUnit::Tokens(16),
        max_bytes: DEFAULT_MAX_BYTES,
        tenant_share: DEFAULT_TENANT_SHARE,
        claim_life: Duration::from_secs(30),
        seed: 7,
    });
    cache.reconcile(&snapshot());
    cache
}

fn snapshot() -> PoolSnapshot {
    let spec = |id: u32| EndpointSpec::at(([10, 0, 0, 1], 8000 + id as u16).into());
    let endpoint = |id| Endpoint::new(EndpointId(id), spec(id));
    let endpoints = (0..ENDPOINTS).map(|id| EndpointState::new(Arc::new(endpoint(id)), None)).collect();
    PoolSnapshot::new(1, true, endpoints)
}

fn blocks(salt: u64, count: usize) -> impl Iterator<Item = BlockKey> {
    (0..count as u64).map(move |block| BlockKey(xxh3_64_with_seed(&block.to_le_bytes(), salt)))
}

/// A conversation: its last prompt, and the endpoint that serves it.
struct Conversation {
    keys: Vec<BlockKey>,
    endpoint: EndpointId,
}

/// Fills a cache with requests of conversations. Returns the last prompts.
fn fill(cache: &PrefixCache) -> Vec<Conversation> {
    let mut rng = for_request(1, 1);
    let mut salt = 1_000;
    let (mut open, mut done): (Vec<Conversation>, Vec<Conversation>) = (Vec::new(), Vec::new());
    let mut at = Timestamp(1_000_000_000);
    while cache.index().stats().blocks < BLOCKS {
        salt += 1;
        if open.len() < OPEN {
            let system = rng.random_range(0..SYSTEM_PROMPTS);
            let keys = blocks(system, 50 + 7 * system as usize).chain(blocks(salt, SHORTEST)).collect();
            open.push(Conversation { keys, endpoint: EndpointId(rng.random_range(0..ENDPOINTS)) });
        }
        let which = rng.random_range(0..open.len());
        let conversation = &mut open[which];
        conversation.keys.extend(blocks(salt, rng.random_range(10..150)));
        if rng.random_range(0..10) == 0 {
            // Another endpoint was less busy.
            conversation.endpoint = EndpointId(rng.random_range(0..ENDPOINTS));
        }
        at = at.after(Duration::from_millis(5));
        cache.record(conversation.endpoint, &conversation.keys, cache.tenant(Some("tenant")), at);
        if conversation.keys.len() > LONGEST - 150 {
            done.push(open.swap_remove(which));
        }
    }
    done.extend(open);
    done
}

/// Seconds of lookups and of records.
#[derive(Default)]
struct Latencies {
    lookups: Vec<f64>,
    records: Vec<f64>,
}

impl Latencies {
    /// Looks prompts up and records them, until `is_done` returns true for the number of lookups.
    fn measure(cache: &PrefixCache, prompts: &[Conversation], is_done: impl Fn(usize) -> bool) -> Self {
        let mut latencies = Self::default();
        let mut rng = for_request(2, 2);
        while !is_done(latencies.lookups.len()) {
            let Conversation { keys, endpoint } = &prompts[rng.random_range(0..prompts.len())];
            let start = now();
            let found = cache.lookup(&mut keys.as_slice(), Timestamp(1));
            let deepest = (0..ENDPOINTS).map(|id| found.depth(EndpointId(id)).any).max();
            latencies.lookups.push(start.elapsed().as_secs_f64());
            black_box(deepest);
            drop(found);
            if latencies.lookups.len().is_multiple_of(LOOKUPS_A_RECORD) {
                let start = now();
                cache.record(*endpoint, keys, cache.tenant(Some("tenant")), Timestamp(1_000_000_000_000));
                latencies.records.push(start.elapsed().as_secs_f64());
            }
        }
        latencies
    }

    /// Runs `work` beside the measurement. Returns its result and seconds.
    fn beside<T>(cache: &PrefixCache, prompts: &[Conversation], work: impl FnOnce() -> T) -> (Self, T, f64) {
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let lookups = scope.spawn(|| Self::measure(cache, prompts, |_| done.load(Relaxed)));
            let start = now();
            let result = work();
            let seconds = start.elapsed().as_secs_f64();
            done.store(true, Relaxed);
            (lookups.join().expect("lookups do not panic"), result, seconds)
        })
    }
}

/// The 99th percentile.
fn p99(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() * 99 / 100).copied().unwrap_or(f64::NAN)
}

fn export(source: &PrefixCache, at: Timestamp) -> Vec<ExportChunk> {
    let mut chunks: Vec<ExportChunk> = Vec::new();
    let mut next = Some(Default::default());
    while let Some(cursor) = next {
        let chunk = source.export(cursor, CHUNK_BYTES, &|_| true, at);
        next = chunk.next;
        chunks.push(chunk);
    }
    chunks
}

/// Messages that a replica has sent.
#[derive(Debug, Default)]
struct Sent(Mutex<Vec<Vec<u8>>>);

impl Outbox for Sent {
    fn publish(&self, _: Option<u64>, message: Vec<u8>) {
        self.0.lock().expect("not poisoned").push(message);
    }

    fn wake(&self) {}
}

/// A picker without strategies, which loses no cache.
#[derive(Debug)]
struct Nothing;

impl CacheLossSink for Nothing {
    fn cache_lost(&self, _: EndpointId) {}
}

impl StrategyRecords for Nothing {
    fn observe(&self, _: &str, _: &str, _: &Digest, _: EndpointId, _: Timestamp) {}

    fn moved(&self, _: &PeerRecord, _: EndpointId, _: EndpointId, _: Timestamp) {}

    fn charged(&self, _: &str, _: UserCharge, _: Timestamp) {}
}

/// A replica with one pool, and what it sends.
fn replica(sender: u64, cache: Arc<PrefixCache>) -> (Replica, Arc<Sent>) {
    let sent = Arc::new(Sent::default());
    let settings = ReplicaSettings { name: format!("picker-{sender}"), sender, seed: 7, origin: 0 };
    let replica = Replica::new(settings, sent.clone(), Arc::default());
    let store = Arc::new(SnapshotStore::default());
    store.publish(snapshot());
    replica.set_pools(vec![PoolView {
        name: "pool".into(),
        store,
        cache: Some(cache),
        health: HealthPolicy::default(),
        stale_after: Duration::from_secs(2),
        records: Arc::new(Nothing),
        flows: None,
        losses: Arc::new(Nothing),
    }]);
    (replica, sent)
}

/// Transfers the index between two replicas. Returns the copy, the seconds of work, the longest call on either side,
/// the number of chunks, and the bytes of all messages.
fn transfer(source: &Arc<PrefixCache>, start: Timestamp) -> (Arc<PrefixCache>, [f64; 5]) {
    let copy = Arc::new(cache());
    let members = [replica(1, source.clone()), replica(2, copy.clone())];
    // A picker without peers gives its index after 30 s.
    let _ = members[0].0.tick(start);
    let (mut at, mut bytes) = (start.after(Duration::from_secs(40)), 0.0);
    let (mut seconds, mut longest) = (0.0, [0.0_f64; 2]);
    while members[1].0.snapshot().state != SnapshotState::Done {
        at = at.after(Duration::from_millis(5));
        for (to, (receiver, _)) in members.iter().enumerate() {
            let from = &members[1 - to];
            let messages = std::mem::take(&mut *from.1.0.lock().expect("not poisoned"));
            let work = now();
            for message in &messages {
                let call = now();
                receiver.receive(Some(from.0.sender()), message, at);
                longest[to] = longest[to].max(call.elapsed().as_secs_f64());
                bytes += message.len() as f64;
            }
            let _ = receiver.tick(at);
            seconds += work.elapsed().as_secs_f64();
        }
    }
    let chunks = members[1].0.snapshot().chunks as f64;
    (copy, [seconds, longest[0], longest[1], chunks, bytes])
}

/// Figures of one round, in the order in which they are printed.
fn round(source: &Arc<PrefixCache>, prompts: &[Conversation]) -> Vec<(&'static str, f64)> {
    let at = Timestamp(1_000_000_000_000);
    let quiet = Latencies::measure(source, prompts, |lookups| lookups == LOOKUPS);
    let (exporting, chunks, export_seconds) = Latencies::beside(source, prompts, || {
        (1..TRANSFERS).for_each(|_| drop(export(source, at)));
        export(source, at)
    });
    let (mut importing, mut import_seconds, mut copy) = (Latencies::default(), 0.0, cache());
    for _ in 0..TRANSFERS {
        copy = cache();
        let (latencies, new, seconds) = Latencies::beside(&copy, prompts, || {
            chunks.iter().map(|chunk| copy.import(chunk, at).expect("the chunk is valid")).sum::<u64>()
        });
        assert!(new > 0);
        importing.lookups.extend(latencies.lookups);
        importing.records.extend(latencies.records);
        import_seconds += seconds;
    }
    let quiet_copy = Latencies::measure(&copy, prompts, |lookups| lookups == LOOKUPS);
    for Conversation { keys, endpoint } in prompts {
        let [theirs, ours] = [&**source, &copy].map(|cache| cache.lookup(&mut keys.as_slice(), at).depth(*endpoint));
        assert_eq!(theirs, ours);
    }
    let (transferred, [seconds, exporter, importer, messages, message_bytes]) = transfer(source, at);
    for Conversation { keys, endpoint } in prompts {
        let [theirs, ours] =
            [source, &transferred].map(|cache| cache.lookup(&mut keys.as_slice(), at).depth(*endpoint));
        assert_eq!(theirs, ours);
    }
    let bytes: usize = chunks.iter().map(ExportChunk::bytes).sum();
    let stats = source.index().stats();
    assert!(stats.refused_blocks == 0 && copy.index().stats().refused_blocks == 0);
    let micros = |values: &[f64]| p99(values) * 1e6;
    let ratio = |with: &[f64], without: &[f64]| p99(with) / p99(without);
    vec![
        ("blocks", stats.blocks as f64),
        ("chunks", chunks.len() as f64),
        ("lookups beside exports", exporting.lookups.len() as f64),
        ("lookups beside imports", importing.lookups.len() as f64),
        ("export, seconds", export_seconds / f64::from(TRANSFERS)),
        ("import, seconds", import_seconds / f64::from(TRANSFERS)),
        ("bytes a block", bytes as f64 / stats.blocks as f64),
        ("transfer between replicas, seconds", seconds),
        ("  chunks", messages),
        ("  bytes of messages a block", message_bytes / stats.blocks as f64),
        ("  longest call, exporting side, ms", exporter * 1e3),
        ("  longest call, importing side, ms", importer * 1e3),
        ("p99 of a lookup, exporting side, µs", micros(&exporting.lookups)),
        ("  against without an export", ratio(&exporting.lookups, &quiet.lookups)),
        ("p99 of a lookup, importing side, µs", micros(&importing.lookups)),
        ("  against without an import", ratio(&importing.lookups, &quiet_copy.lookups)),
        ("p99 of a record, exporting side, µs", micros(&exporting.records)),
        ("  against without an export", ratio(&exporting.records, &quiet.records)),
        ("p99 of a record, importing side, µs", micros(&importing.records)),
        ("  against without an import", ratio(&importing.records, &quiet_copy.records)),
    ]
}

fn main() {
    let source = Arc::new(cache());
    let prompts = fill(&source);
    let rounds: Vec<_> = (0..ROUNDS).map(|_| round(&source, &prompts)).collect();
    for (row, (name, _)) in rounds[0].iter().enumerate() {
        let mut values: Vec<f64> = rounds.iter().map(|round| round[row].1).collect();
        values.sort_by(f64::total_cmp);
        println!("{name:<40} {:>14.3}   {:.3} to {:.3}", values[ROUNDS / 2], values[0], values[ROUNDS - 1]);
    }
}
