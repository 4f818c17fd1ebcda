//! What an engine tells of its cache, and when.

use super::*;
use crate::content::Contents;
use crate::kv::{KvBlock, KvEvent, content_hash};
use std::collections::BTreeMap;

fn telling(num_blocks: u32) -> Engine {
    Engine::new(EngineConfig { kv_events: true, ..small(num_blocks) })
}

/// Runs a job to its end in an engine that has nothing else to do; what it told meanwhile.
fn run(engine: &mut Engine, job: Job) -> Vec<KvBatch> {
    let at = Timestamp(job.id.0 << 40);
    engine.submit(at, job).unwrap();
    run_dry(engine);
    engine.take_kv_batches()
}

/// The names of the full blocks of `tokens`.
fn chain_of(tokens: &[u32]) -> Vec<BlockHash> {
    let mut parent = BlockHash::root("sim", None, None);
    let blocks = tokens.chunks_exact(4).map(|block| {
        parent = parent.then(content_hash(block));
        parent
    });
    blocks.collect()
}

/// The event of blocks `from..to` of `tokens`.
fn stored(known: &[u32], from: usize, to: usize) -> KvEvent {
    let chain = chain_of(known);
    let tokens = &known[from * 4..to * 4];
    KvEvent::Stored {
        parent: from.checked_sub(1).map(|last| chain[last]),
        blocks: (chain[from..to].iter().zip(tokens.chunks(4)))
            .map(|(hash, block)| KvBlock { hash: *hash, content: content_hash(block) })
            .collect(),
        tokens: tokens.to_vec(),
        lora: None,
        cache_salt: None,
    }
}

fn events(batches: &[KvBatch]) -> Vec<KvEvent> {
    batches.iter().flat_map(|batch| batch.events.clone()).collect()
}

/// Prompt and the first `n` tokens of the answer of `job`.
fn with_answer(mut prompt: Vec<u32>, job: u64, n: u32) -> Vec<u32> {
    prompt.extend((0..n).map(|i| answer_token(job, i)));
    prompt
}

#[test]
fn a_prompt_is_told_in_one_event_at_the_end_of_its_step() {
    let mut engine = telling(64);
    let prompt = tokens(1, 14);
    engine.submit(Timestamp(5), job(1, prompt.clone(), 1)).unwrap();
    engine.advance(Timestamp(5), &mut vec![]);
    assert_eq!(engine.take_kv_batches(), [], "the step is under way");
    let end = engine.next_event_at().unwrap();
    engine.advance(end, &mut vec![]);
    assert_eq!(engine.take_kv_batches(), [KvBatch { at: end, events: vec![stored(&prompt, 0, 3)] }]);
    assert_eq!(run(&mut engine, job(2, prompt, 1)), [], "a full hit stores nothing, and partial blocks have no name");
}

#[test]
fn chunks_of_a_long_prompt_are_told_one_by_one() {
    let mut engine = telling(64);
    let prompt = tokens(1, 26);
    let batches = run(&mut engine, job(1, prompt.clone(), 1));
    // 16 tokens a step.
    assert_eq!(events(&batches), [stored(&prompt, 0, 4), stored(&prompt, 4, 6)]);
    assert_eq!(batches.len(), 2);
    let longer = [prompt, tokens(2, 6)].concat();
    assert_eq!(events(&run(&mut engine, job(2, longer.clone(), 1))), [stored(&longer, 6, 8)]);
}

#[test]
fn an_answer_tells_of_each_block_when_it_is_full() {
    let mut engine = telling(64);
    let batches = run(&mut engine, job(1, tokens(1, 6), 8));
    let known = with_answer(tokens(1, 6), 1, 8);
    // The last of the 14 tokens is never computed, so 13 are in the cache.
    assert_eq!(events(&batches), [stored(&known, 0, 1), stored(&known, 1, 2), stored(&known, 2, 3)]);
    assert_eq!(batches.len(), 3);
}

