//! Recorded frames, random batches against another reader of MessagePack, and bytes that lie.

use super::*;
use crate::prefix::key::{BlockKey, Root};
use proptest::prelude::*;
use rmpv::Value as Any;

/// What the events of a batch say, owned.
#[derive(Clone, Debug, PartialEq)]
enum Said {
    Stored {
        parent: Option<u64>,
        blocks: Vec<(u64, BlockKey)>,
        tier: Tier,
        block_size: u32,
        lora: Option<String>,
        group: Option<u32>,
        kind: GroupKind,
    },
    Removed(Vec<u64>, Tier, Option<u32>),
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
            kind: event.kind,
        });
    }

    fn removed(&mut self, event: Removed<'_>) {
        self.0.push(Said::Removed(event.hashes.iter().map(|h| h.0).collect(), event.tier, event.group));
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

/// The keys that `tokens` must get, made the long way.
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

/// A `BlockStored` of two blocks of four tokens as a map, with other or more fields.
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
    // The event after it must come through.
    match decode(&batch(vec![event, map(&[("type", Any::from("AllBlocksCleared"))])])).1.as_slice() {
        [Said::Refused(reason), Said::Cleared] => *reason,
        other => panic!("{other:?}"),
    }
}

mod recorded {
    use super::*;
    use serde_json::Value as Json;

    const SCENARIO: &str = include_str!("../../../tests/data/kv_events/scenario.json");
    const LEGACY: &str = include_str!("../../../tests/data/kv_events/events_legacy_0.22.1.json");
    const BYTES: &str = include_str!("../../../tests/data/kv_events/events_sha256_cbor_seedunset_bytes.json");
    const BYTES_32: &str = include_str!("../../../tests/data/kv_events/events_sha256_seed0_bytes_bs32.json");
    const XXHASH: &str = include_str!("../../../tests/data/kv_events/events_xxhash_seed0_int.json");

    pub(super) fn unhex(hex: &str) -> Vec<u8> {
        (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
    }

    /// Each recorded batch: its payload and what Python's msgspec made of it.
    pub(super) fn batches() -> Vec<(Vec<u8>, Json)> {
        let mut found = Vec::new();
        let steps: Vec<Json> = serde_json::from_str(SCENARIO).unwrap();
        let scenario = steps.iter().filter_map(|s| s["batches"].as_array()).flatten().cloned();
        let others = [LEGACY, BYTES, BYTES_32, XXHASH].map(|f| serde_json::from_str::<Vec<Json>>(f).unwrap());
        for batch in scenario.chain(others.into_iter().flatten()) {
            let Some(payload) = batch["frames_hex"].as_array().and_then(|f| f.last()) else { continue };
            found.push((unhex(payload.as_str().unwrap()), batch["decoded"].clone()));
        }
        found
    }

    fn hash(json: &Json) -> u64 {
        let digest = || unhex(json["$bytes"].as_str().unwrap());
        json.as_u64().unwrap_or_else(|| u64::from_be_bytes(*digest().last_chunk().unwrap()))
    }

    /// What an event must decode to, from its JSON form alone.
    fn expected(event: &Json) -> Said {
        const STORED: [&str; 10] = [
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "lora_id",
            "medium",
            "lora_name",
            "extra_keys",
            "group_idx",
            "kv_cache_spec_kind",
        ];
        let name = event.get("type").unwrap_or(&event[0]).as_str().unwrap();
        let order: &[&str] = if name == "BlockStored" { &STORED } else { &["block_hashes", "medium", "group_idx"] };
        let field = |name: &str| match event {
            Json::Array(values) => {
                let at = order.iter().position(|n| *n == name).unwrap();
                values.get(at + 1).cloned().unwrap_or(Json::Null)
            }
            _ => event[name].clone(),
        };
        let hashes = |json: Json| json.as_array().unwrap().iter().map(hash).collect::<Vec<_>>();
        let group = |json: Json| json.as_u64().map(|g| u32::try_from(g).unwrap());
        match name {
            "AllBlocksCleared" => Said::Cleared,
            "BlockRemoved" => Said::Removed(hashes(field("block_hashes")), Tier::Gpu, group(field("group_idx"))),
            _ => {
                let block_size = field("block_size").as_u64().unwrap();
                let tokens: Vec<u32> = field("token_ids")
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|t| u32::try_from(t.as_u64().unwrap()).unwrap())
                    .collect();
                let parent = field("parent_block_hash");
                let parent = (!parent.is_null()).then(|| hash(&parent));
                let lora = field("lora_name").as_str().map(str::to_owned);
                let first_extra = field("extra_keys")[0].as_array().cloned().unwrap_or_default();
                let salt = first_extra.iter().filter_map(Json::as_str).find(|s| Some(*s) != lora.as_deref());
                let root = Root { name: lora.as_deref().unwrap_or(""), cache_salt: salt, tenant: None };
                let keys =
                    expected_keys(&tokens, usize::try_from(block_size).unwrap(), parent.is_none().then_some(root));
                Said::Stored {
                    parent,
                    blocks: hashes(field("block_hashes")).into_iter().zip(keys).collect(),
                    tier: Tier::Gpu,
                    block_size: u32::try_from(block_size).unwrap(),
                    lora,
                    group: group(field("group_idx")),
                    kind: GroupKind::Prefix,
                }
            }
        }
    }

