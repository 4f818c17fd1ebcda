//! Export and import in single cases: full caches, other threads, and bad chunks.

use super::*;
use crate::index::{ExportHolder, ExportRun, ImportError};
use std::sync::atomic::AtomicBool;

#[test]
fn import_into_full_endpoint_evicts_older_blocks_only() {
    let source = pool();
    let (old, new) = (prompt(50, 1), prompt(50, 2));
    source.record(EndpointId(1), &old, TenantId(0), at(0));
    source.record(EndpointId(1), &new, TenantId(0), at(100));
    let chunks = chunks(&source, usize::MAX, at(110), || ());
    let copy = pool();
    let own = prompt(50, 3);
    // 60 s ago, which is between both prompts of the source.
    copy.record(EndpointId(1), &own, TenantId(0), at(1_000));
    set_capacity(&copy, 1, 100);
    let import = |now| chunks.iter().map(|chunk| copy.import(chunk, now).unwrap()).sum::<u64>();
    assert!(import(at(1_060)) >= 50);
    assert_eq!([&own, &new, &old].map(|keys| held(&copy, keys, 1)), [50, 50, 0]);
    set_capacity(&copy, 1, 50);
    assert_eq!([&own, &new].map(|keys| held(&copy, keys, 1)), [0, 50], "the own prompt is 60 s old, the other 10 s");
}

#[test]
fn import_without_memory_is_refused_and_evicts_nothing() {
    let source = pool();
    let theirs: Vec<_> = (0..300).map(|salt| prompt(100, salt)).collect();
    theirs.iter().for_each(|keys| source.record(EndpointId(1), keys, TenantId(0), NOW));
    let small = CacheConfig {
        claim_every_block: false,
        unit: BlockUnit::Tokens(16),
        max_bytes: 1 << 18,
        tenant_share: 1.0,
        claim_life: Duration::from_secs(30),
        seed: 7,
    };
    for limit in [None, Some(6_000)] {
        let copy = PrefixCache::new(&small).with_max_blocks(limit);
        copy.reconcile(&snapshot(&[(1, None)]));
        let own: Vec<_> = (1_000..1_040).map(|salt| prompt(100, salt)).collect();
        own.iter().for_each(|keys| copy.record(EndpointId(1), keys, TenantId(0), NOW));
        let new: u64 = chunks(&source, 10_000, NOW, || ()).iter().map(|chunk| copy.import(chunk, at(1)).unwrap()).sum();
        let stats = copy.index.stats();
        assert!(own.iter().all(|keys| held(&copy, keys, 1) == 100));
        assert!(new > 0 && new + stats.refused_blocks == 30_000, "{new} and {}", stats.refused_blocks);
        assert_eq!(stats.evicted_for_budget + stats.evicted_for_tenant + stats.evicted_for_capacity, 0);
        copy.index.check_recency();
        copy.index.check_bills();
        // Records evict imported blocks first.
        (2_000..2_020).for_each(|salt| copy.record(EndpointId(1), &prompt(100, salt), TenantId(0), at(2)));
        assert!(own.iter().all(|keys| held(&copy, keys, 1) == 100));
    }
}

#[test]
fn export_has_only_the_requested_endpoints() {
    let source = pool();
    let keys = prompt(20, 1);
    (0..3).for_each(|id| source.record(EndpointId(id), &keys, TenantId(0), NOW));
    let chunk = source.export(ExportCursor::default(), usize::MAX, &|id| id == EndpointId(1), NOW);
    let copy = pool();
    assert_eq!((chunk.bytes(), copy.import(&chunk, NOW)), (24 + 4 * 20 + 12, Ok(20)));
    assert_eq!([0, 1, 2].map(|id| held(&copy, &keys, id)), [0, 20, 0]);
    assert_eq!(source.export(ExportCursor(u64::MAX), 1, &|_| true, NOW), ExportChunk::default());
}

#[test]
fn import_skips_endpoints_with_exact_events_and_unknown_ones() {
    let source = pool();
    let keys = prompt(20, 1);
    (0..3).for_each(|id| source.record(EndpointId(id), &keys, TenantId(0), NOW));
    let chunk = source.export(ExportCursor::default(), usize::MAX, &|_| true, NOW);
    let copy = cache(BlockUnit::Tokens(16));
    copy.reconcile(&snapshot(&[(0, None), (1, None)]));
    let cell = TrustCell::default();
    cell.set(Trust::Exact);
    let resident = Resident {
        caches: [Cache { holder: copy.index().add_holder(), trust: Arc::new(cell) }].into(),
        ..Resident::default()
    };
    copy.residents().publish([(EndpointId(1), resident)].into_iter().collect());
    assert_eq!(copy.import(&chunk, NOW), Ok(20));
    assert_eq!(stored(&copy), [20, 0]);
}

#[test]
fn import_in_the_middle_of_another_run_shares_its_blocks() {
    let (source, copy) = (pool(), pool());
    let long = prompt(30, 1);
    let branch: Vec<_> = long[..10].iter().copied().chain(prompt(5, 2)).collect();
    // The source has the branch in one run, and the copy the other prompt.
    source.record(EndpointId(1), &branch, TenantId(0), NOW);
    source.record(EndpointId(2), &long, TenantId(0), NOW);
    copy.record(EndpointId(1), &long, TenantId(0), NOW);
    for chunk in chunks(&source, usize::MAX, NOW, || ()) {
        copy.import(&chunk, NOW).unwrap();
    }
    assert_eq!([1, 2].map(|id| held(&copy, &long, id)), [30, 30]);
    assert_eq!([1, 2].map(|id| held(&copy, &branch, id)), [15, 10]);
    assert_eq!(copy.index.stats().blocks, 35, "equal blocks are stored once");
}

