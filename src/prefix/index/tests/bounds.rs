//! Memory limits, shares and capacities; many holders; structures that must not grow.

use super::{depth, index, index_with_share, key, named};
use crate::index::{EngineHash, HolderId, Matches, PrefixIndex, StoredBlock, TenantId, Tier};
use crate::key::{BlockKey, BlockKeys};
use attache_types::clock::Timestamp;
use std::time::Duration;

const BUDGET: usize = 4 << 20;

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

#[test]
fn flood_of_one_tenant_does_not_evict_others() {
    let index = index(BUDGET);
    let holder = index.add_holder();
    let mine = keys(1, 500);
    index.record(holder, &mine, TenantId(1), seconds(1));
    for i in 0..12_000 {
        index.record(holder, &keys(1000 + i, 100), TenantId(2), seconds(2));
        if i % 64 == 0 {
            assert_within(&index);
        }
    }
    assert_within(&index);
    assert_eq!(depth(&index, holder, &mine).gpu, 500);
    let stats = index.stats();
    assert!(stats.evicted_for_tenant > 300_000, "{stats:?}");
    assert_eq!(stats.evicted_for_budget, 0, "{stats:?}");
    assert_eq!(depth(&index, holder, &keys(12_999, 100)).gpu, 100, "the newest prompt is found");
}

#[test]
fn max_blocks_evicts_least_recently_used_prompts() {
    let index = index(BUDGET);
    index.set_max_blocks(Some(250));
    let holder = index.add_holder();
    for prompt in 0..4 {
        index.record(holder, &keys(prompt, 100), TenantId(0), seconds(prompt));
        assert!(index.stats().blocks <= 250, "{:?}", index.stats());
    }
    let held = [0, 1, 2, 3].map(|prompt| depth(&index, holder, &keys(prompt, 100)).gpu);
    assert_eq!(held, [0, 0, 100, 100]);
    index.record(holder, &keys(9, 400), TenantId(0), seconds(9));
    assert_eq!((depth(&index, holder, &keys(9, 400)).gpu, index.stats().blocks), (250, 250), "the limit is reached");
    index.set_max_blocks(None);
    index.record(holder, &keys(10, 400), TenantId(0), seconds(10));
    assert_eq!(index.stats().blocks, 650);
}

#[test]
fn single_tenant_may_use_the_whole_budget() {
    let room = |share, tenant| {
        let index = index_with_share(BUDGET, share);
        let holder = index.add_holder();
        let record = |prompt: &u64| {
            index.record(holder, &keys(*prompt, 100), tenant, seconds(1));
            let stats = index.stats();
            stats.evicted_for_budget + stats.evicted_for_tenant == 0
        };
        (0..).take_while(record).count()
    };
    let all = room(1.0, TenantId(0));
    assert!(all > 4_000, "{all}");
    assert_eq!((room(0.25, TenantId(0)), room(0.25, TenantId(7))), (all, all));
}

/// Each of three tenants has 1,200 prompts of 100 blocks, about 22 % of [`BUDGET`].
fn three_tenants(index: &PrefixIndex, holder: HolderId) -> impl Fn() -> usize {
    let prompts = |tenant: u64| (0..1_200).map(move |i| keys(tenant << 11 | i, 100));
    for tenant in 1..=3 {
        prompts(tenant).for_each(|p| index.record(holder, &p, TenantId(tenant as u32), seconds(1)));
    }
    move || (1..=3).flat_map(prompts).filter(|p| depth(index, holder, p).gpu == 100).count()
}

#[test]
fn flood_and_giant_prompt_do_not_evict_full_shares() {
    for (blocks, prompts) in [(100, 10_000), (300_000, 3)] {
        let index = index_with_share(BUDGET, 0.25);
        let holder = index.add_holder();
        let others = three_tenants(&index, holder);
        for i in 0..prompts {
            index.record(holder, &keys(1 << 20 | i, blocks), TenantId(4), seconds(2));
        }
        assert_within(&index);
        let stats = index.stats();
        assert_eq!((others(), stats.evicted_for_budget), (3_600, 0), "{stats:?}");
        assert!(stats.evicted_for_tenant > 0 || stats.refused_blocks > 0, "the budget is used up: {stats:?}");
    }
}

