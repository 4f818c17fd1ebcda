use super::*;
use proptest::prelude::*;

/// A chain of `n` blocks that is the same for the same `prompt`.
fn chain(prompt: u64, n: usize) -> Vec<BlockHash> {
    let mut parent = BlockHash::root("m", None, None);
    (0..n as u64)
        .map(|i| {
            parent = parent.then(prompt * 1000 + i);
            parent
        })
        .collect()
}

/// The held blocks of `chain` and `fresh` new ones.
fn take(cache: &mut KvCache, chain: &[BlockHash], fresh: u32) -> Option<Vec<BlockId>> {
    let mut table = vec![];
    cache.find(chain, &mut table);
    assert_eq!(table.len(), chain.len());
    cache.take(&mut table, fresh).then_some(table)
}

fn matched(cache: &KvCache, chain: &[BlockHash]) -> usize {
    let mut table = vec![];
    cache.find(chain, &mut table);
    table.len()
}

fn admit(cache: &mut KvCache, chain: &[BlockHash]) -> Option<(usize, Vec<BlockId>)> {
    let hits = matched(cache, chain);
    let table = take(cache, &chain[..hits], (chain.len() - hits) as u32)?;
    cache.seal(&table, chain);
    Some((hits, table))
}

impl KvCache {
    /// Everything that must hold between calls.
    fn check(&self, tables: &[Vec<BlockId>]) {
        let mut listed = vec![];
        let mut id = self.free_head;
        while id != NIL {
            listed.push(id);
            assert!(listed.len() <= self.blocks.len(), "the free list has a cycle");
            id = self.blocks[id as usize].next;
        }
        assert_eq!(listed.len(), self.free as usize);
        assert_eq!(self.used() + self.free(), self.total());
        for (id, block) in self.blocks.iter().enumerate() {
            let held = tables.iter().flatten().filter(|held| held.0 as usize == id).count();
            assert_eq!(block.refs as usize, held, "references of block {id}");
            assert_eq!(block.refs == 0, listed.contains(&(id as u32)), "block {id} in the free list");
            if block.findable {
                assert_eq!(self.blocks[block.newer as usize].older, id as u32);
                assert_eq!(self.blocks[block.newer as usize].hash, block.hash);
                assert!(self.holder(block.hash).is_some());
            }
        }
        let copies: usize = self.held().map(|(_, copies)| copies).sum();
        assert_eq!(copies, self.blocks.iter().filter(|block| block.findable).count());
    }
}

#[test]
fn the_tail_is_evicted_before_the_head() {
    let mut cache = KvCache::new(3);
    let prompt = chain(1, 3);
    let (_, mut table) = admit(&mut cache, &prompt).unwrap();
    cache.release(&mut table);
    let other = take(&mut cache, &[], 1).unwrap();
    assert_eq!(matched(&cache, &prompt), 2);
    assert_eq!(cache.evictions(), 1);
    cache.check(&[other]);
}

#[test]
fn a_hit_needs_the_whole_history() {
    let mut cache = KvCache::new(8);
    let (_, mut table) = admit(&mut cache, &chain(1, 2)).unwrap();
    cache.release(&mut table);
    let same_content_elsewhere = BlockHash::root("m", None, None).then(1001);
    assert_eq!(matched(&cache, &[same_content_elsewhere]), 0);
}

#[test]
fn roots_keep_models_adapters_and_salts_apart() {
    let roots = [
        BlockHash::root("m", None, None),
        BlockHash::root("m", Some("a"), None),
        BlockHash::root("m", None, Some("a")),
        BlockHash::root("m", Some(""), None),
        BlockHash::root("ma", None, None),
    ];
    for (i, a) in roots.iter().enumerate() {
        assert!(roots[i + 1..].iter().all(|b| a != b));
    }
}

#[test]
fn a_hit_on_a_free_block_is_not_counted_as_room() {
    let mut cache = KvCache::new(2);
    let prompt = chain(1, 1);
    let (_, mut table) = admit(&mut cache, &prompt).unwrap();
    cache.release(&mut table);
    assert!(take(&mut cache, &prompt, 2).is_none());
    assert!(take(&mut cache, &prompt, 1).is_some());
}

#[test]
fn the_same_content_may_lie_in_two_blocks() {
    let mut cache = KvCache::new(4);
    let prompt = chain(1, 1);
    let (_, mut first) = admit(&mut cache, &prompt).unwrap();
    // What an engine does with an aligned prompt: the last block is computed again although it is held.
    let second = take(&mut cache, &[], 1).unwrap();
    cache.seal(&second, &prompt);
    cache.release(&mut first);
    let filler = take(&mut cache, &[], 3).unwrap();
    assert_eq!(matched(&cache, &prompt), 1, "the second copy is still there");
    cache.check(&[second, filler]);
}

