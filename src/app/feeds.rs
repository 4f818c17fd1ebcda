//! The feeds of every pool: discovery, scraping, snapshots. A reload keeps the state of endpoints that it does not
//! change.

mod deciding;
mod leased;
mod prefix;

use super::kubernetes::{Cluster, Following};
use super::presence::Presence;
use super::prompts::remote_settings;
use crate::admin::guard::Guard;
use crate::clock::Clock;
use crate::config::Settings;
use crate::config::settings::{
    DnsSource, FileSource, KubernetesSource, ModelsAnswer, PoolSearch, PoolSettings, PrefixSettings, ScrapeSettings,
    TokenizerSettings,
};
use crate::connections::Connections;
use crate::discovery::dns::{DnsStats, SystemResolver};
use crate::discovery::file::FileStats;
use crate::discovery::kube::KubeStats;
use crate::discovery::kube::catalogue::Finding;
use crate::discovery::{dns, file, publish, static_source};
use crate::health::{Latch, Readiness};
use crate::kv_events::{Destination, Feed, KvEventStats};
use crate::pool::writer::SourceId;
use crate::pool::{EndpointSpec, ModelList, ModelStore, PoolEvent, PoolWriter, Published, SnapshotStore};
use crate::prefix::cache::PrefixCache;
use crate::record::tape::PoolChange;
use crate::record::{PoolTape, Recorder};
use crate::scheduling::router::RuleStore;
use crate::scrape::{ModelFeed, ScrapeStats, Scraper};
use crate::tokenize::RemotePool;
use anyhow::Context;
use arc_swap::ArcSwap;
use attache_sync::Replica;
use deciding::{Announced, Deciding};
pub(super) use leased::{Leased, leased};
pub(super) use prefix::cache;
use prefix::{cache_config, subscription};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Source id of endpoints from flags and the configuration file.
const CONFIGURED: SourceId = SourceId(0);
/// Source id of endpoints from an endpoints file.
const FILE: SourceId = SourceId(u32::MAX - 1);
/// Source id of pods. An address that another source has too belongs to the other one.
const KUBERNETES: SourceId = SourceId(u32::MAX);

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
    shutdown: CancellationToken,
}

/// The feeds of one pool.
#[derive(Debug)]
pub struct PoolFeeds {
    /// Snapshots of the pool's endpoints.
    pub store: Arc<SnapshotStore>,
    /// Counters of the scraper.
    pub scrape_stats: Arc<ScrapeStats>,
    /// Counters of DNS lookups.
    pub dns_stats: Arc<DnsStats>,
    /// Counters of the endpoints file.
    pub file_stats: Arc<FileStats>,
    /// Rules for models from objects of the cluster.
    pub rules: Arc<RuleStore>,
    /// Models that the pool's endpoints list, if Attaché responds to clients with them.
    pub models: Arc<ModelStore>,
    pub(super) deciding: Deciding,
    /// Ends the queries of these lists.
    listing: Option<CancellationToken>,
    events: mpsc::Sender<PoolEvent>,
    endpoints: watch::Sender<Vec<EndpointSpec>>,
    scrape: watch::Sender<ScrapeSettings>,
    prefix: Arc<ArcSwap<PrefixCache>>,
    /// Number of `prefix`: how many others it has replaced.
    cache_number: u32,
    prefix_settings: PrefixSettings,
    kv_events: Option<KvEvents>,
    kv_connections: Arc<Connections>,
    remote: Option<Remote>,
    published: watch::Receiver<Published>,
    tape: PoolTape,
    clock: Clock,
    names: Vec<(DnsSource, SourceId, CancellationToken)>,
    file: Option<(FileSource, CancellationToken)>,
    following: Option<Following>,
    next_source: u32,
    shutdown: CancellationToken,
}

/// Subscriptions to the engines' KV events.
#[derive(Debug)]
struct KvEvents {
    stats: Arc<KvEventStats>,
    /// The socket that engines connect to, if it is used.
    socket: Option<Arc<TcpListener>>,
    stop: CancellationToken,
}

/// Everything that new prefix settings need and that may fail.
struct Made {
    cache: Arc<PrefixCache>,
    socket: Option<Arc<TcpListener>>,
    feed: Option<Feed>,
    remote: Option<RemotePool>,
}

