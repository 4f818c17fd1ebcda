//! Export and import of random caches that change meanwhile.

mod cases;

use super::*;
use crate::index::{ExportChunk, ExportCursor};
use proptest::prelude::*;
use std::collections::BTreeMap;

const ENDPOINTS: u32 = 4;
/// The KV cache of an engine that publishes events: the first holder of each index.
const ENGINE: HolderId = HolderId(0);
/// Blocks of one symbol of a prompt.
const PART: u64 = 7;

/// A change of the exporting cache.
#[derive(Clone, Debug)]
enum Change {
    Record {
        endpoint: u32,
        prompt: Vec<u8>,
        tenant: u8,
    },
    Capacity {
        endpoint: u32,
        blocks: u32,
    },
    /// The endpoint loses its estimated blocks.
    Clear {
        endpoint: u32,
    },
    /// An engine stores the prompt, or drops its last symbols.
    Event {
        prompt: Vec<u8>,
        dropped: usize,
    },
}

fn record() -> impl Strategy<Value = Change> {
    // Few symbols, so that prompts share prefixes of every length.
    (0..ENDPOINTS, prop::collection::vec(0u8..3, 1..11), 0u8..3).prop_map(|(endpoint, prompt, tenant)| Change::Record {
        endpoint,
        prompt,
        tenant,
    })
}

fn change() -> impl Strategy<Value = Change> {
    let capacity = (0..ENDPOINTS, 1u32..140).prop_map(|(endpoint, blocks)| Change::Capacity { endpoint, blocks });
    prop_oneof![6 => record(), 1 => capacity]
}

/// As [`change`], and blocks of engines and cleared endpoints.
fn any_change() -> impl Strategy<Value = Change> {
    let event = (prop::collection::vec(0u8..3, 1..11), 0usize..11);
    prop_oneof![
        6 => change(),
        1 => (0..ENDPOINTS).prop_map(|endpoint| Change::Clear { endpoint }),
        3 => event.prop_map(|(prompt, dropped)| Change::Event { prompt, dropped }),
    ]
}

fn keys_of(symbols: &[u8]) -> Vec<BlockKey> {
    symbols.iter().flat_map(|symbol| prompt(PART, u64::from(*symbol) + 1)).collect()
}

fn pool() -> PrefixCache {
    pool_with(16 << 20)
}

fn pool_with(max_bytes: u64) -> PrefixCache {
    let unit = BlockUnit::Tokens(16);
    let claim_life = Duration::from_secs(30);
    let cache = PrefixCache::new(&CacheConfig {
        claim_every_block: false,
        unit,
        max_bytes,
        tenant_share: 0.5,
        claim_life,
        seed: 7,
    });
    assert_eq!(cache.index.add_holder(), ENGINE);
    let endpoints: Vec<_> = (0..ENDPOINTS).map(|id| (id, None)).collect();
    cache.reconcile(&snapshot(&endpoints));
    cache
}

fn at(second: u64) -> Timestamp {
    NOW.after(Duration::from_secs(second))
}

fn apply(cache: &PrefixCache, change: &Change, now: Timestamp) {
    match change {
        Change::Record { endpoint, prompt, tenant } => {
            let tenant = format!("tenant {tenant}");
            cache.record(EndpointId(*endpoint), &keys_of(prompt), cache.tenant(Some(&tenant)), now);
        }
        Change::Capacity { endpoint, blocks } => set_capacity(cache, *endpoint, *blocks),
        Change::Clear { endpoint } => {
            cache.index.clear(cache.guesses.load().get(&EndpointId(*endpoint)).unwrap().holder)
        }
        Change::Event { prompt, dropped } => apply_event(cache, &keys_of(prompt), *dropped * PART as usize),
    }
}

/// Stores blocks of the engine with the first holder, and drops the last ones.
fn apply_event(cache: &PrefixCache, keys: &[BlockKey], dropped: usize) {
    let mut hash = 0;
    let blocks: Vec<StoredBlock> = keys
        .iter()
        .map(|key| {
            hash = xxhash_rust::xxh3::xxh3_64_with_seed(&key.0.to_le_bytes(), hash);
            StoredBlock { hash: EngineHash(hash), key: *key }
        })
        .collect();
    let _ = cache.index.store(ENGINE, Tier::Gpu, None, &blocks);
    let gone: Vec<EngineHash> = blocks.iter().rev().take(dropped).map(|block| block.hash).collect();
    cache.index.remove(ENGINE, Tier::Gpu, &gone);
}