#[test]
fn an_aligned_prompt_stores_its_last_block_again_and_later_removes_it_twice() {
    let mut engine = telling(5);
    let prompt = tokens(1, 8);
    run(&mut engine, job(1, prompt.clone(), 1));
    assert_eq!(events(&run(&mut engine, job(2, prompt.clone(), 1))), [stored(&prompt, 1, 2)]);
    let chain = chain_of(&prompt);
    let held: BTreeMap<BlockHash, usize> = engine.held_blocks().collect();
    assert_eq!(held, BTreeMap::from([(chain[0], 1), (chain[1], 2)]));
    let other = tokens(2, 16);
    let told = events(&run(&mut engine, job(3, other.clone(), 1)));
    let removed = |at: usize| KvEvent::Removed { hash: chain[at] };
    assert_eq!(told, [removed(1), removed(1), stored(&other, 0, 4)], "deepest first, before what they made room for");
}

#[test]
fn requests_of_one_step_share_what_it_stores() {
    let mut engine = telling(64);
    for id in [1, 2] {
        engine.submit(Timestamp(0), job(id, tokens(1, 6), 1)).unwrap();
    }
    run_dry(&mut engine);
    assert_eq!(events(&engine.take_kv_batches()), [stored(&tokens(1, 6), 0, 1)]);
}

#[test]
fn adapters_and_salts_are_told_with_their_blocks() {
    let mut engine = telling(64);
    let job = Job { lora: Some("sql".into()), cache_salt: Some("s".into()), ..job(1, tokens(1, 4), 1) };
    let told = events(&run(&mut engine, job));
    let [KvEvent::Stored { parent: None, blocks, lora, cache_salt, .. }] = told.as_slice() else { panic!("{told:?}") };
    assert_eq!((lora.as_deref(), cache_salt.as_deref()), (Some("sql"), Some("s")));
    assert_eq!(blocks[0].hash, BlockHash::root("sim", Some("sql"), Some("s")).then(content_hash(&tokens(1, 4))));
}

#[test]
fn a_prompt_in_pieces_tells_its_content() {
    let mut engine = telling(64);
    let pieces = [Piece::new(10, 6), Piece::new(11, 4)];
    let mut contents = vec![];
    pieces.iter().fold(Contents::new(4), |mut cut, piece| {
        cut.push(*piece, |content| contents.push(content));
        cut
    });
    let prompt = JobPrompt::Pieces(pieces.to_vec());
    let told = events(&run(&mut engine, Job { prompt, ..job(1, vec![], 1) }));
    let [KvEvent::Stored { blocks, tokens, .. }] = told.as_slice() else { panic!("{told:?}") };
    assert_eq!(blocks.iter().map(|block| block.content).collect::<Vec<_>>(), contents);
    assert_eq!(contents.len(), 2);
    assert!(tokens.is_empty());
}

#[test]
fn a_cleared_cache_is_told_of_with_the_next_step() {
    let mut engine = telling(64);
    let prompt = tokens(1, 9);
    run(&mut engine, job(1, prompt.clone(), 1));
    assert!(engine.reset_prefix_cache());
    assert!(engine.reset_prefix_cache());
    engine.advance(Timestamp(3 << 40), &mut vec![]);
    assert_eq!(engine.take_kv_batches(), [], "an idle engine takes no step");
    assert_eq!(engine.held_blocks().count(), 0);
    let batches = run(&mut engine, job(4, prompt.clone(), 1));
    assert_eq!(events(&batches), [KvEvent::Cleared, KvEvent::Cleared, stored(&prompt, 0, 2)]);
    assert_eq!(batches.len(), 1);

    engine.submit(Timestamp(5 << 40), job(5, prompt, 1)).unwrap();
    engine.advance(Timestamp(5 << 40), &mut vec![]);
    assert!(!engine.reset_prefix_cache(), "a request has blocks");
}

