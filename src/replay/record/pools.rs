//! Recorded pools, and the live picker of each of their configurations. Called by [`super::player`]; pure.

use super::kv::EngineCaches;
use crate::front::known_prefix;
use attache_config::pool::PoolStores;
use attache_config::settings::PoolSettings;
use attache_picker::event::Unobserved;
use attache_picker::settings::ExchangeSettings;
use attache_picker::{ActiveConfig, Picker, PoolRuntime};
use attache_pool::{Endpoint, PoolWriter, SnapshotStore};
use attache_prefix::cache::PrefixCache;
use attache_scheduling::router::{ModelRewrites, PoolSwitches};
use attache_scheduling::{Choices, Pool, Scheduler};
use attache_types::clock::Clock;
use attache_types::ids::EndpointId;
use attache_types::limits::Limits;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A recorded pool: endpoints, snapshots and prefix cache, which outlive reloads.
#[derive(Debug)]
pub(super) struct PoolState {
    pub(super) name: Arc<str>,
    pub(super) writer: PoolWriter,
    pub(super) store: Arc<SnapshotStore>,
    pub(super) cache: Arc<PrefixCache>,
    /// What KV events change, by the number of the prefix cache: requests of an earlier configuration use earlier
    /// caches.
    pub(super) engines: BTreeMap<u32, EngineCaches>,
    /// All endpoints that the pool ever had, by id.
    pub(super) known: BTreeMap<EndpointId, Arc<Endpoint>>,
}

impl PoolState {
    /// `ip:port` of an endpoint; its number if the recording lacks it.
    pub(super) fn authority(&self, id: EndpointId) -> String {
        self.known.get(&id).map_or_else(|| id.to_string(), |endpoint| endpoint.authority.to_string())
    }
}

/// The picker of a pool in one configuration: what a reload replaces.
#[derive(Debug)]
pub(super) struct LivePool {
    /// Key of its [`PoolState`].
    pub(super) number: u32,
    pub(super) pool: Arc<Pool>,
    pub(super) picker: Picker,
}

impl LivePool {
    pub(super) fn new(number: u32, state: &PoolState, scheduler: Scheduler, settings: &PoolSettings) -> Self {
        let stores = PoolStores { endpoints: state.store.clone(), ..PoolStores::default() };
        // Recorded requests have their final model, and the recording says which were split or met their deadline.
        let pool = Arc::new(Pool {
            name: state.name.clone(),
            rewrites: ModelRewrites::default(),
            switches: PoolSwitches::default(),
            default_model: None,
            disagg: None,
            ..settings.pool(scheduler, stores)
        });
        // The time is not read: no prompt is rendered.
        let prefix = Arc::new(known_prefix(state.cache.clone(), None, Clock::start()));
        let observer = Arc::new(Unobserved);
        let runtime = PoolRuntime { pool: pool.clone(), observer: observer.clone(), prefix: Some(prefix), queue: None };
        // Headers name the model and the endpoints of preset decisions.
        let settings =
            ExchangeSettings { trust_client_headers: true, conformance_headers: true, ..ExchangeSettings::default() };
        let config = ActiveConfig::new(vec![Arc::new(runtime)], Limits::default(), settings);
        Self { number, pool, picker: Picker::new(config, observer, 0) }
    }

    pub(super) fn choices(&self) -> &Choices {
        &self.pool.scheduler.choices
    }
}
