//! The recorded scenario, and other effects of batches.

use super::*;
use attache_prefix::block_size::BlockSize;
use attache_prefix::index::{IndexConfig, Matches};
use attache_prefix::key::{BlockKey, KeySpace, Root};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use rmpv::Value as Any;
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::time::Duration;

const SCENARIO: &str = include_str!("../../../tests/data/kv_events/scenario.json");
const LEGACY: &str = include_str!("../../../tests/data/kv_events/events_legacy_0.22.1.json");
const KEYS: u64 = 3;

struct Rig {
    index: Arc<PrefixIndex>,
    applier: Applier,
    stats: Arc<KvEventStats>,
    size: Arc<PoolSize>,
}

fn index() -> Arc<PrefixIndex> {
    Arc::new(PrefixIndex::new(IndexConfig {
        budget_bytes: 1 << 26,
        tenant_share: 1.0,
        half_life: Duration::from_secs(60),
        seed: 1,
    }))
}

impl Rig {
    fn new() -> Self {
        Self::beside(index(), Arc::new(PoolSize::new(Arc::new(BlockSize::of_engines(16)), KvTape::default())))
    }

    /// An endpoint besides the first one, with the same index.
    fn beside(index: Arc<PrefixIndex>, size: Arc<PoolSize>) -> Self {
        let stats: Arc<KvEventStats> = Arc::default();
        let holder = index.add_holder();
        let own = OwnSize::new(size.clone(), EndpointId(holder.0), holder);
        let to = Destination {
            index: index.clone(),
            residents: Arc::default(),
            keys: KeySpace::new(KEYS),
            block_size: Arc::new(BlockSize::of_engines(16)),
            recomputed: Arc::default(),
            tape: KvTape::default(),
        };
        let applier = Applier::new(&to, 64, own, stats.clone(), Clock::start());
        Self { index, applier, stats, size }
    }

    fn holder(&self) -> HolderId {
        self.applier.book.holder
    }

    fn held(&self, tier: Tier) -> Vec<u64> {
        let mut held: Vec<u64> = self.index.held(self.holder(), tier).into_iter().map(|h| h.0).collect();
        held.sort_unstable();
        held
    }

    fn apply(&mut self, events: Vec<Any>) -> BatchEffect {
        let mut payload = Vec::new();
        let batch = Any::Array(vec![Any::from(1.0), Any::Array(events), Any::from(0)]);
        rmpv::encode::write_value(&mut payload, &batch).unwrap();
        self.applier.apply(&payload)
    }
}

fn unhex(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
}

/// Number of copies of each block that must remain, computed from the decoded events alone.
#[derive(Default)]
struct Reckoning(BTreeMap<u64, u32>);

impl Reckoning {
    fn take(&mut self, event: &Json) {
        let name = event.get("type").unwrap_or(&event[0]).as_str().unwrap();
        let hashes = event.get("block_hashes").unwrap_or(&event[1]);
        let digest = |h: &Json| u64::from_be_bytes(*unhex(h["$bytes"].as_str().unwrap()).last_chunk().unwrap());
        let hashes = hashes.as_array().into_iter().flatten().map(|h| h.as_u64().unwrap_or_else(|| digest(h)));
        match name {
            "BlockStored" => hashes.for_each(|h| *self.0.entry(h).or_default() += 1),
            "BlockRemoved" => {
                for hash in hashes {
                    if let Some(copies) = self.0.get_mut(&hash) {
                        *copies -= 1;
                        if *copies == 0 {
                            self.0.remove(&hash);
                        }
                    }
                }
            }
            _ => self.0.clear(),
        }
    }

    fn left(&self) -> Vec<u64> {
        self.0.keys().copied().collect()
    }
}