#[test]
fn tenant_over_its_share_is_evicted_first() {
    let index = index_with_share(BUDGET, 0.25);
    let holder = index.add_holder();
    (0..10_000).for_each(|i| index.record(holder, &keys(1 << 20 | i, 100), TenantId(4), seconds(1)));
    let others = three_tenants(&index, holder);
    assert_eq!(others(), 3_600);
    assert_eq!(depth(&index, holder, &keys(1 << 20 | 9_999, 100)).gpu, 100, "its newest are there");
    assert_eq!(index.stats().refused_blocks, 0);
}

#[test]
fn flood_of_one_tenant_keeps_prompts_that_others_use() {
    let index = index(BUDGET);
    let (holder, other) = (index.add_holder(), index.add_holder());
    let head = keys(1, 200);
    let behind = |prompt: u64| head.iter().copied().chain(keys(prompt, 100)).collect::<Vec<_>>();
    // The flooding tenant recorded the prefix first.
    index.record(holder, &behind(2), TenantId(2), seconds(1));
    index.record(holder, &behind(3), TenantId(1), seconds(1));
    // This tenant has only prompts that it shares with the first one.
    let same = keys(4, 100);
    index.record(holder, &same, TenantId(2), seconds(1));
    index.record(other, &same, TenantId(3), seconds(1));
    for i in 0..12_000 {
        index.record(holder, &keys(1000 + i, 100), TenantId(2), seconds(2));
    }
    assert_eq!((depth(&index, holder, &behind(3)).gpu, depth(&index, other, &same).gpu), (300, 100));
    let stats = index.stats();
    assert!(stats.evicted_for_tenant > 300_000 && stats.evicted_for_budget == 0, "{stats:?}");
    index.check_bills();
}

#[test]
fn shared_prompts_are_kept_up_to_the_other_tenants_share() {
    let index = index(BUDGET);
    let holder = index.add_holder();
    for i in 0..12_000 {
        index.record(holder, &keys(1000 + i, 100), TenantId(2), seconds(1));
        index.record(holder, &keys(1000 + i, 100), TenantId(1), seconds(1));
    }
    for i in 0..12_000 {
        index.record(holder, &keys(100_000 + i, 100), TenantId(2), seconds(2));
    }
    let stats = index.stats();
    let kept = (0..12_000).filter(|i| depth(&index, holder, &keys(1000 + i, 100)).gpu == 100).count();
    let all = stats.blocks / 100;
    assert!(kept * 5 > all && kept * 4 < all + 100, "a quarter: {kept} of {all}");
    index.check_bills();
}

#[test]
fn runs_change_their_tenant_a_few_at_a_time() {
    let index = index(BUDGET);
    let holder = index.add_holder();
    let billed = |tenant| index.writer.lock().bytes_of(&index.shared, TenantId(tenant));
    // Both tenants record prompts until memory is exhausted; the first one is billed.
    let prompts = (1000..).take_while(|prompt| {
        (1..=2).for_each(|tenant| index.record(holder, &keys(*prompt, 100), TenantId(tenant), seconds(1)));
        index.stats().evicted_for_tenant == 0
    });
    let prompts = prompts.count() as u64;
    let (run, once) = (billed(1) / prompts, billed(2));
    assert!(prompts > 4_000 && once > 0 && once < 200 * run, "{once} of {prompts} times {run}");
    let forgotten = index.stats().evicted_for_tenant;
    index.record(holder, &keys(100_000, 100), TenantId(1), seconds(2));
    let evicted = index.stats().evicted_for_tenant - forgotten;
    let changed = billed(2) - once;
    assert!(evicted > 0 && changed > 0 && changed <= evicted / 100 * 33 * run, "{changed} with {evicted}");
    index.check_bills();
}

