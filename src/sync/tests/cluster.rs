//! Several pickers, each with its own view of one pool, on a bus in memory.

use crate::pools::CacheLossSink;
use crate::{
    BookedBlocks, MemoryBus, MemoryBusSettings, Outbox, OwnBooking, OwnRecord, PeerRecord, PoolView, QueueFlows,
    Replica, ReplicaSettings, ServedFlow, Sessions, SharedBooking, SharedPressure, StoredResponses, StrategyRecords,
};
use attache_pool::health::HealthPolicy;
use attache_pool::{Endpoint, EndpointSpec, EndpointState, PoolSnapshot, SnapshotStore};
use attache_prefix::cache::{BlockUnit, CacheConfig, PrefixCache};
use attache_prefix::key::BlockKey;
use attache_scheduling::digest::Digest;
use attache_scheduling::plugin::UserCharge;
use attache_scheduling::policy::Document;
use attache_scheduling::{Booking, ModelPolicies, ModelPolicy, Order};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;

pub(super) const ENDPOINTS: usize = 3;
const STALE_AFTER: Duration = Duration::from_secs(2);

/// Messages that a picker has sent and that the bus has not taken yet.
#[derive(Debug, Default)]
pub(super) struct Sent(pub(super) Mutex<Vec<(Option<u64>, Vec<u8>)>>);

impl Outbox for Sent {
    fn publish(&self, to: Option<u64>, message: Vec<u8>) {
        self.0.lock().push((to, message));
    }

    fn wake(&self) {}
}

#[derive(Debug, Default)]
pub(super) struct Losses(pub(super) Mutex<Vec<EndpointId>>);

impl CacheLossSink for Losses {
    fn cache_lost(&self, endpoint: EndpointId) {
        self.0.lock().push(endpoint);
    }
}

/// What peers have recorded, as the strategies of a picker get it.
#[derive(Debug, Default)]
pub(super) struct Records(pub(super) Mutex<Vec<String>>);

impl StrategyRecords for Records {
    fn observe(&self, strategy: &str, model: &str, trail: &Digest, endpoint: EndpointId, _: Timestamp) {
        self.0.lock().push(format!("{strategy}: {model} {trail:?} at {}", endpoint.0));
    }

    fn moved(&self, _: &PeerRecord, from: EndpointId, to: EndpointId, _: Timestamp) {
        self.0.lock().push(format!("moved from {} to {}", from.0, to.0));
    }

    fn charged(&self, strategy: &str, charge: UserCharge, _: Timestamp) {
        self.0.lock().push(format!("{strategy}: {} tokens for {}", charge.tokens, charge.user));
    }
}

impl QueueFlows for Records {
    fn freed(self: Arc<Self>, _: Timestamp) {
        self.0.lock().push("freed".to_owned());
    }

    fn served(&self, served: ServedFlow) {
        self.0.lock().push(format!("{served:?}"));
    }
}

impl Sessions for Records {
    fn ended(&self, session: u64) {
        self.0.lock().push(format!("session {session} ended"));
    }
}

/// The stored responses that a picker knows of peers.
#[derive(Debug, Default)]
pub(super) struct Responses(pub(super) Mutex<Vec<(u64, EndpointId)>>);

impl StoredResponses for Responses {
    fn stored(&self, _: &Arc<str>, response: u64, owner: EndpointId) {
        self.0.lock().push((response, owner));
    }
}

/// One picker.
pub(super) struct Member {
    pub(super) records: Arc<Records>,
    pub(super) responses: Arc<Responses>,
    pub(super) pressure: Arc<SharedPressure>,
    pub(super) policies: Arc<ModelPolicies>,
    pub(super) replica: Arc<Replica>,
    pub(super) store: Arc<SnapshotStore>,
    pub(super) cache: Arc<PrefixCache>,
    pub(super) losses: Arc<Losses>,
    pub(super) sent: Arc<Sent>,
}

/// A request that a picker has routed: its own booking, and the one that the others see.
pub(super) struct Routed {
    pub(super) picker: usize,
    pub(super) booking: Booking,
    pub(super) shared: SharedBooking,
    pub(super) begun: bool,
}

