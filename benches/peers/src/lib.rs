//! Attaché's prefix index beside those of SMG (`kv-index`) and NVIDIA Dynamo (`dynamo-kv-router`): one workload, one run, ratios.
//!
//! A package of its own, so that the peers' dependencies stay out of the project's build. Ours is taken in by path, because the
//! peers pin versions that the project does not use.

// The files below name the crate `types`, of which they need this module alone.
extern crate self as attache_types;

#[path = "../../../src/prefix/atomics.rs"]
mod atomics;
#[path = "../../../src/types/clock.rs"]
pub mod clock;
#[path = "../../../src/prefix/index/mod.rs"]
pub mod index;
#[path = "../../../src/prefix/key.rs"]
pub mod key;
#[path = "../../../src/prefix/wire/mod.rs"]
pub mod wire;

/// The parts of the crate of that name that are measured here.
pub mod prefix {
    pub use crate::index::{HolderId, IndexConfig, PrefixIndex, StoredBlock, TenantId, Tier, UnknownParent};
    pub use crate::key::{BlockKey, BlockKeys, EngineHash, KeySpace, Root};
    pub use crate::wire;
}

pub mod backends;
pub mod measure;
pub mod workload;