#[test]
fn recorded_frames_leave_the_blocks_of_the_recordings_end() {
    let mut rig = Rig::new();
    let mut reckoning = Reckoning::default();
    let mut most = 0;
    let steps: Vec<Json> = serde_json::from_str(SCENARIO).unwrap();
    for batch in steps.iter().filter_map(|s| s["batches"].as_array()).flatten() {
        let payload = unhex(batch["frames_hex"][2].as_str().unwrap());
        assert_eq!(rig.applier.apply(&payload).doubt, None);
        batch["decoded"][1].as_array().unwrap().iter().for_each(|event| reckoning.take(event));
        assert_eq!(rig.held(Tier::Gpu), reckoning.left(), "after frame {}", batch["seq"]);
        most = most.max(reckoning.left().len());
    }
    assert!(most >= 30, "the pool of 40 blocks was in use: {most}");
    assert_eq!(rig.size.get(), 16);
    assert_eq!(rig.stats.get(Count::OrphansParked), 0, "a whole recording has no orphans");
}

#[test]
fn recorded_prompts_are_found_by_their_tokens() {
    let steps: Vec<Json> = serde_json::from_str(SCENARIO).unwrap();
    let mut rig = Rig::new();
    // Until the pool of 40 blocks is full: prompts of 100 and 140 tokens, an adapter's and a salted one.
    for batch in steps.iter().take(11).filter_map(|s| s["batches"].as_array()).flatten().take(10) {
        rig.applier.apply(&unhex(batch["frames_hex"][2].as_str().unwrap()));
    }
    let keys = KeySpace::new(KEYS);
    let depth = |root: Root<'_>, tokens: Vec<u32>| {
        let root = keys.root(&root);
        let blocks = tokens.chunks_exact(16).enumerate();
        let content = |b: &[u32]| b.iter().flat_map(|t| t.to_le_bytes()).collect::<Vec<u8>>();
        let all: Vec<BlockKey> =
            blocks.map(|(i, b)| if i == 0 { keys.first(root, &content(b)) } else { keys.next(&content(b)) }).collect();
        let mut matches = Matches::default();
        rig.index.lookup(&mut all.as_slice(), &mut matches);
        matches.depth(rig.holder()).gpu
    };
    let extended: Vec<u32> = (1000..1100).chain(2000..2040).collect();
    assert_eq!(depth(Root::default(), extended.clone()), 8);
    assert_eq!(depth(Root { name: "sql", ..Root::default() }, extended.clone()), 6);
    assert_eq!(depth(Root { name: "chat", ..Root::default() }, extended.clone()), 0);
    assert_eq!(depth(Root { cache_salt: Some("another"), ..Root::default() }, extended), 0);
}

#[test]
fn older_encoding_leaves_the_same_blocks() {
    let batches: Vec<Json> = serde_json::from_str(LEGACY).unwrap();
    let mut rig = Rig::new();
    let mut reckoning = Reckoning::default();
    let (mut next, mut whole, mut compared) = (0, true, 0);
    for batch in &batches {
        // The file has several runs, each of which begins at 0. One has a gap, and is complete again once
        // the engine clears its cache.
        let seq = batch["seq"].as_u64().unwrap();
        if seq == 0 {
            rig.applier.restart();
            reckoning = Reckoning::default();
        }
        whole = seq == 0 || (whole && seq == next);
        next = seq + 1;
        let frames = batch["frames_hex"].as_array().unwrap();
        let outcome = rig.applier.apply(&unhex(frames.last().unwrap().as_str().unwrap()));
        assert_eq!(outcome.doubt, None);
        whole |= outcome.cleared;
        batch["decoded"][1].as_array().unwrap().iter().for_each(|event| reckoning.take(event));
        if whole {
            assert_eq!(rig.held(Tier::Gpu), reckoning.left(), "after frame {seq}");
            compared += 1;
        }
    }
    assert_eq!(compared, 65, "all but five");
}

fn map(fields: Vec<(&str, Any)>) -> Any {
    Any::Map(fields.into_iter().map(|(k, v)| (Any::from(k), v)).collect())
}

fn ints(values: &[u64]) -> Any {
    Any::Array(values.iter().map(|v| Any::from(*v)).collect())
}

/// Blocks of one token each, named and filled by `hashes`.
fn stored(parent: Option<u64>, hashes: &[u64]) -> Any {
    stored_with(parent, hashes, vec![])
}