/// Client of remote tokenizers.
#[derive(Debug)]
struct Remote {
    pool: Arc<RemotePool>,
    stop: CancellationToken,
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
        Self { pools, clock, seed, cache_seed, replica, recorder, kv_connections, cluster, presence, shutdown }
    }

    /// The same, if `shared` has a replica and a seed: with prefix caches that have the seed of all pickers of a cluster,
    /// whose members the replica informs of lost caches.
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
    pub(super) async fn connect(&mut self) -> anyhow::Result<()> {
        self.cluster.connect().await
    }

    /// Searches for InferencePools until `stop`; returns the namespace and
    /// the findings. `None` without [`Feeds::connect`].
    pub(super) fn search(
        &self,
        search: &PoolSearch,
        stop: CancellationToken,
    ) -> Option<(String, watch::Receiver<Finding>)> {
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
                Some(feeds) if feeds.prefix_settings != pool.prefix => {
                    let cache = Arc::new(cache(&pool.prefix, self.cache_seed));
                    Some(feeds.make(pool, cache, feeds.cache_number + 1, self.seed).await?)
                }
                _ => None,
            });
        }
        let started = self.start(settings, readiness).await?;
        self.cluster.trust_headers(trusts_headers);
        for (pool, made) in settings.iter().zip(made) {
            if let Some(feeds) = self.pools.get_mut(&pool.name) {
                feeds.change(pool, made, self.seed, &self.cluster).await;
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
            let tape =
                PoolTape::begin(self.recorder.as_ref(), &pool.name, &cache_config(&pool.prefix, self.cache_seed));
            let (connections, stop) = (self.kv_connections.clone(), stop.child_token());
            let cache = cache(&pool.prefix, self.cache_seed);
            let announced = Announced::of(self.replica.as_ref(), &pool.name, self.clock);
            let feeds =
                PoolFeeds::start(pool, cache, announced, self.clock, self.seed, tape, connections, stop, readiness)
                    .await?;
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
                pool.shutdown.cancel();
                gone.push(name.clone());
            }
            stays
        });
        self.presence.set(self.pools.values());
        gone
    }
}

/// The sources of endpoints in the settings.
fn sources(settings: &PoolSettings) -> Vec<SourceId> {
    let dns = (1u32..).zip(&settings.dns).map(|(i, _)| SourceId(i));
    let file = settings.file.as_ref().map(|_| FILE);
    let kubernetes = settings.kubernetes.as_ref().map(|_| KUBERNETES);
    std::iter::once(CONFIGURED).chain(dns).chain(file).chain(kubernetes).collect()
}

/// Releases the latch after the first round of scrapes. Readiness does not wait for a pool that a reload removes.
async fn release_after(mut first_round: watch::Receiver<bool>, latch: Latch, gone: CancellationToken) {
    let _ = gone.run_until_cancelled(first_round.wait_for(|done| *done)).await;
    latch.release();
}

impl PoolFeeds {
    #[expect(clippy::too_many_arguments, reason = "called once, with the parts of `Feeds`")]
    async fn start(
        settings: &PoolSettings,
        cache: PrefixCache,
        announced: Option<Announced>,
        clock: Clock,
        seed: u64,
        tape: PoolTape,
        kv_connections: Arc<Connections>,
        shutdown: CancellationToken,
        readiness: &Readiness,
    ) -> anyhow::Result<Self> {
        let store = Arc::new(SnapshotStore::default());
        let (events, inbox) = mpsc::channel(publish::EVENT_QUEUE);
        let published = watch::Sender::new(Published::default());
        let follow = published.subscribe();
        let scrape = watch::Sender::new(settings.scrape.clone());
        let endpoints = watch::Sender::new(settings.endpoints.clone());
        let scraper =
            Scraper::new(store.clone(), published.subscribe(), scrape.subscribe(), events.clone(), clock, seed)?;
        let scrape_stats = scraper.stats();
        let latch = readiness.latch(format!("pool `{}` discovered and scraped once", settings.name));
        tokio::spawn(release_after(scraper.first_round(), latch, shutdown.clone()));
        let writer = PoolWriter::new(sources(settings));
        let prefix = Arc::new(ArcSwap::from_pointee(cache));
        let deciding = Deciding::default();
        let prepare = deciding::prepare(prefix.clone(), deciding.clone(), announced);
        tokio::spawn(publish::run(writer, inbox, store.clone(), prepare, published, tape.clone(), shutdown.clone()));
        tokio::spawn(scraper.run(shutdown.clone()));
        tokio::spawn(static_source::run(CONFIGURED, endpoints.subscribe(), events.clone(), shutdown.clone()));
        let mut feeds = Self {
            store,
            scrape_stats,
            dns_stats: Arc::default(),
            file_stats: Arc::default(),
            rules: Arc::default(),
            models: Arc::default(),
            deciding,
            listing: None,
            events,
            endpoints,
            scrape,
            prefix,
            cache_number: 0,
            prefix_settings: settings.prefix.clone(),
            kv_events: None,
            kv_connections,
            remote: None,
            published: follow,
            tape,
            clock,
            names: Vec::new(),
            file: None,
            following: None,
            next_source: 1,
            shutdown,
        };
        for name in &settings.dns {
            feeds.resolve(name.clone(), seed);
        }
        feeds.list(settings.file.as_ref());
        let made = feeds.make(settings, feeds.prefix(), 0, seed).await?;
        feeds.take_up(made);
        Ok(feeds)
    }

