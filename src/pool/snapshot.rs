//! The immutable view of a pool that requests are decided on.

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

/// One endpoint in a snapshot. A decision reads all of them, so what it reads is copied here and fills one cache line: it need not follow
/// the endpoint to its spec nor the page to its figures.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub struct EndpointState {
    /// Identity, ledger and health.
    pub endpoint: Arc<Endpoint>,
    metrics: Option<Arc<EndpointMetrics>>,
    live: Arc<Live>,
    reported: Option<Reported>,
    id: EndpointId,
    /// None while it is draining.
    roles: Roles,
}

impl EndpointState {
    /// `endpoint`, of which `metrics` is the last page that could be read.
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

    /// The last page that could be read; `None` before the first.
    #[must_use]
    pub fn metrics(&self) -> Option<&EndpointMetrics> {
        self.metrics.as_deref()
    }

    /// The same endpoint with a new spec; what an engine of another kind reported is void.
    #[must_use]
    pub fn respecified(self, spec: impl Into<Arc<EndpointSpec>>) -> Self {
        let spec = spec.into();
        let metrics = self.metrics.filter(|_| self.endpoint.spec.engine == spec.engine);
        Self::new(Arc::new(self.endpoint.respecified(spec)), metrics)
    }

    /// The endpoint's number in the pool.
    #[inline]
    #[must_use]
    pub fn id(&self) -> EndpointId {
        self.id
    }

    /// What it gets new requests for: nothing while it is draining.
    #[inline]
    #[must_use]
    pub fn roles(&self) -> Roles {
        self.roles
    }

    /// Whether it gets new requests, as something that is there for all of `roles`.
    #[inline]
    #[must_use]
    pub fn serves(&self, roles: Roles) -> bool {
        self.roles != Roles::NONE && self.roles.has(roles)
    }

    /// Whether it gets nothing new.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.endpoint.spec.draining
    }

    /// The endpoint's ledger, health and speed.
    #[inline]
    #[must_use]
    pub fn live(&self) -> &Live {
        &self.live
    }

    /// What it reports, unless that is too old to say anything.
    #[must_use]
    pub fn fresh_metrics(&self, now: Timestamp, stale_after: Duration) -> Option<&EndpointMetrics> {
        self.fresh(now, stale_after).and(self.metrics.as_deref())
    }

    /// The figures of the last page that every decision reads.
    #[inline]
    #[must_use]
    pub fn reported(&self) -> Option<&Reported> {
        self.reported.as_ref()
    }

    /// The figures that every decision reads, unless they are too old to say anything.
    #[inline]
    #[must_use]
    pub fn fresh(&self, now: Timestamp, stale_after: Duration) -> Option<&Reported> {
        self.reported.as_ref().filter(|m| m.scraped_at.after(stale_after) >= now)
    }
}

/// All endpoints of a pool at one moment, in order of their ids.
#[derive(Debug, Default)]
pub struct PoolSnapshot {
    /// Grows by one with every publication.
    pub generation: u64,
    /// Every source of discovery has spoken at least once.
    pub synced: bool,
    /// The endpoints, sorted by id.
    pub endpoints: Box<[EndpointState]>,
    /// The endpoints that have left, or whose model server has lost its cache, since the snapshot before this one.
    pub lost: Box<[EndpointId]>,
    by_address: AHashMap<SocketAddr, u32>,
}

impl PoolSnapshot {
    /// A snapshot of `endpoints`, which are sorted by id here.
    #[must_use]
    pub fn new(generation: u64, synced: bool, mut endpoints: Vec<EndpointState>) -> Self {
        endpoints.sort_by_key(|e| e.endpoint.id);
        let by_address = (0u32..).zip(&endpoints).map(|(i, e)| (e.endpoint.spec.address, i)).collect();
        Self { generation, synced, endpoints: endpoints.into(), lost: Box::default(), by_address }
    }

    /// The same, with the endpoints that have left or lost their cache since the snapshot before.
    #[must_use]
    pub fn after_loss(self, lost: Vec<EndpointId>) -> Self {
        Self { lost: lost.into(), ..self }
    }

    /// The position of the endpoint at `address`.
    #[must_use]
    pub fn position(&self, address: SocketAddr) -> Option<u32> {
        self.by_address.get(&address).copied()
    }

    /// Whether error responses may eject `endpoint`, given how many of the endpoints with the same roles are ejected or half open.
    #[must_use]
    pub fn may_eject(&self, endpoint: &Endpoint, now: Timestamp, policy: &HealthPolicy) -> bool {
        let peers = self.endpoints.iter().filter(|state| state.endpoint.roles == endpoint.roles);
        let counted = peers.fold((0, 0), |(away, total), state| {
            (away + usize::from(state.live().health.is_away(now, policy)), total + 1)
        });
        policy.may_eject(counted.0, counted.1)
    }

    /// The endpoint at `position`.
    #[must_use]
    pub fn get(&self, position: u32) -> Option<&EndpointState> {
        self.endpoints.get(position as usize)
    }
}

/// What the publisher tells those who follow a pool: that there is a newer snapshot, and whether other endpoints are in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Published {
    /// The generation of the current snapshot; 0 before the first.
    pub generation: u64,
    /// The generation at which discovery last said something new. Pages that are read don't change it.
    pub membership: u64,
}

/// Holds the current snapshot: one writer, any number of readers, none of whom waits.
#[derive(Debug, Default)]
pub struct SnapshotStore(ArcSwap<PoolSnapshot>);

impl SnapshotStore {
    /// The current snapshot, for the length of one decision.
    pub fn load(&self) -> Guard<Arc<PoolSnapshot>> {
        self.0.load()
    }

    /// The current snapshot, to keep.
    #[must_use]
    pub fn load_full(&self) -> Arc<PoolSnapshot> {
        self.0.load_full()
    }

    /// Publishes a snapshot. Only the pool's writer task calls this.
    pub fn publish(&self, snapshot: PoolSnapshot) {
        self.0.store(Arc::new(snapshot));
    }
}
