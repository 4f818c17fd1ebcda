//! Attaché's prefix index beside those of SMG (`kv-index`) and NVIDIA Dynamo (`dynamo-kv-router`): one workload, one run, ratios.
//!
//! A package of its own, so that the peers' dependencies stay out of the project's build. Ours is taken in by path, because the
//! peers pin versions that the project does not use.

#[path = "../../../src/clock.rs"]
pub mod clock;

/// The parts of the project's module of that name that are measured here.
#[path = "."]
pub mod prefix {
    #[path = "../../../src/prefix/atomics.rs"]
    mod atomics;
    #[path = "../../../src/prefix/index/mod.rs"]
    pub mod index;
    #[path = "../../../src/prefix/key.rs"]
    pub mod key;
    #[path = "../../../src/prefix/wire/mod.rs"]
    pub mod wire;

    pub use index::{HolderId, IndexConfig, PrefixIndex, StoredBlock, TenantId, Tier, UnknownParent};
    pub use key::{BlockKey, BlockKeys, EngineHash, KeySpace, Root};
}

pub mod backends;
pub mod measure;
pub mod workload;
