//! Settings of a prefix cache, with their defaults.

use std::time::Duration;

/// Default memory of the index, 256 MiB: about eight million blocks, for example 300 servers with 27,000 blocks each.
pub const DEFAULT_MAX_BYTES: u64 = 256 << 20;

/// Default share of one tenant: a quarter. Entries of four tenants survive a flood of requests of another tenant. A
/// single tenant may use all memory.
pub const DEFAULT_TENANT_SHARE: f32 = 0.25;

/// Time after which a cached block's weight is halved: 2 min, as in LocalAI.
pub(crate) const DEFAULT_HALF_LIFE: Duration = Duration::from_secs(120);

/// Bytes of text in a token until responses have been measured.
pub const DEFAULT_BYTES_PER_TOKEN: f64 = 4.0;

/// Bytes of text that count as one token in the configured size of a text block.
pub const CHARACTERS_PER_TOKEN: u32 = 4;

/// Content of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockUnit {
    /// Number of token ids in a block.
    Tokens(u32),
    /// Number of bytes of text in a block.
    Bytes(u32),
}

/// Settings of a pool's prefix cache.
#[derive(Clone, Debug, PartialEq, serde::Deserialize, serde::Serialize)]
pub struct CacheConfig {
    /// Content and size of a block.
    pub unit: BlockUnit,
    /// Memory limit of the index, in bytes.
    pub max_bytes: u64,
    /// Share of one tenant, 0..=1: part of the memory that engines' exact entries leave free. When memory is exhausted,
    /// a tenant keeps estimated entries up to this share.
    pub tenant_share: f32,
    /// Time after which a speculative entry whose prefill has not finished is ignored.
    pub claim_life: Duration,
    /// Seed of all hash functions.
    pub seed: u64,
    /// Whether prompts in flight match others to the block, as in AIBrix's table, and not only at powers of two.
    #[serde(default)]
    pub claim_every_block: bool,
}
