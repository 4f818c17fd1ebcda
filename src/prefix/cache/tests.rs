mod transfer;

use super::*;
use crate::carried::KeptTurn;
use crate::index::{StoredBlock, Tier};
use crate::key::EngineHash;
use crate::learning::Learning;
use crate::residents::Cache;
use crate::trust::{Doubt, Trust, TrustCell};
use attache_pool::{Endpoint, EndpointMetrics, EndpointSpec, EndpointState, LoraState};
use attache_protocol::{Prompt, Usage};
use std::time::Duration;

const NOW: Timestamp = Timestamp(1_000_000_000);

fn cache(unit: BlockUnit) -> PrefixCache {
    PrefixCache::new(&CacheConfig {
        claim_every_block: false,
        unit,
        max_bytes: 16 << 20,
        tenant_share: 1.0,
        claim_life: Duration::from_secs(30),
        seed: 7,
    })
}

fn snapshot(endpoints: &[(u32, Option<EndpointMetrics>)]) -> PoolSnapshot {
    let state = |(id, metrics): &(u32, Option<EndpointMetrics>)| {
        EndpointState::new(
            Arc::new(Endpoint::new(EndpointId(*id), EndpointSpec::at(([10, 0, 0, 1], 8000).into()))),
            metrics.clone().map(Arc::new),
        )
    };
    PoolSnapshot::new(1, true, endpoints.iter().map(state).collect())
}

fn started(at: f64) -> Option<EndpointMetrics> {
    Some(EndpointMetrics {
        process_start: Some(at),
        block_size: Some(16),
        num_blocks: Some(100),
        ..EndpointMetrics::default()
    })
}

fn prompt(length: u64, salt: u64) -> Vec<BlockKey> {
    (0..length).map(|i| BlockKey(xxhash_rust::xxh3::xxh3_64_with_seed(&i.to_le_bytes(), salt))).collect()
}

fn prefix_update(keys: &[BlockKey], fresh: u32) -> PrefixUpdate {
    PrefixUpdate { keys: Arc::new(keys.to_vec()), whole: true, fresh, ..PrefixUpdate::default() }
}

fn held(cache: &PrefixCache, keys: &[BlockKey], endpoint: u32) -> u32 {
    cache.lookup(&mut &*keys, NOW).held(EndpointId(endpoint)).any
}

#[test]
fn lookup_writes_no_shared_memory() {
    let cache = cache(BlockUnit::Tokens(16));
    cache.reconcile(&snapshot(&[(1, None)]));
    let guesses = cache.guesses.load_full();
    let readers = Arc::strong_count(&guesses);
    let found = cache.lookup(&mut prompt(10, 1).as_slice(), NOW);
    assert_eq!(Arc::strong_count(&guesses), readers, "a reader is not counted");
    drop(found);
}

#[test]
fn weight_halves_after_each_half_life() {
    let cache = cache(BlockUnit::Tokens(16));
    cache.reconcile(&snapshot(&[(1, None), (2, None)]));
    cache.record(EndpointId(1), &prompt(100, 1), TenantId(0), NOW);
    let holder = cache.index().add_holder();
    let resident =
        Resident { caches: [Cache { holder, trust: Arc::default() }].into_iter().collect(), ..Resident::default() };
    cache.residents().publish([(EndpointId(2), resident)].into_iter().collect());
    let stored = StoredBlock { hash: EngineHash(1), key: BlockKey(1) };
    cache.index().store(holder, Tier::Gpu, None, &[stored]).unwrap();
    let weights = |now| [1, 2, 3].map(|e| (cache.weight(EndpointId(e), now) * 100.0).round());
    assert_eq!(weights(NOW), [10_000.0, 100.0, 0.0]);
    assert_eq!(weights(NOW.after(DEFAULT_HALF_LIFE)), [5_000.0, 50.0, 0.0]);
}

