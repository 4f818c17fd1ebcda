//! The index against its model, with threads, and with hostile input.

mod bounds;
mod histories;
mod in_use;
mod model;
mod regressions;
mod shares;
mod tables;
mod threads;

use super::*;
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64_with_seed;

pub(super) fn index(budget_bytes: usize) -> PrefixIndex {
    index_with_share(budget_bytes, 0.25)
}

pub(super) fn index_with_share(budget_bytes: usize, tenant_share: f32) -> PrefixIndex {
    PrefixIndex::new(IndexConfig { budget_bytes, tenant_share, half_life: Duration::from_secs(60), seed: 42 })
}

/// Returns a key for each number.
pub(super) fn key(n: u64) -> BlockKey {
    BlockKey(xxh3_64_with_seed(&n.to_le_bytes(), 7))
}

/// Names blocks by a chained hash, as engines do.
pub(super) fn named(keys: &[BlockKey], seed: u64) -> Vec<StoredBlock> {
    let mut parent = seed;
    keys.iter()
        .map(|key| {
            parent = xxh3_64_with_seed(&key.0.to_le_bytes(), parent);
            StoredBlock { hash: EngineHash(parent), key: *key }
        })
        .collect()
}

pub(super) fn depth(index: &PrefixIndex, holder: HolderId, keys: &[BlockKey]) -> Depth {
    let mut matches = Matches::default();
    let mut keys = keys;
    index.lookup(&mut keys, &mut matches);
    matches.depth(holder)
}

impl PrefixIndex {
    /// Panics where a tenant's bill differs from the size of its runs.
    pub(crate) fn check_bills(&self) {
        self.writer.lock().check_bills(&self.shared);
    }

    /// Panics where a holder's segments are not in the order of their use, or differ from the blocks that it has.
    pub(crate) fn check_recency(&self) {
        self.writer.lock().check_recency(&self.shared);
    }
}
