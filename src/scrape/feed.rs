//! The scraping task of one pool.

use super::credentials::BearerToken;
use super::engines::{EngineMap, Reading};
use super::pace::{Pace, Process, Seen};
use super::stats::{ErrorReason, ScrapeError, ScrapeStats};
use crate::settings::ScrapeSettings;
use ahash::AHashMap;
use attache_http_client::{Clients, FetchError, fetch};
use attache_pool::health::Contact;
use attache_pool::{Endpoint, EndpointMetrics, PoolEvent, Published, RateWindow, SnapshotStore};
use attache_types::clock::{Clock, Timestamp};
use attache_types::ids::EndpointId;
use attache_types::rng::{self, PickRng};
use futures_util::stream::{FuturesUnordered, StreamExt};
use rand::RngExt;
use reqwest::header::HeaderValue;
use reqwest::{Client, Url};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Most concurrent fetches. A fetch takes a few milliseconds, so 64 suffice for thousands of idle endpoints and
/// hundreds of busy ones. They also limit the memory that hostile servers can use.
pub const MAX_CONCURRENT_FETCHES: usize = 64;
/// Largest buffer that is kept for the next scrape; larger ones are released.
const MAX_KEPT_BUFFER_BYTES: usize = 1 << 20;

/// One endpoint with its next scrape.
#[derive(Debug)]
struct Target {
    endpoint: Arc<Endpoint>,
    url: Result<Url, FetchError>,
    engine: &'static EngineMap,
    pace: Pace,
    process: Process,
    rates: RateWindow,
    tried: bool,
    fetching: bool,
}

/// What the scrapes of a pool show about its endpoints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reach {
    /// A source of discovery has not reported, or an endpoint was not tried.
    #[default]
    Unknown,
    /// Every endpoint was tried, and none accepts connections. Nothing else says that they serve: no Kubernetes readiness
    /// and no response to a request.
    Unreachable,
    /// An endpoint was reached, or may serve. Permanent.
    Reached,
}

/// The result of one fetch.
struct Fetched {
    id: EndpointId,
    buffer: Vec<u8>,
    outcome: Result<Reading, ScrapeError>,
}

/// Scrapes the endpoints of one pool.
#[derive(Debug)]
pub struct Scraper {
    store: Arc<SnapshotStore>,
    published: watch::Receiver<Published>,
    settings: watch::Receiver<ScrapeSettings>,
    events: mpsc::Sender<PoolEvent>,
    clock: Clock,
    rng: PickRng,
    clients: Clients,
    token: BearerToken,
    stats: Arc<ScrapeStats>,
    reach: watch::Sender<Reach>,
    membership: Option<u64>,
    targets: AHashMap<EndpointId, Target>,
    timetable: BinaryHeap<Reverse<(Timestamp, EndpointId)>>,
    buffers: Vec<Vec<u8>>,
}

impl Scraper {
    /// Creates a scraper for the pool with the snapshots in `store`; `published` signals new ones.
    /// Metrics are sent to `events`.
    ///
    /// # Errors
    /// When the HTTP client cannot be created.
    pub fn new(
        store: Arc<SnapshotStore>,
        published: watch::Receiver<Published>,
        settings: watch::Receiver<ScrapeSettings>,
        events: mpsc::Sender<PoolEvent>,
        clock: Clock,
        seed: u64,
    ) -> Result<Self, FetchError> {
        Ok(Self {
            store,
            published,
            settings,
            events,
            clock,
            rng: rng::for_request(seed, 0),
            clients: Clients::new()?,
            token: BearerToken::default(),
            stats: Arc::default(),
            reach: watch::Sender::default(),
            membership: None,
            targets: AHashMap::new(),
            timetable: BinaryHeap::new(),
            buffers: Vec::new(),
        })
    }

    /// Returns the scraper's counters.
    #[must_use]
    pub fn stats(&self) -> Arc<ScrapeStats> {
        self.stats.clone()
    }

    /// Returns what the scrapes show. It is known once every source of discovery has reported and every endpoint known
    /// then was tried once.
    #[must_use]
    pub fn reach(&self) -> watch::Receiver<Reach> {
        self.reach.subscribe()
    }