#[test]
fn recorded_blocks_are_found_until_endpoint_leaves_or_restarts() {
    let cache = cache(BlockUnit::Tokens(16));
    cache.reconcile(&snapshot(&[(1, started(1.0)), (2, None)]));
    let keys = prompt(10, 1);
    cache.record(EndpointId(1), &keys, TenantId(0), NOW);
    cache.record(EndpointId(2), &keys[..4], TenantId(0), NOW);
    cache.record(EndpointId(3), &keys, TenantId(0), NOW);
    assert_eq!([1, 2, 3].map(|e| held(&cache, &keys, e)), [10, 4, 0], "an endpoint outside the pool is ignored");
    cache.reconcile(&snapshot(&[(1, started(1.0)), (2, None)]));
    assert_eq!(held(&cache, &keys, 1), 10, "nothing has changed");
    cache.reconcile(&snapshot(&[(1, started(2.0)), (2, None)]).after_loss(vec![EndpointId(1)]));
    assert_eq!([1, 2].map(|e| held(&cache, &keys, e)), [0, 4], "a new process begins with an empty cache");
    cache.reconcile(&snapshot(&[(1, started(2.0))]));
    assert_eq!(held(&cache, &keys, 2), 0);
}

#[test]
fn adapter_name_stays_known_when_no_server_is_busy_with_it() {
    let cache = cache(BlockUnit::Tokens(16));
    let busy_with = |running: &[&str], waiting: &[&str]| {
        let [running, waiting] = [running, waiting].map(|names| names.iter().map(|n| Arc::from(*n)).collect());
        let lora = Some(LoraState { max: 2, running, waiting });
        cache.reconcile(&snapshot(&[(1, Some(EndpointMetrics { lora, ..EndpointMetrics::default() })), (2, None)]));
    };
    busy_with(&["sql"], &["chat"]);
    busy_with(&[], &[]);
    let adapters = ["sql", "chat", "base"].map(|name| cache.residents().adapters().contains(name));
    assert_eq!(adapters, [true, true, false]);
}

#[test]
fn engine_events_are_used_while_trusted() {
    let cache = cache(BlockUnit::Tokens(16));
    cache.reconcile(&snapshot(&[(1, None)]));
    let keys = prompt(10, 1);
    cache.record(EndpointId(1), &keys, TenantId(0), NOW);
    let trust: Arc<TrustCell> = Arc::default();
    let holder = cache.index().add_holder();
    let resident =
        Resident { caches: [Cache { holder, trust: trust.clone() }].into_iter().collect(), ..Resident::default() };
    cache.residents().publish([(EndpointId(1), resident)].into_iter().collect());
    assert!(cache.learns(EndpointId(1)), "no event was received yet");
    trust.set(Trust::Exact);
    assert_eq!((held(&cache, &keys, 1), cache.learns(EndpointId(1))), (0, false));
    let own = cache.lookup(&mut &*keys, NOW).of_own_keys(true);
    assert_eq!((own.held(EndpointId(1)).any, own.is_exact(EndpointId(1))), (10, false), "not comparable with events");
    let stored: Vec<_> =
        (0u64..).zip(&keys[..4]).map(|(i, key)| StoredBlock { hash: EngineHash(i), key: *key }).collect();
    cache.index().store(holder, Tier::Gpu, None, &stored).unwrap();
    trust.set(Trust::Incomplete);
    assert_eq!((held(&cache, &keys, 1), cache.learns(EndpointId(1))), (10, true), "its blocks are estimated");
    let others = prompt(3, 2);
    let other = [StoredBlock { hash: EngineHash(99), key: others[0] }];
    cache.index().store(holder, Tier::Gpu, None, &other).unwrap();
    assert_eq!(held(&cache, &others, 1), 1, "its events count as well");
    trust.set(Trust::Exact);
    assert_eq!((held(&cache, &keys, 1), held(&cache, &others, 1)), (4, 1));
    trust.set(Trust::Suspect(Doubt::Gap));
    assert_eq!((held(&cache, &keys, 1), cache.learns(EndpointId(1))), (10, true));
}

