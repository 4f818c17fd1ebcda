//! Shares of KV caches in a full index: floods of reported blocks, and what they must leave.

use super::{depth, index, key, named};
use crate::index::{EngineHash, HolderId, PrefixIndex, TenantId, Tier};
use crate::key::BlockKey;
use attache_types::clock::Timestamp;

const BUDGET: usize = 1 << 20;

fn keys(prompt: u64, blocks: u64) -> Vec<BlockKey> {
    (0..blocks).map(|i| key(prompt << 20 | i)).collect()
}

fn assert_within(index: &PrefixIndex) {
    let stats = index.stats();
    assert!(stats.bytes <= stats.budget_bytes, "{stats:?}");
}

fn seconds(s: u64) -> Timestamp {
    Timestamp(s * 1_000_000_000)
}

fn store(index: &PrefixIndex, holder: HolderId, prompt: u64, blocks: u64) {
    index.store(holder, Tier::Gpu, None, &named(&keys(prompt, blocks), 0)).expect("no parent is needed");
}

#[test]
fn flood_of_one_server_evicts_its_own_blocks_only() {
    let index = index(BUDGET);
    let [honest, flood] = [(); 2].map(|()| index.add_holder());
    (0..20).for_each(|prompt| store(&index, honest, prompt, 100));
    let mut reported = 0;
    while reported < 80_000 {
        store(&index, flood, 1_000 + reported, 1);
        reported += 1;
        if reported % 4_096 == 0 {
            assert_within(&index);
        }
    }
    assert_within(&index);
    let stats = index.stats();
    assert_eq!((0..20).filter(|p| depth(&index, honest, &keys(*p, 100)).gpu == 100).count(), 20, "{stats:?}");
    assert!(stats.evicted_reported > reported / 3 && stats.refused_blocks == 0, "{stats:?}");
    assert_eq!((index.is_short(honest), index.is_short(flood), index.shortages()), (false, true, 1));
    assert_eq!(depth(&index, flood, &keys(1_000 + reported - 1, 1)).gpu, 1, "the newest block is found");
    // The honest server still has room for as much as its share.
    (20..45).for_each(|prompt| store(&index, honest, prompt, 100));
    assert_within(&index);
    assert_eq!((0..45).filter(|p| depth(&index, honest, &keys(*p, 100)).gpu == 100).count(), 45);
    assert!(!index.is_short(honest) && index.stats().refused_blocks == 0, "{:?}", index.stats());
    // Cleared, it is whole again.
    index.clear(flood);
    assert!(!index.is_short(flood));
}

#[test]
fn flood_of_chains_copies_and_names_of_one_server_leaves_others_their_share() {
    let index = index(BUDGET);
    let [honest, flood] = [(); 2].map(|()| index.add_holder());
    let known: Vec<Vec<BlockKey>> = (0..20).map(|prompt| keys(prompt, 100)).collect();
    (0..20).for_each(|prompt| store(&index, honest, prompt, 100));
    // Long chains, the honest server's blocks under names of its own, and each of them again and again.
    for round in 0..20u64 {
        for keys in &known {
            let other = named(keys, 1 + round);
            index.store(flood, Tier::Gpu, None, &other).expect("no parent is needed");
        }
        store(&index, flood, 1_000 + round, 15_000);
        assert_within(&index);
    }
    assert!(index.stats().evicted_reported > 0, "{:?}", index.stats());
    assert!(known.iter().all(|keys| depth(&index, honest, keys).gpu == 100));
    // The engine's names still stand for the blocks.
    for (prompt, before) in (0..).zip(&known) {
        let names = named(before, 0);
        let whole = [before.as_slice(), &keys(77 + prompt, 8)].concat();
        let behind = named(&whole, 0).split_off(100);
        index.store(honest, Tier::Gpu, names.last().map(|block| block.hash), &behind).expect("its parent is there");
        assert_eq!(depth(&index, honest, &whole).gpu, 108);
    }
    let removed: Vec<EngineHash> = named(&known[0], 0).iter().rev().map(|block| block.hash).collect();
    index.remove(honest, Tier::Gpu, &removed);
    assert_eq!(depth(&index, honest, &known[0]).gpu, 0, "its names remove its blocks");
}

