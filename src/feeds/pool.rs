//! The feeds of one pool.

use crate::Feeds;
use crate::cluster::{Cluster, Following};
use crate::deciding::{self, Announced, Deciding};
use crate::prefix::{cache, cache_config, remote_settings, subscription};
use anyhow::Context;
use arc_swap::ArcSwap;
use attache_config::settings::{
    DnsSource, FileSource, KubernetesSource, PoolSettings, PrefixSettings, ScrapeSettings, TokenizerSettings,
};
use attache_discovery::dns::{DnsStats, SystemResolver};
use attache_discovery::file::FileStats;
use attache_discovery::kube::KubeStats;
use attache_discovery::{dns, file, publish, static_source};
use attache_kv_events::{Destination, Feed, KvEventStats};
use attache_pool::writer::SourceId;
use attache_pool::{EndpointSpec, ModelList, ModelStore, PoolEvent, PoolWriter, Published, SnapshotStore};
use attache_prefix::cache::PrefixCache;
use attache_record::PoolTape;
use attache_record::tape::PoolChange;
use attache_scheduling::Pool;
use attache_scheduling::router::RuleStore;
use attache_scrape::{ModelFeed, Reach, ScrapeStats, Scraper};
use attache_serving::connections::Connections;
use attache_serving::health::{Latch, Readiness};
use attache_tokenize::RemotePool;
use attache_types::clock::Clock;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

/// Source id of endpoints from flags and the configuration file.
const CONFIGURED: SourceId = SourceId(0);
/// Source id of endpoints from an endpoints file.
const FILE: SourceId = SourceId(u32::MAX - 1);
/// Source id of pods. An address that another source has too belongs to the other one.
const KUBERNETES: SourceId = SourceId(u32::MAX);

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
    deciding: Deciding,
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
    seed: u64,
    /// Seed of the prefix caches.
    cache_seed: u64,
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
pub(crate) struct Made {
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

/// The sources of endpoints in the settings.
fn sources(settings: &PoolSettings) -> Vec<SourceId> {
    let dns = (1u32..).zip(&settings.dns).map(|(i, _)| SourceId(i));
    let file = settings.file.as_ref().map(|_| FILE);
    let kubernetes = settings.kubernetes.as_ref().map(|_| KUBERNETES);
    std::iter::once(CONFIGURED).chain(dns).chain(file).chain(kubernetes).collect()
}

/// Releases the latch of a new pool after the first round of scrapes. While none of its endpoints accepts connections,
/// and no pool was ever reached, another latch says so: a picker without any server is not ready. Readiness does not wait
/// for a pool that a reload removes, because its scraper ends.
async fn release_after(scraped: Scraped, mut latch: Latch, readiness: Readiness) {
    let Scraped { pool, mut reach, any } = scraped;
    let first = reach.wait_for(|reach| *reach != Reach::Unknown).await.map_or(Reach::Reached, |reach| *reach);
    let mut others = any.subscribe();
    if first == Reach::Unreachable && !*others.borrow_and_update() {
        let unreachable = readiness.latch(format!("pool `{pool}`: an endpoint that accepts connections"));
        std::mem::replace(&mut latch, unreachable).release();
        tokio::select! {
            _ = reach.wait_for(|reach| *reach == Reach::Reached) => {}
            _ = others.wait_for(|any| *any) => {}
        }
    }
    if *reach.borrow() == Reach::Reached {
        any.send_replace(true);
    }
    latch.release();
}

/// What the scrapes of a new pool show.
struct Scraped {
    pool: Arc<str>,
    reach: watch::Receiver<Reach>,
    /// Whether an endpoint of any pool was ever reached.
    any: watch::Sender<bool>,
}

impl PoolFeeds {
    /// Starts the feeds of a new pool, which holds a latch of `readiness` until it has its first data. They end on
    /// `shutdown`.
    pub(crate) async fn start(
        all: &Feeds,
        settings: &PoolSettings,
        shutdown: CancellationToken,
        readiness: &Readiness,
    ) -> anyhow::Result<Self> {
        let Feeds { clock, seed, cache_seed, .. } = *all;
        let tape = PoolTape::begin(all.recorder.as_ref(), &settings.name, &cache_config(&settings.prefix, cache_seed));
        let announced = Announced::of(all.replica.as_ref(), &settings.name, clock);
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
        let scraped = Scraped { pool: settings.name.clone(), reach: scraper.reach(), any: all.reached.clone() };
        tokio::spawn(release_after(scraped, latch, readiness.clone()));
        let writer = PoolWriter::new(sources(settings));
        let prefix = Arc::new(ArcSwap::from_pointee(cache(&settings.prefix, cache_seed)));
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
            kv_connections: all.kv_connections.clone(),
            remote: None,
            published: follow,
            tape,
            clock,
            seed,
            cache_seed,
            names: Vec::new(),
            file: None,
            following: None,
            next_source: 1,
            shutdown,
        };
        for name in &settings.dns {
            feeds.resolve(name.clone());
        }
        feeds.list(settings.file.as_ref());
        let made = feeds.make(settings, feeds.prefix(), 0).await?;
        feeds.take_up(made);
        Ok(feeds)
    }