#[test]
fn bytes_per_token_and_capacity_follow_reported_tokens() {
    let cache = cache(BlockUnit::Bytes(64));
    cache.reconcile(&snapshot(&[(1, started(1.0))]));
    assert!((cache.tokens_per_block() - 16.0).abs() < 1e-9);
    cache.correct(EndpointId(1), [0; 2], Some(1_000), None, 2_000);
    cache.measured(31, 1_008);
    cache.measured(2, 1_000);
    assert!((cache.tokens_per_block() - 32.0).abs() < 0.1, "one response suffices: {}", cache.tokens_per_block());
    let own = cache.lookup(&mut &[][..], NOW).of_own_keys(true);
    assert_eq!(
        (own.tokens(10), cache.lookup(&mut &[][..], NOW).tokens(10)),
        (320, 160),
        "token ids need no measurement"
    );
    assert_eq!(own.prompt_tokens(&Prompt { text_bytes: 4_000, count: 1, ..Prompt::default() }), 2_000);
    let trust = |cache: &PrefixCache| cache.servers.lock()[&EndpointId(1)].trust;
    cache.correct(EndpointId(1), [1_000; 2], Some(1_000), Some(990), 2_000);
    assert!((trust(&cache) - 1.0).abs() < 1e-9);
    for _ in 0..10 {
        // A prompt with longer tokens: everything was cached, but the expected number was too high.
        cache.correct(EndpointId(1), [1_000; 2], Some(500), Some(496), 2_000);
    }
    assert!((trust(&cache) - 1.0).abs() < 1e-9, "{}", trust(&cache));
    for _ in 0..20 {
        cache.correct(EndpointId(1), [1_000; 2], Some(1_000), Some(0), 2_000);
    }
    assert!(trust(&cache) < 0.5, "{}", trust(&cache));
    for _ in 0..200 {
        cache.correct(EndpointId(1), [1_000; 2], Some(1_000), Some(0), 2_000);
    }
    assert!((trust(&cache) - LEAST_CAPACITY).abs() < 1e-9);
    assert_eq!(cache.stats().foretold_tokens.load(Relaxed), 221 * 999 + 10 * 499, "the last token is always computed");
    assert_eq!(cache.stats().reported_tokens.load(Relaxed), 990 + 10 * 496);
}

#[test]
fn blocks_that_prompts_in_flight_will_evict_are_forgotten_at_once() {
    let cache = cache(BlockUnit::Tokens(16));
    cache.reconcile(&snapshot(&[(1, started(1.0)), (2, None)]));
    let (old, newer) = (prompt(40, 1), prompt(60, 2));
    cache.record(EndpointId(1), &old, TenantId(0), NOW);
    cache.record(EndpointId(1), &newer, TenantId(0), NOW.after(Duration::from_secs(1)));
    let coming = prompt(30, 3);
    let failed = cache.claim(EndpointId(1), &prefix_update(&coming, 30), NOW);
    assert_eq!([&old, &newer].map(|keys| held(&cache, keys, 1)), [10, 60], "30 of 100 blocks will be needed");
    drop(failed);
    let mut claim = cache.claim(EndpointId(1), &prefix_update(&coming, 30), NOW);
    claim.arrived();
    cache.record(EndpointId(1), &coming, TenantId(0), NOW.after(Duration::from_secs(2)));
    assert_eq!([&old, &newer, &coming].map(|keys| held(&cache, keys, 1)), [10, 60, 30], "its capacity was reserved");
    // Blocks that the endpoint holds already take no capacity, and an endpoint of unknown capacity has no limit.
    let _again = cache.claim(EndpointId(1), &prefix_update(&coming, 0), NOW);
    let _elsewhere = cache.claim(EndpointId(2), &prefix_update(&coming, 30), NOW);
    assert_eq!([&old, &newer, &coming].map(|keys| held(&cache, keys, 1)), [10, 60, 30]);
}

#[test]
fn blocks_that_a_waiting_prompt_will_use_are_not_evicted() {
    let cache = Arc::new(cache(BlockUnit::Tokens(16)));
    cache.reconcile(&snapshot(&[(1, started(1.0))]));
    let at = |seconds| NOW.after(Duration::from_secs(seconds));
    let (head, other) = (prompt(40, 1), prompt(50, 2));
    cache.record(EndpointId(1), &head, TenantId(0), NOW);
    cache.record(EndpointId(1), &other, TenantId(0), at(1));
    let send = |question: u64, now| {
        let keys = [head.clone(), prompt(10, question)].concat();
        let prefix_update = cache.lookup(&mut &keys[..], now).prefix_update(EndpointId(1), keys, true);
        (prefix_update.held, prefix_update.fresh, Learning::begin(cache.clone(), prefix_update, EndpointId(1), now))
    };
    let (held_first, fresh_first, _first) = send(3, at(2));
    let (held_again, fresh_again, _again) = send(3, at(3));
    let (_, _, _third) = send(4, at(4));
    assert_eq!((held_first, fresh_first), (40, 10));
    assert_eq!((held_again, fresh_again), (40, 0), "the first prompt has reserved capacity for them");
    assert_eq!(
        [&head, &other].map(|keys| held(&cache, keys, 1)),
        [40, 40],
        "20 of 100 blocks are in flight, and the first ones are in use"
    );
}

