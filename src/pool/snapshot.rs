//! The immutable view of a pool that requests are decided on.

use super::endpoint::Endpoint;
use super::metrics::EndpointMetrics;
use crate::clock::Timestamp;
use ahash::AHashMap;
use arc_swap::{ArcSwap, Guard};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// One endpoint in a snapshot.
#[derive(Clone, Debug)]
pub struct EndpointState {
    /// Identity, ledger and health.
    pub endpoint: Arc<Endpoint>,
    /// The last page that could be read; `None` before the first.
    pub metrics: Option<Arc<EndpointMetrics>>,
}

impl EndpointState {
    /// What it reports, unless that is too old to say anything.
    #[must_use]
    pub fn fresh_metrics(&self, now: Timestamp, stale_after: Duration) -> Option<&EndpointMetrics> {
        self.metrics.as_deref().filter(|m| now.since(m.scraped_at) <= stale_after)
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
    by_address: AHashMap<SocketAddr, u32>,
}

impl PoolSnapshot {
    /// A snapshot of `endpoints`, which are sorted by id here.
    #[must_use]
    pub fn new(generation: u64, synced: bool, mut endpoints: Vec<EndpointState>) -> Self {
        endpoints.sort_by_key(|e| e.endpoint.id);
        let by_address = (0u32..).zip(&endpoints).map(|(i, e)| (e.endpoint.spec.address, i)).collect();
        Self { generation, synced, endpoints: endpoints.into(), by_address }
    }

    /// The position of the endpoint at `address`.
    #[must_use]
    pub fn position(&self, address: SocketAddr) -> Option<u32> {
        self.by_address.get(&address).copied()
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