fn set_capacity(cache: &PrefixCache, endpoint: u32, blocks: u32) {
    let guesses = cache.guesses.load();
    cache.index.set_capacity(guesses.get(&EndpointId(endpoint)).unwrap().holder, blocks);
}

/// How much of each prompt each endpoint has.
fn depths(cache: &PrefixCache, changes: &[Change]) -> BTreeMap<Vec<u8>, Vec<u32>> {
    let prompts = changes.iter().filter_map(|change| match change {
        Change::Record { prompt, .. } => Some(prompt.clone()),
        _ => None,
    });
    let depths = |keys: Vec<BlockKey>| {
        let found = cache.lookup(&mut keys.as_slice(), NOW);
        (0..ENDPOINTS).map(|id| found.depth(EndpointId(id)).any).collect()
    };
    prompts.map(|prompt| (prompt.clone(), depths(keys_of(&prompt)))).collect()
}

fn stored(cache: &PrefixCache) -> Vec<u32> {
    cache.guesses.load().values().map(|guess| cache.index.blocks(guess.holder).guessed).collect()
}

/// All chunks of a cache; `between` is called before each chunk but the first.
fn chunks(cache: &PrefixCache, max_bytes: usize, now: Timestamp, mut between: impl FnMut()) -> Vec<ExportChunk> {
    let mut chunks = vec![cache.export(ExportCursor::default(), max_bytes, &|_| true, now)];
    while let Some(next) = chunks.last().unwrap().next {
        between();
        let chunk = cache.export(next, max_bytes, &|_| true, now);
        assert!(chunk.next.is_none_or(|after| after.0 > next.0), "every chunk makes progress");
        chunks.push(chunk);
    }
    chunks
}

fn imported<'a>(chunks: impl IntoIterator<Item = &'a ExportChunk>) -> PrefixCache {
    let copy = pool();
    for chunk in chunks {
        copy.import(chunk, NOW).unwrap();
        copy.index.check_recency();
        copy.index.check_bills();
    }
    copy
}

