//! The endpoint that stores each response of the Responses API. A request that continues a stored response must go to
//! that endpoint.

use attache_sync::StoredResponses;
use attache_types::ids::EndpointId;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// 100,000 responses: at 40 bytes an entry about 4 MB, for hours of traffic.
pub const DEFAULT_REMEMBERED_RESPONSES: usize = 100_000;

/// A bounded table from response ids to endpoints. Keys are seeded hashes, so clients can't cause collisions.
#[derive(Debug)]
pub struct ResponseTable {
    seed: u64,
    owners: quick_cache::sync::Cache<u64, (Arc<str>, EndpointId)>,
}

impl ResponseTable {
    /// A table of at most `capacity` responses. It evicts those first that no request has continued. Pickers that share
    /// it have equal seeds.
    #[must_use]
    pub fn new(capacity: usize, seed: u64) -> Self {
        Self { seed, owners: quick_cache::sync::Cache::new(capacity) }
    }

    /// Records that endpoint `owner` of `pool` stores the response `id`. Returns the hash of the id.
    pub fn learn(&self, pool: &Arc<str>, id: &str, owner: EndpointId) -> u64 {
        let hash = self.hash(id);
        self.stored(pool, hash, owner);
        hash
    }

    /// The endpoint of `pool` that stores the response `id`; `None` if unknown.
    #[must_use]
    pub fn owner(&self, pool: &str, id: &str) -> Option<EndpointId> {
        let (owner_pool, owner) = self.owners.get(&self.hash(id))?;
        (*owner_pool == *pool).then_some(owner)
    }

    fn hash(&self, id: &str) -> u64 {
        xxh3_64_with_seed(id.as_bytes(), self.seed)
    }
}

impl StoredResponses for ResponseTable {
    fn stored(&self, pool: &Arc<str>, response: u64, owner: EndpointId) {
        self.owners.insert(response, (pool.clone(), owner));
    }
}
