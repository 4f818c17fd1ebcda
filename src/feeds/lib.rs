//! The feeds of pools: the tasks that keep the endpoints, metrics, rules and cache events of each pool current.
//!
//! A reload starts, changes and ends feeds ([`Feeds::apply`], [`Feeds::keep`]), and keeps the state of endpoints that
//! it does not change.
//!
//! **Owns** the tasks of each pool ([`PoolFeeds`]), the one Kubernetes client of all pools (`cluster`), the pools that
//! are found in the cluster ([`found`]), and readiness by existing InferencePools (`presence`).
//! **Called by** `app`, at start and at each reload.
//! **Must not** know of requests. It joins `discovery`, `scrape`, `kv_events` and `tokenize`, which know each
//! endpoint's protocol.
//!
//! Read first: `lib.rs`, `pool.rs`, `found.rs`.

mod cluster;
mod deciding;
pub mod found;
mod leased;
mod pool;
mod prefix;
mod presence;

use crate::cluster::Cluster;
use crate::presence::Presence;
use anyhow::Context;
use attache_admin::guard::Guard;
use attache_config::Settings;
use attache_config::settings::{ModelsAnswer, PoolSearch, PoolSettings};
use attache_discovery::kube::catalogue::Finding;
use attache_record::Recorder;
use attache_serving::connections::Connections;
use attache_serving::health::Readiness;
use attache_sync::Replica;
use attache_types::clock::Clock;
pub use leased::{Leased, leased};
pub use pool::PoolFeeds;
pub use prefix::cache;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// The feeds of all pools, by name.
#[derive(Debug)]
pub struct Feeds {
    pools: BTreeMap<Arc<str>, PoolFeeds>,
    clock: Clock,
    seed: u64,
    /// Seed of the prefix caches.
    cache_seed: u64,
    /// Announces lost caches to other pickers.
    replica: Option<Arc<Replica>>,
    recorder: Option<Arc<Recorder>>,
    /// Limits for connections to all central sockets for KV events.
    kv_connections: Arc<Connections>,
    /// Discovery through Kubernetes, shared by all pools.
    cluster: Cluster,
    presence: Presence,
    /// Whether an endpoint of any pool was ever reached.
    reached: watch::Sender<bool>,
    shutdown: CancellationToken,
}

impl Feeds {
    /// Creates a set without feeds. All feeds end on `shutdown`, send their changes to `recorder`, and accept KV events
    /// within the limits of `kv_connections`.
    #[must_use]
    pub fn new(
        clock: Clock,
        seed: u64,
        recorder: Option<Arc<Recorder>>,
        kv_connections: Arc<Connections>,
        shutdown: CancellationToken,
    ) -> Self {
        let (cluster, presence) = (Cluster::new(clock), Presence::default());
        let (cache_seed, replica) = (seed, None);
        let pools = BTreeMap::new();
        let reached = watch::Sender::new(false);
        Self { pools, clock, seed, cache_seed, replica, recorder, kv_connections, cluster, presence, reached, shutdown }
    }

    /// The same, if `shared` has a replica and a seed: with prefix caches that have the seed of all pickers of a
    /// cluster, whose members the replica informs of lost caches.
    #[must_use]
    pub fn sharing(self, shared: Option<(Arc<Replica>, u64)>) -> Self {
        match shared {
            Some((replica, cache_seed)) => Self { replica: Some(replica), cache_seed, ..self },
            None => self,
        }
    }

    /// Holds `readiness` back while every pool is an InferencePool that does not exist.
    pub fn hold(&self, readiness: &Readiness) {
        self.presence.hold(readiness.clone());
    }

    /// The feeds of one pool, by name.
    #[must_use]
    pub fn pool(&self, name: &str) -> Option<&PoolFeeds> {
        self.pools.get(name)
    }