#[test]
fn passed_on_runs_are_evicted_before_the_tenants_own() {
    let index = index_with_share(BUDGET, 0.25);
    let holder = index.add_holder();
    let record = |tenant: u32, prompts: std::ops::Range<u64>| {
        prompts.for_each(|p| index.record(holder, &keys(p, 100), TenantId(tenant), seconds(1)));
    };
    let kept = |prompts: std::ops::Range<u64>| -> Vec<u64> {
        prompts.filter(|p| depth(&index, holder, &keys(*p, 100)).gpu == 100).collect()
    };
    // Two tenants within their shares, and a third with less, of its own.
    record(3, 3_000..4_150);
    record(4, 4_000 << 10..(4_000 << 10) + 1_150);
    let own = 1_000..1_400;
    record(1, own.clone());
    // The prompts that it shares are billed to the flooding tenant.
    let shared = 20_000..21_500;
    record(2, shared.clone());
    record(1, shared.clone());
    record(2, 30_000..40_000);
    let before = kept(shared.clone());
    assert!(before.len() > 500 && kept(own.clone()).len() == 400, "{}", before.len());
    record(1, 50_000..50_600);
    assert_eq!((kept(own).len(), kept(50_000..50_600).len()), (400, 600));
    let after = kept(shared);
    assert!(after.len() + 100 < before.len(), "{} of {}", after.len(), before.len());
    assert!(before.ends_with(&after), "the least recently used ones were evicted");
    index.check_bills();
}

#[test]
fn shares_shrink_with_the_memory_of_engine_blocks() {
    let index = index(BUDGET);
    let (engine, holder) = (index.add_holder(), index.add_holder());
    for prompt in 0.. {
        store(&index, engine, &keys(1 << 30 | prompt, 200));
        let stats = index.stats();
        if stats.budget_bytes - stats.bytes + stats.free_bytes < BUDGET / 8 {
            break;
        }
    }
    // Less than a quarter of the budget is left, so a share of the whole budget would never be exceeded.
    let mine = keys(1, 100);
    index.record(holder, &mine, TenantId(1), seconds(1));
    for i in 0..4_000 {
        index.record(holder, &keys(1000 + i, 100), TenantId(2), seconds(2));
    }
    let stats = index.stats();
    assert!(stats.evicted_for_tenant > 50_000 && stats.evicted_for_budget == 0, "{stats:?}");
    assert_eq!(depth(&index, holder, &mine).gpu, 100);
    index.check_bills();
}

#[test]
fn blocks_over_a_holders_capacity_are_not_billed() {
    let index = index(BUDGET);
    let (holder, other) = (index.add_holder(), index.add_holder());
    index.record(holder, &keys(1, 1_000), TenantId(1), seconds(1));
    index.record(other, &keys(1, 1_000), TenantId(1), seconds(1));
    let billed = || index.writer.lock().bytes_of(&index.shared, TenantId(1));
    let both = billed();
    index.set_capacity(holder, 10);
    index.set_capacity(other, 10);
    let few = billed();
    assert!(few * 4 < both, "{both} {few}");
    index.remove_holder(other);
    // Sweeping happens during writes.
    (0..64).for_each(|_| index.remove(holder, Tier::Gpu, &[]));
    assert!(billed() < few, "a holder that is gone has nothing");
    index.check_bills();
}

#[test]
fn prompt_larger_than_the_budget_keeps_its_first_blocks() {
    let index = index(1 << 20);
    let holder = index.add_holder();
    let long = keys(1, 300_000);
    index.record(holder, &long, TenantId(1), seconds(1));
    assert_within(&index);
    let found = depth(&index, holder, &long).gpu;
    assert!(found > 150_000 && found < 260_000, "{found}");
    assert_eq!(index.blocks(holder).guessed, found, "no block without those before it: {:?}", index.stats());
}

#[test]
fn exhausted_budget_evicts_least_recently_used_of_all() {
    let index = index(BUDGET);
    let holder = index.add_holder();
    let mine = keys(1, 300);
    for i in 0..10_000u32 {
        index.record(holder, &keys(1000 + u64::from(i), 100), TenantId(i), seconds(2));
        if i % 64 == 0 {
            index.record(holder, &mine, TenantId(1 << 30), seconds(2));
            assert_within(&index);
        }
    }
    let stats = index.stats();
    assert!(stats.evicted_for_budget > 300_000, "{stats:?}");
    assert_eq!(stats.refused_blocks, 0, "{stats:?}");
    assert_eq!(depth(&index, holder, &mine).gpu, 300, "a prompt in use stays");
    assert_eq!(depth(&index, holder, &keys(10_999, 100)).gpu, 100, "the newest prompt is found");
}

