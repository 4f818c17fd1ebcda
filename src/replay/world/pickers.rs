//! The pickers of a simulation, and the bus on which they share state. Owned by [`super::World`]; pure.
//!
//! Requests go to the pickers in turn, as an Envoy sends its streams to the endpoints of a cluster by default.

use crate::front::{Front, FrontConfig};
use attache_pool::PoolEvent;
use attache_sync::{CacheLossSink, MemoryBus, MemoryBusSettings, Outbox, Replica, ReplicaSettings};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use attache_types::params::ParamError;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Key of the simulated cluster.
const CLUSTER_KEY: &[u8] = b"attache replay";

/// Messages between the pickers of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BusTotals {
    /// Number of messages; one to all others counts once.
    pub messages: u64,
    /// Their size, bytes.
    pub bytes: u64,
}

/// The pickers.
#[derive(Debug)]
pub(super) struct Pickers {
    fronts: Vec<Front>,
    exchange: Option<Exchange>,
}

/// What one picker sends, until the bus takes it.
#[derive(Debug, Default)]
struct Outgoing {
    messages: Mutex<Vec<(Option<u64>, Vec<u8>)>>,
    wake: AtomicBool,
}

impl Outbox for Outgoing {
    fn publish(&self, to: Option<u64>, message: Vec<u8>) {
        self.messages.lock().push((to, message));
    }

    fn wake(&self) {
        self.wake.store(true, Relaxed);
    }
}

/// Caches that are lost according to a peer, until the picker drops their records.
#[derive(Debug, Default)]
struct Losses(Mutex<Vec<EndpointId>>);

impl CacheLossSink for Losses {
    fn cache_lost(&self, endpoint: EndpointId) {
        self.0.lock().push(endpoint);
    }
}

/// One picker as a member of the cluster.
#[derive(Debug)]
struct Member {
    replica: Arc<Replica>,
    outgoing: Arc<Outgoing>,
    losses: Arc<Losses>,
    next_tick: Timestamp,
}

/// The exchange between all pickers.
#[derive(Debug)]
struct Exchange {
    bus: MemoryBus,
    members: Vec<Member>,
}

impl Pickers {
    /// Pickers with these configurations, at least one, and the bus between them.
    ///
    /// # Errors
    /// The plugin of `flowControl.ceiling` rejects its parameters.
    pub(super) fn new(configs: Vec<FrontConfig>, bus: Option<MemoryBusSettings>) -> Result<Self, ParamError> {
        let exchange = bus.filter(|_| configs.len() > 1).map(|bus| Exchange {
            bus: MemoryBus::new(configs.len(), bus),
            members: (1..).zip(&configs).map(|(sender, _)| Member::new(sender)).collect(),
        });
        let replica = |i: usize| exchange.as_ref().and_then(|e| e.members.get(i)).map(|member| member.replica.clone());
        let fronts = configs.into_iter().enumerate().map(|(i, config)| Front::new(config, replica(i)));
        let fronts: Vec<Front> = fronts.collect::<Result<_, _>>()?;
        for (front, member) in fronts.iter().zip(exchange.iter().flat_map(|exchange| &exchange.members)) {
            member.replica.set_pools(vec![front.shared_view(member.losses.clone())]);
        }
        Ok(Self { fronts, exchange })
    }

    fn position(&self, request: u64) -> usize {
        (request % self.fronts.len() as u64) as usize
    }

    /// The picker of a request.
    #[expect(clippy::indexing_slicing, reason = "a remainder of the length")]
    pub(super) fn of(&self, request: u64) -> &Front {
        &self.fronts[self.position(request)]
    }

    /// As [`Pickers::of`].
    #[expect(clippy::indexing_slicing, reason = "a remainder of the length")]
    pub(super) fn of_mut(&mut self, request: u64) -> &mut Front {
        let at = self.position(request);
        &mut self.fronts[at]
    }

    /// The first picker. All have the same configuration and endpoints.
    #[expect(clippy::indexing_slicing, reason = "there is at least one")]
    pub(super) fn first(&self) -> &Front {
        &self.fronts[0]
    }

    /// All pickers.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Front> {
        self.fronts.iter()
    }

    /// As [`Pickers::iter`].
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Front> {
        self.fronts.iter_mut()
    }

    /// The picker at a position.
    pub(super) fn get_mut(&mut self, position: usize) -> Option<&mut Front> {
        self.fronts.get_mut(position)
    }

    /// Hands over what has arrived by `now`, and takes what was sent. Returns when to call it again; `None` without a
    /// bus.
    pub(super) fn exchange(&mut self, now: Timestamp) -> Option<Timestamp> {
        let Exchange { bus, members } = self.exchange.as_mut()?;
        while let Some((to, from, message)) = bus.pop(now) {
            if let Some(member) = members.get(to) {
                member.replica.receive(Some(from as u64 + 1), &message, now);
            }
        }
        for member in members.iter_mut() {
            if member.outgoing.wake.swap(false, Relaxed) || member.next_tick <= now {
                member.next_tick = member.replica.tick(now);
            }
        }
        for (from, member) in members.iter().enumerate() {
            for (to, message) in std::mem::take(&mut *member.outgoing.messages.lock()) {
                bus.send(from, to.map(|sender| (sender - 1) as usize), &message, now);
            }
        }
        for (front, member) in self.fronts.iter_mut().zip(members.iter()) {
            let lost = std::mem::take(&mut *member.losses.0.lock());
            if !lost.is_empty() {
                lost.into_iter().for_each(|id| front.apply(PoolEvent::CacheCleared { id }));
                front.publish();
            }
        }
        members.iter().map(|member| member.next_tick).chain(bus.next()).min()
    }

    /// Messages so far.
    pub(super) fn totals(&self) -> BusTotals {
        let members = self.exchange.iter().flat_map(|exchange| &exchange.members);
        members.fold(BusTotals::default(), |sum, member| {
            let stats = member.replica.stats();
            BusTotals {
                messages: sum.messages + stats.sent_messages.load(Relaxed),
                bytes: sum.bytes + stats.sent_bytes.load(Relaxed),
            }
        })
    }
}

impl Member {
    fn new(sender: u64) -> Self {
        let (outgoing, losses) = (Arc::new(Outgoing::default()), Arc::new(Losses::default()));
        let (name, seed) = (format!("picker-{sender}"), ReplicaSettings::seed_of(CLUSTER_KEY));
        let identity = ReplicaSettings { name, sender, seed, origin: 0 };
        let replica = Arc::new(Replica::new(identity, outgoing.clone(), Arc::default()));
        Self { replica, outgoing, losses, next_tick: Timestamp(0) }
    }
}
