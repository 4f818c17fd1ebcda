//! Frames that were recorded from engines.

use super::*;
use serde_json::Value as Json;

const SCENARIO: &str = include_str!("../../../../tests/data/kv_events/scenario.json");
const LEGACY: &str = include_str!("../../../../tests/data/kv_events/events_legacy_0.22.1.json");
const BYTES: &str = include_str!("../../../../tests/data/kv_events/events_sha256_cbor_seedunset_bytes.json");
const BYTES_32: &str = include_str!("../../../../tests/data/kv_events/events_sha256_seed0_bytes_bs32.json");
const XXHASH: &str = include_str!("../../../../tests/data/kv_events/events_xxhash_seed0_int.json");

pub(super) fn unhex(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
}

/// Each recorded batch: its payload and the result of Python's msgspec.
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

/// The expected result of decoding an event, derived from its JSON form alone.
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
            let keys = expected_keys(&tokens, usize::try_from(block_size).unwrap(), parent.is_none().then_some(root));
            Said::Stored {
                parent,
                blocks: hashes(field("block_hashes")).into_iter().zip(keys).collect(),
                tier: Tier::Gpu,
                block_size: u32::try_from(block_size).unwrap(),
                lora,
                group: group(field("group_idx")),
                origin: None,
            }
        }
    }
}

#[test]
fn recorded_frames_decode_to_the_recorded_events() {
    let batches = batches();
    assert!(batches.len() > 150, "{}", batches.len());
    for (payload, json) in batches {
        let (batch, said) = decode(&payload);
        let events = json[1].as_array().unwrap();
        let batch = batch.unwrap();
        // serde_json may get the last bit of a decimal fraction wrong.
        assert!((batch.timestamp - json[0].as_f64().unwrap()).abs() < 1e-5);
        assert_eq!(batch.rank, Some(0));
        assert_eq!(batch.events as usize, events.len());
        assert_eq!(batch.unknown, 0);
        assert_eq!(said, events.iter().map(expected).collect::<Vec<_>>());
        assert_eq!(timestamp(&payload), Some(batch.timestamp));
        assert_eq!(envelope(&payload).unwrap().rank, batch.rank);
    }
}