fn store(index: &PrefixIndex, holder: HolderId, keys: &[BlockKey]) -> Vec<StoredBlock> {
    let blocks = named(keys, 0);
    index.store(holder, Tier::Gpu, None, &blocks).unwrap();
    blocks
}

#[test]
fn engine_blocks_replace_estimates_and_then_older_engine_blocks() {
    let index = index(BUDGET);
    let (engine, guessed) = (index.add_holder(), index.add_holder());
    for i in 0..7_000u64 {
        index.record(guessed, &keys(1_000_000 + i, 100), TenantId(i as u32), seconds(1));
    }
    assert!(index.blocks(guessed).guessed > 100_000);
    index.set_share(guessed, false);
    let mut stored = Vec::new();
    while index.stats().evicted_reported == 0 {
        let prompt = keys(stored.len() as u64, 200);
        stored.push((store(&index, engine, &prompt), prompt));
        assert_within(&index);
    }
    assert_eq!(index.blocks(guessed).guessed, 0, "{:?}", index.stats());
    assert!(stored.len() > 300, "{}: {:?}", stored.len(), index.stats());
    let gone = index.stats().evicted_reported;
    let held: u64 = stored.iter().map(|(_, p)| u64::from(depth(&index, engine, p).gpu)).sum();
    assert_eq!(held + gone, stored.len() as u64 * 200, "stored blocks are found");
    assert_eq!(u64::from(index.blocks(engine).gpu), held);
    // Removing blocks frees memory.
    for (blocks, _) in &stored {
        let names: Vec<EngineHash> = blocks.iter().rev().map(|b| b.hash).collect();
        index.remove(engine, Tier::Gpu, &names);
    }
    let stats = index.stats();
    assert_eq!((stats.runs, stats.blocks, stats.refused_blocks), (0, 0, 0), "{stats:?}");
    let prompt = keys(1, 200);
    store(&index, engine, &prompt);
    assert_eq!(depth(&index, engine, &prompt).gpu, 200);
}

#[test]
fn memory_stays_within_any_budget() {
    for budget in [0, 1 << 10, 100 << 10, 300 << 10, 1 << 20] {
        let index = index(budget);
        let (a, b) = (index.add_holder(), index.add_holder());
        for i in 0..1_000 {
            store(&index, a, &keys(i, 40));
            index.record(b, &keys(i + 1, 40), TenantId(i as u32 % 7), seconds(1));
            if budget >= 300 << 10 {
                assert_within(&index);
            }
        }
    }
}

#[test]
fn capacity_evicts_tails_before_heads() {
    let index = index(BUDGET);
    let holder = index.add_holder();
    index.set_capacity(holder, 150);
    let (old, new) = (keys(1, 100), keys(2, 100));
    index.record(holder, &old, TenantId(1), seconds(1));
    index.record(holder, &new, TenantId(1), seconds(2));
    assert_eq!(depth(&index, holder, &old).gpu, 50, "the old prompt's tail was evicted");
    assert_eq!(depth(&index, holder, &new).gpu, 100);
    assert_eq!(index.blocks(holder).guessed, 150);
    // The first blocks of the old prompt are used again, and are now younger than the new one.
    index.record(holder, &old[..20], TenantId(1), seconds(3));
    index.set_capacity(holder, 60);
    assert_eq!(depth(&index, holder, &old).gpu, 20);
    assert_eq!(depth(&index, holder, &new).gpu, 40);
}

/// Fills an index of one tenant with prompts until the next one would not fit. Returns how many fit besides the first.
fn filled(index: &PrefixIndex, holder: HolderId) -> u64 {
    let record = |prompt: u64| index.record(holder, &keys(prompt, 64), TenantId(1), seconds(1));
    record(0);
    let fits = |prompt: &u64| {
        record(*prompt);
        index.stats().evicted_for_budget == 0
    };
    (1..).take_while(fits).count() as u64
}