    #[test]
    fn every_recorded_frame_decodes_to_what_was_recorded() {
        let batches = batches();
        assert!(batches.len() > 150, "{}", batches.len());
        for (payload, json) in batches {
            let (batch, said) = decode(&payload);
            let events = json[1].as_array().unwrap();
            let batch = batch.unwrap();
            // serde_json reads decimal fractions with the last bit off.
            assert!((batch.timestamp - json[0].as_f64().unwrap()).abs() < 1e-5);
            assert_eq!(batch.rank, Some(0));
            assert_eq!(batch.events as usize, events.len());
            assert_eq!(batch.unknown, 0);
            assert_eq!(said, events.iter().map(expected).collect::<Vec<_>>());
            assert_eq!(timestamp(&payload), Some(batch.timestamp));
            assert_eq!(envelope(&payload).unwrap().rank, batch.rank);
        }
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
        // Arrays grow at the end from version to version, beyond what we know too.
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
fn fields_may_stand_in_any_order() {
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
fn hashes_are_read_in_all_their_types() {
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
fn media_are_tiers() {
    for (medium, tier) in [
        (Any::Nil, Tier::Gpu),
        (Any::from("GPU"), Tier::Gpu),
        (Any::from("cpu"), Tier::Cpu),
        (Any::from("DISK"), Tier::Disk),
        (Any::from("shared storage"), Tier::Disk),
    ] {
        let said = decode(&batch(vec![stored_with(&[("medium", medium)])])).1;
        assert!(matches!(&said[0], Said::Stored { tier: t, .. } if *t == tier), "{said:?}");
    }
}

#[test]
fn groups_that_keep_no_prefix_are_told_apart() {
    for (kind, want) in [
        (Any::Nil, GroupKind::Prefix),
        (Any::from("full_attention"), GroupKind::Prefix),
        (Any::from("mla_attention"), GroupKind::Prefix),
        (Any::from("sink_full_attention"), GroupKind::Prefix),
        (Any::from("something new"), GroupKind::Prefix),
        (Any::from("sliding_window"), GroupKind::Partial),
        (Any::from("mamba"), GroupKind::Partial),
        (Any::from("cross_attention"), GroupKind::Partial),
    ] {
        let event = stored_with(&[("kv_cache_spec_kind", kind), ("group_idx", Any::from(2))]);
        let said = decode(&batch(vec![event])).1;
        assert!(matches!(&said[0], Said::Stored { kind, group: Some(2), .. } if *kind == want), "{said:?}");
    }
}

mod roots {
    use super::*;

    const TOKENS: [u32; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

    fn strings(values: &[&str]) -> Any {
        Any::Array(values.iter().map(|v| Any::from(*v)).collect())
    }

    fn pair(hash: &str, offset: i64) -> Any {
        Any::Array(vec![Any::from(hash), Any::from(offset)])
    }

    fn under(name: &str, salt: Option<&str>) -> Vec<BlockKey> {
        expected_keys(&TOKENS, 4, Some(Root { name, cache_salt: salt, tenant: None }))
    }

    #[test]
    fn adapter_and_salt_make_the_root_tagged_or_not() {
        let sql = ("lora_name", Any::from("sql"));
        let extra = |first: Any, second: Any| ("extra_keys", Any::Array(vec![first, second]));
        let tagged_lora = Any::Array(vec![strings(&["lora", "sql", "path/to/sql"])]);
        let tagged_both = Any::Array(vec![strings(&["lora", "sql", "path/to/sql"]), strings(&["cache_salt", "s"])]);
        assert_eq!(keys_of(stored_with(&[])), under("", None));
        assert_eq!(keys_of(stored_with(&[extra(Any::Nil, Any::Nil)])), under("", None));
        assert_eq!(keys_of(stored_with(std::slice::from_ref(&sql))), under("sql", None));
        assert_eq!(
            keys_of(stored_with(&[sql.clone(), extra(strings(&["sql"]), strings(&["sql"]))])),
            under("sql", None)
        );
        assert_eq!(
            keys_of(stored_with(&[sql.clone(), extra(strings(&["sql", "s"]), strings(&["sql"]))])),
            under("sql", Some("s"))
        );
        assert_eq!(keys_of(stored_with(&[extra(strings(&["s"]), Any::Nil)])), under("", Some("s")));
        assert_eq!(
            keys_of(stored_with(&[sql.clone(), extra(tagged_lora.clone(), tagged_lora.clone())])),
            under("sql", None)
        );
        assert_eq!(keys_of(stored_with(&[sql, extra(tagged_both, tagged_lora)])), under("sql", Some("s")));
    }

    #[test]
    fn an_adapter_that_is_only_numbered_is_not_the_base_model() {
        let numbered = keys_of(stored_with(&[("lora_id", Any::from(1))]));
        assert_ne!(numbered[0], under("", None)[0]);
        assert_ne!(numbered[0], keys_of(stored_with(&[("lora_id", Any::from(2))]))[0]);
    }

    #[test]
    fn images_are_part_of_their_blocks() {
        let mut buffer = Vec::new();
        let mut with = |key: BlockKey, hash: &str, offset: Option<i64>| {
            multimodal_content(hash.as_bytes(), offset, &mut buffer);
            keys().with_extra(key, &buffer)
        };
        let salted = under("", Some("s"));
        let extra = |first: Any, second: Any| stored_with(&[("extra_keys", Any::Array(vec![first, second]))]);
        // Bare strings: behind the first block they are images, in it the last one is the salt.
        assert_eq!(
            keys_of(extra(strings(&["img", "s"]), strings(&["img"]))),
            [with(salted[0], "img", None), with(salted[1], "img", None)]
        );
        let pairs =
            extra(Any::Array(vec![pair("img", 2), pair("two", 3), Any::from("s")]), Any::Array(vec![pair("img", -2)]));
        let first = with(salted[0], "img", Some(2));
        assert_eq!(keys_of(pairs), [with(first, "two", Some(3)), with(salted[1], "img", Some(-2))]);
        let tagged = extra(
            Any::Array(vec![
                Any::Array(vec![Any::from("mm"), Any::from("img"), Any::from(2)]),
                strings(&["cache_salt", "s"]),
            ]),
            Any::Array(vec![Any::Array(vec![Any::from("mm"), Any::from("img"), Any::from(-2)])]),
        );
        assert_eq!(keys_of(tagged), [with(salted[0], "img", Some(2)), with(salted[1], "img", Some(-2))]);
    }

    #[test]
    fn what_is_not_understood_still_separates() {
        let extra = |second: Any| keys_of(stored_with(&[("extra_keys", Any::Array(vec![Any::Nil, second]))]));
        let plain = extra(Any::Nil);
        let odd = [
            Any::Array(vec![strings(&["novel", "x"])]),
            Any::Array(vec![strings(&["novel", "y"])]),
            Any::Array(vec![Any::from(1.25)]),
            Any::Array(vec![Any::Array(vec![])]),
        ];
        let mut seen = vec![plain[1]];
        for entry in odd {
            let keys = extra(entry);
            assert_eq!(keys[0], plain[0]);
            assert!(!seen.contains(&keys[1]));
            seen.push(keys[1]);
        }
    }

    #[test]
    fn later_events_have_no_root() {
        let said = keys_of(stored_with(&[("parent_block_hash", Any::from(10)), ("lora_name", Any::from("sql"))]));
        assert_eq!(said, expected_keys(&TOKENS, 4, None));
    }
}

#[test]
fn events_that_contradict_themselves_are_refused_alone() {
    let shape = |blocks, tokens, block_size| Refusal::Shape { blocks, tokens, block_size };
    let of = |fields: &[(&str, Any)]| refusal(stored_with(fields));
    assert_eq!(of(&[("block_size", Any::from(8))]), shape(2, 8, 8));
    assert_eq!(of(&[("block_size", Any::from(0))]), shape(2, 8, 0));
    assert_eq!(of(&[("block_size", Any::from(u64::MAX))]), shape(2, 8, u64::MAX));
    assert_eq!(of(&[("token_ids", ints(&[1, 2, 3]))]), shape(2, 3, 0));
    assert_eq!(of(&[("token_ids", ints(&[]))]), shape(2, 0, 0));
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
fn unknown_events_are_counted_and_passed_over() {
    let novel = map(&[("type", Any::from("BlockMoved")), ("to", ints(&[1, 2]))]);
    let array = Any::Array(vec![Any::from("BlockMoved"), ints(&[1])]);
    let (batch, said) = decode(&batch(vec![novel, array, stored_with(&[])]));
    assert_eq!(batch.unwrap(), Batch { timestamp: 1.5, rank: Some(3), events: 3, unknown: 2 });
    assert_eq!(said.len(), 1);
}

#[test]
fn what_is_no_batch_is_an_error() {
    for payload in [bytes(&Any::Nil), bytes(&ints(&[])), bytes(&ints(&[1])), bytes(&map(&[])), bytes(&ints(&[1, 2]))] {
        assert_eq!(decode(&payload).0, Err(BatchError::NotABatch), "{payload:?}");
    }
    assert_eq!(decode(&[]).0, Err(Malformed::Truncated.into()));
    assert_eq!(decode(&[0xc1]).0, Err(Malformed::Reserved.into()));
}

#[test]
fn a_claimed_length_allocates_nothing() {
    // Heads that claim 2^32-1 elements, in every place where one can stand.
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
fn depth_costs_no_stack() {
    let mut payload = b"\x92\x00\x91\x92\xa4deep".to_vec();
    payload.extend(std::iter::repeat_n(0x91, 1_000_000));
    payload.push(0xc0);
    assert_eq!(decode(&payload).0.unwrap().unknown, 1);
}

/// A field of a random event, as rmpv would write it.
fn any_event() -> impl Strategy<Value = (Any, Said)> {
    let token = prop_oneof![0u32..128, 128..256u32, 256..65_536u32, 65_536..=u32::MAX];
    let stored = (1usize..5, 1usize..20, any::<Option<u64>>(), any::<bool>(), any::<Option<u32>>()).prop_flat_map(
        move |(blocks, size, parent, positional, group)| {
            let tokens = proptest::collection::vec(token.clone(), blocks * size);
            let hashes = proptest::collection::vec(any::<i64>(), blocks);
            let lora = proptest::option::of("[a-z]{1,8}");
            (tokens, hashes, lora).prop_map(move |(tokens, hashes, lora)| {
                let name = lora.clone().map_or(Any::Nil, Any::from);
                let root = Root { name: lora.as_deref().unwrap_or(""), cache_salt: None, tenant: None };
                let keys = expected_keys(&tokens, size, parent.is_none().then_some(root));
                let said = Said::Stored {
                    parent,
                    blocks: hashes.iter().map(|h| h.cast_unsigned()).zip(keys).collect(),
                    tier: Tier::Gpu,
                    block_size: u32::try_from(size).unwrap(),
                    lora,
                    group,
                    kind: GroupKind::Prefix,
                };
                let fields = [
                    ("block_hashes", Any::Array(hashes.iter().map(|h| Any::from(*h)).collect())),
                    ("parent_block_hash", parent.map_or(Any::Nil, Any::from)),
                    ("token_ids", Any::Array(tokens.iter().map(|t| Any::from(*t)).collect())),
                    ("block_size", Any::from(size)),
                    ("lora_id", Any::Nil),
                    ("medium", Any::from("GPU")),
                    ("lora_name", name),
                    ("extra_keys", Any::Nil),
                    ("group_idx", group.map_or(Any::Nil, Any::from)),
                ];
                (event("BlockStored", &fields, positional), said)
            })
        },
    );
    let removed = (proptest::collection::vec(any::<u64>(), 0..6), any::<bool>()).prop_map(|(hashes, positional)| {
        let fields = [("block_hashes", ints(&hashes)), ("medium", Any::from("CPU"))];
        (event("BlockRemoved", &fields, positional), Said::Removed(hashes, Tier::Cpu, None))
    });
    let cleared = any::<bool>().prop_map(|positional| (event("AllBlocksCleared", &[], positional), Said::Cleared));
    prop_oneof![4 => stored, 2 => removed, 1 => cleared]
}

fn event(name: &str, fields: &[(&str, Any)], positional: bool) -> Any {
    if positional {
        let values = fields.iter().map(|(_, v)| v.clone());
        return Any::Array(std::iter::once(Any::from(name)).chain(values).collect());
    }
    let mut all = vec![("type", Any::from(name))];
    all.extend(fields.iter().cloned());
    map(&all)
}

proptest! {
    #[test]
    fn random_batches_decode_as_another_reader_reads_them(
        events in proptest::collection::vec(any_event(), 0..8),
        timestamp in 0.0..2e9,
        rank in any::<Option<u32>>(),
    ) {
        let (values, said): (Vec<Any>, Vec<Said>) = events.into_iter().unzip();
        let count = u32::try_from(values.len()).unwrap();
        let value = Any::Array(vec![Any::from(timestamp), Any::Array(values), rank.map_or(Any::Nil, Any::from)]);
        let (batch, heard) = decode(&bytes(&value));
        prop_assert_eq!(batch, Ok(Batch { timestamp, rank, events: count, unknown: 0 }));
        prop_assert_eq!(heard, said);
    }

    #[test]
    fn random_bytes_never_panic_and_never_allocate_much(payload in proptest::collection::vec(any::<u8>(), 0..512)) {
        let mut decoder = Decoder::new(keys());
        let _ = decoder.decode(&payload, &mut Heard::default());
        prop_assert!(decoder.buffers.capacity() <= 64 * (payload.len() + 64));
        let _ = (envelope(&payload), timestamp(&payload));
    }

    #[test]
    fn damaged_frames_never_panic_and_never_allocate_much(
        which in any::<prop::sample::Index>(),
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        keep in any::<prop::sample::Index>(),
    ) {
        thread_local! {
            static FRAMES: Vec<Vec<u8>> = recorded::batches().into_iter().map(|(p, _)| p).collect();
        }
        let mut payload = FRAMES.with(|f| f[which.index(f.len())].clone());
        for (at, byte) in damage {
            let at = at.index(payload.len());
            payload[at] = byte;
        }
        let whole = payload.len();
        payload.truncate(whole / 2 + keep.index(whole - whole / 2 + 1));
        let mut decoder = Decoder::new(keys());
        let _ = decoder.decode(&payload, &mut Heard::default());
        prop_assert!(decoder.buffers.capacity() <= 64 * (payload.len() + 64));
    }

    #[test]
    fn another_reader_agrees_on_what_is_one_value(payload in proptest::collection::vec(any::<u8>(), 1..64)) {
        let mut theirs = payload.as_slice();
        let valid = rmpv::decode::read_value(&mut theirs).is_ok();
        let mut ours = Reader::new(&payload);
        let skipped = ours.skip();
        if skipped == Err(Malformed::Reserved) {
            // rmpv takes the byte that means nothing for nil.
        } else if valid {
            prop_assert_eq!(skipped, Ok(()));
            prop_assert_eq!(Reader::new(&payload).until(&ours).len(), payload.len() - theirs.len());
        } else {
            prop_assert!(skipped.is_err());
        }
    }
}
