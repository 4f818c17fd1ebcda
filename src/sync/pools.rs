//! The pools of this picker, as the exchange with peers needs them: endpoints by their incarnation.

use crate::records::{QueueFlows, StrategyRecords};
use ahash::AHashMap;
use attache_pool::health::{Availability, HealthPolicy};
use attache_pool::{Endpoint, EndpointSpec, PoolSnapshot, SnapshotStore};
use attache_prefix::cache::PrefixCache;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

/// Most ejected endpoints in a heartbeat.
pub(crate) const MAX_EJECTED: usize = 1_024;

/// Incarnation of an endpoint: a hash of its pool, address and pod UID under the cluster's key. All pickers of a
/// cluster compute the same one; another pod at the same address has another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EndpointKey(pub u64);

impl EndpointKey {
    /// The incarnation of the endpoint that `spec` describes in `pool`; never 0.
    #[must_use]
    pub fn of(seed: u64, pool: &str, spec: &EndpointSpec) -> Self {
        let mut hasher = Xxh3::with_seed(seed);
        let mut field = |bytes: &[u8]| {
            // The length comes first, so that different fields never hash the same bytes.
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        field(pool.as_bytes());
        match spec.address.ip() {
            IpAddr::V4(ip) => field(&ip.octets()),
            IpAddr::V6(ip) => field(&ip.octets()),
        }
        field(&spec.address.port().to_le_bytes());
        field(spec.uid.as_deref().unwrap_or_default().as_bytes());
        Self(hasher.digest().max(1))
    }
}

/// Receives the endpoints whose cache is lost according to a peer.
pub trait CacheLossSink: Send + Sync + std::fmt::Debug {
    /// Drops what is recorded about the cache of `endpoint`, before a later decision.
    fn cache_lost(&self, endpoint: EndpointId);
}

/// A pool of this picker.
#[derive(Clone, Debug)]
pub struct PoolView {
    /// Name of the pool; the same on all pickers.
    pub name: Arc<str>,
    /// Its endpoints.
    pub store: Arc<SnapshotStore>,
    /// Its prefix cache; `None` without one.
    pub cache: Option<Arc<PrefixCache>>,
    /// When its endpoints are ejected.
    pub health: HealthPolicy,
    /// Metrics older than this are ignored.
    pub stale_after: Duration,
    /// The strategies, which receive what peers have recorded.
    pub records: Arc<dyn StrategyRecords>,
    /// The queue, which receives what peers have served; `None` without one.
    pub flows: Option<Arc<dyn QueueFlows>>,
    /// Receives losses that peers announce.
    pub losses: Arc<dyn CacheLossSink>,
}

/// An endpoint of this picker that a message names.
#[derive(Debug)]
pub(crate) struct Located<'v> {
    pub(crate) view: &'v PoolView,
    pub(crate) snapshot: Arc<PoolSnapshot>,
    pub(crate) endpoint: Arc<Endpoint>,
}

/// All pools, and where the endpoints are.
#[derive(Debug)]
pub(crate) struct Pools {
    seed: u64,
    views: Vec<PoolView>,
    /// The key of each pool.
    keys: Vec<u64>,
    /// Pool and address of each incarnation, as of the snapshots `generations`.
    addresses: AHashMap<u64, (usize, SocketAddr)>,
    generations: Vec<u64>,
}

impl Pools {
    pub(crate) fn new(seed: u64) -> Self {
        Self { seed, views: Vec::new(), keys: Vec::new(), addresses: AHashMap::new(), generations: Vec::new() }
    }

    /// Hash of a pool's name under the cluster's key.
    pub(crate) fn key(seed: u64, pool: &str) -> u64 {
        xxh3_64_with_seed(pool.as_bytes(), seed)
    }

    pub(crate) fn set(&mut self, views: Vec<PoolView>) {
        self.keys = views.iter().map(|view| Self::key(self.seed, &view.name)).collect();
        self.views = views;
        self.generations.clear();
    }

    pub(crate) fn view(&self, name: &str) -> Option<&PoolView> {
        self.views.iter().find(|view| *view.name == *name)
    }

    /// The pools, each with a hash of its name under the cluster's key.
    pub(crate) fn keyed(&self) -> impl Iterator<Item = (u64, &PoolView)> {
        self.keys.iter().copied().zip(&self.views)
    }

    /// The pool whose name has this hash.
    pub(crate) fn by_key(&self, key: u64) -> Option<&PoolView> {
        self.keyed().find(|(other, _)| *other == key).map(|(_, view)| view)
    }

    /// Incarnations of the endpoints that are ejected, at most [`MAX_EJECTED`].
    pub(crate) fn ejected(&self, now: Timestamp) -> Vec<u64> {
        let mut ejected = Vec::new();
        for view in &self.views {
            let is_ejected = |endpoint: &&Arc<Endpoint>| {
                let availability = endpoint.health.availability(now, &view.health);
                matches!(availability, Availability::Ejected | Availability::HalfOpen)
            };
            let snapshot = view.store.load();
            let of_view = snapshot.endpoints.iter().map(|state| &state.endpoint).filter(is_ejected);
            ejected.extend(of_view.map(|endpoint| EndpointKey::of(self.seed, &view.name, &endpoint.spec).0));
        }
        ejected.truncate(MAX_EJECTED);
        ejected
    }

    /// Requests of peers may have freed capacity, for which requests of this picker are queued.
    pub(crate) fn freed(&self, now: Timestamp) {
        self.views.iter().filter_map(|view| view.flows.clone()).for_each(|flows| flows.freed(now));
    }

    /// The endpoint of an incarnation; `None` if this picker does not have it.
    pub(crate) fn locate(&mut self, key: u64) -> Option<Located<'_>> {
        if self.at(key).is_none() {
            self.read_endpoints();
        }
        let (view, snapshot, endpoint) = self.at(key)?;
        Some(Located { view: self.views.get(view)?, snapshot, endpoint })
    }

    fn at(&self, key: u64) -> Option<(usize, Arc<PoolSnapshot>, Arc<Endpoint>)> {
        let (at, address) = *self.addresses.get(&key)?;
        let view = self.views.get(at)?;
        let snapshot = view.store.load_full();
        let endpoint = snapshot.get(snapshot.position(address)?)?.endpoint.clone();
        // Another pod may have the address since.
        (EndpointKey::of(self.seed, &view.name, &endpoint.spec).0 == key).then_some((at, snapshot, endpoint))
    }

    /// Reads the endpoints of all pools, unless nothing has changed since the last time.
    fn read_endpoints(&mut self) {
        let snapshots: Vec<_> = self.views.iter().map(|view| view.store.load_full()).collect();
        let generations: Vec<u64> = snapshots.iter().map(|snapshot| snapshot.generation).collect();
        if generations == self.generations {
            return;
        }
        self.generations = generations;
        self.addresses.clear();
        for (at, (view, snapshot)) in self.views.iter().zip(&snapshots).enumerate() {
            for state in &snapshot.endpoints {
                let key = EndpointKey::of(self.seed, &view.name, &state.endpoint.spec);
                self.addresses.insert(key.0, (at, state.endpoint.spec.address));
            }
        }
    }
}