#[test]
fn growing_the_oldest_prompt_evicts_the_next_oldest() {
    for share in [1.0, 0.25] {
        let index = || index_with_share(1 << 20, share);
        let room = {
            let index = index();
            filled(&index, index.add_holder())
        };
        let index = index();
        let holder = index.add_holder();
        (0..=room).for_each(|prompt| index.record(holder, &keys(prompt, 64), TenantId(1), seconds(1)));
        assert_eq!(index.stats().evicted_for_budget, 0);
        // The first prompt comes back and continues.
        index.record(holder, &keys(0, 1_024), TenantId(1), seconds(2));
        let stats = index.stats();
        assert_eq!((depth(&index, holder, &keys(0, 1_024)).gpu, stats.refused_blocks), (1_024, 0), "{stats:?}");
        assert!(stats.evicted_for_budget > 0, "{stats:?}");
        assert_eq!(depth(&index, holder, &keys(1, 64)).gpu, 0, "the next prompt was evicted");
    }
}

#[test]
fn tenant_whose_only_prompt_is_evicted_for_its_next_one_stays() {
    let index = || index_with_share(1 << 20, 1.0);
    let record = |index: &PrefixIndex, holder, prompt: u64, tenants: u64| {
        index.record(holder, &keys(prompt, 64), TenantId((prompt % tenants) as u32), seconds(1));
        index.stats().evicted_for_budget
    };
    let tenants = {
        let index = index();
        let holder = index.add_holder();
        (0..).take_while(|prompt| record(&index, holder, *prompt, u64::MAX) == 0).count() as u64
    };
    let index = index();
    let holder = index.add_holder();
    for prompt in 0..4 * tenants {
        let forgotten = record(&index, holder, prompt, tenants);
        let stats = index.stats();
        assert_eq!((depth(&index, holder, &keys(prompt, 64)).gpu, stats.refused_blocks), (64, 0), "{stats:?}");
        assert!(forgotten > 0 || prompt <= tenants, "{stats:?}");
    }
}

#[test]
fn no_estimate_is_evicted_when_memory_for_gaps_is_exhausted() {
    let index = index(1 << 20);
    let (whole, holes, guessed) = (index.add_holder(), index.add_holder(), index.add_holder());
    index.record(guessed, &keys(1_000, 100), TenantId(1), seconds(1));
    for prompt in 0..2 {
        let blocks = store(&index, whole, &keys(prompt, 2_000));
        for at in (1..2_000).step_by(2) {
            index.store(holes, Tier::Gpu, Some(blocks[at - 1].hash), &blocks[at..=at]).unwrap();
        }
    }
    let stats = index.stats();
    assert!(stats.refused_blocks > 0, "{stats:?}");
    assert_eq!((index.blocks(guessed).guessed, stats.evicted_for_budget), (100, 0), "{stats:?}");
}

#[test]
fn dead_names_do_not_accumulate() {
    let index = index(16 << 20);
    let (a, b) = (index.add_holder(), index.add_holder());
    for prompt in 0..1_000 {
        let prompt = keys(prompt, 64);
        let [first, second] = [1, 2].map(|seed| named(&prompt, seed));
        index.store(a, Tier::Gpu, None, &first).unwrap();
        index.store(b, Tier::Gpu, None, &second).unwrap();
        for (holder, blocks) in [(a, first), (b, second)] {
            let names: Vec<EngineHash> = blocks.iter().rev().map(|b| b.hash).collect();
            index.remove(holder, Tier::Gpu, &names);
        }
    }
    let stats = index.stats();
    assert_eq!(stats.blocks, 0);
    assert!(stats.names < 2_000, "{stats:?}");
}

#[test]
fn storing_and_clearing_keeps_memory_constant() {
    let index = index(64 << 20);
    let holders: Vec<HolderId> = (0..4).map(|_| index.add_holder()).collect();
    let mut after = Vec::new();
    for round in 0..12u64 {
        for (h, holder) in holders.iter().enumerate() {
            for i in 0..64 {
                let prompt = keys((round << 12) + (h as u64 * 64) + i, 128);
                store(&index, *holder, &prompt);
                index.record(*holder, &keys((1 << 30) + i, 64), TenantId(1), seconds(round));
            }
            index.clear(*holder);
        }
        after.push(index.stats().bytes);
    }
    assert!(after[11] <= after[3], "{after:?}");
}

