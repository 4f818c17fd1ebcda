//! Types of the index that its callers use.

use crate::key::{BlockKey, EngineHash};
use std::time::Duration;

/// One KV cache: an endpoint, or one data-parallel rank of it. [`super::PrefixIndex::add_holder`] assigns it. The same
/// value is not assigned again before its slot was reused 65,536 times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HolderId(pub u32);

impl HolderId {
    pub(super) fn slot(self) -> usize {
        (self.0 & 0xffff) as usize
    }
}

/// The tenant that estimated entries are billed to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantId(pub u32);

/// The memory that holds a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// The accelerator's own memory.
    Gpu,
    /// The memory of the host.
    Cpu,
    /// Anything slower, such as disks and remote stores.
    Disk,
}

/// Memory limit and eviction settings of an index.
#[derive(Clone, Debug)]
pub struct IndexConfig {
    /// Memory limit of all structures together, in bytes.
    pub budget_bytes: usize,
    /// Share of one tenant, [`LEAST_SHARE`]..=1: part of the memory that engines' entries leave for estimated ones.
    /// When memory is exhausted, a tenant keeps estimated entries up to this share.
    pub tenant_share: f32,
    /// Time after which a block counts half in [`super::PrefixIndex::weight`].
    pub half_life: Duration,
    /// Seed of the hash tables. Keep it secret: a client that knows it can slow lookups down.
    pub seed: u64,
}

/// A block that an engine has stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredBlock {
    /// The engine's own hash of the block.
    pub hash: EngineHash,
    /// Attaché's hash of the block's content.
    pub key: BlockKey,
}

/// Why an engine reports a block as stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// It has stored the block. If the holder has the block already, this is another copy.
    #[default]
    New,
    /// It has used a block again that it had.
    Reused,
}

impl Origin {
    /// Whether this is [`Origin::New`], which recordings omit.
    #[must_use]
    pub fn is_new(&self) -> bool {
        *self == Self::New
    }
}

/// What a report of stored blocks changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreEffect {
    /// Number of blocks that the holder did not have.
    pub new: u32,
    /// Number of blocks that count as another copy now.
    pub again: u32,
    /// Number of blocks that no holder had. They are the last ones of the report. Blocks of a cleared holder may count
    /// as held until the index reuses their memory.
    pub first: u32,
}

/// A block was stored behind a parent that the index does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the parent block is not in the index")]
pub struct UnknownParent;

/// Number of blocks that a holder has, by tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Blocks {
    /// Blocks in GPU memory.
    pub gpu: u32,
    /// Blocks in host memory.
    pub cpu: u32,
    /// Blocks on slower tiers.
    pub disk: u32,
    /// Estimated blocks in GPU memory.
    pub guessed: u32,
}

/// Size and counters of an index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes that the structures take.
    pub bytes: usize,
    /// The memory limit in bytes.
    pub budget_bytes: usize,
    /// Part of `bytes` that is mapped memory. In huge pages, the system may have allocated up to one such page more.
    pub mapped_bytes: usize,
    /// Part of the mapped bytes that is free.
    pub free_bytes: usize,
    /// Number of runs of blocks.
    pub runs: usize,
    /// Number of blocks; a block counts once however many hold it.
    pub blocks: usize,
    /// Number of engines' names for blocks.
    pub names: usize,
    /// Number of holders.
    pub holders: usize,
    /// Estimated blocks evicted because their holder's capacity was exceeded.
    pub evicted_for_capacity: u64,
    /// Estimated blocks evicted because memory was exhausted and their tenant was over its share, while
    /// other tenants' blocks were older.
    pub evicted_for_tenant: u64,
    /// Estimated blocks evicted because memory was exhausted and none were older.
    pub evicted_for_budget: u64,
    /// Blocks that engines had reported, evicted because memory was exhausted and their cache was over its share.
    pub evicted_reported: u64,
    /// Blocks that were not stored for lack of memory.
    pub refused_blocks: u64,
}

/// Smallest share of a tenant. It limits the tenants with at least half a share, which an
/// eviction searches, to two hundred.
pub const LEAST_SHARE: f32 = 0.01;