fn stored_with(parent: Option<u64>, hashes: &[u64], more: Vec<(&str, Any)>) -> Any {
    let mut fields = vec![
        ("type", Any::from("BlockStored")),
        ("block_hashes", ints(hashes)),
        ("parent_block_hash", parent.map_or(Any::Nil, Any::from)),
        ("token_ids", ints(hashes)),
        ("block_size", Any::from(1)),
    ];
    fields.extend(more);
    map(fields)
}

fn removed(hashes: &[u64], more: Vec<(&str, Any)>) -> Any {
    let mut fields = vec![("type", Any::from("BlockRemoved")), ("block_hashes", ints(hashes))];
    fields.extend(more);
    map(fields)
}

fn cleared() -> Any {
    map(vec![("type", Any::from("AllBlocksCleared"))])
}

#[test]
fn orphans_are_stored_when_their_parent_arrives() {
    let mut rig = Rig::new();
    rig.apply(vec![stored(Some(4), &[5, 6]), stored(Some(2), &[3, 4]), stored(Some(6), &[7])]);
    assert_eq!(rig.held(Tier::Gpu), [0u64; 0]);
    assert_eq!(rig.stats.get(Count::OrphansParked), 3);
    rig.apply(vec![stored(None, &[1, 2])]);
    assert_eq!(rig.held(Tier::Gpu), [1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(rig.stats.get(Count::OrphansAdopted), 3);
    let mut matches = Matches::default();
    let keys = KeySpace::new(KEYS);
    let mut all = vec![keys.first(keys.root(&Root::default()), &1u32.to_le_bytes())];
    all.extend((2u32..9).map(|t| keys.next(&t.to_le_bytes())));
    rig.index.lookup(&mut all.as_slice(), &mut matches);
    assert_eq!(matches.depth(rig.holder()).gpu, 7);
}

#[test]
fn removed_or_cleared_orphans_are_not_stored() {
    let mut rig = Rig::new();
    rig.apply(vec![stored(Some(2), &[3, 4, 5]), stored(Some(9), &[10])]);
    rig.apply(vec![removed(&[5, 4], vec![]), removed(&[10], vec![])]);
    rig.apply(vec![stored(None, &[1, 2]), stored(None, &[9])]);
    assert_eq!(rig.held(Tier::Gpu), [1, 2, 3, 9]);
    rig.apply(vec![stored(Some(20), &[21]), cleared(), stored(None, &[20])]);
    assert_eq!(rig.held(Tier::Gpu), [20]);
}

#[test]
fn groups_without_prefix_caching_are_ignored_in_stores_and_removals() {
    let mut rig = Rig::new();
    let group = |g: u64, kind: &'static str| vec![("group_idx", Any::from(g)), ("kv_cache_spec_kind", Any::from(kind))];
    rig.apply(vec![
        stored_with(None, &[1, 2], group(0, "full_attention")),
        stored_with(None, &[1, 2], group(1, "sliding_window")),
        removed(&[1], vec![("group_idx", Any::from(1u64))]),
    ]);
    assert_eq!(rig.held(Tier::Gpu), [1, 2], "the full attention's copy is still there");
    rig.apply(vec![removed(&[2], vec![("group_idx", Any::from(0u64))])]);
    assert_eq!(rig.held(Tier::Gpu), [1]);
}

fn origin(name: &str) -> Vec<(&'static str, Any)> {
    vec![("origin", Any::from(name))]
}

#[test]
fn blocks_reported_as_reused_go_with_one_removal() {
    let mut rig = Rig::new();
    rig.apply(vec![stored_with(None, &[1, 2, 3, 4], origin("NEW"))]);
    rig.apply(vec![stored_with(None, &[1, 2, 3], origin("REUSED")), stored_with(None, &[1], origin("REUSED"))]);
    assert!(!rig.applier.has_uncounted());
    assert_eq!((rig.applier.held(), rig.stats.get(Count::BlocksStored)), (4, 4), "reports of reuse store nothing");
    rig.apply(vec![removed(&[4, 3, 2, 1], vec![])]);
    assert_eq!(rig.held(Tier::Gpu), [0u64; 0]);
    // Attaché may have missed the first report.
    rig.apply(vec![stored_with(None, &[7, 8], origin("REUSED"))]);
    assert_eq!(rig.held(Tier::Gpu), [7, 8]);
    // A further copy is said to be new.
    rig.apply(vec![stored_with(None, &[7, 8], origin("NEW")), removed(&[7, 8], vec![])]);
    assert_eq!(rig.held(Tier::Gpu), [7, 8]);
    assert!(!rig.applier.has_uncounted());
}

#[test]
fn removals_that_count_copies_win_over_reports() {
    let mut rig = Rig::new();
    let counts = |counts: &[u64]| vec![("remaining_copy_counts", ints(counts))];
    rig.apply(vec![stored(None, &[1, 2, 3]), stored(None, &[1, 2, 3])]);
    assert!(rig.applier.has_uncounted());
    rig.apply(vec![removed(&[3, 2, 1], counts(&[0, 1, 0]))]);
    assert_eq!(rig.held(Tier::Gpu), [2]);
    assert!(!rig.applier.has_uncounted(), "the engine has counted all of them");
    rig.apply(vec![removed(&[2], counts(&[0]))]);
    assert_eq!(rig.held(Tier::Gpu), [0u64; 0]);
}

#[test]
fn unmarked_reports_from_the_start_of_a_prompt_are_uncertain() {
    let mut rig = Rig::new();
    rig.apply(vec![stored(None, &[1, 2, 3, 4])]);
    // A block behind others is computed again, as vLLM does with the last one of a prompt.
    rig.apply(vec![stored(Some(3), &[4]), removed(&[4], vec![])]);
    assert_eq!(rig.held(Tier::Gpu), [1, 2, 3, 4]);
    assert!(!rig.applier.has_uncounted(), "reports of reused blocks begin with the first block");
    rig.apply(vec![stored(None, &[1, 2])]);
    assert!(rig.applier.has_uncounted());
    rig.apply(vec![removed(&[2, 1], vec![])]);
    assert_eq!(rig.held(Tier::Gpu), [1, 2, 3, 4], "two copies need two removals");
    assert!(rig.applier.has_uncounted());
    rig.apply(vec![removed(&[2, 1], vec![])]);
    assert_eq!(rig.held(Tier::Gpu), [3, 4]);
    assert!(!rig.applier.has_uncounted(), "all copies were removed");
    rig.apply(vec![stored(None, &[1]), stored(None, &[1]), cleared()]);
    assert!(!rig.applier.has_uncounted());
}

#[test]
fn tiers_are_separate() {
    let mut rig = Rig::new();
    rig.apply(vec![stored(None, &[1]), stored_with(None, &[1], cpu())]);
    rig.apply(vec![removed(&[1], vec![])]);
    assert_eq!((rig.held(Tier::Gpu), rig.held(Tier::Cpu)), (vec![], vec![1]));
}

/// Blocks as vLLM's OffloadingConnector reports them.
fn offloaded(hashes: &[u64], size: u64, more: Vec<(&str, Any)>) -> Any {
    let mut fields = vec![
        ("type", Any::from("BlockStored")),
        ("block_hashes", ints(hashes)),
        ("parent_block_hash", Any::Nil),
        ("token_ids", ints(&[])),
        ("block_size", Any::from(size)),
        ("medium", Any::from("CPU")),
    ];
    fields.extend(more);
    map(fields)
}

fn cpu() -> Vec<(&'static str, Any)> {
    vec![("medium", Any::from("CPU"))]
}

#[test]
fn offloaded_blocks_are_on_both_tiers() {
    let mut rig = Rig::new();
    rig.apply(vec![stored(None, &[1, 2, 3, 4])]);
    // Names that were never reported are skipped.
    let outcome = rig.apply(vec![offloaded(&[1, 77, 2], 0, vec![]), offloaded(&[3], 1, vec![])]);
    assert_eq!(outcome, BatchEffect::default());
    assert_eq!((rig.held(Tier::Gpu), rig.held(Tier::Cpu)), (vec![1, 2, 3, 4], vec![1, 2, 3]));
    rig.apply(vec![removed(&[4, 3, 2], vec![])]);
    assert_eq!((rig.held(Tier::Gpu), rig.held(Tier::Cpu)), (vec![1], vec![1, 2, 3]));
    let keys = KeySpace::new(KEYS);
    let mut all = vec![keys.first(keys.root(&Root::default()), &1u32.to_le_bytes())];
    all.extend((2u32..5).map(|t| keys.next(&t.to_le_bytes())));
    let mut matches = Matches::default();
    rig.index.lookup(&mut all.as_slice(), &mut matches);
    let depth = matches.depth(rig.holder());
    assert_eq!((depth.gpu, depth.cpu, depth.any), (1, 3, 3));
    // Blocks that leave host memory stay on other tiers.
    rig.apply(vec![stored(Some(1), &[2]), removed(&[2, 1], cpu())]);
    assert_eq!((rig.held(Tier::Gpu), rig.held(Tier::Cpu)), (vec![1, 2], vec![3]));
    rig.apply(vec![removed(&[3], cpu()), offloaded(&[3], 0, vec![])]);
    assert_eq!(rig.held(Tier::Cpu), [0u64; 0], "removed from all tiers");
}

#[test]
fn name_of_several_blocks_is_not_a_copy_of_one() {
    let mut rig = Rig::new();
    rig.apply(vec![stored(None, &[1, 2, 3, 4]), offloaded(&[4], 4, vec![])]);
    assert_eq!((rig.held(Tier::Gpu).len(), rig.held(Tier::Cpu).len()), (4, 0));
}

#[test]
fn blocks_of_another_size_on_another_tier_are_skipped() {
    let mut rig = Rig::new();
    rig.apply(vec![stored(None, &[1, 2])]);
    let mut chunk = vec![
        ("type", Any::from("BlockStored")),
        ("block_hashes", ints(&[9])),
        ("token_ids", ints(&[1, 2])),
        ("block_size", Any::from(2)),
    ];
    chunk.extend(cpu());
    assert_eq!(rig.apply(vec![map(chunk)]), BatchEffect::default());
    assert_eq!((rig.held(Tier::Gpu).len(), rig.held(Tier::Cpu).len()), (2, 0));
}

#[test]
fn offloads_of_groups_without_prefix_caching_are_ignored() {
    let mut rig = Rig::new();
    let group = |g: u64| vec![("group_idx", Any::from(g))];
    let mut window = group(1);
    window.push(("kv_cache_spec_kind", Any::from("sliding_window")));
    window.push(("block_size", Any::from(16)));
    let outcome = rig.apply(vec![stored(None, &[1, 2]), stored_with(None, &[1, 2], window)]);
    assert_eq!(outcome.doubt, None, "its blocks may be of any size");
    rig.apply(vec![offloaded(&[1, 2], 0, group(1)), offloaded(&[1], 0, group(0))]);
    assert_eq!((rig.held(Tier::Gpu), rig.held(Tier::Cpu)), (vec![1, 2], vec![1]));
}

#[test]
fn block_offloaded_with_its_tokens_keeps_its_key() {
    let mut rig = Rig::new();
    let salted = || vec![("extra_keys", Any::Array(vec![Any::Array(vec![Any::from("salt")]), Any::Nil]))];
    rig.apply(vec![stored_with(None, &[1, 2], salted())]);
    // The event omits the salt.
    rig.apply(vec![stored_with(None, &[1, 2, 3], cpu())]);
    assert_eq!((rig.held(Tier::Gpu), rig.held(Tier::Cpu)), (vec![1, 2], vec![1, 2, 3]));
    let keys = KeySpace::new(KEYS);
    let depth = |rig: &Rig, cache_salt| {
        let root = keys.root(&Root { cache_salt, ..Root::default() });
        let mut all = vec![keys.first(root, &1u32.to_le_bytes())];
        all.extend((2u32..5).map(|t| keys.next(&t.to_le_bytes())));
        let mut matches = Matches::default();
        rig.index.lookup(&mut all.as_slice(), &mut matches);
        let depth = matches.depth(rig.holder());
        (depth.gpu, depth.cpu)
    };
    assert_eq!((depth(&rig, Some("salt")), depth(&rig, None)), ((2, 3), (0, 0)));
    rig.apply(vec![removed(&[2, 1], vec![])]);
    assert_eq!(depth(&rig, Some("salt")), (0, 3), "its name led to the blocks that were stored");
}

#[test]
fn other_block_size_is_a_doubt_until_most_engines_have_it() {
    let mut old = Rig::new();
    old.apply(vec![stored(None, &[1])]);
    assert_eq!(old.size.get(), 1);
    let two = || {
        let fields = vec![
            ("type", Any::from("BlockStored")),
            ("block_hashes", ints(&[1])),
            ("token_ids", ints(&[1, 2])),
            ("block_size", Any::from(2)),
        ];
        map(fields)
    };
    let mut new = [(); 3].map(|()| Rig::beside(old.index.clone(), old.size.clone()));
    assert_eq!(new[0].apply(vec![two()]).doubt, Some(Doubt::BlockSize), "as many engines have the old size");
    assert_eq!(old.applier.sizes().map(|(engine, _)| engine), None);
    assert_eq!(new[0].applier.sizes().map(|(engine, pool)| (engine, pool.get())), Some((2, 1)));
    assert_eq!((new[0].held(Tier::Gpu), new[0].applier.fits()), (vec![], Some(false)));
    // A clearing resets doubts; later events of the batch can cause a new one.
    assert_eq!(new[0].apply(vec![two(), cleared()]), BatchEffect { cleared: true, doubt: None });
    assert_eq!(
        (new[1].apply(vec![two()]).doubt, old.size.get()),
        (Some(Doubt::BlockSize), 1),
        "one more engine is not enough"
    );
    assert_eq!((new[2].apply(vec![two()]).doubt, old.size.get()), (None, 2));
    assert_eq!((old.applier.fits(), new[0].applier.fits(), new[2].held(Tier::Gpu)), (Some(false), Some(true), vec![1]));
    assert_eq!(
        old.applier.sizes().map(|(engine, pool)| (engine, pool.get())),
        Some((1, 2)),
        "most engines have another size"
    );
    assert_eq!(old.apply(vec![stored(None, &[2])]).doubt, Some(Doubt::BlockSize));
    // A restarted process may have another block size.
    old.applier.restart();
    assert_eq!((old.apply(vec![two()]).doubt, old.held(Tier::Gpu)), (None, vec![1]));
    assert_eq!(old.apply(vec![stored(None, &[2])]).doubt, Some(Doubt::BlockSize), "no engine has two sizes");
}

#[test]
fn holder_is_removed_with_its_applier() {
    let mut rig = Rig::new();
    rig.apply(vec![stored(None, &[1])]);
    let (index, holder) = (rig.index.clone(), rig.holder());
    assert_eq!(index.held(holder, Tier::Gpu).len(), 1);
    index.record(holder, &[BlockKey(1)], attache_prefix::index::TenantId(0), Timestamp(0));
    drop(rig);
    assert!(index.held(holder, Tier::Gpu).is_empty());
}

#[test]
fn undecodable_batch_is_a_doubt() {
    let mut rig = Rig::new();
    assert_eq!(rig.applier.apply(b"\xc1").doubt, Some(Doubt::Undecodable));
    assert_eq!(rig.apply(vec![Any::from(1)]).doubt, Some(Doubt::Undecodable));
    assert_eq!(rig.stats.get(Count::DecodeErrors), 1);
    assert_eq!(rig.stats.get(Count::RefusedEvents), 1);
    let novel = map(vec![("type", Any::from("BlockDreamt"))]);
    assert_eq!(rig.apply(vec![novel]).doubt, None, "unknown events are skipped");
    assert_eq!(rig.stats.get(Count::UnknownEvents), 1);
}
