//! All encodings of events, and hostile input. The submodules test recorded frames, roots of blocks, and random input.

use super::*;
use crate::key::{BlockKey, Root};
use rmpv::Value as Any;

mod random;
mod recorded;
mod roots;

/// Decoded events in owned form, for comparison.
#[derive(Clone, Debug, PartialEq)]
enum Said {
    Stored {
        parent: Option<u64>,
        blocks: Vec<(u64, BlockKey)>,
        tier: Tier,
        block_size: u32,
        lora: Option<String>,
        group: Option<u32>,
        origin: Option<Origin>,
    },
    Copied(Vec<u64>, Tier, u64, Option<u32>),
    Apart(Option<u32>),
    Removed(Vec<u64>, Tier, Option<u32>),
    /// A removal that says how many copies remain.
    RemovedTo(Vec<u64>, Vec<u32>),
    Cleared,
    Refused(Refusal),
}

#[derive(Default)]
struct Heard(Vec<Said>);

impl Sink for Heard {
    fn stored(&mut self, event: Stored<'_>) {
        self.0.push(Said::Stored {
            parent: event.parent.map(|p| p.0),
            blocks: event.blocks.iter().map(|b| (b.hash.0, b.key)).collect(),
            tier: event.tier,
            block_size: event.block_size,
            lora: event.lora.map(str::to_owned),
            group: event.group,
            origin: event.origin,
        });
    }

    fn copied(&mut self, event: Copied<'_>) {
        let hashes = event.hashes.iter().map(|h| h.0).collect();
        self.0.push(Said::Copied(hashes, event.tier, event.block_size, event.group));
    }

    fn stored_apart(&mut self, group: Option<u32>) {
        self.0.push(Said::Apart(group));
    }

    fn removed(&mut self, event: Removed<'_>) {
        let hashes = event.hashes.iter().map(|h| h.0).collect();
        self.0.push(match event.remaining {
            Some(remaining) => Said::RemovedTo(hashes, remaining.to_vec()),
            None => Said::Removed(hashes, event.tier, event.group),
        });
    }

    fn cleared(&mut self) {
        self.0.push(Said::Cleared);
    }

    fn refused(&mut self, reason: Refusal) {
        self.0.push(Said::Refused(reason));
    }
}

const KEYS: u64 = 7;

fn keys() -> KeySpace {
    KeySpace::new(KEYS)
}

fn decode(payload: &[u8]) -> (Result<Batch, BatchError>, Vec<Said>) {
    let mut heard = Heard::default();
    let batch = Decoder::new(keys()).decode(payload, &mut heard);
    (batch, heard.0)
}

fn content(tokens: &[u32]) -> Vec<u8> {
    tokens.iter().flat_map(|t| t.to_le_bytes()).collect()
}

/// The keys that `tokens` must get, computed block by block.
fn expected_keys(tokens: &[u32], block_size: usize, root: Option<Root<'_>>) -> Vec<BlockKey> {
    let blocks = tokens.chunks(block_size).enumerate();
    blocks
        .map(|(i, block)| match &root {
            Some(root) if i == 0 => keys().first(keys().root(root), &content(block)),
            _ => keys().next(&content(block)),
        })
        .collect()
}

fn bytes(value: &Any) -> Vec<u8> {
    let mut out = Vec::new();
    rmpv::encode::write_value(&mut out, value).unwrap();
    out
}

fn ints(values: &[u64]) -> Any {
    Any::Array(values.iter().map(|v| Any::from(*v)).collect())
}

fn map(fields: &[(&str, Any)]) -> Any {
    Any::Map(fields.iter().map(|(k, v)| (Any::from(*k), v.clone())).collect())
}

fn batch(events: Vec<Any>) -> Vec<u8> {
    bytes(&Any::Array(vec![Any::from(1.5), Any::Array(events), Any::from(3)]))
}

/// A `BlockStored` of two blocks of four tokens as a map; `fields` replace or extend its fields.
fn stored_with(fields: &[(&str, Any)]) -> Any {
    let mut all = vec![
        ("type", Any::from("BlockStored")),
        ("block_hashes", ints(&[11, 12])),
        ("parent_block_hash", Any::Nil),
        ("token_ids", ints(&[1, 2, 3, 4, 5, 6, 7, 8])),
        ("block_size", Any::from(4)),
    ];
    for (name, value) in fields {
        all.retain(|(n, _)| n != name);
        all.push((name, value.clone()));
    }
    map(&all)
}