    /// Starts leader election if the settings enable it: this replica is then ready only while it leads. It releases
    /// the lease on `stop`; the returned handle ends after that.
    pub fn lead(&self, settings: &Settings, readiness: &Readiness, stop: CancellationToken) -> Option<JoinHandle<()>> {
        let (elects, status) = (settings.server.leader_election, settings.server.model_status);
        if !elects && status.is_none() {
            self.cluster.write_unasked();
        }
        let Leased { of, namespace } = leased(settings).filter(|_| elects || status == Some(true))?;
        self.cluster.lead(&of, namespace.as_deref(), Some(readiness).filter(|_| elects), stop)
    }

    /// Connects to the API server, unless that was done before.
    ///
    /// # Errors
    /// If no API server of Kubernetes is configured.
    pub async fn connect(&mut self) -> anyhow::Result<()> {
        self.cluster.connect().await
    }

    /// Searches for InferencePools until `stop`; returns the namespace and the findings. `None` without [`Feeds::connect`].
    pub fn search(&self, search: &PoolSearch, stop: CancellationToken) -> Option<(String, watch::Receiver<Finding>)> {
        self.cluster.search(search, stop)
    }

    /// Asks the cluster who may see admin pages.
    ///
    /// # Errors
    /// If no API server of Kubernetes is configured.
    pub async fn guard(&mut self) -> anyhow::Result<Guard> {
        self.cluster.connect().await.context("pages can't be guarded (`--metrics-endpoint-auth`)")?;
        self.cluster.guard()
    }

    /// Applies the settings: starts and changes feeds. A new pool holds a latch of `readiness` until it has its first
    /// data. Pools that the settings do not name continue until [`Feeds::keep`].
    ///
    /// # Errors
    /// If an HTTP client can't be created, the socket for KV events can't be bound, or no API server of Kubernetes is
    /// configured. Existing pools are then unchanged.
    pub async fn apply(&mut self, settings: &Settings, readiness: &Readiness) -> anyhow::Result<()> {
        let tells_models = settings.exchange.models == ModelsAnswer::Pool;
        let trusts_headers = settings.exchange.trust_client_headers;
        let settings = &settings.pools;
        // Everything that may fail comes before any change.
        if settings.iter().any(|pool| pool.kubernetes.is_some()) {
            self.cluster.connect().await?;
        }
        let mut made = Vec::with_capacity(settings.len());
        for pool in settings {
            made.push(match self.pools.get(&pool.name) {
                Some(feeds) => feeds.prepare(pool).await?,
                None => None,
            });
        }
        let started = self.start(settings, readiness).await?;
        self.cluster.trust_headers(trusts_headers);
        for (pool, made) in settings.iter().zip(made) {
            if let Some(feeds) = self.pools.get_mut(&pool.name) {
                feeds.change(pool, made, &self.cluster).await;
            }
        }
        for (pool, mut feeds) in started {
            feeds.follow(pool, &self.cluster).await;
            self.pools.insert(pool.name.clone(), feeds);
        }
        for feeds in self.pools.values_mut() {
            feeds.list_models(tells_models)?;
        }
        self.presence.set(self.pools.values());
        Ok(())
    }

    /// Starts the new pools: all of them, or none.
    async fn start<'a>(
        &self,
        settings: &'a [PoolSettings],
        readiness: &Readiness,
    ) -> anyhow::Result<Vec<(&'a PoolSettings, PoolFeeds)>> {
        // Ends the started pools, unless all have started.
        let stop = self.shutdown.child_token();
        let undo = stop.clone().drop_guard();
        let mut started = Vec::new();
        for pool in settings.iter().filter(|pool| !self.pools.contains_key(&pool.name)) {
            let feeds = PoolFeeds::start(self, pool, stop.child_token(), readiness).await?;
            started.push((pool, feeds));
        }
        undo.disarm();
        Ok(started)
    }

    /// Ends the pools that these settings do not name, and returns their names.
    pub fn keep(&mut self, settings: &[PoolSettings]) -> Vec<Arc<str>> {
        let mut gone = Vec::new();
        self.pools.retain(|name, pool| {
            let stays = settings.iter().any(|s| s.name == *name);
            if !stays {
                pool.end();
                gone.push(name.clone());
            }
            stays
        });
        self.presence.set(self.pools.values());
        gone
    }
}