pub(super) struct Cluster {
    pub(super) members: Vec<Member>,
    pub(super) bus: MemoryBus,
    pub(super) now: Timestamp,
    pool: Arc<str>,
    next_sender: u64,
}

impl Member {
    /// Its pool under another name.
    pub(super) fn view(&self, name: &str) -> PoolView {
        PoolView {
            name: name.into(),
            store: self.store.clone(),
            cache: Some(self.cache.clone()),
            health: HealthPolicy::default(),
            stale_after: STALE_AFTER,
            records: self.records.clone(),
            flows: Some(self.records.clone()),
            losses: self.losses.clone(),
        }
    }
}

impl Cluster {
    pub(super) fn new(pickers: usize, bus: MemoryBusSettings) -> Self {
        let mut cluster = Self {
            members: Vec::new(),
            bus: MemoryBus::new(pickers, bus),
            now: Timestamp(1_000_000_000),
            pool: "pool".into(),
            next_sender: 0,
        };
        for _ in 0..pickers {
            let member = cluster.member();
            cluster.members.push(member);
        }
        cluster
    }

    /// A picker that has just started.
    pub(super) fn member(&mut self) -> Member {
        let name = format!("picker-{}", self.next_sender + 1);
        self.named(name)
    }

    fn named(&mut self, name: String) -> Member {
        self.next_sender += 1;
        let endpoint = |i: usize| {
            let spec = EndpointSpec::at(([10, 0, 0, 1], 8000 + i as u16).into());
            EndpointState::new(Arc::new(Endpoint::new(EndpointId(i as u32), spec)), None)
        };
        let snapshot = PoolSnapshot::new(1, true, (0..ENDPOINTS).map(endpoint).collect());
        let cache = Arc::new(PrefixCache::new(&CacheConfig {
            claim_every_block: false,
            unit: BlockUnit::Tokens(16),
            max_bytes: 16 << 20,
            tenant_share: 1.0,
            claim_life: Duration::from_secs(60),
            seed: 7,
        }));
        cache.reconcile(&snapshot);
        let (store, losses, sent) = (Arc::new(SnapshotStore::default()), Arc::new(Losses::default()), Arc::default());
        store.publish(snapshot);
        let (records, responses, pressure) = (Arc::<Records>::default(), Arc::<Responses>::default(), Arc::default());
        let settings = ReplicaSettings { name, sender: self.next_sender, seed: 7, origin: 0 };
        let replica = Replica::new(settings, Arc::clone(&sent) as Arc<dyn Outbox>, Arc::clone(&pressure));
        replica.set_responses(responses.clone());
        replica.set_sessions(records.clone());
        let policies: Arc<ModelPolicies> = Arc::default();
        replica.set_policies(policies.clone());
        let replica = Arc::new(replica);
        let member = Member { records, responses, pressure, policies, replica, store, cache, losses, sent };
        member.replica.set_pools(vec![member.view("pool")]);
        member
    }

    /// Restarts a picker under its name, with nothing of its state.
    pub(super) fn restart(&mut self, picker: usize) {
        self.members[picker] = self.named(format!("picker-{}", picker + 1));
    }

    /// Routes a request of `picker` to an endpoint.
    pub(super) fn route(&mut self, picker: usize, endpoint: usize, keys: &[BlockKey]) -> Routed {
        let member = &self.members[picker];
        let snapshot = member.store.load_full();
        let endpoint = snapshot.endpoints[endpoint].endpoint.clone();
        let update = member.cache.lookup(&mut &*keys, self.now).prefix_update(endpoint.id, keys.to_vec(), true);
        let prompt_tokens = keys.len() as u32 * 16;
        let trail = Digest::from_slice(&[1, 2]);
        let booked = OwnBooking {
            endpoint: member.replica.key(&self.pool, &endpoint.spec),
            prompt_tokens,
            cached_tokens: update.foretold,
            understood: true,
            streams: true,
            arrives: false,
            model: "m",
            share: 0.0,
            rank: Some(1),
            record: Some(OwnRecord {
                strategy: "s",
                trail: Some(&trail),
                charge: Some(UserCharge { user: 5, tokens: u64::from(prompt_tokens) }),
            }),
            blocks: Some(BookedBlocks {
                keys,
                whole: true,
                tenant: 0,
                text_bytes: 0,
                own_keys: false,
                tells_cached: true,
            }),
        };
        let shared = member.replica.book(&self.pool, &booked, self.now);
        let order = Order {
            model: "m",
            prompt_tokens,
            cached_tokens: update.foretold,
            understood: true,
            streams: true,
            arrives: false,
            share: 0.0,
            prefix_update: Some((member.cache.clone(), update)),
        };
        let booking = Booking::new(endpoint, &snapshot, STALE_AFTER, order, self.now);
        Routed { picker, booking, shared, begun: false }
    }

