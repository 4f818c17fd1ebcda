//! The feed of one pool: a lane for every engine of the pool's current endpoints.

use super::apply::Applier;
use super::central::{Central, Inbox, Inboxes};
use super::lane::{EngineUpdates, Fed, Identity, Lane, Live, Shared};
use super::replay::MAX_CONCURRENT_REPLAYS;
use super::size::{OwnSize, PoolSize};
use super::stats::KvEventStats;
use super::subscription::{Source, Subscription};
use ahash::AHashMap;
use attache_pool::ports::{KvEventPorts, PortError, RankPorts};
use attache_pool::{Endpoint, PoolEvent, PoolSnapshot, Published, SnapshotStore};
use attache_prefix::block_size::BlockSize;
use attache_prefix::index::PrefixIndex;
use attache_prefix::key::KeySpace;
use attache_prefix::recomputed::Recomputed;
use attache_prefix::residents::{Cache, Resident, ResidentTable, Residents};
use attache_prefix::trust::{Doubt, TrustCell};
use attache_record::{KvChange, KvTape};
use attache_types::clock::Clock;
use attache_types::ids::EndpointId;
use attache_types::rng;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_util::sync::CancellationToken;

/// An endpoint with running lanes.
#[derive(Debug)]
struct Followed {
    address: SocketAddr,
    ports: Result<KvEventPorts, PortError>,
    resident: Resident,
    inboxes: Vec<Inbox>,
    /// Start time of the endpoint's process for its lanes: Unix time, seconds.
    started: watch::Sender<Option<f64>>,
    stop: CancellationToken,
}

/// Where the feed writes events.
#[derive(Clone, Debug)]
pub struct Destination {
    /// The prefix index of the pool.
    pub index: Arc<PrefixIndex>,
    /// The endpoints' holders in the index, with their trust states.
    pub residents: Arc<Residents>,
    /// The key space in which blocks are hashed.
    pub keys: KeySpace,
    /// Number of tokens in a block. Events with other block sizes are not used.
    pub block_size: Arc<BlockSize>,
    /// Learns which blocks are computed again.
    pub recomputed: Arc<Recomputed>,
    /// The recording of the pool's KV events.
    pub tape: KvTape,
}

/// Reads the KV events of one pool into its index.
#[derive(Debug)]
pub struct Feed {
    to: Destination,
    published: watch::Receiver<Published>,
    subscription: Subscription,
    shared: Shared,
    seed: u64,
    topic: Arc<str>,
    size: Arc<PoolSize>,
    inboxes: Arc<Inboxes>,
    membership: Option<u64>,
    followed: AHashMap<EndpointId, Followed>,
    lanes: u64,
}

impl Feed {
    /// Creates a feed for the pool with the snapshots in `store`; `published` signals new ones.
    /// Events are written to `to`.
    #[must_use]
    pub fn new(
        to: Destination,
        store: Arc<SnapshotStore>,
        published: watch::Receiver<Published>,
        subscription: Subscription,
        clock: Clock,
        seed: u64,
    ) -> Self {
        let shared = Shared {
            store,
            stats: Arc::default(),
            replays: Arc::new(Semaphore::new(MAX_CONCURRENT_REPLAYS)),
            bounds: subscription.bounds,
            timing: subscription.timing,
            clock,
            tape: to.tape.clone(),
            events: None,
            shortages: Arc::new(watch::Sender::new(0)),
            repeated_reports: Arc::default(),
        };
        Self {
            published,
            topic: subscription.topic.as_str().into(),
            subscription,
            shared,
            seed,
            size: Arc::new(PoolSize::new(to.block_size.clone(), to.tape.clone())),
            to,
            inboxes: Arc::default(),
            membership: None,
            followed: AHashMap::new(),
            lanes: 0,
        }
    }

    /// Returns the feed with a channel to the pool's writer, to which it reports cleared caches.
    #[must_use]
    pub fn telling(mut self, events: mpsc::Sender<PoolEvent>) -> Self {
        self.shared.events = Some(events);
        self
    }

    /// Returns the feed's counters.
    #[must_use]
    pub fn stats(&self) -> Arc<KvEventStats> {
        self.shared.stats.clone()
    }