#[test]
fn blocks_in_use_are_not_evicted() {
    let cache = Arc::new(cache(BlockUnit::Tokens(16)));
    cache.reconcile(&snapshot(&[(1, started(1.0))]));
    let (keys, before) = (prompt(40, 1), prompt(40, 2));
    let begin = |keys: &[BlockKey]| {
        let prefix_update = cache.lookup(&mut &*keys, NOW).prefix_update(EndpointId(1), keys.to_vec(), true);
        Learning::begin(cache.clone(), prefix_update, EndpointId(1), NOW)
    };
    let (mut running, mut refused) = (begin(&keys), begin(&before));
    running.first_byte(true, EndpointId(1), NOW);
    refused.first_byte(false, EndpointId(1), NOW);
    cache.record(EndpointId(1), &prompt(90, 3), TenantId(0), NOW.after(Duration::from_secs(1)));
    // Longer than the lifetime of a claim.
    let late = NOW.after(Duration::from_secs(300));
    let depth = |keys: &[BlockKey]| cache.lookup(&mut &*keys, late).depth(EndpointId(1)).any;
    assert_eq!((depth(&keys), held(&cache, &keys, 1)), (40, 40), "the capacity leaves 60 of 100 blocks for others");
    assert_eq!(depth(&before), 0, "a refused prompt has no claim");
    running.end(&Usage::default(), |_| false, EndpointId(1), NOW);
    assert_eq!(depth(&keys), 40);
    cache.record(EndpointId(1), &prompt(90, 4), TenantId(0), NOW.after(Duration::from_secs(2)));
    assert_eq!(depth(&keys), 10, "the server works on it no more");
}

#[test]
fn blocks_evicted_while_a_prompt_waits_do_not_lower_capacity() {
    let trust = |cache: &PrefixCache| cache.servers.lock()[&EndpointId(1)].trust;
    let usage = |cached| Usage { prompt_tokens: Some(80 * 16 + 1), cached_tokens: Some(cached), ..Usage::default() };
    // Of 80 expected blocks, other prompts leave 20, or all.
    for (others, cached, falls) in [(80, 20 * 16, false), (80, 0, true), (10, 20 * 16, true)] {
        let cache = Arc::new(cache(BlockUnit::Tokens(16)));
        cache.reconcile(&snapshot(&[(1, started(1.0))]));
        let keys = prompt(80, 1);
        cache.record(EndpointId(1), &keys, TenantId(0), NOW);
        let prefix_update = cache.lookup(&mut &keys[..], NOW).prefix_update(EndpointId(1), keys, true);
        let mut learning = Learning::begin(cache.clone(), prefix_update, EndpointId(1), NOW);
        let begins = NOW.after(Duration::from_secs(9));
        cache.record(EndpointId(1), &prompt(others, 2), TenantId(0), NOW.after(Duration::from_secs(1)));
        learning.first_byte(true, EndpointId(1), begins);
        learning.end(&usage(cached), |_| false, EndpointId(1), begins);
        assert_eq!(trust(&cache) < 1.0, falls, "{others} {cached}");
    }
}

#[test]
fn prompt_is_at_least_as_long_as_its_deepest_match() {
    let cache = cache(BlockUnit::Tokens(16));
    cache.reconcile(&snapshot(&[(1, None), (2, None)]));
    let keys = prompt(20, 1);
    cache.record(EndpointId(1), &keys[..18], TenantId(0), NOW);
    cache.record(EndpointId(2), &keys[..19], TenantId(0), NOW);
    let short = Prompt { text_bytes: 500, count: 1, ..Prompt::default() };
    let tokens = |cache: &PrefixCache, keys: &[BlockKey]| cache.lookup(&mut &*keys, NOW).prompt_tokens(&short);
    assert_eq!(
        tokens(&cache, &keys),
        19 * 16,
        "500 bytes are more than 125 tokens, as the endpoint that holds most shows"
    );
    assert_eq!(tokens(&cache, &prompt(20, 2)), 125);
    let _claim = cache.claim(EndpointId(1), &prefix_update(&keys, 20), NOW);
    assert_eq!(tokens(&cache, &keys), 20 * 16);
}

