//! Which endpoint holds which prefix of a prompt in its KV cache.
//!
//! Blocks of a prompt become [`BlockKey`]s. The index knows which endpoint holds them: from engines' KV events (exact)
//! or from the requests that were routed there (approximate).
//!
//! **Owns** block keys ([`key`]), the [`index`], speculative entries ([`claims`]), the cache of one pool ([`cache`])
//! and decoding of KV events ([`wire`]).
//! **Called by** `picker` for each request, by `kv_events` for each event, and by `replay`.
//! **Must not** do I/O, ask for the time, or read request bodies. The index uses atomics from `atomics.rs` only, since
//! `tests/interleavings` replaces them.
//!
//! Read first: `key.rs`, `index/mod.rs`, `cache.rs`.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

pub mod adapters;
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
pub mod recomputed;
pub mod residents;
pub mod trust;
pub mod unread;
pub mod wire;

pub use index::{
    Blocks, Depth, ExportChunk, ExportCursor, ExportHolder, ExportRun, HolderId, ImportError, IndexConfig, Kept, Match,
    Matches, PrefixIndex, Stats, StoredBlock, TenantId, Tier, UnknownParent,
};
pub use key::{BlockKey, BlockKeys, EngineHash, KeySpace, Root};