#[test]
fn of_several_copies_the_oldest_is_found() {
    let mut cache = KvCache::new(4);
    let prompt = chain(1, 1);
    let mut copies: Vec<_> = (0..4).map(|_| take(&mut cache, &[], 1).unwrap()).collect();
    copies.iter().for_each(|copy| cache.seal(copy, &prompt));
    for (evicted, oldest) in [(0, 1), (2, 1), (1, 3)] {
        // The only free block makes room.
        cache.release(&mut copies[evicted]);
        copies[evicted] = take(&mut cache, &[], 1).unwrap();
        let mut found = vec![];
        cache.find(&prompt, &mut found);
        assert_eq!(found, copies[oldest]);
        cache.check(&copies);
    }
}

#[derive(Clone, Debug)]
enum Op {
    Admit { prompt: u64, blocks: usize },
    Extend { request: usize, blocks: u32 },
    Release { request: usize },
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        3 => (0..6u64, 1..9usize).prop_map(|(prompt, blocks)| Op::Admit { prompt, blocks }),
        1 => (any::<prop::sample::Index>(), 1..4u32).prop_map(|(i, blocks)| Op::Extend { request: i.index(64), blocks }),
        2 => any::<prop::sample::Index>().prop_map(|i| Op::Release { request: i.index(64) }),
    ];
    prop::collection::vec(op, 1..80)
}

proptest! {
    #[test]
    fn accounts_balance_and_nothing_referenced_is_evicted(total in 1..24u32, ops in ops()) {
        let mut cache = KvCache::new(total);
        let mut tables: Vec<Vec<BlockId>> = vec![];
        let mut chains: Vec<Vec<BlockHash>> = vec![];
        for op in ops {
            match op {
                Op::Admit { prompt, blocks } => {
                    let chain = chain(prompt, blocks);
                    let before = (cache.free(), cache.evictions(), matched(&cache, &chain));
                    match admit(&mut cache, &chain) {
                        Some((_, table)) => { tables.push(table); chains.push(chain); }
                        None => prop_assert_eq!(before, (cache.free(), cache.evictions(), matched(&cache, &chain))),
                    }
                }
                Op::Extend { request, blocks } if !tables.is_empty() => {
                    let slot = request % tables.len();
                    let before = cache.free();
                    prop_assert_eq!(cache.extend(&mut tables[slot], blocks), blocks <= before);
                }
                Op::Release { request } if !tables.is_empty() => {
                    let slot = request % tables.len();
                    chains.swap_remove(slot);
                    cache.release(&mut tables.swap_remove(slot));
                }
                _ => {}
            }
            cache.check(&tables);
            for chain in &chains {
                prop_assert_eq!(matched(&cache, chain), chain.len(), "a referenced block was evicted");
            }
        }
        for mut table in tables.drain(..) {
            cache.release(&mut table);
        }
        cache.check(&[]);
        prop_assert_eq!(cache.free(), total);
    }
}

#[test]
fn the_record_says_what_made_room_and_in_which_order() {
    let mut cache = KvCache::new(3).recording();
    let prompt = chain(1, 3);
    let (_, mut table) = admit(&mut cache, &prompt).unwrap();
    cache.release(&mut table);
    take(&mut cache, &prompt[..1], 2).unwrap();
    let removed = |at: usize| KvEvent::Removed { hash: prompt[at] };
    assert_eq!(cache.take_events(), [removed(2), removed(1)], "the deepest first, and not the one that is in use");
    assert_eq!(cache.take_events(), []);
    assert_eq!(cache.held().collect::<Vec<_>>(), [(prompt[0], 1)]);
}

#[test]
fn a_cache_in_use_is_not_cleared() {
    let mut cache = KvCache::new(4).recording();
    let prompt = chain(1, 2);
    let (_, mut table) = admit(&mut cache, &prompt).unwrap();
    assert!(!cache.clear());
    assert_eq!(matched(&cache, &prompt), 2);
    cache.release(&mut table);
    assert!(cache.clear());
    assert_eq!((matched(&cache, &prompt), cache.held().count()), (0, 0));
    assert_eq!(cache.take_events(), [KvEvent::Cleared]);
    assert!(take(&mut cache, &[], 4).is_some());
    assert_eq!(cache.take_events(), [], "what was forgotten is not removed again");
    assert!(!KvCache::new(1).is_recording());
}
