//! The feeds of every pool: discovery, scraping and the task that publishes snapshots. A reload changes them in place, so that ledgers,
//! health and metrics of endpoints that stay are kept.

use super::kubernetes::{Cluster, Following};
use crate::clock::Clock;
use crate::config::Settings;
use crate::config::settings::{
    DnsSource, KvEventSettings, PoolSettings, PrefixSettings, ScrapeSettings, TokenizerSettings,
};
use crate::discovery::dns::{DnsStats, SystemResolver};
use crate::discovery::kube::KubeStats;
use crate::discovery::{dns, publish, static_source};
use crate::health::{Latch, Readiness};
use crate::kv_events::{Destination, Feed, KvEventStats, Source, Subscription};
use crate::pool::writer::SourceId;
use crate::pool::{EndpointSpec, PoolEvent, PoolSnapshot, PoolWriter, Published, SnapshotStore};
use crate::prefix::cache::{BlockUnit, CHARACTERS_PER_TOKEN, CacheConfig, PrefixCache};
use crate::record::tape::Told;
use crate::record::{PoolTape, Recorder};
use crate::scheduling::router::RuleStore;
use crate::scrape::{ScrapeStats, Scraper};
use crate::tokenize::{RemoteApi, RemotePool, RemoteSettings};
use anyhow::Context;
use arc_swap::ArcSwap;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// The source that flags and the file are.
const CONFIGURED: SourceId = SourceId(0);
/// The source that a cluster's pods are: an address that something else names too is that one's.
const KUBERNETES: SourceId = SourceId(u32::MAX);

/// The feeds of all pools, by name.
#[derive(Debug)]
pub struct Feeds {
    pools: BTreeMap<Arc<str>, PoolFeeds>,
    clock: Clock,
    seed: u64,
    recorder: Option<Arc<Recorder>>,
    /// The cluster, once a pool needs it.
    cluster: Cluster,
    shutdown: CancellationToken,
}

/// The feeds of one pool.
#[derive(Debug)]
pub struct PoolFeeds {
    /// The snapshots.
    pub store: Arc<SnapshotStore>,
    /// What the scraper counts.
    pub scrape_stats: Arc<ScrapeStats>,
    /// What resolving names counts.
    pub dns_stats: Arc<DnsStats>,
    /// What others than the configuration say of its models.
    pub rules: Arc<RuleStore>,
    events: mpsc::Sender<PoolEvent>,
    endpoints: watch::Sender<Vec<EndpointSpec>>,
    scrape: watch::Sender<ScrapeSettings>,
    prefix: Arc<ArcSwap<PrefixCache>>,
    prefix_settings: PrefixSettings,
    kv_events: Option<KvEvents>,
    remote: Option<Remote>,
    published: watch::Receiver<Published>,
    tape: PoolTape,
    clock: Clock,
    names: Vec<(DnsSource, SourceId, CancellationToken)>,
    following: Option<Following>,
    next_source: u32,
    shutdown: CancellationToken,
}

/// What reads the engines' KV events.
#[derive(Debug)]
struct KvEvents {
    stats: Arc<KvEventStats>,
    stop: CancellationToken,
}

/// What asks servers for tokens.
#[derive(Debug)]
struct Remote {
    pool: Arc<RemotePool>,
    stop: CancellationToken,
}

impl Feeds {
    /// No feeds yet. All of them end on `shutdown`, and tell `recorder` what they change.
    #[must_use]
    pub fn new(clock: Clock, seed: u64, recorder: Option<Arc<Recorder>>, shutdown: CancellationToken) -> Self {
        Self { pools: BTreeMap::new(), clock, seed, recorder, cluster: Cluster::default(), shutdown }
    }

    /// The feeds of one pool.
    #[must_use]
    pub fn pool(&self, name: &str) -> Option<&PoolFeeds> {
        self.pools.get(name)
    }

    /// Lets one replica lead, where the settings say so: this one is ready only while it does. It gives way on `stop`; what comes back has ended
    /// when it has.
    pub fn lead(&self, settings: &Settings, readiness: &Readiness, stop: CancellationToken) -> Option<JoinHandle<()>> {
        let source = settings.pools.iter().find_map(|pool| pool.kubernetes.as_ref().map(|source| (&pool.name, source)));
        let (pool, source) = source.filter(|_| settings.server.leader_election)?;
        self.cluster.lead(pool, source, readiness, self.clock, stop)
    }

