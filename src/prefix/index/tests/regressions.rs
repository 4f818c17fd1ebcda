//! Cases that other prefix indexes get wrong.

use super::{depth, index, key, named};
use crate::index::{EngineHash, Matches, Origin, StoreEffect, StoredBlock, TenantId, Tier, UnknownParent};
use crate::key::{BlockKey, KeySpace, Root};
use attache_types::clock::Timestamp;

fn keys(numbers: std::ops::Range<u64>) -> Vec<BlockKey> {
    numbers.map(key).collect()
}

fn names(blocks: &[StoredBlock]) -> Vec<EngineHash> {
    blocks.iter().map(|b| b.hash).collect()
}

#[test]
fn shared_prefix_keeps_all_its_holders() {
    let index = index(4 << 20);
    let (a, b) = (index.add_holder(), index.add_holder());
    let prompt = keys(0..8);
    let blocks = named(&prompt, 0);
    index.store(a, Tier::Gpu, None, &blocks).unwrap();
    index.store(b, Tier::Gpu, None, &blocks[..5]).unwrap();
    index.remove(a, Tier::Gpu, &names(&blocks));
    assert_eq!((depth(&index, a, &prompt).gpu, depth(&index, b, &prompt).gpu), (0, 5));
    // The names still work for the remaining holder.
    index.remove(b, Tier::Gpu, &names(&blocks[3..]));
    assert_eq!(depth(&index, b, &prompt).gpu, 3);
}

#[test]
fn two_ranks_of_one_host_are_two_holders() {
    let index = index(4 << 20);
    let (rank0, rank1) = (index.add_holder(), index.add_holder());
    let prompt = keys(0..4);
    index.store(rank0, Tier::Gpu, None, &named(&prompt, 0)).unwrap();
    index.clear(rank1);
    assert_eq!((depth(&index, rank0, &prompt).gpu, depth(&index, rank1, &prompt).gpu), (4, 0));
}

#[test]
fn match_ends_at_a_gap() {
    let index = index(4 << 20);
    let holder = index.add_holder();
    let prompt = keys(0..10);
    let blocks = named(&prompt, 0);
    index.store(holder, Tier::Gpu, None, &blocks).unwrap();
    index.remove(holder, Tier::Gpu, &[blocks[4].hash]);
    assert_eq!(depth(&index, holder, &prompt).gpu, 4);
    assert_eq!(index.blocks(holder).gpu, 9, "blocks behind the gap are still held");
    index.store(holder, Tier::Gpu, Some(blocks[3].hash), &blocks[4..5]).unwrap();
    assert_eq!(depth(&index, holder, &prompt).gpu, 10, "and match again when the gap is filled");
    index.remove(holder, Tier::Gpu, &[blocks[0].hash]);
    assert_eq!(depth(&index, holder, &prompt).gpu, 0, "dropping the first block ends the match");
    assert_eq!(index.held(holder, Tier::Gpu).len(), 9);
}

#[test]
fn blocks_on_several_tiers_form_one_match() {
    let index = index(4 << 20);
    let holder = index.add_holder();
    let prompt = keys(0..9);
    let blocks = named(&prompt, 0);
    index.store(holder, Tier::Gpu, None, &blocks[..3]).unwrap();
    index.store(holder, Tier::Cpu, Some(blocks[2].hash), &blocks[3..6]).unwrap();
    index.store(holder, Tier::Disk, Some(blocks[5].hash), &blocks[6..]).unwrap();
    let d = depth(&index, holder, &prompt);
    assert_eq!((d.gpu, d.cpu, d.any), (3, 6, 9));
    index.remove(holder, Tier::Gpu, &[blocks[1].hash]);
    let d = depth(&index, holder, &prompt);
    assert_eq!((d.gpu, d.cpu, d.any), (1, 1, 1));
    index.store(holder, Tier::Cpu, Some(blocks[0].hash), &blocks[1..2]).unwrap();
    let d = depth(&index, holder, &prompt);
    assert_eq!((d.gpu, d.cpu, d.any), (1, 6, 9));
}

#[test]
fn block_stored_twice_is_held_until_removed_twice() {
    let index = index(4 << 20);
    let holder = index.add_holder();
    let prompt = keys(0..4);
    let blocks = named(&prompt, 0);
    index.store(holder, Tier::Gpu, None, &blocks).unwrap();
    index.store(holder, Tier::Gpu, Some(blocks[1].hash), &blocks[2..]).unwrap();
    index.remove(holder, Tier::Gpu, &names(&blocks[2..]));
    assert_eq!(depth(&index, holder, &prompt).gpu, 4);
    index.remove(holder, Tier::Gpu, &names(&blocks[2..]));
    assert_eq!(depth(&index, holder, &prompt).gpu, 2);
}