    /// Returns the address where engines connect; `None` when Attaché connects to them.
    ///
    /// # Errors
    /// When the system does not report the address.
    pub fn central_address(&self) -> io::Result<Option<SocketAddr>> {
        match &self.subscription.source {
            Source::Endpoints { .. } => Ok(None),
            Source::Central { socket, .. } => socket.local_addr().map(Some),
        }
    }

    /// Follows the pool until `shutdown`, or until its writer has ended. Holders are removed with their lanes.
    pub async fn run(mut self, shutdown: CancellationToken) {
        // Lanes end with the feed, however it ends.
        let stop = shutdown.child_token();
        let _ends = stop.clone().drop_guard();
        if let Source::Central { socket, connections, require_sender_address } = &self.subscription.source {
            let central = Central {
                inboxes: self.inboxes.clone(),
                connections: connections.clone(),
                require_sender_address: *require_sender_address,
                warned: Arc::default(),
                topic: self.topic.clone(),
                ranks: self.subscription.ranks,
                bounds: self.shared.bounds,
                timing: self.shared.timing,
                stats: self.shared.stats.clone(),
            };
            tokio::spawn(central.run(socket.clone(), stop.clone()));
        }
        self.follow(&stop);
        while let Some(Ok(())) = shutdown.run_until_cancelled(self.published.changed()).await {
            self.follow(&stop);
        }
        self.publish(ResidentTable::default());
    }

    /// Publishes the KV caches of the endpoints.
    fn publish(&self, table: ResidentTable) {
        let caches = |resident: &Resident| resident.caches.iter().map(|cache| cache.holder.0).collect();
        let all = table.iter().map(|(endpoint, resident)| (endpoint, caches(resident))).collect();
        self.to.tape.change(|| self.to.residents.publish(table), |()| Some(KvChange::Caches(all)));
    }

    /// Starts and stops lanes according to the current snapshot.
    fn follow(&mut self, stop: &CancellationToken) {
        let published = *self.published.borrow_and_update();
        let snapshot = self.shared.store.load_full();
        if self.membership.replace(published.membership) != Some(published.membership) {
            self.follow_members(&snapshot, stop);
        }
        self.read_pages(&snapshot);
    }

    /// Reads values from scraped metrics that events do not contain, or not yet.
    fn read_pages(&self, snapshot: &PoolSnapshot) {
        for state in &snapshot.endpoints {
            let Some(metrics) = state.metrics() else { continue };
            if let (Some(followed), Some(_)) = (self.followed.get(&state.endpoint.id), metrics.process_start) {
                let started = metrics.process_start;
                followed.started.send_if_modified(|now| std::mem::replace(now, started) != started);
            }
        }
        let sizes = snapshot.endpoints.iter();
        self.size.pages(sizes.map(|state| (state.endpoint.id, state.metrics().and_then(|m| m.block_size))));
    }

    fn follow_members(&mut self, snapshot: &PoolSnapshot, stop: &CancellationToken) {
        let mut before = std::mem::take(&mut self.followed);
        for (state, ports) in snapshot.endpoints.iter().zip(self.ports(snapshot)) {
            let endpoint = &state.endpoint;
            let known = before.remove(&endpoint.id);
            let followed = match known {
                Some(known) if known.address == endpoint.spec.address && known.ports == ports => known,
                moved => {
                    if let Some(moved) = moved {
                        moved.stop.cancel();
                    }
                    self.start(endpoint, ports, stop.child_token())
                }
            };
            self.followed.insert(endpoint.id, followed);
        }
        before.into_values().for_each(|gone| gone.stop.cancel());
        self.publish(self.followed.iter().map(|(id, f)| (*id, f.resident.clone())).collect());
        let inboxes = self
            .followed
            .values()
            .flat_map(|f| (0u16..).zip(&f.inboxes).map(|(rank, inbox)| ((f.address, rank), inbox.clone())));
        self.inboxes.store(Arc::new(inboxes.collect()));
    }