    /// Time passes: messages are delivered, and timers run.
    pub(super) fn pass(&mut self, time: Duration) {
        let end = self.now.after(time);
        loop {
            self.collect();
            let next = self.bus.next().unwrap_or(end).min(self.now.after(Duration::from_millis(1))).min(end);
            self.now = self.now.max(next);
            while let Some((to, from, message)) = self.bus.pop(self.now) {
                let sender = self.members[from].replica.sender();
                // A restarted picker sends under its new identity only.
                let vouched = Some(sender).filter(|_| from < self.members.len());
                self.members[to].replica.receive(vouched, &message, self.now);
            }
            for member in &self.members {
                let _ = member.replica.tick(self.now);
            }
            if self.now >= end {
                return self.collect();
            }
        }
    }

    /// Hands what the pickers have sent to the bus.
    fn collect(&mut self) {
        for from in 0..self.members.len() {
            let sent = std::mem::take(&mut *self.members[from].sent.0.lock());
            for (to, message) in sent {
                let to = to.map(|to| self.members.iter().position(|member| member.replica.sender() == to));
                // To a picker that is gone: lost.
                if to != Some(None) {
                    self.bus.send(from, to.flatten(), &message, self.now);
                }
            }
        }
    }

    /// What each picker counts on each endpoint: requests in flight, and tokens to prefill.
    pub(super) fn loads(&self) -> Vec<Vec<(u32, u64)>> {
        let load = |member: &Member| {
            let snapshot = member.store.load();
            let one =
                |state: &EndpointState| (state.endpoint.ledger.in_flight(), state.endpoint.ledger.prefill_tokens());
            snapshot.endpoints.iter().map(one).collect()
        };
        self.members.iter().map(load).collect()
    }

    /// Diverted requests of all pickers, as each picker counts them.
    pub(super) fn pressures(&self) -> Vec<u64> {
        let sum = |member: &Member| member.pressure.list(self.now).iter().map(|row| row.all).sum();
        self.members.iter().map(sum).collect()
    }

    /// A change by the admin API of a picker.
    pub(super) fn change_policy(&self, picker: usize, document: &serde_json::Value) {
        let (member, document) = (&self.members[picker], Document::read(document).unwrap());
        member.policies.change(&document, member.replica.unix_ms(self.now)).unwrap();
        member.replica.policy_changed(&document.model, self.now);
    }

    /// Removal of a model's policy by the admin API of a picker.
    pub(super) fn remove_policy(&self, picker: usize, model: &str) {
        let member = &self.members[picker];
        assert!(member.policies.remove(model, member.replica.unix_ms(self.now)));
        member.replica.policy_changed(model, self.now);
    }

    /// All policies of each picker.
    pub(super) fn policies(&self) -> Vec<Vec<(String, ModelPolicy)>> {
        let all = |member: &Member| member.policies.all().iter().map(|(m, policy)| (m.to_string(), *policy)).collect();
        self.members.iter().map(all).collect()
    }

    /// Blocks of a prompt that each picker expects on each endpoint.
    pub(super) fn depths(&self, keys: &[BlockKey]) -> Vec<[u32; ENDPOINTS]> {
        let depth = |member: &Member| {
            let found = member.cache.lookup(&mut &*keys, self.now);
            std::array::from_fn(|i| found.depth(EndpointId(i as u32)).any)
        };
        self.members.iter().map(depth).collect()
    }
}
