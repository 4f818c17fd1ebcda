//! Export and import of estimated blocks, so that a replica of Attaché that joins others starts with what they know.

use super::PrefixCache;
use crate::index::{ExportChunk, ExportCursor, HolderId, ImportError};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;

impl PrefixCache {
    /// Exports a chunk of the estimated blocks of the endpoints that `endpoints` accepts, from `cursor` on. The chunk
    /// has at most `max_bytes` bytes by [`ExportChunk::bytes`], except that it always has one run with its
    /// predecessors.
    ///
    /// Decisions continue meanwhile, and the writer's lock is held only for short times. All chunks of an export
    /// together contain every block that its endpoint held, with all blocks before it, from the first call to the last.
    /// Blocks that were stored or evicted meanwhile may be missing. Blocks that engines report, prompts in flight and
    /// capacities are not exported.
    ///
    /// The keys mean the same to another cache only if both have equal [`super::CacheConfig::seed`] and
    /// [`PrefixCache::unit`]; the caller compares them.
    #[must_use]
    pub fn export(
        &self,
        cursor: ExportCursor,
        max_bytes: usize,
        endpoints: &dyn Fn(EndpointId) -> bool,
        now: Timestamp,
    ) -> ExportChunk {
        let guesses = self.guesses.load();
        let wanted = guesses.iter().filter(|(endpoint, _)| endpoints(*endpoint));
        let holders: Vec<(HolderId, EndpointId)> = wanted.map(|(endpoint, guess)| (guess.holder, endpoint)).collect();
        self.index.export(cursor, max_bytes, &holders, now)
    }

    /// Records the blocks of a chunk for the endpoints that this cache estimates, and skips the others. The caller has
    /// replaced the endpoints by this cache's own. Chunks may be imported in any order and again. Returns the number of
    /// blocks that were new to an endpoint.
    ///
    /// An endpoint's blocks keep the order of their last use, also among those that were recorded here. An import
    /// evicts the oldest blocks of an endpoint that is beyond its capacity, as a record does. It evicts none for lack
    /// of memory: blocks that do not fit are refused. In evictions for the memory limit, imported blocks count as older
    /// than those that were recorded here, in the order of their import. In [`PrefixCache::weight`] they count as much
    /// as if they had been recorded when they were last used.
    /// # Errors
    /// [`ImportError`] when the chunk is invalid; then nothing of it is imported.
    pub fn import(&self, chunk: &ExportChunk, now: Timestamp) -> Result<u64, ImportError> {
        let guesses = self.guesses.load();
        guesses.values().for_each(|guess| self.update_capacity(guess));
        let learned = |endpoint| guesses.get(&endpoint).filter(|_| self.learns(endpoint));
        self.index.import(chunk, &|endpoint| learned(endpoint).map(|guess| guess.holder), now)
    }
}
