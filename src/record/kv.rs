//! Changes of what engines cache, as their KV events reported it.

use super::line::{decode, encode};
use attache_prefix::index::{Origin, StoredBlock, Tier};
use attache_prefix::key::{BlockKey, EngineHash};
use attache_prefix::trust::Trust;
use attache_types::ids::EndpointId;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;

/// One change. `cache` is the number of a KV cache in the prefix index.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum KvChange {
    /// The KV caches of each endpoint, in the order of ranks.
    Caches(Vec<(EndpointId, Vec<u32>)>),
    /// How far the index's entries for a cache can be trusted.
    Trust { cache: u32, trust: Trust },
    /// A cache stored blocks behind `parent`.
    Stored {
        cache: u32,
        tier: Tier,
        #[serde(with = "maybe_hash", skip_serializing_if = "Option::is_none", default)]
        parent: Option<EngineHash>,
        #[serde(with = "blocks")]
        blocks: Vec<StoredBlock>,
        #[serde(skip_serializing_if = "Origin::is_new", default)]
        origin: Origin,
    },
    /// A cache stored blocks on another tier, which it had before.
    Copied {
        cache: u32,
        tier: Tier,
        #[serde(with = "hashes")]
        hashes: Vec<EngineHash>,
        #[serde(skip_serializing_if = "Origin::is_new", default)]
        origin: Origin,
    },
    /// A cache evicted a copy of each block, and said how many remain or not.
    Removed {
        cache: u32,
        tier: Tier,
        #[serde(with = "hashes")]
        hashes: Vec<EngineHash>,
        #[serde(skip_serializing_if = "Option::is_none", default)]
        remaining: Option<Vec<u32>>,
    },
    /// The blocks of a cache are not known any more.
    Cleared { cache: u32 },
    /// A cache is gone.
    Gone { cache: u32 },
    /// The pool has another block size, tokens.
    BlockSize(u32),
}

mod hashes {
    use super::{Cow, Deserialize, Deserializer, EngineHash, Error, Serializer, decode, encode};

    pub(super) fn serialize<S: Serializer>(hashes: &[EngineHash], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&encode(hashes.iter().map(|hash| hash.0)))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<EngineHash>, D::Error> {
        let numbers = decode(&Cow::<'_, str>::deserialize(from)?).map_err(D::Error::custom)?;
        Ok(numbers.into_iter().map(EngineHash).collect())
    }
}

mod maybe_hash {
    use super::{Deserialize, Deserializer, EngineHash, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(hash: &Option<EngineHash>, to: S) -> Result<S::Ok, S::Error> {
        hash.map(|hash| hash.0).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<EngineHash>, D::Error> {
        Ok(Option::<u64>::deserialize(from)?.map(EngineHash))
    }
}

/// Hash and key of each block in turn.
mod blocks {
    use super::{BlockKey, Cow, Deserialize, Deserializer, EngineHash, Error, Serializer, StoredBlock, decode, encode};

    pub(super) fn serialize<S: Serializer>(blocks: &[StoredBlock], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&encode(blocks.iter().flat_map(|block| [block.hash.0, block.key.0])))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<StoredBlock>, D::Error> {
        let numbers = decode(&Cow::<'_, str>::deserialize(from)?).map_err(D::Error::custom)?;
        let (pairs, rest) = numbers.as_chunks::<2>();
        if !rest.is_empty() {
            return Err(D::Error::custom("`blocks` has an odd number of hashes and keys"));
        }
        Ok(pairs.iter().map(|[hash, key]| StoredBlock { hash: EngineHash(*hash), key: BlockKey(*key) }).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attache_prefix::trust::Doubt;
    use proptest::prelude::*;

    proptest! {
        /// Changes are read exactly as they were written.
        #[test]
        fn changes_are_read_as_they_were_written(
            numbers in prop::collection::vec(any::<u64>(), 0..20),
            parent in any::<Option<u64>>(),
            cache in any::<u32>(),
        ) {
            let hashes: Vec<EngineHash> = numbers.iter().copied().map(EngineHash).collect();
            let block = |hash: &EngineHash| StoredBlock { hash: *hash, key: BlockKey(hash.0.rotate_left(7)) };
            let blocks: Vec<StoredBlock> = hashes.iter().map(block).collect();
            let parent = parent.map(EngineHash);
            for change in [
                KvChange::Caches(vec![(EndpointId(cache), vec![cache, 7]), (EndpointId(2), Vec::new())]),
                KvChange::Trust { cache, trust: Trust::Exact },
                KvChange::Trust { cache, trust: Trust::Suspect(Doubt::ReplayFailed) },
                KvChange::Stored { cache, tier: Tier::Gpu, parent, blocks: blocks.clone(), origin: Origin::New },
                KvChange::Stored { cache, tier: Tier::Gpu, parent, blocks, origin: Origin::Reused },
                KvChange::Copied { cache, tier: Tier::Cpu, hashes: hashes.clone(), origin: Origin::Reused },
                KvChange::Removed { cache, tier: Tier::Disk, hashes: hashes.clone(), remaining: None },
                KvChange::Removed { cache, tier: Tier::Gpu, hashes: hashes.clone(), remaining: Some(vec![0, 7]) },
                KvChange::Cleared { cache },
                KvChange::Gone { cache },
                KvChange::BlockSize(cache),
            ] {
                let text = serde_json::to_string(&change).unwrap();
                prop_assert_eq!(serde_json::from_str::<KvChange>(&text).unwrap(), change);
            }
        }
    }

    #[test]
    fn blocks_without_a_key_are_refused() {
        let odd = r#"{"stored":{"cache":1,"tier":"gpu","blocks":"AQAAAAAAAAA"}}"#;
        let error = serde_json::from_str::<KvChange>(odd).unwrap_err().to_string();
        assert!(error.starts_with("`blocks` has an odd number of hashes and keys"), "{error}");
    }
}