    /// The prefix index of the pool.
    #[must_use]
    pub fn prefix(&self) -> Arc<PrefixCache> {
        self.prefix.load_full()
    }

    fn resolve(&mut self, name: DnsSource, seed: u64) {
        let source = SourceId(self.next_source);
        self.next_source += 1;
        let stop = self.shutdown.child_token();
        let stats = self.dns_stats.clone();
        let events = self.events.clone();
        tokio::spawn(dns::run(SystemResolver, source, name.clone(), events, stats, seed, stop.clone()));
        self.names.push((name, source, stop));
    }

    /// Reads endpoints from this file instead of the previous one. Returns whether a file was removed.
    fn list(&mut self, settings: Option<&FileSource>) -> bool {
        if self.file.as_ref().map(|(file, _)| file) == settings {
            return false;
        }
        let before = self.file.take().inspect(|(_, stop)| stop.cancel());
        if let Some(settings) = settings {
            let stop = self.shutdown.child_token();
            let (events, stats) = (self.events.clone(), self.file_stats.clone());
            tokio::spawn(file::run(FILE, settings.clone(), events, stats, stop.clone()));
            self.file = Some((settings.clone(), stop));
        }
        before.is_some() && settings.is_none()
    }

    /// Follows the pods in the settings instead of the previous ones.
    async fn follow(&mut self, settings: &PoolSettings, cluster: &Cluster) {
        if self.following.as_ref().map(Following::source) == settings.kubernetes.as_ref() {
            return;
        }
        // The previous endpoints stay until the new ones are known.
        let mut before = None;
        if let Some(old) = self.following.take() {
            let of = |source: &KubernetesSource| (source.namespace.clone(), source.pods.clone());
            let same = settings.kubernetes.as_ref().is_some_and(|source| of(source) == of(old.source()));
            before = Some(old.end().await).filter(|_| same);
        }
        match &settings.kubernetes {
            Some(source) => {
                let (events, rules) = (self.events.clone(), self.rules.clone());
                let stop = self.shutdown.child_token();
                self.following = cluster.follow(&settings.name, source, before, KUBERNETES, events, rules, stop);
            }
            None => {
                self.rules.store(Default::default());
                // The channel is closed only when the pool ends.
                let _ = self.events.send(PoolEvent::SourceGone { source: KUBERNETES }).await;
            }
        }
    }

    /// Counters of discovery through Kubernetes, if it is used.
    #[must_use]
    pub fn kube_stats(&self) -> Option<Arc<KubeStats>> {
        self.following.as_ref().map(Following::stats)
    }

    /// Receives a notice of every new snapshot.
    pub(super) fn published(&self) -> watch::Receiver<Published> {
        self.published.clone()
    }

    /// Creates everything that these prefix settings need besides `cache`, which gets this number. The pool does not
    /// change.
    async fn make(
        &self,
        settings: &PoolSettings,
        cache: Arc<PrefixCache>,
        cache_number: u32,
        seed: u64,
    ) -> anyhow::Result<Made> {
        let prefix = &settings.prefix;
        let bind = prefix.kv_events.as_ref().and_then(|events| events.bind.as_deref());
        let socket = match bind {
            None => None,
            Some(bind) => {
                Some(self.socket(bind).await.context("can't listen for KV events (`prefixCache.kvEvents.bind`)")?)
            }
        };
        let feed = prefix.kv_events.as_ref().map(|events| {
            let to = Destination {
                index: cache.index().clone(),
                residents: cache.residents().clone(),
                keys: cache.space(),
                block_size: cache.block_size().clone(),
                tape: self.tape.of_kv_events(cache_number),
            };
            let subscription = subscription(events, socket.as_ref(), &self.kv_connections);
            let feed = Feed::new(to, self.store.clone(), self.published.clone(), subscription, self.clock, seed);
            feed.telling(self.events.clone())
        });
        let remote = self.remote_pool(settings, seed)?;
        Ok(Made { cache, socket, feed, remote })
    }

    /// The socket at `bind`: the existing one if the address is unchanged, since it can't be bound twice.
    async fn socket(&self, bind: &str) -> anyhow::Result<Arc<TcpListener>> {
        let before = self.kv_events.as_ref().and_then(|events| events.socket.as_ref());
        let bound = self.prefix_settings.kv_events.as_ref().and_then(|events| events.bind.as_deref());
        match before.filter(|_| bound == Some(bind)) {
            Some(socket) => Ok(socket.clone()),
            None => {
                let address: SocketAddr = bind.trim_start_matches("tcp://").parse()?;
                let socket = TcpListener::bind(address).await;
                Ok(Arc::new(socket.with_context(|| address.to_string())?))
            }
        }
    }