    /// The prefix index of the pool.
    #[must_use]
    pub fn prefix(&self) -> Arc<PrefixCache> {
        self.prefix.load_full()
    }

    fn resolve(&mut self, name: DnsSource) {
        let source = SourceId(self.next_source);
        self.next_source += 1;
        let stop = self.shutdown.child_token();
        let stats = self.dns_stats.clone();
        let events = self.events.clone();
        tokio::spawn(dns::run(SystemResolver, source, name.clone(), events, stats, self.seed, stop.clone()));
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
    pub(crate) async fn follow(&mut self, settings: &PoolSettings, cluster: &Cluster) {
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
    #[must_use]
    pub fn published(&self) -> watch::Receiver<Published> {
        self.published.clone()
    }

    /// Creates everything that these settings need if those of the prefix index have changed. The pool does not change.
    pub(crate) async fn prepare(&self, settings: &PoolSettings) -> anyhow::Result<Option<Made>> {
        if self.prefix_settings == settings.prefix {
            return Ok(None);
        }
        let cache = Arc::new(cache(&settings.prefix, self.cache_seed));
        Ok(Some(self.make(settings, cache, self.cache_number + 1).await?))
    }

    /// Creates everything that these prefix settings need besides `cache`, which gets this number. The pool does not
    /// change.
    async fn make(&self, settings: &PoolSettings, cache: Arc<PrefixCache>, cache_number: u32) -> anyhow::Result<Made> {
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
                recomputed: cache.recomputed_blocks().clone(),
                tape: self.tape.of_kv_events(cache_number),
            };
            let subscription = subscription(events, socket.as_ref(), &self.kv_connections);
            let feed = Feed::new(to, self.store.clone(), self.published.clone(), subscription, self.clock, self.seed);
            feed.telling(self.events.clone())
        });
        let remote = self.remote_pool(settings)?;
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
    fn remote_pool(&self, settings: &PoolSettings) -> anyhow::Result<Option<RemotePool>> {
        let TokenizerSettings::Remote(wanted) = &settings.prefix.tokenizer else { return Ok(None) };
        let remote = remote_settings(wanted);
        let pool = RemotePool::new(settings.name.clone(), remote, self.store.clone(), self.clock, self.seed)
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
    pub(crate) fn list_models(&mut self, wanted: bool) -> anyhow::Result<()> {
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
    #[must_use]
    pub fn events(&self) -> mpsc::Sender<PoolEvent> {
        self.events.clone()
    }

    /// Sets the pool as requests see it. The strategies of its scheduler drop their entries of lost caches from now on.
    pub fn set_deciding(&self, pool: Arc<Pool>) {
        self.deciding.store(Some(pool));
    }

    /// Ends all tasks of the pool.
    pub(crate) fn end(&self) {
        self.shutdown.cancel();
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
    pub(crate) async fn change(&mut self, settings: &PoolSettings, made: Option<Made>, cluster: &Cluster) {
        self.follow(settings, cluster).await;
        self.endpoints.send_if_modified(|now| replace(now, &settings.endpoints));
        self.scrape.send_if_modified(|now| replace(now, &settings.scrape));
        if let Some(made) = made {
            self.prefix_settings = settings.prefix.clone();
            // Block size or keys have changed, so known entries are worthless.
            self.cache_number += 1;
            self.tape.change(|tell| {
                tell(PoolChange::Cache(&cache_config(&settings.prefix, self.cache_seed), self.cache_number));
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
                self.resolve(name.clone());
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
