//! Which endpoint gave which answer of the Responses API: the answer's state lives there, so what continues it must go there.

use ahash::RandomState;
use attache_types::ids::EndpointId;
use std::sync::Arc;

/// Answers that are remembered: at 40 bytes an entry about 4 MB, and hours of traffic.
pub const DEFAULT_REMEMBERED_RESPONSES: usize = 100_000;

/// A bounded memory of response ids. Keys are seeded hashes, so that clients can't choose where they collide.
#[derive(Debug)]
pub struct ResponseTable {
    hasher: RandomState,
    owners: quick_cache::sync::Cache<u64, (Arc<str>, EndpointId)>,
}

impl ResponseTable {
    /// A table of at most `capacity` answers; the ones that nobody continues go first.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { hasher: RandomState::new(), owners: quick_cache::sync::Cache::new(capacity) }
    }

    /// Remembers that endpoint `owner` of `pool` gave the answer `id`.
    pub fn learn(&self, pool: &Arc<str>, id: &str, owner: EndpointId) {
        self.owners.insert(self.hasher.hash_one(id), (pool.clone(), owner));
    }

    /// The endpoint of `pool` that gave the answer `id`.
    #[must_use]
    pub fn owner(&self, pool: &str, id: &str) -> Option<EndpointId> {
        let (owner_pool, owner) = self.owners.get(&self.hasher.hash_one(id))?;
        (*owner_pool == *pool).then_some(owner)
    }
}
