use super::*;
use crate::vllm_hash::HashAlgorithm;
use rmpv::Value;

/// A recorded batch, with the engine's own names made of the recorded ones.
struct Recorded {
    payload: Vec<u8>,
    seconds: f64,
    batch: KvBatch,
    /// Has fields that a simulated server never has.
    foreign: bool,
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

fn block(hash: &Value) -> BlockHash {
    BlockHash(match hash {
        Value::Binary(bytes) => u64::from_be_bytes(bytes[bytes.len() - 8..].try_into().unwrap()),
        hash => hash.as_u64().unwrap(),
    })
}

fn blocks(hashes: &Value) -> Vec<BlockHash> {
    hashes.as_array().unwrap().iter().map(block).collect()
}

/// Field `index` of an array, or `key` of a map.
fn field<'a>(event: &'a Value, index: usize, key: &str) -> &'a Value {
    match event {
        Value::Map(pairs) => &pairs.iter().find(|(k, _)| k.as_str() == Some(key)).unwrap().1,
        event => &event.as_array().unwrap()[index],
    }
}

fn event(recorded: &Value) -> KvEvent {
    let text = |value: &Value| value.as_str().map(Arc::from);
    match field(recorded, 0, "type").as_str().unwrap() {
        "BlockStored" => {
            let lora: Option<Arc<str>> = text(field(recorded, 7, "lora_name"));
            let tokens = field(recorded, 3, "token_ids").as_array().unwrap();
            let first_keys = &field(recorded, 8, "extra_keys").as_array().unwrap()[0];
            let keys = first_keys.as_array().cloned().unwrap_or_default();
            KvEvent::Stored {
                parent: Some(field(recorded, 2, "parent_block_hash")).filter(|parent| !parent.is_nil()).map(block),
                blocks: blocks(field(recorded, 1, "block_hashes"))
                    .into_iter()
                    .map(|hash| KvBlock { hash, content: 0 })
                    .collect(),
                tokens: tokens.iter().map(|token| token.as_u64().unwrap() as u32).collect(),
                cache_salt: keys.get(usize::from(lora.is_some())).and_then(text),
                lora,
            }
        }
        "BlockRemoved" => KvEvent::Removed { hash: blocks(field(recorded, 1, "block_hashes"))[0] },
        "AllBlocksCleared" => KvEvent::Cleared,
        other => panic!("{other}"),
    }
}

fn recorded(hex: &str) -> Recorded {
    let payload = unhex(hex);
    let value = rmpv::decode::read_value(&mut payload.as_slice()).unwrap();
    let parts = value.as_array().unwrap();
    let events = parts[1].as_array().unwrap();
    let foreign =
        events.iter().filter_map(Value::as_map).any(|m| m.iter().any(|(k, _)| k.as_str() == Some("session_id")));
    Recorded {
        seconds: parts[0].as_f64().unwrap(),
        batch: KvBatch { at: Timestamp(0), events: events.iter().map(event).collect() },
        foreign,
        payload,
    }
}

