//! Look-ups concurrent with the writer: every answer must have been true at one moment between the start and the end of
//! the look-up.

use attache_interleavings::explore::explore;
use attache_interleavings::index::{TenantId, Tier};
use attache_interleavings::key::BlockKey;
use attache_interleavings::story::{Story, Write, alone, prompt};
use std::fs;
use std::path::Path;

/// Budget for five chunks and 64 columns, bytes.
const BUDGET: usize = 96 << 10;

fn story(before: Vec<Write>, writes: Vec<Write>, prompts: &[&str]) -> Story {
    let prompts = prompts.iter().map(|blocks| prompt(blocks)).collect();
    Story { budget_bytes: BUDGET, seed: 42, before, writes, prompts }
}

fn store(holder: usize, blocks: &str, behind: usize) -> Write {
    store_on(Tier::Gpu, holder, blocks, behind)
}

fn store_on(tier: Tier, holder: usize, blocks: &str, behind: usize) -> Write {
    Write::Store { holder, tier, prompt: prompt(blocks), behind }
}

fn remove(holder: usize, blocks: &str, from: usize) -> Write {
    Write::Remove { holder, tier: Tier::Gpu, prompt: prompt(blocks), from }
}

fn record(holder: usize, blocks: &str) -> Write {
    Write::Record { holder, prompt: prompt(blocks), evicts: None }
}

/// The keys of a prompt that shares no prefix with others.
fn unique_prompt(number: u64, blocks: u64) -> Vec<BlockKey> {
    (0..blocks).map(|block| BlockKey((number << 8 | block).wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect()
}

/// Other runs: enough that a sweep reaches later runs only after several writes.
fn others(holder: usize, runs: u64) -> impl Iterator<Item = Write> {
    (0..runs).map(move |n| Write::Store { holder, tier: Tier::Gpu, prompt: unique_prompt(n, 1), behind: 0 })
}

#[test]
fn lookups_are_consistent_while_a_run_grows() {
    // A run of one holder grows while a second holder shares its start, then all of it.
    explore(story(
        vec![Write::Add, Write::Add, store(0, "abc", 0), store(1, "ab", 0)],
        vec![store(0, "abcdef", 3), store(1, "abcdef", 2)],
        &["abcdef", "abcz", "abz"],
    ));
}

#[test]
fn lookups_are_consistent_while_a_run_forks() {
    // A second prompt diverges in the middle of a run, which is then split there.
    explore(story(
        vec![Write::Add, Write::Add, store(0, "abcdef", 0)],
        vec![store(1, "abcxy", 0), remove(0, "abcdef", 3), store(0, "abcuv", 3)],
        &["abcdef", "abcxy", "abcuv"],
    ));
}

#[test]
fn lookups_are_consistent_while_freed_lines_are_reused() {
    // The table's seed decides which runs share a bucket.
    for seed in 0..8 {
        let seeded = story(
            vec![Write::Add, Write::Add, store(1, "stuv", 0), store(0, "abcd", 0)],
            vec![remove(0, "abcd", 0), store(0, "efgh", 0), remove(0, "efgh", 0), store(0, "abcd", 0)],
            &["stuv", "abcd", "efgh"],
        );
        explore(Story { seed, ..seeded });
    }
}

#[test]
fn lookups_are_consistent_while_the_table_grows() {
    // Each run adds a bucket, and moves the entries of another.
    for seed in 0..2 {
        let seeded = story(
            vec![Write::Add, store(0, "ab", 0)],
            ["ac", "ad", "ae", "af"].map(|fork| store(0, fork, 1)).to_vec(),
            &["ab", "ac", "af"],
        );
        explore(Story { seed, ..seeded });
    }
}

#[test]
fn lookups_are_consistent_while_holders_are_cleared() {
    // Blocks of a cleared holder are gone at once, whenever the sweep removes them.
    let mut before = vec![Write::Add; 4];
    before.extend(others(3, 120));
    before.extend([store(0, "abcd", 0), store(1, "abc", 0), store(2, "abcd", 0)]);
    let writes = vec![Write::Clear(0), Write::Clear(2), store(0, "ab", 0), Write::Clear(1)];
    explore(story(before, writes, &["abcd"]));
}

#[test]
fn lookups_are_consistent_while_a_holder_slot_is_reused() {
    // All 64 slots are taken. A reader that sees later writes must not see the removed holder.
    let mut before = vec![Write::Add; 64];
    before.extend(others(3, 70));
    before.extend([store(1, "ab", 0), store(2, "ab", 0), store(1, "abcd", 2), store(2, "abcd", 2), store(0, "a", 0)]);
    let writes = vec![Write::RemoveHolder(0), store(1, "abcdef", 4), Write::Add, store(64, "abcd", 0)];
    explore(story(before, writes, &["abcdef", "abcd"]));
}

#[test]
fn lookups_are_consistent_with_blocks_on_cpu_and_disk() {
    explore(story(
        vec![Write::Add, Write::Add, store(0, "ab", 0), store(1, "abcd", 0)],
        vec![
            store_on(Tier::Cpu, 0, "abcd", 2),
            store_on(Tier::Disk, 1, "abcdef", 4),
            remove(1, "abcd", 2),
            store_on(Tier::Cpu, 1, "abcd", 2),
        ],
        &["abcdef", "abz"],
    ));
}

#[test]
fn lookups_are_consistent_while_routed_prompts_are_recorded() {
    explore(story(
        vec![Write::Add, Write::Add, record(0, "abc"), store(1, "ab", 0)],
        vec![record(1, "abcdef"), record(0, "abxy"), Write::Clear(1)],
        &["abcdef", "abxy"],
    ));
}

#[test]
fn lookups_are_consistent_during_budget_evictions() {
    const BUDGET: usize = 48 << 10;
    const BLOCKS: u64 = 64;
    let record = |holder, number, evicts| Write::Record { holder, prompt: unique_prompt(number, BLOCKS), evicts };
    let empty = Story { budget_bytes: BUDGET, seed: 42, before: vec![Write::Add], writes: vec![], prompts: vec![] };
    let probe = empty.clone();
    let capacity = alone(move || {
        let (index, holders) = probe.begin();
        let fits = |number: &u64| {
            index.record(holders[0], &unique_prompt(*number, BLOCKS), TenantId(0), Default::default());
            index.stats().evicted_for_budget == 0
        };
        (0..1_000).take_while(fits).count() as u64
    });
    let mut before = vec![Write::Add, Write::Add, record(0, 0, None)];
    before.extend((1..capacity).map(|number| record(1, number, None)));
    let writes = vec![record(1, capacity, Some(0))];
    explore(Story {
        before,
        writes,
        prompts: [0, capacity - 1, capacity].map(|number| unique_prompt(number, BLOCKS)).to_vec(),
        ..empty
    });
}

#[test]
fn index_uses_only_the_scheduled_atomics_and_locks() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../src/prefix/index");
    let sources = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut seen = 0;
    for path in sources.filter(|path| path.extension().is_some_and(|e| e == "rs")) {
        let code = fs::read_to_string(&path).unwrap();
        for other in ["sync::atomic", "sync::Mutex", "RwLock", "parking_lot", "hint::spin_loop", "thread::yield_now"] {
            assert!(!code.contains(other), "{} names {other}: take it from `atomics`", path.display());
        }
        seen += usize::from(code.contains("crate::atomics"));
    }
    assert!(seen > 5, "the sources were found");
}