#[test]
fn two_thousand_holders_are_found() {
    let index = index(64 << 20);
    let holders: Vec<HolderId> = (0..2000).map(|_| index.add_holder()).collect();
    let prompt = keys(1, 300);
    let blocks = named(&prompt, 0);
    let has = |h: usize| 1 + (h * 7) % 300;
    for (h, holder) in holders.iter().enumerate() {
        index.store(*holder, Tier::Gpu, None, &blocks[..has(h)]).unwrap();
    }
    let mut matches = Matches::default();
    index.lookup(&mut prompt.as_slice(), &mut matches);
    assert_eq!(matches.iter().count(), 2000);
    assert_eq!(matches.deepest(), 300);
    for (h, holder) in holders.iter().enumerate() {
        assert_eq!(matches.depth(*holder).gpu, has(h) as u32, "holder {h}");
    }
    for holder in holders.iter().step_by(2) {
        index.clear(*holder);
    }
    index.lookup(&mut prompt.as_slice(), &mut matches);
    assert_eq!(matches.iter().count(), 1000);
    matches.iter().for_each(|m| assert_eq!(m.depth.any as usize, has(m.holder.slot())));
    for holder in holders.iter().step_by(2) {
        index.store(*holder, Tier::Cpu, None, &blocks[..5]).unwrap();
    }
    index.lookup(&mut prompt.as_slice(), &mut matches);
    assert_eq!(matches.iter().count(), 2000);
    let d = matches.depth(holders[2]);
    assert_eq!((d.gpu, d.cpu, d.any), (0, 5, 5));
    assert_within(&index);
}

#[test]
fn removed_holder_is_never_found() {
    let index = index(BUDGET);
    let gone = index.add_holder();
    let prompt = keys(1, 10);
    let blocks = store(&index, gone, &prompt);
    index.remove_holder(gone);
    assert_eq!(depth(&index, gone, &prompt).any, 0);
    let other = index.add_holder();
    assert_ne!(other, gone);
    store(&index, gone, &prompt);
    index.remove(gone, Tier::Gpu, &[blocks[0].hash]);
    index.record(gone, &prompt, TenantId(1), seconds(1));
    assert_eq!(depth(&index, other, &prompt).any, 0);
    assert_eq!(index.stats().holders, 1);
}

struct Counting<'a> {
    keys: &'a [BlockKey],
    made: usize,
}

impl BlockKeys for Counting<'_> {
    fn upto(&mut self, n: usize) -> &[BlockKey] {
        self.made = self.made.max(n.min(self.keys.len()));
        &self.keys[..self.made]
    }
}

#[test]
fn lookup_requests_only_the_keys_that_matter() {
    let index = index(BUDGET);
    let holder = index.add_holder();
    let prompt = keys(1, 10_000);
    let mut matches = Matches::default();
    for held in [0, 1, 63, 64, 65, 1000, 5000] {
        index.clear(holder);
        store(&index, holder, &prompt[..held]);
        let mut counting = Counting { keys: &prompt, made: 0 };
        index.lookup(&mut counting, &mut matches);
        assert_eq!(matches.depth(holder).gpu as usize, held);
        assert!(counting.made <= (2 * held + 64).min(held + 1024), "{} of {held}", counting.made);
    }
    store(&index, holder, &prompt);
    let mut counting = Counting { keys: &prompt, made: 0 };
    index.lookup(&mut counting, &mut matches);
    assert_eq!((matches.depth(holder).gpu, counting.made), (10_000, 10_000));
}

#[test]
fn weight_halves_after_each_half_life() {
    let index = index(BUDGET);
    let holder = index.add_holder();
    let near = |a: f64, b: f64| (a - b).abs() < 1e-3 * b.max(1.0);
    assert!(near(index.weight(holder, seconds(5)), 0.0));
    index.record(holder, &keys(1, 100), TenantId(1), seconds(10));
    assert!(near(index.weight(holder, seconds(10)), 100.0));
    assert!(near(index.weight(holder, seconds(70)), 50.0));
    let blocks = store(&index, holder, &keys(2, 50));
    assert!(near(index.weight(holder, seconds(70)), 100.0));
    assert!(near(index.weight(holder, seconds(130)), 50.0));
    let names: Vec<EngineHash> = blocks.iter().map(|b| b.hash).collect();
    index.remove(holder, Tier::Gpu, &names);
    assert!(near(index.weight(holder, seconds(130)), 50.0 * 100.0 / 150.0));
    index.clear(holder);
    assert!(near(index.weight(holder, seconds(130)), 0.0));
    assert_eq!(Duration::from_secs(60).as_secs(), 60);
}
