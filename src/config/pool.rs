//! From the settings of a pool to the [`Pool`] that decides about requests. The live picker, `attache explain`, replays
//! and recordings all build their pools here, so that a new setting takes effect in each of them.

use crate::settings::{PoolSettings, PrefixSettings};
use attache_pool::{ModelStore, SnapshotStore};
use attache_prefix::cache::{BlockUnit, CacheConfig};
use attache_scheduling::router::RuleStore;
use attache_scheduling::{Pool, Scheduler};
use std::sync::Arc;

/// The stores that a pool reads.
#[derive(Clone, Debug, Default)]
pub struct PoolStores {
    /// Snapshots of the endpoints.
    pub endpoints: Arc<SnapshotStore>,
    /// Rules of Kubernetes objects.
    pub rules: Arc<RuleStore>,
    /// Models that the servers report.
    pub models: Arc<ModelStore>,
}

impl PoolSettings {
    /// The pool with these settings. `scheduler` comes from [`PoolSettings::scheduler`].
    #[must_use]
    pub fn pool(&self, scheduler: Scheduler, stores: PoolStores) -> Pool {
        Pool {
            name: self.name.clone(),
            matches: self.matches.clone(),
            store: stores.endpoints,
            scheduler,
            rewrites: self.rewrites.clone(),
            switches: self.switches,
            default_model: self.default_model.clone(),
            rules: stores.rules,
            models: stores.models,
            stale_after: self.scrape.stale_after,
            destination: self.destination,
            destination_names: self.destination_names.clone(),
            disagg: self.disaggregation.as_ref().map(|disaggregation| Arc::new(disaggregation.mode.clone())),
        }
    }
}

impl PrefixSettings {
    /// Limits of the prefix cache, with blocks of `unit`.
    #[must_use]
    pub fn cache_config(&self, unit: BlockUnit, seed: u64) -> CacheConfig {
        CacheConfig {
            claim_every_block: self.claim_every_block,
            unit,
            max_bytes: self.max_bytes,
            tenant_share: self.tenant_share,
            claim_life: self.claim_life,
            seed,
        }
    }
}