#[test]
fn bad_chunk_is_an_error_that_names_the_field() {
    let good = || ExportRun {
        keys: vec![1, 2, 3],
        holders: vec![ExportHolder { endpoint: EndpointId(1), blocks: 3, age_ms: 0 }],
        ..ExportRun::default()
    };
    let holder = |blocks| vec![ExportHolder { endpoint: EndpointId(1), blocks, age_ms: 0 }];
    let parent = |parent| ImportError::Parent { run: 1, parent };
    let offset = |offset, least, most| ImportError::Offset { run: 1, offset, least, most };
    let cases = [
        (ExportRun { parent: Some(1), offset: 1, ..good() }, parent(1), "runs[1].parent"),
        (ExportRun { parent: Some(u32::MAX), offset: 1, ..good() }, parent(u32::MAX), "runs[1].parent"),
        (ExportRun { parent: Some(0), offset: 0, ..good() }, offset(0, 1, 3), "runs[1].offset"),
        (ExportRun { parent: Some(0), offset: 4, ..good() }, offset(4, 1, 3), "runs[1].offset"),
        (ExportRun { parent: None, offset: 1, ..good() }, offset(1, 0, 0), "runs[1].offset"),
        (
            ExportRun { parent: Some(0), offset: 1, first_key_high: 1, ..good() },
            ImportError::FirstKeyHigh { run: 1 },
            "runs[1].first_key_high",
        ),
        (ExportRun { keys: vec![], ..good() }, ImportError::Keys { run: 1, keys: 0 }, "runs[1].keys"),
        (ExportRun { keys: vec![0; 2_049], ..good() }, ImportError::Keys { run: 1, keys: 2_049 }, "runs[1].keys"),
        (
            ExportRun { holders: holder(0), ..good() },
            ImportError::HolderBlocks { run: 1, holder: 0, blocks: 0, keys: 3 },
            "runs[1].holders[0].blocks",
        ),
        (
            ExportRun { holders: holder(4), ..good() },
            ImportError::HolderBlocks { run: 1, holder: 0, blocks: 4, keys: 3 },
            "runs[1].holders[0].blocks",
        ),
    ];
    for (bad, error, field) in cases {
        let copy = pool();
        let chunk = ExportChunk { runs: vec![good(), bad], next: None };
        assert_eq!(copy.import(&chunk, NOW), Err(error));
        assert!(error.to_string().starts_with(field), "{error}");
        assert_eq!(copy.index.stats().blocks, 0, "nothing of the chunk is imported");
    }
}

#[test]
fn contradictory_holders_are_imported_as_far_as_they_are_reachable() {
    let holder = |id, blocks| ExportHolder { endpoint: EndpointId(id), blocks, age_ms: 5 };
    let first = ExportRun { keys: vec![1, 2, 3], holders: vec![holder(1, 3), holder(1, 1)], ..ExportRun::default() };
    let second = ExportRun {
        parent: Some(0),
        offset: 3,
        keys: vec![1, 2, 3],
        // One entry twice, and an endpoint that does not have the blocks before.
        holders: vec![holder(1, 2), holder(1, 2), holder(2, 3)],
        ..ExportRun::default()
    };
    let copy = pool();
    assert_eq!(copy.import(&ExportChunk { runs: vec![first, second], next: None }, NOW), Ok(5));
    assert_eq!(stored(&copy), [0, 5, 0, 0]);
    copy.index.check_recency();
}

#[test]
fn transfer_beside_recording_threads_brings_all_earlier_blocks() {
    let (source, copy) = (pool(), pool());
    let earlier: Vec<_> = (0..400).map(|i| [prompt(30, i % 7), prompt(40, i)].concat()).collect();
    for (id, keys) in (0u32..).zip(&earlier) {
        source.record(EndpointId(id % ENDPOINTS), keys, TenantId(0), NOW);
    }
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for cache in [&source, &copy] {
            let done = &done;
            scope.spawn(move || {
                for i in (0u64..).take_while(|_| !done.load(Relaxed)) {
                    let keys = [prompt(30, i % 7), prompt(40, i % 800)].concat();
                    cache.record(EndpointId(i as u32 % ENDPOINTS), &keys, TenantId(0), at(i));
                }
            });
        }
        for chunk in chunks(&source, 5_000, NOW, || ()) {
            copy.import(&chunk, NOW).unwrap();
        }
        done.store(true, Relaxed);
    });
    for (id, keys) in (0u32..).zip(&earlier) {
        assert_eq!(held(&copy, keys, id % ENDPOINTS), 70);
    }
    [&source, &copy].iter().for_each(|cache| cache.index.check_recency());
}

#[test]
fn import_among_thousands_of_records_counts_as_oldest() {
    let (source, copy) = (pool(), pool());
    let theirs = prompt(5, 1);
    source.record(EndpointId(1), &theirs, TenantId(0), NOW);
    (0..2_000).for_each(|second| copy.record(EndpointId(1), &prompt(1, 10 + second), TenantId(0), at(second)));
    // 1,000 records are older and 1,000 are newer: too many to search.
    let chunk = source.export(ExportCursor::default(), usize::MAX, &|_| true, NOW);
    assert_eq!(copy.import(&chunk, at(1_000)), Ok(5));
    copy.index.check_recency();
    set_capacity(&copy, 1, 2_000);
    assert_eq!((held(&copy, &theirs, 1), stored(&copy)[1]), (0, 2_000));
}