    /// Creates the client of remote tokenizers, if the settings need one.
    fn remote_pool(&self, settings: &PoolSettings, seed: u64) -> anyhow::Result<Option<RemotePool>> {
        let TokenizerSettings::Remote(wanted) = &settings.prefix.tokenizer else { return Ok(None) };
        let remote = remote_settings(wanted);
        let pool = RemotePool::new(settings.name.clone(), remote, self.store.clone(), self.clock, seed)
            .context("the remote tokenizer can't be set up")?;
        Ok(Some(pool))
    }

    /// Replaces the present subscriptions and tokenizer clients by `made`.
    fn take_up(&mut self, Made { socket, feed, remote, .. }: Made) {
        let feed = feed.map(|feed| {
            let (stats, stop) = (feed.stats(), self.shutdown.child_token());
            tokio::spawn(feed.run(stop.clone()));
            KvEvents { stats, socket, stop }
        });
        if let Some(old) = std::mem::replace(&mut self.kv_events, feed) {
            old.stop.cancel();
        }
        let remote = remote.map(|pool| {
            let (pool, stop) = (Arc::new(pool), self.shutdown.child_token());
            tokio::spawn(pool.clone().run(stop.clone()));
            Remote { pool, stop }
        });
        if let Some(old) = std::mem::replace(&mut self.remote, remote) {
            old.stop.cancel();
        }
    }

    /// Starts or stops queries of the endpoints' model lists.
    fn list_models(&mut self, wanted: bool) -> anyhow::Result<()> {
        match (wanted, self.listing.take()) {
            (true, None) => {
                let stop = self.shutdown.child_token();
                let (store, models, stats) = (self.store.clone(), self.models.clone(), self.scrape_stats.clone());
                let feed = ModelFeed::new(store, self.published(), self.scrape.subscribe(), models, stats)?;
                tokio::spawn(feed.run(stop.clone()));
                self.listing = Some(stop);
            }
            (false, Some(stop)) => {
                stop.cancel();
                self.models.store(ModelList::default());
            }
            (_, as_before) => self.listing = as_before,
        }
        Ok(())
    }

    /// Where changes of the pool are sent.
    #[cfg(feature = "nats")]
    pub(super) fn events(&self) -> mpsc::Sender<PoolEvent> {
        self.events.clone()
    }

    /// The client of remote tokenizers, if it is used.
    #[must_use]
    pub fn remote(&self) -> Option<Arc<RemotePool>> {
        self.remote.as_ref().map(|r| r.pool.clone())
    }

    /// Counters of KV events, if they are used.
    #[must_use]
    pub fn kv_event_stats(&self) -> Option<Arc<KvEventStats>> {
        self.kv_events.as_ref().map(|k| k.stats.clone())
    }

    /// Applies these settings, with `made` if those of the prefix index have changed.
    async fn change(&mut self, settings: &PoolSettings, made: Option<Made>, seed: u64, cluster: &Cluster) {
        self.follow(settings, cluster).await;
        self.endpoints.send_if_modified(|now| replace(now, &settings.endpoints));
        self.scrape.send_if_modified(|now| replace(now, &settings.scrape));
        if let Some(made) = made {
            self.prefix_settings = settings.prefix.clone();
            // Block size or keys have changed, so known entries are worthless.
            self.cache_number += 1;
            self.tape.change(|tell| {
                tell(PoolChange::Cache(&cache_config(&settings.prefix, seed), self.cache_number));
                made.cache.reconcile(&self.store.load());
                self.prefix.store(made.cache.clone());
            });
            self.take_up(made);
        }
        if self.list(settings.file.as_ref()) {
            // The channel is closed only when the pool ends.
            let _ = self.events.send(PoolEvent::SourceGone { source: FILE }).await;
        }
        let (stay, go): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.names).into_iter().partition(|(n, _, _)| settings.dns.contains(n));
        self.names = stay;
        for name in &settings.dns {
            if !self.names.iter().any(|(n, _, _)| n == name) {
                self.resolve(name.clone(), seed);
            }
        }
        for (_, source, stop) in go {
            stop.cancel();
            // The channel is closed only when the pool ends.
            let _ = self.events.send(PoolEvent::SourceGone { source }).await;
        }
    }
}

fn replace<T: Clone + PartialEq>(now: &mut T, new: &T) -> bool {
    let changed = now != new;
    if changed {
        *now = new.clone();
    }
    changed
}
