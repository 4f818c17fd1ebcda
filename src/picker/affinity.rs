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
        self.owners.insert(hash, (pool.clone(), owner));
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
    /// An owner that is known stays: a response is stored once, and another picker may be wrong about it.
    fn stored(&self, pool: &Arc<str>, response: u64, owner: EndpointId) {
        if self.owners.peek(&response).is_none() {
            self.owners.insert(response, (pool.clone(), owner));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn announced_owner_of_a_response_stays() {
        let (table, pool): (_, Arc<str>) = (ResponseTable::new(10, 1), "pool".into());
        let response = table.learn(&pool, "resp_1", EndpointId(1));
        table.stored(&pool, response, EndpointId(2));
        assert_eq!(table.owner("pool", "resp_1"), Some(EndpointId(1)), "another picker says otherwise");
        let other = table.hash("resp_2");
        table.stored(&pool, other, EndpointId(2));
        table.stored(&"other".into(), other, EndpointId(3));
        assert_eq!(table.owner("pool", "resp_2"), Some(EndpointId(2)));
        table.learn(&pool, "resp_2", EndpointId(4));
        assert_eq!(table.owner("pool", "resp_2"), Some(EndpointId(4)), "this picker has seen the response itself");
    }
}
