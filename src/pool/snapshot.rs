//! The immutable view of a pool that decisions read.

use super::endpoint::{Endpoint, EndpointSpec, Live};
use super::health::HealthPolicy;
use super::metrics::{EndpointMetrics, Reported};
use super::role::Roles;
use ahash::AHashMap;
use arc_swap::{ArcSwap, Guard};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// One endpoint in a snapshot. Decisions read all endpoints, so the values that they need are copied here and fill one
/// cache line: they need not follow pointers to the specification or the metrics.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub struct EndpointState {
    /// The endpoint's identity, ledger and health.
    pub endpoint: Arc<Endpoint>,
    metrics: Option<Arc<EndpointMetrics>>,
    live: Arc<Live>,
    reported: Option<Reported>,
    id: EndpointId,
    /// The endpoint's roles; none while it is draining.
    roles: Roles,
}

impl EndpointState {
    /// The state of `endpoint` with the metrics of its last successful scrape.
    #[must_use]
    pub fn new(endpoint: Arc<Endpoint>, metrics: Option<Arc<EndpointMetrics>>) -> Self {
        Self {
            live: endpoint.live.clone(),
            reported: metrics.as_deref().map(EndpointMetrics::reported),
            id: endpoint.id,
            roles: if endpoint.spec.draining { Roles::NONE } else { endpoint.roles },
            endpoint,
            metrics,
        }
    }

    /// Returns the metrics of the last successful scrape; `None` before the first.
    #[must_use]
    pub fn metrics(&self) -> Option<&EndpointMetrics> {
        self.metrics.as_deref()
    }

    /// Returns the state with a new specification. A change of the engine discards the metrics.
    #[must_use]
    pub fn respecified(self, spec: impl Into<Arc<EndpointSpec>>) -> Self {
        let spec = spec.into();
        let metrics = self.metrics.filter(|_| self.endpoint.spec.engine == spec.engine);
        Self::new(Arc::new(self.endpoint.respecified(spec)), metrics)
    }

    /// Returns the endpoint's number in the pool.
    #[inline]
    #[must_use]
    pub fn id(&self) -> EndpointId {
        self.id
    }

    /// Returns the roles in which it gets new requests: none while it is draining.
    #[inline]
    #[must_use]
    pub fn roles(&self) -> Roles {
        self.roles
    }

    /// Whether it gets new requests and has all of `roles`.
    #[inline]
    #[must_use]
    pub fn serves(&self, roles: Roles) -> bool {
        self.roles != Roles::NONE && self.roles.has(roles)
    }

    /// Whether it is draining and gets no new requests.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.endpoint.spec.draining
    }

    /// Returns the endpoint's live state: ledger, health and speed.
    #[inline]
    #[must_use]
    pub fn live(&self) -> &Live {
        &self.live
    }

    /// Returns its metrics, unless they are stale.
    #[must_use]
    pub fn fresh_metrics(&self, now: Timestamp, stale_after: Duration) -> Option<&EndpointMetrics> {
        self.fresh(now, stale_after).and(self.metrics.as_deref())
    }

    /// Returns the metrics of the last scrape that every decision reads.
    #[inline]
    #[must_use]
    pub fn reported(&self) -> Option<&Reported> {
        self.reported.as_ref()
    }

    /// Returns the metrics that every decision reads, unless they are stale.
    #[inline]
    #[must_use]
    pub fn fresh(&self, now: Timestamp, stale_after: Duration) -> Option<&Reported> {
        self.reported.as_ref().filter(|m| m.scraped_at.after(stale_after) >= now)
    }
}

/// All endpoints of a pool at one moment, sorted by their ids.
#[derive(Debug, Default)]
pub struct PoolSnapshot {
    /// Number of the snapshot, which grows by one with every publication.
    pub generation: u64,
    /// Whether every source of discovery has reported its endpoints at least once.
    pub synced: bool,
    /// The endpoints, sorted by id.
    pub endpoints: Box<[EndpointState]>,
    /// Endpoints that have left, or whose model server has lost its cache, since the previous snapshot.
    pub lost: Box<[EndpointId]>,
    by_address: AHashMap<SocketAddr, u32>,
    has_prefill_workers: bool,
}

impl PoolSnapshot {
    /// A snapshot of `endpoints`, which are sorted here.
    #[must_use]
    pub fn new(generation: u64, synced: bool, mut endpoints: Vec<EndpointState>) -> Self {
        endpoints.sort_by_key(|e| e.endpoint.id);
        let by_address = (0u32..).zip(&endpoints).map(|(i, e)| (e.endpoint.spec.address, i)).collect();
        let has_prefill_workers = endpoints.iter().any(|e| e.serves(Roles::PREFILL));
        let (endpoints, lost) = (endpoints.into(), Box::default());
        Self { generation, synced, endpoints, lost, by_address, has_prefill_workers }
    }

    /// Whether at least one endpoint takes new requests and computes prompts for decode workers.
    #[inline]
    #[must_use]
    pub fn has_prefill_workers(&self) -> bool {
        self.has_prefill_workers
    }

    /// Returns the snapshot with the endpoints that have left or lost their cache since the previous one.
    #[must_use]
    pub fn after_loss(self, lost: Vec<EndpointId>) -> Self {
        Self { lost: lost.into(), ..self }
    }

    /// Returns the position of the endpoint at `address`.
    #[must_use]
    pub fn position(&self, address: SocketAddr) -> Option<u32> {
        self.by_address.get(&address).copied()
    }

    /// Whether error responses may eject `endpoint`, given how many endpoints with the same roles
    /// are ejected or half open.
    #[must_use]
    pub fn may_eject(&self, endpoint: &Endpoint, now: Timestamp, policy: &HealthPolicy) -> bool {
        let peers = self.endpoints.iter().filter(|state| state.endpoint.roles == endpoint.roles);
        let counted = peers.fold((0, 0), |(away, total), state| {
            (away + usize::from(state.live().health.is_away(now, policy)), total + 1)
        });
        policy.may_eject(counted.0, counted.1)
    }

    /// Returns the endpoint at `position`.
    #[must_use]
    pub fn get(&self, position: u32) -> Option<&EndpointState> {
        self.endpoints.get(position as usize)
    }
}

/// What followers of a pool receive: the number of the current snapshot, and when its membership changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Published {
    /// Number of the current snapshot; 0 before the first.
    pub generation: u64,
    /// Number of the snapshot in which discovery last changed an endpoint. Scrapes do not change it.
    pub membership: u64,
}

/// Holds the current snapshot: one writer, any number of readers that never block.
#[derive(Debug, Default)]
pub struct SnapshotStore(ArcSwap<PoolSnapshot>);

impl SnapshotStore {
    /// Returns the current snapshot, for the duration of one decision.
    pub fn load(&self) -> Guard<Arc<PoolSnapshot>> {
        self.0.load()
    }

    /// Returns the current snapshot, to keep.
    #[must_use]
    pub fn load_full(&self) -> Arc<PoolSnapshot> {
        self.0.load_full()
    }

    /// Publishes a snapshot. Only the pool's writer task calls this.
    pub fn publish(&self, snapshot: PoolSnapshot) {
        self.0.store(Arc::new(snapshot));
    }
}
