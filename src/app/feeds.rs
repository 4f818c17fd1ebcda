//! The feeds of every pool: discovery, scraping and the task that publishes snapshots. A reload changes them in place, so that ledgers,
//! health and metrics of endpoints that stay are kept.

use crate::clock::Clock;
use crate::config::settings::{DnsSource, PoolSettings, ScrapeSettings};
use crate::discovery::dns::{DnsStats, SystemResolver};
use crate::discovery::{dns, publish, static_source};
use crate::health::{Latch, Readiness};
use crate::pool::writer::SourceId;
use crate::pool::{EndpointSpec, PoolEvent, PoolWriter, Published, SnapshotStore};
use crate::scrape::{ScrapeStats, Scraper};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

/// The source that flags and the file are.
const CONFIGURED: SourceId = SourceId(0);

/// The feeds of all pools, by name.
#[derive(Debug)]
pub struct Feeds {
    pools: BTreeMap<Arc<str>, PoolFeeds>,
    clock: Clock,
    seed: u64,
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
    events: mpsc::Sender<PoolEvent>,
    endpoints: watch::Sender<Vec<EndpointSpec>>,
    scrape: watch::Sender<ScrapeSettings>,
    names: Vec<(DnsSource, SourceId, CancellationToken)>,
    next_source: u32,
    shutdown: CancellationToken,
}

impl Feeds {
    /// No feeds yet. All of them end on `shutdown`.
    #[must_use]
    pub fn new(clock: Clock, seed: u64, shutdown: CancellationToken) -> Self {
        Self { pools: BTreeMap::new(), clock, seed, shutdown }
    }

    /// The feeds of one pool.
    #[must_use]
    pub fn pool(&self, name: &str) -> Option<&PoolFeeds> {
        self.pools.get(name)
    }

    /// Brings the feeds in line with the settings: starts, changes and ends them. A pool that starts holds a latch of `readiness` until it
    /// has its first data.
    ///
    /// # Errors
    /// When no HTTP client can be made.
    pub async fn apply(&mut self, settings: &[PoolSettings], readiness: &Readiness) -> anyhow::Result<()> {
        self.pools.retain(|name, pool| {
            let stays = settings.iter().any(|s| s.name == *name);
            if !stays {
                pool.shutdown.cancel();
            }
            stays
        });
        for pool in settings {
            match self.pools.get_mut(&pool.name) {
                Some(feeds) => feeds.change(pool, self.seed).await,
                None => {
                    let latch = readiness.latch(format!("pool `{}` discovered and scraped once", pool.name));
                    let feeds = PoolFeeds::start(pool, self.clock, self.seed, self.shutdown.child_token(), latch)?;
                    self.pools.insert(pool.name.clone(), feeds);
                }
            }
        }
        Ok(())
    }
}

impl PoolFeeds {
    fn start(
        settings: &PoolSettings,
        clock: Clock,
        seed: u64,
        shutdown: CancellationToken,
        latch: Latch,
    ) -> anyhow::Result<Self> {
        let store = Arc::new(SnapshotStore::default());
        let (events, inbox) = mpsc::channel(publish::EVENT_QUEUE);
        let published = watch::Sender::new(Published::default());
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
        let writer = PoolWriter::new(sources.collect());
        tokio::spawn(publish::run(writer, inbox, store.clone(), published, shutdown.clone()));
        tokio::spawn(scraper.run(shutdown.clone()));
        tokio::spawn(static_source::run(CONFIGURED, endpoints.subscribe(), events.clone(), shutdown.clone()));
        let dns_stats = Arc::default();
        let mut feeds = Self {
            store,
            scrape_stats,
            dns_stats,
            events,
            endpoints,
            scrape,
            names: Vec::new(),
            next_source: 1,
            shutdown,
        };
        for name in &settings.dns {
            feeds.resolve(name.clone(), seed);
        }
        Ok(feeds)
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

    async fn change(&mut self, settings: &PoolSettings, seed: u64) {
        self.endpoints.send_if_modified(|now| replace(now, &settings.endpoints));
        self.scrape.send_if_modified(|now| replace(now, &settings.scrape));
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
    }
}

fn replace<T: Clone + PartialEq>(now: &mut T, new: &T) -> bool {
    let changed = now != new;
    if changed {
        *now = new.clone();
    }
    changed
}