    /// Scrapes until `shutdown`, or until the pool's writer has ended.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut fetches = FuturesUnordered::new();
        let mut settings_live = true;
        let mut next_sweep = self.clock.now();
        self.follow();
        loop {
            let now = self.clock.now();
            if now >= next_sweep {
                self.sweep(now);
                next_sweep = now.after(self.settings.borrow().interval.max(super::pace::MIN_INTERVAL));
            }
            while fetches.len() < MAX_CONCURRENT_FETCHES
                && let Some(fetch) = self.next_fetch(now)
            {
                fetches.push(fetch);
            }
            let wake = match self.timetable.peek() {
                Some(Reverse((due, _))) if fetches.len() < MAX_CONCURRENT_FETCHES => next_sweep.min(*due),
                _ => next_sweep,
            };
            tokio::select! {
                () = shutdown.cancelled() => return,
                Some(fetched) = fetches.next(), if !fetches.is_empty() => {
                    let events = self.finish(fetched);
                    for event in events.into_iter().flatten() {
                        tokio::select! {
                            sent = self.events.send(event) => if sent.is_err() { return },
                            () = shutdown.cancelled() => return,
                        }
                    }
                }
                changed = self.published.changed() => match changed {
                    Ok(()) => self.follow(),
                    Err(_) => return,
                },
                changed = self.settings.changed(), if settings_live => match changed {
                    Ok(()) => self.reschedule(),
                    Err(_) => settings_live = false,
                },
                () = tokio::time::sleep_until(self.clock.instant(wake)), if !self.targets.is_empty() => {}
            }
        }
    }

    /// Updates the targets to the current snapshot.
    fn follow(&mut self) {
        let published = *self.published.borrow_and_update();
        if self.membership == Some(published.membership) {
            return;
        }
        self.membership = Some(published.membership);
        let snapshot = self.store.load_full();
        let now = self.clock.now();
        let mut before = std::mem::take(&mut self.targets);
        for state in &snapshot.endpoints {
            let endpoint = &state.endpoint;
            let (Some(engine), Some(url)) = (EngineMap::of(endpoint.spec.engine), endpoint.spec.metrics_url()) else {
                continue;
            };
            let url = Url::parse(&url).map_err(|e| FetchError::Url(format!("{url}: {e}")));
            let target = match before.remove(&endpoint.id) {
                Some(mut known) => {
                    if !std::ptr::eq(known.engine, engine) {
                        known.rates.reset();
                    }
                    Target { endpoint: endpoint.clone(), url, engine, ..known }
                }
                None => {
                    self.timetable.push(Reverse((now, endpoint.id)));
                    Target {
                        endpoint: endpoint.clone(),
                        url,
                        engine,
                        pace: Pace::new(now),
                        process: Process::default(),
                        rates: RateWindow::default(),
                        tried: false,
                        fetching: false,
                    }
                }
            };
            self.targets.insert(endpoint.id, target);
        }
        self.stats.keep_failing(|id| self.targets.contains_key(&id));
        self.update_reach();
    }

    /// Applies new settings: every endpoint is scraped within the new interval.
    fn reschedule(&mut self) {
        let settings = self.settings.borrow_and_update().clone();
        let now = self.clock.now();
        for (id, target) in &mut self.targets {
            if !target.fetching && target.pace.hurry(now, &settings, self.rng.random()) {
                self.timetable.push(Reverse((target.pace.due, *id)));
            }
        }
    }

    /// Finds endpoints that were idle and have received requests since.
    fn sweep(&mut self, now: Timestamp) {
        let settings = self.settings.borrow();
        for (id, target) in &mut self.targets {
            let busy = target.endpoint.ledger.in_flight() > 0;
            if busy && !target.fetching && target.pace.hurry(now, &settings, self.rng.random()) {
                self.timetable.push(Reverse((target.pace.due, *id)));
            }
        }
    }

    /// Returns the next fetch that is due, if any.
    fn next_fetch(&mut self, now: Timestamp) -> Option<impl Future<Output = Fetched> + use<>> {
        while let Some(Reverse((due, id))) = self.timetable.peek().copied() {
            if due > now {
                return None;
            }
            self.timetable.pop();
            // An entry is outdated if its endpoint has left or was rescheduled.
            let Some(target) = self.targets.get_mut(&id).filter(|t| !t.fetching && t.pace.due == due) else { continue };
            target.fetching = true;
            let settings = self.settings.borrow();
            let token = self.token.header(settings.bearer_token_file.as_deref(), Instant::now());
            let ready = target.url.clone().and_then(|url| {
                let client = self.clients.client(&url, settings.insecure_skip_verify)?;
                Ok((client, url, token))
            });
            return Some(scrape(
                ready,
                target.endpoint.clone(),
                target.engine,
                (settings.timeout, settings.max_bytes),
                self.buffers.pop().unwrap_or_default(),
                self.clock,
            ));
        }
        None
    }

    /// Processes metrics or a failure; returns the events to send.
    fn finish(&mut self, fetched: Fetched) -> [Option<PoolEvent>; 2] {
        let Fetched { id, buffer, outcome } = fetched;
        self.stats.count_bytes(buffer.len());
        if buffer.capacity() <= MAX_KEPT_BUFFER_BYTES {
            self.buffers.push(buffer);
        }
        let now = self.clock.now();
        let random = self.rng.random();
        let Some(target) = self.targets.get_mut(&id) else { return [None, None] };
        target.fetching = false;
        target.tried = true;
        let mut events = [None, None];
        let seen = match outcome {
            Ok(Reading { mut metrics, skipped }) => {
                self.stats.count_page(skipped);
                self.stats.set_failing(id, None);
                target.endpoint.health.reached();
                if target.pace.failures > 0 {
                    tracing::info!(endpoint = %target.endpoint.spec.name, "scrape works again");
                }
                let on_page = u64::from(metrics.waiting) + u64::from(metrics.running);
                let busy = on_page > 0 || target.endpoint.ledger.in_flight() > 0;
                let restarted = target.process.observe(&metrics);
                if restarted {
                    self.stats.count_restart();
                    tracing::info!(endpoint = %target.endpoint.spec.name, "model server restarted");
                    target.rates.reset();
                }
                metrics.rates = target.rates.observe(metrics.scraped_at, &metrics.counters);
                let scraped = PoolEvent::Scraped { id, metrics: Arc::new(metrics) };
                events = [restarted.then_some(PoolEvent::Restarted { id }), Some(scraped)];
                if busy { Seen::Busy } else { Seen::Idle }
            }
            Err(error) => {
                self.stats.count_error(error.reason());
                match error.reason() {
                    // A metrics port of its own says nothing about the port for requests.
                    ErrorReason::Connect if target.endpoint.spec.metrics_at_serving_port() => {
                        target.endpoint.health.unreachable();
                    }
                    ErrorReason::Connect | ErrorReason::Timeout | ErrorReason::Broken | ErrorReason::Url => {}
                    // It responded.
                    _ => target.endpoint.health.reached(),
                }
                let url = target.endpoint.spec.metrics_url().unwrap_or_default();
                // Logged once per outage, not per attempt.
                if target.pace.failures == 0 {
                    let (reason, help) = (error.reason().label(), error.reason().remedy());
                    tracing::warn!(endpoint = %target.endpoint.spec.name, url, reason, %error, help, "scrape failed");
                }
                self.stats.set_failing(id, Some(format!("{url}: {error}; {}", error.reason().remedy()).into()));
                Seen::Failed
            }
        };
        target.pace.done(seen, now, &self.settings.borrow(), random);
        self.timetable.push(Reverse((target.pace.due, id)));
        self.update_reach();
        events
    }

    fn update_reach(&self) {
        if *self.reach.borrow() == Reach::Reached || !self.targets.values().all(|t| t.tried) {
            return;
        }
        let snapshot = self.store.load();
        if !snapshot.synced {
            return;
        }
        // The kubelet has probed pods that are ready.
        let is_down = |e: &Endpoint| e.spec.uid.is_none() && e.health.contact() == Contact::Unreachable;
        let mut endpoints = snapshot.endpoints.iter().filter(|state| !state.is_draining()).peekable();
        let none = endpoints.peek().is_some() && endpoints.all(|state| is_down(&state.endpoint));
        let reach = if none { Reach::Unreachable } else { Reach::Reached };
        self.reach.send_if_modified(|before| std::mem::replace(before, reach) != reach);
    }
}

/// Fetches and converts the metrics of one endpoint.
async fn scrape(
    ready: Result<(Client, Url, Option<HeaderValue>), FetchError>,
    endpoint: Arc<Endpoint>,
    engine: &'static EngineMap,
    (timeout, max_bytes): (Duration, u64),
    mut buffer: Vec<u8>,
    clock: Clock,
) -> Fetched {
    let (in_flight, on_ranks) = (endpoint.ledger.in_flight(), endpoint.ranks.under_way());
    let fetched = match ready {
        Ok((client, url, token)) => fetch(&client, url, token, (timeout, max_bytes), &mut buffer).await,
        Err(error) => Err(error),
    };
    let outcome = match fetched {
        Ok(()) => {
            let read = engine.read(&buffer, clock.now(), in_flight).map_err(ScrapeError::from);
            read.map(|Reading { metrics, skipped }| Reading {
                metrics: EndpointMetrics { ranks_at_scrape: on_ranks, ..metrics },
                skipped,
            })
        }
        Err(error) => {
            buffer.clear();
            Err(error.into())
        }
    };
    Fetched { id: endpoint.id, buffer, outcome }
}

#[cfg(test)]
mod tests;