/// Whether a chunk respects its limit: it may be larger only if it has no run besides one and its predecessors.
fn respects(chunk: &ExportChunk, max_bytes: usize) -> bool {
    let mut path = chunk.runs.len().checked_sub(1);
    let mut on_path = 0;
    while let Some(run) = path {
        on_path += 1;
        path = chunk.runs[run].parent.map(|parent| parent as usize);
    }
    chunk.bytes() <= max_bytes || on_path == chunk.runs.len()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn import_into_empty_cache_finds_what_the_source_finds(
        changes in prop::collection::vec(record(), 1..60),
        max_bytes in 1usize..3_000,
    ) {
        let source = pool();
        (0u64..).zip(&changes).for_each(|(second, change)| apply(&source, change, at(second)));
        source.index.check_recency();
        let chunks = chunks(&source, max_bytes, at(1_000), || ());
        prop_assert!(chunks.iter().all(|chunk| respects(chunk, max_bytes)));
        let copy = imported(&chunks);
        prop_assert_eq!(depths(&copy, &changes), depths(&source, &changes));
        prop_assert_eq!(stored(&copy), stored(&source));
    }

    #[test]
    fn import_of_duplicate_and_reordered_chunks_is_the_same(
        changes in prop::collection::vec(record(), 1..60),
        max_bytes in 1usize..1_500,
        order in prop::collection::vec(any::<prop::sample::Index>(), 0..40),
    ) {
        let source = pool();
        (0u64..).zip(&changes).for_each(|(second, change)| apply(&source, change, at(second)));
        let chunks = chunks(&source, max_bytes, at(1_000), || ());
        let order = order.iter().map(|index| index.get(&chunks)).chain(chunks.iter().rev());
        let copy = imported(order);
        prop_assert_eq!(depths(&copy, &changes), depths(&source, &changes));
        prop_assert_eq!(stored(&copy), stored(&source));
        let again: u64 = chunks.iter().map(|chunk| copy.import(chunk, NOW).unwrap()).sum();
        prop_assert_eq!(again, 0, "nothing is new the second time");
    }

    #[test]
    fn export_beside_changes_has_all_blocks_that_stayed(
        before in prop::collection::vec(record(), 1..40),
        during in prop::collection::vec(change(), 0..40),
        max_bytes in 1usize..1_000,
    ) {
        let source = pool();
        (0u64..).zip(&before).for_each(|(second, change)| apply(&source, change, at(second)));
        let first = depths(&source, &before);
        let (mut least, mut most) = (first.clone(), first);
        let mut changes = (100u64..).zip(&during);
        let chunks = chunks(&source, max_bytes, at(1_000), || {
            for (second, change) in changes.by_ref().take(3) {
                apply(&source, change, at(second));
                for (prompt, now) in depths(&source, &before) {
                    for (id, now) in now.into_iter().enumerate() {
                        let [least, most] = [&mut least, &mut most].map(|all| &mut all.get_mut(&prompt).unwrap()[id]);
                        (*least, *most) = (now.min(*least), now.max(*most));
                    }
                }
            }
        });
        for (prompt, found) in depths(&imported(&chunks), &before) {
            for (id, depth) in found.iter().enumerate() {
                let expected = least[&prompt][id]..=most[&prompt][id];
                prop_assert!(expected.contains(depth), "{} of {:?}, expected {:?}", depth, prompt, expected);
            }
        }
    }

    #[test]
    fn import_keeps_the_order_of_use(
        changes in prop::collection::vec(record(), 1..40),
        max_bytes in 1usize..1_500,
        capacities in prop::collection::vec(1u32..160, ENDPOINTS as usize),
    ) {
        let source = pool();
        (0u64..).zip(&changes).for_each(|(second, change)| apply(&source, change, at(10 * second)));
        // The clock of the importing cache has begun later than all uses.
        let copy = imported(&chunks(&source, max_bytes, at(1_000), || ()));
        for (endpoint, blocks) in (0..).zip(capacities) {
            [&source, &copy].iter().for_each(|cache| set_capacity(cache, endpoint, blocks));
        }
        prop_assert_eq!(depths(&copy, &changes), depths(&source, &changes));
        copy.index.check_recency();
    }

    #[test]
    fn import_beside_own_records_finds_the_blocks_of_both(
        theirs in prop::collection::vec(record(), 1..40),
        own in prop::collection::vec(record(), 1..40),
        max_bytes in 1usize..1_500,
    ) {
        let [source, copy, both] = std::array::from_fn(|_| pool());
        (0u64..).zip(&theirs).for_each(|(second, change)| apply(&source, change, at(second)));
        (0u64..).zip(theirs.iter().chain(&own)).for_each(|(second, change)| apply(&both, change, at(second)));
        let mut later = (500u64..).zip(&own);
        for chunk in chunks(&source, max_bytes, at(1_000), || ()) {
            later.by_ref().take(3).for_each(|(second, change)| apply(&copy, change, at(second)));
            copy.import(&chunk, at(1_000)).unwrap();
            copy.index.check_recency();
            copy.index.check_bills();
        }
        later.for_each(|(second, change)| apply(&copy, change, at(second)));
        let all = [theirs, own].concat();
        prop_assert_eq!(depths(&copy, &all), depths(&both, &all));
        prop_assert_eq!(stored(&copy), stored(&both));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn transfer_between_small_changing_caches_invents_no_blocks(
        theirs in prop::collection::vec(any_change(), 1..150),
        own in prop::collection::vec(any_change(), 1..150),
        budgets in [40_000u64..80_000, 30_000u64..60_000],
        max_bytes in 1usize..3_000,
    ) {
        let [source, copy] = budgets.map(pool_with);
        let mut theirs = (0u64..).zip(&theirs);
        let mut done = Vec::new();
        let mut cursor = Some(ExportCursor::default());
        let mut own = (0u64..).zip(&own);
        while let Some(from) = cursor {
            for (second, change) in theirs.by_ref().take(10) {
                apply(&source, change, at(second));
                done.push(change.clone());
            }
            let chunk = source.export(from, max_bytes, &|_| true, at(100));
            for (second, change) in own.by_ref().take(10) {
                apply(&copy, change, at(second));
                done.push(change.clone());
            }
            copy.import(&chunk, at(100)).unwrap();
            [&source, &copy].iter().for_each(|cache| cache.index.check_recency());
            [&source, &copy].iter().for_each(|cache| cache.index.check_bills());
            cursor = chunk.next;
        }
        let everything = pool();
        done.iter().filter(|change| matches!(change, Change::Record { .. })).for_each(|c| apply(&everything, c, NOW));
        let most = depths(&everything, &done);
        for (prompt, found) in depths(&copy, &done) {
            prop_assert!(found.iter().zip(&most[&prompt]).all(|(depth, most)| depth <= most));
        }
    }
}