    /// The ports of each endpoint of the snapshot.
    fn ports(&self, snapshot: &PoolSnapshot) -> Vec<Result<KvEventPorts, PortError>> {
        let Subscription { source, replay_port, .. } = &self.subscription;
        let events = match source {
            Source::Endpoints { port } => Some(*port),
            Source::Central { .. } => None,
        };
        let of_endpoint = |endpoint: &Endpoint| {
            let ranks = (endpoint.spec.rank.unwrap_or(0), self.ranks(endpoint));
            KvEventPorts::of(&endpoint.spec.labels, (events, *replay_port), ranks)
        };
        let endpoints = || snapshot.endpoints.iter().map(|state| &state.endpoint);
        let mut ports: Vec<_> = endpoints().map(|endpoint| of_endpoint(endpoint)).collect();
        // Who publishes at a port that two endpoints name can't be known.
        let mut by_port: Vec<_> = (0..)
            .zip(endpoints().zip(&ports))
            .filter_map(|(i, (endpoint, ports))| {
                Some((endpoint.spec.address.ip(), ports.as_ref().ok()?.events?, i, endpoint.spec.name.clone()))
            })
            .collect();
        by_port.sort_unstable_by_key(|(ip, events, i, _)| (*ip, *events, *i));
        let mut widest: Option<&(IpAddr, RankPorts, usize, Arc<str>)> = None;
        for own in &by_port {
            if let Some(other) = widest.filter(|other| other.0 == own.0 && other.1.overlaps(own.1)) {
                for ((_, events, i, _), (.., name)) in [(own, other), (other, own)] {
                    if let Some(ports) = ports.get_mut(*i) {
                        *ports = Err(PortError::Shared { events: *events, other: name.clone() });
                    }
                }
            }
            if widest.is_none_or(|widest| widest.0 != own.0 || widest.1.last() < own.1.last()) {
                widest = Some(own);
            }
        }
        ports
    }

    /// Number of engines of an endpoint. Each port of a pod with several has one.
    fn ranks(&self, endpoint: &Endpoint) -> u16 {
        if endpoint.spec.rank.is_some() { 1 } else { self.subscription.ranks.max(1) }
    }

    /// Starts a lane for each rank of an endpoint; none if its ports can't be used.
    fn start(
        &mut self,
        endpoint: &Endpoint,
        ports: Result<KvEventPorts, PortError>,
        stop: CancellationToken,
    ) -> Followed {
        let address = endpoint.spec.address;
        let mut followed = Followed {
            address,
            ports: ports.clone(),
            resident: Resident::default(),
            inboxes: Vec::new(),
            started: watch::Sender::new(None),
            stop,
        };
        let ports = match ports {
            Ok(ports) => ports,
            Err(error) => {
                tracing::warn!(
                    endpoint = %endpoint.spec.name, %error,
                    "KV events of this endpoint are not read; its cache is estimated from routed requests"
                );
                followed.resident.refused = Some(Doubt::Ports);
                return followed;
            }
        };
        let ranks = self.ranks(endpoint);
        for rank in 0..ranks {
            let at = |ports: RankPorts| SocketAddr::new(address.ip(), ports.of(rank));
            let live = match ports.events {
                Some(ports) => Live::Own { address: at(ports), topic: self.topic.clone() },
                None => {
                    let (inbox, fed) = self.inbox();
                    followed.inboxes.push(inbox);
                    Live::Fed(fed)
                }
            };
            let trust: Arc<TrustCell> = Arc::default();
            let holder = self.to.index.add_holder();
            followed.resident.caches.push(Cache { holder, trust: trust.clone() });
            let applier = Applier::new(
                &self.to,
                self.shared.bounds.orphan_blocks,
                OwnSize::new(self.size.clone(), endpoint.id, holder),
                self.shared.stats.clone(),
                self.shared.clock,
            );
            let identity = Identity { endpoint: endpoint.id, name: endpoint.spec.name.clone(), rank, holder, ranks };
            self.lanes += 1;
            let rng = rng::for_request(self.seed, self.lanes);
            let lane = Lane::new(
                identity,
                self.shared.clone(),
                ports.replay.map(at),
                applier,
                trust,
                EngineUpdates {
                    started: followed.started.subscribe(),
                    size: self.size.subscribe(),
                    shortages: self.shared.shortages.subscribe(),
                },
                rng,
            );
            tokio::spawn(lane.run(live, followed.stop.clone()));
        }
        followed
    }

    fn inbox(&self) -> (Inbox, Fed) {
        let (sender, inbox) = mpsc::channel(self.shared.bounds.queue_frames.max(1));
        let handle = Inbox { sender, overflowed: Arc::default(), connections: Arc::default() };
        let overflowed = handle.overflowed.clone();
        (handle, Fed { inbox, overflowed })
    }
}