#[test]
fn block_with_unknown_parent_is_an_error() {
    let index = index(4 << 20);
    let (a, b) = (index.add_holder(), index.add_holder());
    let blocks = named(&keys(0..6), 0);
    assert_eq!(index.store(a, Tier::Gpu, Some(blocks[2].hash), &blocks[3..]), Err(UnknownParent));
    index.store(b, Tier::Gpu, None, &blocks[..3]).unwrap();
    index.store(a, Tier::Gpu, Some(blocks[2].hash), &blocks[3..]).unwrap();
    assert_eq!(depth(&index, a, &keys(0..6)).gpu, 0, "its first blocks are missing");
    assert_eq!(index.blocks(a).gpu, 3);
    index.clear(b);
    assert_eq!(index.store(b, Tier::Gpu, Some(blocks[2].hash), &blocks[3..]), Err(UnknownParent));
}

#[test]
fn roots_keep_caches_apart() {
    let space = KeySpace::new(1);
    let index = index(4 << 20);
    let holder = index.add_holder();
    let prompt = |salt| {
        let root = space.root(&Root { name: "m", cache_salt: salt, tenant: None });
        [space.first(root, b"head"), space.next(b"tail")]
    };
    index.record(holder, &prompt(None), TenantId(0), Timestamp(0));
    assert_eq!(depth(&index, holder, &prompt(None)).gpu, 2);
    assert_eq!(depth(&index, holder, &prompt(Some("x"))).gpu, 0);
}

#[test]
fn branch_in_a_long_run_splits_nothing() {
    let index = index(16 << 20);
    let holder = index.add_holder();
    let trunk = keys(0..1000);
    let blocks = named(&trunk, 0);
    index.store(holder, Tier::Gpu, None, &blocks).unwrap();
    for at in (8..1000).step_by(8) {
        let branch = [key(1 << 40 | at as u64)];
        let name = StoredBlock { hash: EngineHash(1 << 50 | at as u64), key: branch[0] };
        index.store(holder, Tier::Gpu, Some(blocks[at - 1].hash), &[name]).unwrap();
    }
    assert_eq!(index.stats().runs, 125);
    let mut matches = Matches::default();
    for at in (8..1000).step_by(8) {
        let mut prompt = trunk[..at].to_vec();
        prompt.push(key(1 << 40 | at as u64));
        prompt.push(key(1 << 41));
        index.lookup(&mut prompt.as_slice(), &mut matches);
        assert_eq!(matches.depth(holder).gpu as usize, at + 1);
    }
}

#[test]
fn report_counts_the_blocks_that_no_holder_had() {
    let index = index(4 << 20);
    let (one, two) = (index.add_holder(), index.add_holder());
    let blocks = named(&keys(0..40), 0);
    let first =
        |holder, blocks: &[StoredBlock]| index.report(holder, Tier::Gpu, None, blocks, Origin::New).unwrap().first;
    assert_eq!(first(one, &blocks[..10]), 10);
    assert_eq!(first(two, &blocks), 30, "one has the first ten");
    index.remove(one, Tier::Gpu, &names(&blocks[..10]));
    assert_eq!(first(one, &blocks), 0, "two has them all");
}

#[test]
fn reused_blocks_add_no_copy_and_stated_counts_win() {
    let index = index(4 << 20);
    let holder = index.add_holder();
    let prompt = keys(0..40);
    let blocks = named(&prompt, 0);
    let names = names(&blocks);
    let held = || index.held(holder, Tier::Gpu).len();
    let report = |origin| index.report(holder, Tier::Gpu, None, &blocks, origin).unwrap();
    assert_eq!(report(Origin::New), StoreEffect { new: 40, again: 0, first: 40 });
    assert_eq!(report(Origin::Reused), StoreEffect { new: 0, again: 0, first: 0 });
    index.remove(holder, Tier::Gpu, &names);
    assert_eq!(held(), 0, "stored once, reported again, removed once");
    assert_eq!(report(Origin::Reused).new, 40, "what is reused is there");
    assert_eq!(report(Origin::New).again, 40);
    index.remove(holder, Tier::Gpu, &names);
    assert_eq!(held(), 40, "two copies, one removal");
    index.remove(holder, Tier::Gpu, &names);
    assert_eq!(held(), 0);

    // The engine counts: more copies than reported, fewer, and each block's own number.
    report(Origin::New);
    index.remove_to(holder, Tier::Gpu, &names, Some(&[2; 40]));
    index.remove(holder, Tier::Gpu, &names);
    assert_eq!(held(), 40, "one copy of the two is left");
    report(Origin::New);
    report(Origin::New);
    let counts: Vec<u32> = (0..40).map(|at| at % 3).collect();
    index.remove_to(holder, Tier::Gpu, &names, Some(&counts));
    assert_eq!(held(), 40 - counts.iter().filter(|count| **count == 0).count());
    index.remove(holder, Tier::Gpu, &names);
    assert_eq!(held(), counts.iter().filter(|count| **count == 2).count());
    index.remove_to(holder, Tier::Gpu, &names, Some(&[0; 40]));
    assert_eq!(held(), 0);
    // A count of a block that the holder does not have adds nothing.
    index.remove_to(holder, Tier::Gpu, &names, Some(&[5; 40]));
    assert_eq!(held(), 0);
}