#[test]
fn full_index_of_one_server_keeps_the_blocks_that_prompts_use() {
    let index = index(BUDGET);
    let holder = index.add_holder();
    let mut prompts = 0;
    while index.shortages() == 0 {
        store(&index, holder, prompts, 100);
        prompts += 1;
    }
    let used: Vec<u64> =
        (0..prompts / 2).filter(|p| depth(&index, holder, &keys(*p, 100)).gpu == 100).take(25).collect();
    for round in 0..4 * prompts {
        if round % 50 == 0 {
            used.iter().for_each(|prompt| index.mark_used(&keys(*prompt, 100)));
        }
        store(&index, holder, prompts + round, 100);
    }
    assert_within(&index);
    assert_eq!(used.iter().filter(|p| depth(&index, holder, &keys(**p, 100)).gpu == 100).count(), 25);
    assert_eq!(index.stats().refused_blocks, 0, "{:?}", index.stats());
    assert!((5 * prompts - 5..5 * prompts).all(|p| depth(&index, holder, &keys(p, 100)).gpu == 100), "the newest");
}

#[test]
fn estimates_of_a_server_without_events_keep_their_share() {
    let index = index(BUDGET);
    let [guessed, flood] = [(); 2].map(|()| index.add_holder());
    let mine = || (0..25).map(|prompt| keys(prompt, 100));
    mine().for_each(|keys| index.record(guessed, &keys, TenantId(0), seconds(1)));
    for prompt in 0..60_000 {
        store(&index, flood, 1_000 + prompt, 1);
    }
    assert_within(&index);
    assert_eq!(mine().filter(|keys| depth(&index, guessed, keys).gpu == 100).count(), 25, "{:?}", index.stats());
    // New estimates take the place of the blocks over the share.
    let more = || (25..50).map(|prompt| keys(prompt, 100));
    more().for_each(|keys| index.record(guessed, &keys, TenantId(0), seconds(2)));
    assert_eq!(mine().chain(more()).filter(|keys| depth(&index, guessed, keys).gpu == 100).count(), 50);
    // Estimates of a server that reports its blocks have no share.
    index.set_share(guessed, false);
    let reported = index.blocks(flood).gpu;
    (0..15_000).for_each(|prompt| store(&index, flood, 1_000_000 + prompt, 1));
    assert!(index.blocks(flood).gpu > reported + 1_000, "{:?}", index.stats());
    index.check_bills();
}

#[test]
fn gaps_of_one_server_leave_room_for_those_of_others() {
    let index = index(BUDGET);
    let [honest, flood] = [(); 2].map(|()| index.add_holder());
    let known: Vec<Vec<BlockKey>> = (0..40).map(|prompt| keys(prompt, 100)).collect();
    for keys in &known {
        index.store(honest, Tier::Gpu, None, &named(keys, 0)).expect("no parent is needed");
    }
    // Every second block of each prompt.
    for keys in &known {
        let all = named(keys, 0);
        for at in (1..100).step_by(2) {
            let _ = index.store(flood, Tier::Gpu, Some(all[at - 1].hash), &all[at..=at]);
        }
    }
    assert!(index.is_short(flood), "{:?}", index.stats());
    let other = index.add_holder();
    let all = named(&known[0], 0);
    let _ = index.store(other, Tier::Gpu, Some(all[50].hash), &all[51..]);
    index.store(other, Tier::Gpu, None, &all[..51]).expect("no parent is needed");
    assert_eq!(depth(&index, other, &known[0]).gpu, 100);
    assert!(!index.is_short(other) && !index.is_short(honest));
}
