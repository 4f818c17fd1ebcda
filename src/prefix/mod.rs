//! Which endpoint holds which beginning of a prompt in its KV cache.
//!
//! Blocks of a prompt become [`BlockKey`]s ([`key`]); the [`index`] knows who holds them, from engines' KV events (exact) or from
//! what was routed there (approximate). Pure: moments come in as arguments. May import `clock`, `ids`, `pool` and `protocol`.

mod atomics;
mod average;
pub mod block_size;
pub mod by_endpoint;
pub mod cache;
pub mod carried;
pub mod claims;
pub mod index;
pub mod key;
pub mod learning;
pub mod residents;
pub mod trust;
pub mod vllm_hash;
pub mod wire;

pub use index::{
    Blocks, Depth, HolderId, IndexConfig, Kept, Match, Matches, PrefixIndex, Stats, StoredBlock, TenantId, Tier,
    UnknownParent,
};
pub use key::{BlockKey, BlockKeys, EngineHash, KeySpace, Root};
