//! Applies the recorded KV events to the prefix cache of a replay. Called by [`super::player`].

use ahash::AHashMap;
use attache_prefix::cache::PrefixCache;
use attache_prefix::residents::{Cache, Resident};
use attache_prefix::trust::TrustCell;
use attache_record::KvChange;
use std::sync::Arc;

/// The KV caches of engines that publish events for one prefix cache.
#[derive(Debug)]
pub(super) struct EngineCaches {
    to: Arc<PrefixCache>,
    /// The caches in the replay's index, by their recorded numbers.
    caches: AHashMap<u32, Cache>,
}

impl EngineCaches {
    pub(super) fn of(to: Arc<PrefixCache>) -> Self {
        Self { to, caches: AHashMap::new() }
    }

    fn get(&mut self, recorded: u32) -> Cache {
        let begin = || Cache { holder: self.to.index().add_holder(), trust: Arc::<TrustCell>::default() };
        self.caches.entry(recorded).or_insert_with(begin).clone()
    }

    /// Makes a recorded change.
    pub(super) fn apply(&mut self, change: KvChange) {
        let to = self.to.clone();
        let index = to.index();
        match change {
            KvChange::Caches(endpoints) => {
                let mut resident = |caches: Vec<u32>| Resident {
                    caches: caches.into_iter().map(|cache| self.get(cache)).collect(),
                    ..Resident::default()
                };
                let table = endpoints.into_iter().map(|(endpoint, caches)| (endpoint, resident(caches))).collect();
                to.residents().publish(table);
            }
            KvChange::Trust { cache, trust } => {
                self.get(cache).trust.set(trust);
            }
            KvChange::Stored { cache, tier, parent, blocks, origin } => {
                // The live index had the parent; with another size limit, the replay may have evicted it.
                let _ = index.report(self.get(cache).holder, tier, parent, &blocks, origin);
            }
            KvChange::Copied { cache, tier, hashes, origin } => {
                index.copy(self.get(cache).holder, tier, hashes, origin);
            }
            KvChange::Removed { cache, tier, hashes, remaining } => {
                index.remove_to(self.get(cache).holder, tier, &hashes, remaining.as_deref());
            }
            KvChange::Cleared { cache } => index.clear(self.get(cache).holder),
            KvChange::Gone { cache } => {
                if let Some(Cache { holder, .. }) = self.caches.remove(&cache) {
                    index.remove_holder(holder);
                }
            }
            KvChange::BlockSize(tokens) => to.block_size().replay(tokens),
        }
    }
}
