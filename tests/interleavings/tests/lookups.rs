//! Look-ups beside the writer: every answer must have been true at one moment between the look-up's begin and its end.

use attache_interleavings::explore::explore;
use attache_interleavings::index::{TenantId, Tier};
use attache_interleavings::key::BlockKey;
use attache_interleavings::story::{Story, Write, alone, prompt};
use std::fs;
use std::path::Path;

/// Five chunks, and 64 columns.
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

/// The keys of a prompt that shares nothing with others.
fn numbered(number: u64, blocks: u64) -> Vec<BlockKey> {
    (0..blocks).map(|block| BlockKey((number << 8 | block).wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect()
}

/// Other runs, so many that a sweep does not come to what is stored behind them before several writes have passed.
fn others(holder: usize, runs: u64) -> impl Iterator<Item = Write> {
    (0..runs).map(move |n| Write::Store { holder, tier: Tier::Gpu, prompt: numbered(n, 1), behind: 0 })
}

#[test]
fn a_store() {
    // The run gets longer while a part of it is another's, and then is both's.
    explore(story(
        vec![Write::Add, Write::Add, store(0, "abc", 0), store(1, "ab", 0)],
        vec![store(0, "abcdef", 3), store(1, "abcdef", 2)],
        &["abcdef", "abcz", "abz"],
    ));
}

#[test]
fn a_fork() {
    // Another goes on differently in the middle of a run, which then ends there.
    explore(story(
        vec![Write::Add, Write::Add, store(0, "abcdef", 0)],
        vec![store(1, "abcxy", 0), remove(0, "abcdef", 3), store(0, "abcuv", 3)],
        &["abcdef", "abcxy", "abcuv"],
    ));
}

#[test]
fn lines_that_are_used_again() {
    // Which runs share a bucket depends on the table's seed.
    for seed in 0..8 {
        let told = story(
            vec![Write::Add, Write::Add, store(1, "stuv", 0), store(0, "abcd", 0)],
            vec![remove(0, "abcd", 0), store(0, "efgh", 0), remove(0, "efgh", 0), store(0, "abcd", 0)],
            &["stuv", "abcd", "efgh"],
        );
        explore(Story { seed, ..told });
    }
}

#[test]
fn a_table_that_grows() {
    // Each run is one bucket more, and moves what hangs in another.
    for seed in 0..2 {
        let told = story(
            vec![Write::Add, store(0, "ab", 0)],
            ["ac", "ad", "ae", "af"].map(|fork| store(0, fork, 1)).to_vec(),
            &["ab", "ac", "af"],
        );
        explore(Story { seed, ..told });
    }
}

#[test]
fn holders_that_are_cleared() {
    // All is forgotten at once, whenever it is swept.
    let mut before = vec![Write::Add; 4];
    before.extend(others(3, 120));
    before.extend([store(0, "abcd", 0), store(1, "abc", 0), store(2, "abcd", 0)]);
    let writes = vec![Write::Clear(0), Write::Clear(2), store(0, "ab", 0), Write::Clear(1)];
    explore(story(before, writes, &["abcd"]));
}

#[test]
fn a_holder_whose_place_another_gets() {
    // There are 64 places, all taken. Who sees what came after the removal must not see the holder.
    let mut before = vec![Write::Add; 64];
    before.extend(others(3, 70));
    before.extend([store(1, "ab", 0), store(2, "ab", 0), store(1, "abcd", 2), store(2, "abcd", 2), store(0, "a", 0)]);
    let writes = vec![Write::RemoveHolder(0), store(1, "abcdef", 4), Write::Add, store(64, "abcd", 0)];
    explore(story(before, writes, &["abcdef", "abcd"]));
}

#[test]
fn blocks_outside_gpu_memory() {
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
fn prompts_that_were_routed() {
    explore(story(
        vec![Write::Add, Write::Add, record(0, "abc"), store(1, "ab", 0)],
        vec![record(1, "abcdef"), record(0, "abxy"), Write::Clear(1)],
        &["abcdef", "abxy"],
    ));
}

#[test]
fn what_the_budget_evicts() {
    const BUDGET: usize = 48 << 10;
    const BLOCKS: u64 = 64;
    let record = |holder, number, evicts| Write::Record { holder, prompt: numbered(number, BLOCKS), evicts };
    let empty = Story { budget_bytes: BUDGET, seed: 42, before: vec![Write::Add], writes: vec![], prompts: vec![] };
    let probe = empty.clone();
    let room = alone(move || {
        let (index, holders) = probe.begin();
        let fits = |number: &u64| {
            index.record(holders[0], &numbered(*number, BLOCKS), TenantId(0), Default::default());
            index.stats().evicted_for_budget == 0
        };
        (0..1_000).take_while(fits).count() as u64
    });
    let mut before = vec![Write::Add, Write::Add, record(0, 0, None)];
    before.extend((1..room).map(|number| record(1, number, None)));
    let writes = vec![record(1, room, Some(0))];
    explore(Story {
        before,
        writes,
        prompts: [0, room - 1, room].map(|number| numbered(number, BLOCKS)).to_vec(),
        ..empty
    });
}

#[test]
fn the_index_has_no_other_atomics_and_locks() {
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