#[test]
fn last_block_of_a_prompt_is_always_computed() {
    let cache = cache(BlockUnit::Tokens(16));
    let foretold = |held, prompt| {
        let before = cache.stats().foretold_tokens.load(Relaxed);
        cache.correct(EndpointId(1), [held; 2], prompt, Some(0), 0);
        cache.stats().foretold_tokens.load(Relaxed) - before
    };
    assert_eq!(foretold(192, Some(192)), 176, "a prompt of complete blocks");
    assert_eq!([foretold(192, Some(193)), foretold(192, None), foretold(16, Some(1_000))], [192, 192, 16]);
    assert_eq!([foretold(16, Some(16)), foretold(16, Some(0))], [0, 0]);
}

#[test]
fn kept_conversations_go_when_their_server_restarts_or_leaves() {
    let cache = cache(BlockUnit::Tokens(16));
    cache.reconcile(&snapshot(&[(1, started(1.0)), (2, started(1.0)), (3, None)]));
    let tokens: Vec<u32> = (0..100).collect();
    for id in 1..4 {
        let turn =
            KeptTurn { endpoint: EndpointId(id), root: u64::from(id), tokens: &tokens[..80], until: Timestamp(1_000) };
        cache.carried().keep(&turn, bytes::Bytes::from_static(b"{}"), Timestamp(0));
    }
    let kept = || {
        (1..4u64)
            .filter(|root| cache.carried().find(*root, &tokens, Timestamp(1), |_| true).is_some())
            .collect::<Vec<_>>()
    };
    cache.reconcile(&snapshot(&[(1, started(1.0)), (2, started(1.0)), (3, None)]));
    assert_eq!(kept(), [1, 2, 3]);
    cache.reconcile(&snapshot(&[(1, started(2.0)), (2, started(1.0))]).after_loss(vec![EndpointId(1), EndpointId(3)]));
    assert_eq!(kept(), [2]);
}

#[test]
fn block_size_follows_engines_unless_configured() {
    let cache = cache(BlockUnit::Tokens(16)).of_engines_blocks();
    let keys: Vec<BlockKey> = (1..4).map(BlockKey).collect();
    assert_eq!((cache.unit(), cache.lookup(&mut keys.as_slice(), NOW).tokens(3)), (BlockUnit::Tokens(16), 48));
    let page = || [(EndpointId(1), Some(32))].into_iter();
    cache.block_size().pages(page());
    assert_eq!((cache.unit(), cache.lookup(&mut keys.as_slice(), NOW).tokens(3)), (BlockUnit::Tokens(32), 96));
    let text = self::cache(BlockUnit::Bytes(64)).of_engines_blocks();
    text.block_size().pages(page());
    assert_eq!(text.unit(), BlockUnit::Bytes(128), "text blocks stand for as many tokens");
}

#[test]
fn measured_tokens_per_block_apply_to_other_block_sizes() {
    let cache = cache(BlockUnit::Tokens(16)).of_engines_blocks();
    cache.measured(31, 1_008);
    let own = |cache: &PrefixCache| cache.lookup(&mut &[][..], NOW).of_own_keys(true).tokens(10);
    assert_eq!(own(&cache), 320, "two engine tokens for each nominal one");
    cache.block_size().pages([(EndpointId(1), Some(256))].into_iter());
    assert_eq!(own(&cache), 5_120);
    cache.measured(31, 16_128);
    assert_eq!(own(&cache), 5_120);
}

#[test]
fn only_prompts_that_were_computed_can_be_computed_again() {
    let cache = Arc::new(cache(BlockUnit::Tokens(16)));
    cache.reconcile(&snapshot(&[(1, started(1.0))]));
    let send = |salt: u64, good: bool| {
        let keys = prompt(6_400, salt);
        let prefix_update = cache.lookup(&mut &keys[..], NOW).prefix_update(EndpointId(1), keys, true);
        let mut learning = Learning::begin(cache.clone(), prefix_update, EndpointId(1), NOW);
        learning.first_byte(good, EndpointId(1), NOW);
    };
    (0..4).for_each(|salt| send(salt, false));
    (0..4).for_each(|salt| send(salt, true));
    assert!(cache.recomputed() == 0.0, "the server refused them before: {}", cache.recomputed());
    (0..4).for_each(|salt| send(salt, true));
    assert!((0.3..0.6).contains(&cache.recomputed()), "it holds 100 of 6,400 blocks: {}", cache.recomputed());
}