    /// Brings the feeds in line with the settings: starts, changes and ends them. A pool that starts holds a latch of `readiness` until it
    /// has its first data.
    ///
    /// # Errors
    /// When no HTTP client can be made, the socket for KV events can't be bound, or no API server of Kubernetes is named anywhere.
    pub async fn apply(&mut self, settings: &[PoolSettings], readiness: &Readiness) -> anyhow::Result<()> {
        self.pools.retain(|name, pool| {
            let stays = settings.iter().any(|s| s.name == *name);
            if !stays {
                pool.shutdown.cancel();
            }
            stays
        });
        if settings.iter().any(|pool| pool.kubernetes.is_some()) {
            // Before anything is changed: without a cluster nothing is.
            self.cluster.connect().await?;
        }
        for pool in settings {
            match self.pools.get_mut(&pool.name) {
                Some(feeds) => feeds.change(pool, self.seed, &self.cluster).await?,
                None => {
                    let latch = readiness.latch(format!("pool `{}` discovered and scraped once", pool.name));
                    let tape =
                        PoolTape::begin(self.recorder.as_ref(), &pool.name, &cache_config(&pool.prefix, self.seed));
                    let mut feeds =
                        PoolFeeds::start(pool, self.clock, self.seed, tape, self.shutdown.child_token(), latch).await?;
                    feeds.follow(pool, &self.cluster).await;
                    self.pools.insert(pool.name.clone(), feeds);
                }
            }
        }
        Ok(())
    }
}

impl PoolFeeds {
    async fn start(
        settings: &PoolSettings,
        clock: Clock,
        seed: u64,
        tape: PoolTape,
        shutdown: CancellationToken,
        latch: Latch,
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
        let mut first_round = scraper.first_round();
        let gone = shutdown.clone();
        tokio::spawn(async move {
            // A pool that a reload takes away is not waited for.
            let _ = gone.run_until_cancelled(first_round.wait_for(|done| *done)).await;
            latch.release();
        });
        let sources = std::iter::once(CONFIGURED).chain((1u32..).zip(&settings.dns).map(|(i, _)| SourceId(i)));
        let sources = sources.chain(settings.kubernetes.as_ref().map(|_| KUBERNETES));
        let writer = PoolWriter::new(sources.collect());
        let prefix = Arc::new(ArcSwap::from_pointee(cache(&settings.prefix, seed)));
        let to_prepare = prefix.clone();
        let prepare = move |snapshot: &PoolSnapshot| to_prepare.load().reconcile(snapshot);
        let stop = shutdown.clone();
        tokio::spawn(publish::run(writer, inbox, store.clone(), prepare, published, tape.clone(), stop));
        tokio::spawn(scraper.run(shutdown.clone()));
        tokio::spawn(static_source::run(CONFIGURED, endpoints.subscribe(), events.clone(), shutdown.clone()));
        let dns_stats = Arc::default();
        let mut feeds = Self {
            store,
            scrape_stats,
            dns_stats,
            rules: Arc::default(),
            events,
            endpoints,
            scrape,
            prefix,
            prefix_settings: settings.prefix.clone(),
            kv_events: None,
            remote: None,
            published: follow,
            tape,
            clock,
            names: Vec::new(),
            following: None,
            next_source: 1,
            shutdown,
        };
        for name in &settings.dns {
            feeds.resolve(name.clone(), seed);
        }
        feeds.hear(seed).await?;
        feeds.ask(&settings.name, seed)?;
        Ok(feeds)
    }

    /// What is known of the servers' KV caches.
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

    /// Follows the pods that the settings name, in place of those that it followed before.
    async fn follow(&mut self, settings: &PoolSettings, cluster: &Cluster) {
        if self.following.as_ref().map(Following::source) == settings.kubernetes.as_ref() {
            return;
        }
        // The endpoints of before stay until the new ones are known.
        if let Some(old) = self.following.take() {
            old.end().await;
        }
        match &settings.kubernetes {
            Some(source) => {
                let (events, rules) = (self.events.clone(), self.rules.clone());
                let stop = self.shutdown.child_token();
                self.following = cluster.follow(&settings.name, source, KUBERNETES, events, rules, stop);
            }
            None => {
                self.rules.store(Default::default());
                // The writer is gone only when the pool is.
                let _ = self.events.send(PoolEvent::SourceGone { source: KUBERNETES }).await;
            }
        }
    }

    /// What following pods counts, where they are followed.
    #[must_use]
    pub fn kube_stats(&self) -> Option<Arc<KubeStats>> {
        self.following.as_ref().map(Following::stats)
    }

    /// Tells of every new snapshot.
    pub(super) fn published(&self) -> watch::Receiver<Published> {
        self.published.clone()
    }