fn lines(file: &str) -> String {
    std::fs::read_to_string(format!("{}/../../tests/data/sim/{file}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

#[test]
fn maps_are_byte_for_byte_those_of_vllm_0_32() {
    let config = KvEventsConfig { algorithm: HashAlgorithm::Sha256Cbor, seed: "0".into(), ..KvEventsConfig::default() };
    let mut encoder = KvEncoder::new(&config, 16, 0);
    encoder.adapter(&"sql".into(), "lora/sql");
    let mut compared = 0;
    for (number, line) in lines("kv_frames_0.32.0.txt").lines().enumerate() {
        let recorded = recorded(line);
        let frame = encoder.frame(&recorded.batch, recorded.seconds);
        assert_eq!(frame.sequence, number as u64);
        if !recorded.foreign {
            assert!(frame.payload == recorded.payload, "message {number}: {:?}", recorded.batch);
            compared += 1;
        }
    }
    assert_eq!(compared, 85);
}

#[test]
fn arrays_are_byte_for_byte_those_of_vllm_0_22() {
    let mut current: Option<(KvEventsConfig, KvEncoder)> = None;
    let mut compared = 0;
    for line in lines("kv_frames_0.22.1.txt").lines() {
        let [algorithm, seed, hash, hex] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
        let config = KvEventsConfig {
            algorithm: algorithm.parse().unwrap(),
            seed: seed.to_owned(),
            hash: if hash == "int" { HashForm::Int } else { HashForm::Bytes },
            encoding: EventEncoding::Array,
            ..KvEventsConfig::default()
        };
        if current.as_ref().is_none_or(|(known, _)| *known != config) {
            current = Some((config.clone(), KvEncoder::new(&config, 16, 0)));
        }
        let (_, encoder) = current.as_mut().unwrap();
        encoder.adapter(&"sql".into(), "lora/sql");
        let recorded = recorded(hex);
        assert!(encoder.frame(&recorded.batch, recorded.seconds).payload == recorded.payload, "{line}");
        compared += 1;
    }
    assert_eq!(compared, 48);
}

#[test]
fn a_salt_is_told_with_the_first_block_of_a_prompt_only() {
    let mut encoder = KvEncoder::new(&KvEventsConfig::default(), 2, 3);
    let stored = |parent: Option<u64>, hashes: [u64; 2]| KvEvent::Stored {
        parent: parent.map(BlockHash),
        blocks: hashes.map(|hash| KvBlock { hash: BlockHash(hash), content: 0 }).to_vec(),
        tokens: vec![1, 2, 3, 4],
        lora: None,
        cache_salt: Some("s".into()),
    };
    let batch = KvBatch { at: Timestamp(0), events: vec![stored(None, [1, 2]), stored(Some(2), [3, 4])] };
    let payload = encoder.frame(&batch, 0.0).payload;
    let value = rmpv::decode::read_value(&mut &*payload).unwrap();
    let keys = |event: usize| field(&value[1][event], 8, "extra_keys").clone();
    let salt = Value::Array(vec!["s".into()]);
    assert_eq!(keys(0), Value::Array(vec![salt, Value::Nil]));
    assert_eq!(keys(1), Value::Array(vec![Value::Nil, Value::Nil]));
}

#[test]
fn the_latest_blocks_are_told_to_lie_in_host_memory_too() {
    let config = KvEventsConfig { offload_blocks: 3, ..KvEventsConfig::default() };
    for encoding in [EventEncoding::Map, EventEncoding::Array] {
        let mut encoder = KvEncoder::new(&KvEventsConfig { encoding, ..config.clone() }, 1, 0);
        let stored = |hashes: &[u64]| KvEvent::Stored {
            parent: None,
            blocks: hashes.iter().map(|hash| KvBlock { hash: BlockHash(*hash), content: 0 }).collect(),
            tokens: hashes.iter().map(|hash| *hash as u32).collect(),
            lora: None,
            cache_salt: None,
        };
        let mut told = |events: Vec<KvEvent>| -> Vec<(String, usize)> {
            let payload = encoder.frame(&KvBatch { at: Timestamp(0), events }, 0.0).payload;
            let value = rmpv::decode::read_value(&mut &*payload).unwrap();
            let of_host = |event: &&Value| match field(event, 0, "type").as_str() {
                Some("BlockStored") => field(event, 6, "medium").as_str() == Some("CPU"),
                Some("BlockRemoved") => field(event, 2, "medium").as_str() == Some("CPU"),
                _ => true,
            };
            let events = value[1].as_array().unwrap().iter().filter(of_host);
            let said = events.map(|event| {
                let kind = field(event, 0, "type").as_str().unwrap();
                if kind == "BlockStored" {
                    assert!(field(event, 3, "token_ids").as_array().unwrap().is_empty());
                    assert_eq!(field(event, 4, "block_size").as_u64(), Some(0));
                }
                let named = kind != "AllBlocksCleared";
                (kind.to_owned(), if named { blocks(field(event, 1, "block_hashes")).len() } else { 0 })
            });
            said.collect()
        };
        let said = |kind: &str, count| (kind.to_owned(), count);
        assert_eq!(told(vec![stored(&[1, 2])]), [said("BlockStored", 2)]);
        assert_eq!(told(vec![stored(&[1, 2])]), [], "it is there");
        assert_eq!(told(vec![stored(&[7, 8, 9])]), [said("BlockRemoved", 2), said("BlockStored", 3)]);
        assert_eq!(told(vec![KvEvent::Removed { hash: BlockHash(9) }]), [], "the accelerator's copy is another one");
        let cleared = told(vec![stored(&[1]), KvEvent::Cleared, stored(&[8])]);
        assert_eq!(cleared, [said("AllBlocksCleared", 0), said("BlockStored", 1)]);
    }
}
