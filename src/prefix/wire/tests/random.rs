//! Random batches, compared with another MessagePack reader; random and damaged bytes.

use super::*;
use proptest::prelude::*;

/// A random event as rmpv would write it, with the expected result.
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
                    origin: None,
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
    fn random_batches_decode_like_rmpv(
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
    fn skip_agrees_with_rmpv_on_the_end_of_a_value(payload in proptest::collection::vec(any::<u8>(), 1..64)) {
        let mut theirs = payload.as_slice();
        let valid = rmpv::decode::read_value(&mut theirs).is_ok();
        let mut ours = Reader::new(&payload);
        let skipped = ours.skip();
        if skipped == Err(Malformed::Reserved) {
            // rmpv reads the reserved byte as nil.
        } else if valid {
            prop_assert_eq!(skipped, Ok(()));
            prop_assert_eq!(Reader::new(&payload).until(&ours).len(), payload.len() - theirs.len());
        } else {
            prop_assert!(skipped.is_err());
        }
    }
}