    /// Starts to read the engines' KV events, if the settings name them.
    async fn hear(&mut self, seed: u64) -> anyhow::Result<()> {
        if let Some(old) = self.kv_events.take() {
            old.stop.cancel();
        }
        let Some(settings) = &self.prefix_settings.kv_events else { return Ok(()) };
        let cache = self.prefix.load_full();
        let to =
            Destination { index: cache.index().clone(), residents: cache.residents().clone(), keys: cache.space() };
        let feed = Feed::new(
            to,
            self.store.clone(),
            self.published.clone(),
            subscription(settings, self.prefix_settings.block_size)?,
            self.clock,
            seed,
        )
        .await
        .context("can't listen for KV events (`prefixCache.kvEvents.bind`)")?;
        let stop = self.shutdown.child_token();
        self.kv_events = Some(KvEvents { stats: feed.stats(), stop: stop.clone() });
        tokio::spawn(feed.run(stop));
        Ok(())
    }

    /// Starts to ask servers for tokens, if the settings want it.
    fn ask(&mut self, name: &Arc<str>, seed: u64) -> anyhow::Result<()> {
        if let Some(old) = self.remote.take() {
            old.stop.cancel();
        }
        let TokenizerSettings::Remote { url, render, timeout } = &self.prefix_settings.tokenizer else { return Ok(()) };
        let defaults = RemoteSettings::default();
        let settings = RemoteSettings {
            api: if *render { RemoteApi::Render } else { RemoteApi::Tokenize },
            url: url.clone().unwrap_or(defaults.url.clone()),
            decision_timeout: *timeout,
            ..defaults
        };
        let pool = RemotePool::new(name.clone(), settings, self.store.clone(), self.clock, seed)
            .context("the remote tokenizer can't be set up")?;
        let (pool, stop) = (Arc::new(pool), self.shutdown.child_token());
        tokio::spawn(pool.clone().run(stop.clone()));
        self.remote = Some(Remote { pool, stop });
        Ok(())
    }

    /// What asks servers for tokens.
    #[must_use]
    pub fn remote(&self) -> Option<Arc<RemotePool>> {
        self.remote.as_ref().map(|r| r.pool.clone())
    }

    /// What the feed of KV events counts.
    #[must_use]
    pub fn kv_event_stats(&self) -> Option<Arc<KvEventStats>> {
        self.kv_events.as_ref().map(|k| k.stats.clone())
    }

    async fn change(&mut self, settings: &PoolSettings, seed: u64, cluster: &Cluster) -> anyhow::Result<()> {
        self.follow(settings, cluster).await;
        self.endpoints.send_if_modified(|now| replace(now, &settings.endpoints));
        self.scrape.send_if_modified(|now| replace(now, &settings.scrape));
        if replace(&mut self.prefix_settings, &settings.prefix) {
            // Other blocks, other keys: what was known says nothing any more.
            let config = cache_config(&settings.prefix, seed);
            let cache = PrefixCache::new(&config);
            self.tape.change(|tell| {
                tell(Told::Cache(&config));
                cache.reconcile(&self.store.load());
                self.prefix.store(Arc::new(cache));
            });
            self.hear(seed).await?;
            self.ask(&settings.name, seed)?;
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
            // The writer is gone only when the pool is.
            let _ = self.events.send(PoolEvent::SourceGone { source }).await;
        }
        Ok(())
    }
}

fn subscription(settings: &KvEventSettings, block_size: u32) -> anyhow::Result<Subscription> {
    let source = match &settings.bind {
        Some(bind) => Source::Central { bind: bind.trim_start_matches("tcp://").parse()? },
        None => Source::Endpoints { port: settings.port },
    };
    Ok(Subscription {
        source,
        replay_port: settings.replay_port,
        topic: settings.topic.clone(),
        ranks: settings.ranks,
        block_size: Some(block_size),
        ..Subscription::default()
    })
}

pub(super) fn cache(settings: &PrefixSettings, seed: u64) -> PrefixCache {
    PrefixCache::new(&cache_config(settings, seed))
}

fn cache_config(settings: &PrefixSettings, seed: u64) -> CacheConfig {
    let unit = match settings.tokenizer {
        TokenizerSettings::Characters => BlockUnit::Bytes(settings.block_size * CHARACTERS_PER_TOKEN),
        _ => BlockUnit::Tokens(settings.block_size),
    };
    CacheConfig {
        unit,
        max_bytes: settings.max_bytes,
        tenant_share: settings.tenant_share,
        claim_life: settings.claim_life,
        seed,
    }
}

fn replace<T: Clone + PartialEq>(now: &mut T, new: &T) -> bool {
    let changed = now != new;
    if changed {
        *now = new.clone();
    }
    changed
}
