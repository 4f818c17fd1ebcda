//! Block hashes compared with real vLLM servers: all vectors of vLLM 0.32.0 and 0.22.1, from the seed to the event.

use attache_sim::vllm_hash::{Digest, ExtraForm, ExtraKeys, HashAlgorithm, Hasher, Lora};
use serde_json::Value;

fn vectors(file: &str) -> Vec<Value> {
    let path = format!("{}/tests/data/block_hash/{file}", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_slice(&std::fs::read(&path).expect("the vectors")).expect("JSON")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn numbers(value: &Value) -> Vec<u32> {
    let items = value.as_array().expect("a list");
    items.iter().map(|item| item.as_u64().and_then(|n| u32::try_from(n).ok()).expect("a token id")).collect()
}

/// Recomputes one vector. Returns the number of compared blocks, and of those that a live server published.
fn check(vector: &Value, form: ExtraForm) -> (usize, usize) {
    let text = |key: &str| vector[key].as_str();
    let algorithm: HashAlgorithm = text("algo").expect("an algorithm").parse().expect("a known algorithm");
    let seed = text("none_hash_seed").or(text("pythonhashseed")).expect("a seed");
    let mut hasher = Hasher::new(algorithm, form, seed);
    assert_eq!(hex(hasher.none_hash().as_bytes()), vector["none_hash_hex"]);

    let path = text("lora_path").unwrap_or_default();
    let extra = ExtraKeys { lora: text("lora_name").map(|name| Lora { name, path }), cache_salt: text("cache_salt") };
    let tokens = numbers(&vector["token_ids"]);
    let block_size = vector["block_size"].as_u64().expect("a size") as usize;
    let mut chain: Vec<Digest> = Vec::new();
    for (index, block) in tokens.chunks_exact(block_size).enumerate() {
        let parent = chain.last().copied();
        let bytes = hex(hasher.serialize(parent.as_ref(), block, &extra));
        match index {
            0 => assert_eq!(bytes, vector["first_block_serialized_hex"]),
            1 if vector["second_block_serialized_hex"].is_string() => {
                assert_eq!(bytes, vector["second_block_serialized_hex"]);
            }
            _ => {}
        }
        chain.push(hasher.block(parent.as_ref(), block, &extra));
    }

    let digests: Vec<String> = chain.iter().map(|digest| hex(digest.as_bytes())).collect();
    assert_eq!(Value::from(digests), vector["digests_hex"]);
    let events: Vec<String> = chain.iter().map(|digest| digest.event_hash().to_string()).collect();
    assert_eq!(Value::from(events), vector["event_ints_u64"]);
    // A server publishes only new blocks: the end of the prompt.
    let seen = vector["observed_event_hashes"].as_array().expect("a list");
    for (seen, own) in seen.iter().rev().zip(chain.iter().rev()) {
        match seen.as_u64() {
            Some(number) => assert_eq!(number, own.event_hash()),
            None => assert_eq!(seen["$bytes"], hex(own.as_bytes())),
        }
    }
    (chain.len(), seen.len())
}

fn check_all(file: &str, form: ExtraForm) -> (usize, usize, usize) {
    let vectors = vectors(file);
    let counts: Vec<(usize, usize)> = vectors.iter().map(|vector| check(vector, form)).collect();
    (vectors.len(), counts.iter().map(|c| c.0).sum(), counts.iter().map(|c| c.1).sum())
}

#[test]
fn block_hashes_equal_those_of_vllm_0_32() {
    let (vectors, blocks, seen) = check_all("vectors.json", ExtraForm::Tagged);
    assert!(vectors == 96 && blocks > 200 && seen > 100, "{vectors} vectors, {blocks} blocks, {seen} of them live");
}

#[test]
fn block_hashes_equal_those_of_vllm_0_22() {
    let (vectors, blocks, seen) = check_all("vectors_legacy_0.22.1.json", ExtraForm::Bare);
    assert!(vectors == 48 && blocks > 100 && seen > 50, "{vectors} vectors, {blocks} blocks, {seen} of them live");
}
