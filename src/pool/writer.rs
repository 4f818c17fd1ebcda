//! The rules by which a pool changes. One task owns a [`PoolWriter`], passes events to it and publishes its snapshots.

use super::endpoint::{Endpoint, EndpointSpec};
use super::metrics::EndpointMetrics;
use super::snapshot::{EndpointState, PoolSnapshot, Published};
use super::speed::PoolSpeed;
use ahash::{AHashMap, AHashSet};
use attache_types::ids::EndpointId;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

/// Number of a source of discovery (the flags, one DNS name, …) within its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Deserialize, serde::Serialize)]
pub struct SourceId(pub u32);

/// An event that a feed sends to the writer.
#[derive(Debug)]
pub enum PoolEvent {
    /// The complete list of a source's endpoints. An address that several sources name
    /// belongs to the lowest-numbered one.
    Endpoints { source: SourceId, endpoints: Vec<Arc<EndpointSpec>> },
    /// A source was removed, together with its endpoints.
    SourceGone { source: SourceId },
    /// An endpoint was scraped.
    Scraped { id: EndpointId, metrics: Arc<EndpointMetrics> },
    /// The server's process was restarted: everything learned about the old one is discarded.
    Restarted { id: EndpointId },
    /// The server has cleared its cache and keeps running.
    CacheCleared { id: EndpointId },
    /// The configuration names these sources now. The pool is complete once all have reported; endpoints
    /// of other sources are removed.
    Expect { sources: Vec<SourceId> },
}

/// The mutable state behind a pool's snapshots.
#[derive(Debug)]
pub struct PoolWriter {
    expected_sources: Vec<SourceId>,
    sources: BTreeMap<SourceId, Vec<Arc<EndpointSpec>>>,
    endpoints: Vec<EndpointState>,
    /// Position of each id in `endpoints`.
    positions: AHashMap<EndpointId, usize>,
    /// Endpoints that have left or lost their cache since the last snapshot.
    lost: Vec<EndpointId>,
    /// The pool's speed, from which new endpoints start.
    speed: Arc<PoolSpeed>,
    next_id: u32,
    generation: u64,
    membership: u64,
    dirty: bool,
}

impl PoolWriter {
    /// A writer for a pool that is complete once all `expected_sources` have reported.
    #[must_use]
    pub fn new(expected_sources: Vec<SourceId>) -> Self {
        Self {
            expected_sources,
            sources: BTreeMap::new(),
            endpoints: Vec::new(),
            positions: AHashMap::new(),
            lost: Vec::new(),
            speed: Arc::default(),
            next_id: 0,
            generation: 0,
            membership: 1,
            dirty: true,
        }
    }

    /// Applies one event.
    pub fn apply(&mut self, event: PoolEvent) {
        match event {
            PoolEvent::Endpoints { source, endpoints } => {
                self.sources.insert(source, endpoints);
                self.reconcile();
            }
            PoolEvent::SourceGone { source } => {
                self.expected_sources.retain(|s| *s != source);
                self.sources.remove(&source);
                self.reconcile();
            }
            PoolEvent::Scraped { id, metrics } => {
                if let Some(state) = self.state_mut(id) {
                    *state = EndpointState::new(state.endpoint.clone(), Some(metrics));
                    self.dirty = true;
                }
            }
            PoolEvent::Restarted { id } => {
                if let Some(state) = self.state_mut(id) {
                    state.endpoint.health.reset();
                    state.endpoint.speed.reset();
                    *state = EndpointState::new(state.endpoint.clone(), None);
                    self.lost.push(id);
                    self.dirty = true;
                }
            }
            PoolEvent::CacheCleared { id } => {
                if self.positions.contains_key(&id) {
                    self.lost.push(id);
                    self.dirty = true;
                }
            }
            PoolEvent::Expect { sources } => self.expect(sources),
        }
    }

    /// Changes which sources make the pool complete, and removes all others.
    pub fn expect(&mut self, expected_sources: Vec<SourceId>) {
        let gone: Vec<SourceId> = self.sources.keys().copied().filter(|s| !expected_sources.contains(s)).collect();
        self.expected_sources = expected_sources;
        for source in gone {
            self.sources.remove(&source);
        }
        self.reconcile();
    }

    /// Returns the next snapshot, if anything has changed since the last one.
    pub fn snapshot(&mut self) -> Option<PoolSnapshot> {
        if !std::mem::take(&mut self.dirty) {
            return None;
        }
        self.generation += 1;
        let synced = self.expected_sources.iter().all(|s| self.sources.contains_key(s));
        let lost = std::mem::take(&mut self.lost);
        Some(PoolSnapshot::new(self.generation, synced, self.endpoints.clone()).after_loss(lost))
    }

    /// Returns what followers of the pool receive about the last snapshot.
    #[must_use]
    pub fn published(&self) -> Published {
        Published { generation: self.generation, membership: self.membership }
    }

    fn state_mut(&mut self, id: EndpointId) -> Option<&mut EndpointState> {
        self.positions.get(&id).and_then(|at| self.endpoints.get_mut(*at))
    }

    /// Updates the endpoints to the sources' lists. An endpoint keeps its id, ledger and health as long as its address
    /// and UID are unchanged; another UID at the same address is another endpoint.
    fn reconcile(&mut self) {
        let mut known: AHashMap<SocketAddr, EndpointState> =
            std::mem::take(&mut self.endpoints).into_iter().map(|s| (s.endpoint.spec.address, s)).collect();
        let mut taken = AHashSet::with_capacity(known.len());
        for spec in self.sources.values().flatten() {
            if !taken.insert(spec.address) {
                continue;
            }
            let same = known.remove(&spec.address).filter(|s| s.endpoint.spec.uid == spec.uid);
            self.endpoints.push(match same {
                Some(state) if state.endpoint.spec == *spec => state,
                Some(state) => state.respecified(spec.clone()),
                None => {
                    let id = EndpointId(self.next_id);
                    self.next_id += 1;
                    EndpointState::new(Arc::new(Endpoint::in_pool(id, spec.clone(), &self.speed)), None)
                }
            });
        }
        let before = std::mem::take(&mut self.positions);
        self.positions = self.endpoints.iter().map(|s| s.endpoint.id).zip(0..).collect();
        self.lost.extend(before.into_keys().filter(|id| !self.positions.contains_key(id)));
        // The next snapshot contains the change.
        self.membership = self.generation + 1;
        self.dirty = true;
    }
}

#[cfg(test)]
mod tests;