#[test]
fn nothing_is_told_unless_it_is_wanted_or_without_a_prefix_cache() {
    let mut silent = Engine::new(small(8));
    assert_eq!(run(&mut silent, job(1, tokens(1, 14), 3)), []);
    let config = EngineConfig { kv_events: true, prefix_caching: false, ..small(8) };
    assert_eq!(run(&mut Engine::new(config), job(1, tokens(1, 14), 3)), []);
}

#[test]
fn a_restart_ends_all_jobs_and_forgets_the_cache() {
    let mut engine = telling(64);
    run(&mut engine, job(1, tokens(1, 9), 1));
    engine.submit(Timestamp(2 << 40), job(2, tokens(2, 9), 5)).unwrap();
    let mut ends = vec![];
    engine.advance(Timestamp(2 << 40), &mut ends);
    engine.submit(Timestamp(2 << 40), job(3, tokens(3, 9), 5)).unwrap();
    engine.restart(Timestamp(2 << 40), &mut ends);
    assert_eq!([report(&ends, 2).reason, report(&ends, 3).reason], [FinishReason::Abort; 2]);
    assert_eq!((engine.held_blocks().count(), engine.next_event_at(), engine.stats().steps), (0, None, 0));
    assert_eq!(events(&run(&mut engine, job(4, tokens(1, 9), 1))), [stored(&tokens(1, 9), 0, 2)]);
}

/// Applies what was told; fails where it can't be true.
fn apply(told: &[KvEvent], known: &mut BTreeMap<BlockHash, usize>) {
    for event in told {
        match event {
            KvEvent::Stored { parent, blocks, tokens, .. } => {
                assert!(parent.is_none_or(|parent| known.contains_key(&parent)), "a block behind an unknown one");
                assert_eq!(tokens.len(), blocks.len() * 4);
                blocks.iter().for_each(|block| *known.entry(block.hash).or_default() += 1);
            }
            KvEvent::Removed { hash } => {
                let copies = known.get_mut(hash).expect("removed, and never stored");
                *copies -= 1;
                if *copies == 0 {
                    known.remove(hash);
                }
            }
            KvEvent::Cleared => known.clear(),
        }
    }
}

#[test]
fn what_preempted_jobs_stored_is_told_and_taken_back() {
    let mut engine = telling(6);
    let mut known = BTreeMap::new();
    for round in 0..3 {
        for id in [2 * round + 1, 2 * round + 2] {
            engine.submit(Timestamp(round << 40), job(id, tokens(id as u32, 8), 8)).unwrap();
        }
        run_dry(&mut engine);
        apply(&events(&engine.take_kv_batches()), &mut known);
        assert_eq!(known, engine.held_blocks().collect());
    }
    assert!(engine.stats().preemptions >= 3 && engine.kv.evictions() > 6);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    /// Caches so small that jobs evict each other and are preempted.
    #[test]
    fn the_page_table_is_what_was_told(blocks in 16..40u32, plans in plans()) {
        let mut engine = Engine::new(EngineConfig { max_loras: 3, ..telling(blocks).config().clone() });
        let mut known = BTreeMap::new();
        let mut arrival = 0;
        for (index, plan) in plans.iter().enumerate() {
            arrival += plan.gap;
            while let Some(next) = engine.next_event_at().filter(|next| next.0 <= arrival) {
                engine.advance(next, &mut vec![]);
            }
            if plan.cancel_after.is_some() {
                engine.cancel(Timestamp(arrival), JobId(index as u64), &mut vec![]);
            }
            let job = Job {
                lora: plan.lora.map(|n| n.to_string().into()),
                ..job(index as u64 + 1, tokens(plan.prompt, plan.length), plan.max_tokens)
            };
            let _ = engine.submit(Timestamp(arrival), job);
            if plan.length % 7 == 0 {
                engine.reset_prefix_cache();
            }
        }
        run_dry(&mut engine);
        // A reset after the last step is told with the next one.
        apply(&events(&run(&mut engine, job(1 << 20, tokens(9, 5), 1))), &mut known);
        prop_assert_eq!(known, engine.held_blocks().collect());
    }
}