fn keys_of(event: Any) -> Vec<BlockKey> {
    match decode(&batch(vec![event])).1.as_slice() {
        [Said::Stored { blocks, .. }] => blocks.iter().map(|b| b.1).collect(),
        other => panic!("{other:?}"),
    }
}

fn refusal(event: Any) -> Refusal {
    // The next event must still be decoded.
    match decode(&batch(vec![event, map(&[("type", Any::from("AllBlocksCleared"))])])).1.as_slice() {
        [Said::Refused(reason), Said::Cleared] => *reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_same_blocks_in_every_encoding() {
    let tokens: Vec<u64> = vec![1, 200, 70_000, 65_535, 127, 128, 255, 256];
    let plain = stored_with(&[("token_ids", ints(&tokens))]);
    let (_, said) = decode(&batch(vec![plain]));
    let short: Vec<u32> = tokens.iter().map(|t| u32::try_from(*t).unwrap()).collect();
    let want = expected_keys(&short, 4, Some(Root::default()));
    let Said::Stored { blocks, .. } = &said[0] else { panic!("{said:?}") };
    assert_eq!(*blocks, vec![(11, want[0]), (12, want[1])]);

    let fields = [ints(&[11, 12]), Any::Nil, ints(&tokens), Any::from(4), Any::Nil];
    for extra in 0..8 {
        // Newer versions append fields to the array, also ones that Attaché does not know.
        let mut array = vec![Any::from("BlockStored")];
        array.extend(fields.iter().cloned());
        array.extend(
            [Any::from("GPU"), Any::Nil, Any::Nil, Any::Nil, Any::Nil, Any::Nil, ints(&[1])].into_iter().take(extra),
        );
        let (batch, again) = decode(&batch(vec![Any::Array(array)]));
        assert_eq!(batch.unwrap().timestamp, 1.5);
        assert_eq!(again, said);
    }
    let as_map = map(&[
        ("events", Any::Array(vec![stored_with(&[("token_ids", ints(&tokens))])])),
        ("ts", Any::from(1.5)),
        ("shard", ints(&[1, 2])),
        ("data_parallel_rank", Any::from(3)),
    ]);
    let (batch, again) = decode(&bytes(&as_map));
    assert_eq!(batch.unwrap(), Batch { timestamp: 1.5, rank: Some(3), events: 1, unknown: 0 });
    assert_eq!(again, said);
    assert_eq!(envelope(&bytes(&as_map)).unwrap().rank, Some(3));
    assert_eq!(timestamp(&bytes(&as_map)), Some(1.5));
}

#[test]
fn map_fields_in_any_order_are_decoded() {
    let (_, said) = decode(&batch(vec![stored_with(&[])]));
    let shuffled = map(&[
        ("lora_name", Any::Nil),
        ("token_ids", ints(&[1, 2, 3, 4, 5, 6, 7, 8])),
        ("novelty", map(&[("deep", ints(&[1, 2, 3]))])),
        ("block_size", Any::from(4)),
        ("type", Any::from("BlockStored")),
        ("block_hashes", ints(&[11, 12])),
    ]);
    assert_eq!(decode(&batch(vec![shuffled])).1, said);
}

#[test]
fn hashes_of_every_type_are_decoded() {
    let digest = [[9u8; 24].as_slice(), &0xfedc_ba98_7654_3210u64.to_be_bytes()].concat();
    let hashes = Any::Array(vec![
        Any::from(u64::MAX),
        Any::from(-2i64),
        Any::Binary(digest.clone()),
        Any::from(5),
        Any::Binary(vec![0, 0, 0, 0, 0, 0, 1, 0]),
    ]);
    let removed = map(&[("type", Any::from("BlockRemoved")), ("block_hashes", hashes), ("medium", Any::from("CPU"))]);
    let want = vec![u64::MAX, u64::MAX - 1, 0xfedc_ba98_7654_3210, 5, 256];
    assert_eq!(decode(&batch(vec![removed])).1, [Said::Removed(want, Tier::Cpu, None)]);
    let parent = stored_with(&[("parent_block_hash", Any::Binary(digest))]);
    let said = decode(&batch(vec![parent])).1;
    assert!(matches!(said[0], Said::Stored { parent: Some(0xfedc_ba98_7654_3210), .. }), "{said:?}");
    let short = Any::Array(vec![Any::Binary(vec![1, 2])]);
    assert_eq!(
        refusal(map(&[("type", Any::from("BlockRemoved")), ("block_hashes", short)])),
        Refusal::Type("block_hashes")
    );
}

#[test]
fn media_map_to_tiers() {
    for (medium, tier) in [
        (Any::Nil, Tier::Gpu),
        (Any::from("GPU"), Tier::Gpu),
        (Any::from("cpu"), Tier::Cpu),
        // SGLang now and before, Dynamo's block manager, vLLM.
        (Any::from("CPU_PINNED"), Tier::Cpu),
        (Any::from("CPU_TIER1"), Tier::Cpu),
        (Any::from("cpu_tier1"), Tier::Cpu),
        (Any::from("host_pinned"), Tier::Cpu),
        (Any::from("device"), Tier::Gpu),
        (Any::from("CPU_TIER2"), Tier::Disk),
        (Any::from("EXTERNAL"), Tier::Disk),
        (Any::from("STORAGE"), Tier::Disk),
        (Any::from("DISK"), Tier::Disk),
        (Any::from("shared storage"), Tier::Disk),
    ] {
        let said = decode(&batch(vec![stored_with(&[("medium", medium)])])).1;
        assert!(matches!(&said[0], Said::Stored { tier: t, .. } if *t == tier), "{said:?}");
    }
}

#[test]
fn groups_without_prefix_caching_are_reported_apart() {
    for prefix in [
        Any::Nil,
        Any::from("full_attention"),
        Any::from("mla_attention"),
        Any::from("sink_full_attention"),
        Any::from("something new"),
    ] {
        let event = stored_with(&[("kv_cache_spec_kind", prefix), ("group_idx", Any::from(2))]);
        let said = decode(&batch(vec![event])).1;
        assert!(matches!(&said[0], Said::Stored { group: Some(2), .. }), "{said:?}");
    }
    let odd = [
        ("block_size", Any::from(8)),
        ("token_ids", ints(&[1, 2, 3])),
        ("token_ids", ints(&[])),
        ("token_ids", Any::Nil),
        ("extra_keys", Any::Array(vec![Any::Nil])),
        ("parent_block_hash", Any::from(1.0)),
    ];
    for kind in ["sliding_window", "mamba", "cross_attention"] {
        let group = [("kv_cache_spec_kind", Any::from(kind)), ("group_idx", Any::from(2))];
        // Whatever its fields contain, the next event is still decoded.
        for odd in odd.iter().chain([&("block_size", Any::from(4))]) {
            let event = stored_with(&[group.as_slice(), std::slice::from_ref(odd)].concat());
            let (_, said) = decode(&batch(vec![event, stored_with(&[])]));
            assert!(matches!(said.as_slice(), [Said::Apart(Some(2)), Said::Stored { .. }]), "{odd:?}: {said:?}");
        }
    }
    let array = [Any::from("BlockStored"), ints(&[1]), Any::Nil, ints(&[1, 2, 3]), Any::from(16)];
    let more = [Any::Nil, Any::Nil, Any::Nil, Any::Nil, Any::from(1), Any::from("mamba")];
    let said = decode(&batch(vec![Any::Array([array.as_slice(), &more].concat())])).1;
    assert_eq!(said, [Said::Apart(Some(1))]);
}

#[test]
fn origins_are_read_from_maps_and_arrays() {
    let origin_of = |event: Any| match decode(&batch(vec![event, stored_with(&[])])).1.as_slice() {
        [Said::Stored { origin, .. }, Said::Stored { .. }] => *origin,
        other => panic!("{other:?}"),
    };
    for (said, expected) in [
        (Any::from("REUSED"), Some(Origin::Reused)),
        (Any::from("NEW"), Some(Origin::New)),
        (Any::from("MOVED"), None),
        (Any::Nil, None),
    ] {
        assert_eq!(origin_of(stored_with(&[("origin", said.clone())])), expected, "{said}");
        let array = [Any::from("BlockStored"), ints(&[11, 12]), Any::Nil, ints(&[1, 2, 3, 4]), Any::from(2)];
        // No version has a fixed position for it: behind the kind, behind the owner, or at the end.
        for before in [6, 8, 10, 12] {
            let fields = [array.as_slice(), &vec![Any::Nil; before], &[said.clone(), ints(&[7])]].concat();
            assert_eq!(origin_of(Any::Array(fields)), expected, "{before} {said}");
        }
        // The client chooses the name of its session, in vLLM's 14th field.
        let session = [array.as_slice(), &vec![Any::Nil; 9], std::slice::from_ref(&said), &[Any::Nil]].concat();
        assert_eq!(origin_of(Any::Array(session)), None);
        assert_eq!(origin_of(stored_with(&[("session_id", said)])), None);
    }
    assert_eq!(refusal(stored_with(&[("origin", Any::from(1))])), Refusal::Type("origin"));
}

#[test]
fn remaining_copies_are_read_from_maps_and_arrays() {
    let removed = |counts: Any| {
        let fields = [("type", Any::from("BlockRemoved")), ("block_hashes", ints(&[1, 2]))];
        map(&[fields.as_slice(), &[("medium", Any::from("GPU")), ("remaining_copy_counts", counts)]].concat())
    };
    let counted = [Said::RemovedTo(vec![1, 2], vec![0, 3])];
    let plain = [Said::Removed(vec![1, 2], Tier::Gpu, None)];
    assert_eq!(decode(&batch(vec![removed(ints(&[0, 3]))])).1, counted);
    assert_eq!(decode(&batch(vec![removed(Any::Nil)])).1, plain);
    assert_eq!(decode(&batch(vec![removed(ints(&[0, 1 << 40]))])).1, [Said::RemovedTo(vec![1, 2], vec![0, u32::MAX])]);
    let array = [Any::from("BlockRemoved"), ints(&[1, 2]), Any::from("GPU"), Any::Nil];
    for before in 0..3 {
        let fields =
            |counts: Any| Any::Array([array.as_slice(), &vec![Any::Nil; before], &[counts, Any::Nil]].concat());
        assert_eq!(decode(&batch(vec![fields(ints(&[0, 3]))])).1, counted, "{before}");
        assert_eq!(decode(&batch(vec![fields(Any::from("LOCAL"))])).1, plain, "{before}");
    }
    assert_eq!(refusal(removed(ints(&[1]))), Refusal::CopyCounts { entries: 1, blocks: 2 });
    let one_is_nil = Any::Array(vec![Any::from(1), Any::Nil]);
    for wrong in [Any::from(1), Any::from("1"), one_is_nil] {
        assert_eq!(refusal(removed(wrong)), Refusal::Type("remaining_copy_counts"));
    }
}

#[test]
fn stored_names_without_tokens_are_copies() {
    // As vLLM's OffloadingConnector writes them: with or without the size of a block.
    for (size, expected) in [(Any::from(0), 0), (Any::from(4), 4), (Any::Nil, 0)] {
        let fields = [("token_ids", ints(&[])), ("block_size", size), ("medium", Any::from("CPU"))];
        let said = decode(&batch(vec![stored_with(&fields)])).1;
        assert_eq!(said, [Said::Copied(vec![11, 12], Tier::Cpu, expected, None)]);
    }
    let array = [Any::from("BlockStored"), ints(&[5]), Any::Nil, ints(&[]), Any::from(0), Any::Nil, Any::from("CPU")];
    let group = [Any::Nil, Any::Nil, Any::from(1)];
    let said = decode(&batch(vec![Any::Array([array.as_slice(), &group].concat())])).1;
    assert_eq!(said, [Said::Copied(vec![5], Tier::Cpu, 0, Some(1))]);
    let nothing = stored_with(&[("block_hashes", ints(&[])), ("token_ids", ints(&[]))]);
    assert_eq!(decode(&batch(vec![nothing])).1, []);
}

#[test]
fn contradictory_events_are_refused_and_the_rest_is_decoded() {
    let shape = |blocks, tokens, block_size| Refusal::Shape { blocks, tokens, block_size };
    let of = |fields: &[(&str, Any)]| refusal(stored_with(fields));
    assert_eq!(of(&[("block_size", Any::from(8))]), shape(2, 8, 8));
    assert_eq!(of(&[("block_size", Any::from(0))]), shape(2, 8, 0));
    assert_eq!(of(&[("block_size", Any::from(u64::MAX))]), shape(2, 8, u64::MAX));
    assert_eq!(of(&[("token_ids", ints(&[1, 2, 3]))]), shape(2, 3, 0));
    assert_eq!(of(&[("block_hashes", ints(&[]))]), shape(0, 8, 0));
    assert_eq!(of(&[("block_size", Any::Nil)]), Refusal::Missing("block_size"));
    assert_eq!(of(&[("block_size", Any::from("16"))]), Refusal::Type("block_size"));
    assert_eq!(of(&[("block_hashes", Any::from(1))]), Refusal::Type("block_hashes"));
    assert_eq!(of(&[("token_ids", Any::Nil)]), Refusal::Type("token_ids"));
    assert_eq!(of(&[("parent_block_hash", Any::from(1.0))]), Refusal::Type("parent_block_hash"));
    assert_eq!(of(&[("lora_name", Any::from(3))]), Refusal::Type("lora_name"));
    assert_eq!(of(&[("medium", Any::from(3))]), Refusal::Type("medium"));
    assert_eq!(of(&[("extra_keys", Any::Array(vec![Any::Nil]))]), Refusal::ExtraKeys { entries: 1, blocks: 2 });
    for id in [Any::from(-1), Any::from(1u64 << 32), Any::from(1.5), Any::from("1")] {
        let tokens = Any::Array((1..8).map(Any::from).chain([id]).collect());
        assert_eq!(of(&[("token_ids", tokens)]), Refusal::Type("token_ids"));
    }
    assert_eq!(refusal(Any::Array(vec![Any::from("BlockStored")])), Refusal::Missing("block_hashes"));
    assert_eq!(refusal(Any::Array(vec![Any::from("BlockRemoved")])), Refusal::Missing("block_hashes"));
    assert_eq!(refusal(Any::Array(vec![])), Refusal::NotAnEvent);
    assert_eq!(refusal(Any::from(7)), Refusal::NotAnEvent);
    assert_eq!(refusal(map(&[("block_hashes", ints(&[1]))])), Refusal::NotAnEvent);
}

#[test]
fn unknown_events_are_counted_and_skipped() {
    let novel = map(&[("type", Any::from("BlockMoved")), ("to", ints(&[1, 2]))]);
    let array = Any::Array(vec![Any::from("BlockMoved"), ints(&[1])]);
    let (batch, said) = decode(&batch(vec![novel, array, stored_with(&[])]));
    assert_eq!(batch.unwrap(), Batch { timestamp: 1.5, rank: Some(3), events: 3, unknown: 2 });
    assert_eq!(said.len(), 1);
}

#[test]
fn payload_that_is_no_batch_is_an_error() {
    for payload in [bytes(&Any::Nil), bytes(&ints(&[])), bytes(&ints(&[1])), bytes(&map(&[])), bytes(&ints(&[1, 2]))] {
        assert_eq!(decode(&payload).0, Err(BatchError::NotABatch), "{payload:?}");
    }
    assert_eq!(decode(&[]).0, Err(Malformed::Truncated.into()));
    assert_eq!(decode(&[0xc1]).0, Err(Malformed::Reserved.into()));
}

#[test]
fn claimed_lengths_allocate_nothing() {
    // Headers that claim 2^32-1 elements, at every position where one is possible.
    let huge_array = [0xdd, 0xff, 0xff, 0xff, 0xff];
    let mut decoder = Decoder::new(keys());
    let event_head = b"\x95\xabBlockStored";
    let cases: Vec<Vec<u8>> = vec![
        huge_array.to_vec(),
        [b"\x92\x00".as_slice(), &huge_array].concat(),
        [b"\x92\x00\x91".as_slice(), event_head, &huge_array].concat(),
        [b"\x92\x00\x91".as_slice(), event_head, b"\x91\x01\xc0", &huge_array].concat(),
        [b"\x92\x00\x91".as_slice(), event_head, b"\x91\x01\xc0", &[0xc6, 0xff, 0xff, 0xff, 0xff]].concat(),
        [b"\x92\x00\x91".as_slice(), &[0xdf, 0xff, 0xff, 0xff, 0xff]].concat(),
    ];
    for payload in cases {
        let error = decoder.decode(&payload, &mut Heard::default());
        assert_eq!(error, Err(Malformed::Truncated.into()), "{payload:02x?}");
    }
    assert!(decoder.buffers.capacity() < 4_096, "{}", decoder.buffers.capacity());
}

#[test]
fn deep_nesting_uses_no_stack() {
    let mut payload = b"\x92\x00\x91\x92\xa4deep".to_vec();
    payload.extend(std::iter::repeat_n(0x91, 1_000_000));
    payload.push(0xc0);
    assert_eq!(decode(&payload).0.unwrap().unknown, 1);
}
