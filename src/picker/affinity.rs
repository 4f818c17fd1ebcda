//! The endpoint that stores each response of the Responses API. A request that continues a stored response must go to
//! that endpoint.

use ahash::RandomState;
use attache_types::ids::EndpointId;
use std::sync::Arc;

/// 100,000 responses: at 40 bytes an entry about 4 MB, for hours of traffic.
pub const DEFAULT_REMEMBERED_RESPONSES: usize = 100_000;

/// A bounded table from response ids to endpoints. Keys are seeded hashes, so clients can't cause collisions.
#[derive(Debug)]
pub struct ResponseTable {
    hasher: RandomState,
    owners: quick_cache::sync::Cache<u64, (Arc<str>, EndpointId)>,
}

impl ResponseTable {
    /// A table of at most `capacity` responses. It evicts those first that no request has continued.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { hasher: RandomState::new(), owners: quick_cache::sync::Cache::new(capacity) }
    }

    /// Records that endpoint `owner` of `pool` stores the response `id`.
    pub fn learn(&self, pool: &Arc<str>, id: &str, owner: EndpointId) {
        self.owners.insert(self.hasher.hash_one(id), (pool.clone(), owner));
    }

    /// The endpoint of `pool` that stores the response `id`; `None` if unknown.
    #[must_use]
    pub fn owner(&self, pool: &str, id: &str) -> Option<EndpointId> {
        let (owner_pool, owner) = self.owners.get(&self.hasher.hash_one(id))?;
        (*owner_pool == *pool).then_some(owner)
    }
}
