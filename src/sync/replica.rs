//! This picker as a member of the cluster: what it sends, and what it receives.

use crate::bus::Outbox;
use crate::generated::v1;
use crate::identity::{member_of, token_of};
use crate::joining::Joining;
use crate::own::{Own, OwnBooking};
use crate::paths::PathBook;
use crate::peer::{FORGET_AFTER, PeerState, SILENT_AFTER};
use crate::policies;
use crate::pools::{EndpointKey, PoolView, Pools};
use crate::pressure::SharedPressure;
use crate::rate::Rates;
use crate::records::{ServedFlow, Sessions, StoredResponses, seal_service};
use crate::remote_request::ApplyContext;
use crate::serving::Serving;
use crate::stats::{SyncStats, add};
use crate::unknown_bookings::UnknownBookings;
use crate::wire::{self, HEARTBEAT_EVERY, MAX_PEERS, encode};
use ahash::AHashMap;
use attache_pool::{Endpoint, EndpointSpec};
use attache_protocol::Usage;
use attache_scheduling::ModelPolicies;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use parking_lot::Mutex;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use v1::message::Body;
use xxhash_rust::xxh3::xxh3_64;

/// Longest name of a peer that is shown, characters.
const MAX_NAME: usize = 256;
/// A loss that a peer has announced is not announced again for this long.
const LOSS_KNOWN: Duration = Duration::from_secs(5);

/// Identity of this picker in its cluster.
#[derive(Clone, Debug)]
pub struct ReplicaSettings {
    /// Name of the picker, for people: the pod's name.
    pub name: String,
    /// Identity of this process, not 0; see [`crate::sender_of`].
    pub sender: u64,
    /// The cluster's key, from which all pickers derive equal block keys and endpoint incarnations.
    pub seed: u64,
    /// Unix time of the origin of all timestamps, milliseconds.
    pub origin: u64,
}

impl ReplicaSettings {
    /// The seed that follows from the cluster's key.
    #[must_use]
    pub fn seed_of(key: &[u8]) -> u64 {
        xxh3_64(key)
    }
}

/// A peer as this picker sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerStatus {
    /// Identity of its process.
    pub sender: u64,
    /// Its name; empty before its first heartbeat.
    pub name: String,
    /// Time since its last message.
    pub silent: Duration,
    /// Its requests in flight.
    pub requests: usize,
    /// Whether some of its changes are missing here.
    pub behind: bool,
}

/// This picker in its cluster. All methods take a short lock.
#[derive(Debug)]
pub struct Replica {
    pub(crate) settings: ReplicaSettings,
    pub(crate) stats: Arc<SyncStats>,
    pub(crate) outbox: Arc<dyn Outbox>,
    own: Mutex<Own>,
    paths: Mutex<PathBook>,
    unknown_bookings: Mutex<UnknownBookings>,
    pressure: Arc<SharedPressure>,
    responses: OnceLock<Arc<dyn StoredResponses>>,
    policies: OnceLock<Arc<ModelPolicies>>,
    sessions: OnceLock<Arc<dyn Sessions>>,
    rates: Mutex<Rates>,
    pub(crate) peers: Mutex<Peers>,
}

#[derive(Debug)]
pub(crate) struct Peers {
    pub(crate) pools: Pools,
    pub(crate) states: AHashMap<u64, PeerState>,
    next_heartbeat: Timestamp,
    /// Losses that were announced, by any picker, with their times.
    pub(crate) losses: AHashMap<u64, Timestamp>,
    pub(crate) joining: Joining,
    pub(crate) serving: Serving,
}

impl Replica {
    /// A member that sends through `outbox`, and shares the counts of `pressure`.
    #[must_use]
    pub fn new(settings: ReplicaSettings, outbox: Arc<dyn Outbox>, pressure: Arc<SharedPressure>) -> Self {
        pressure.join(settings.sender, outbox.clone());
        let stats = Arc::new(SyncStats::default());
        let peers = Peers {
            pools: Pools::new(settings.seed),
            states: AHashMap::new(),
            next_heartbeat: Timestamp(0),
            losses: AHashMap::new(),
            joining: Joining::new(settings.sender),
            serving: Serving::default(),
        };
        Self {
            own: Mutex::new(Own::new(settings.sender, settings.seed, outbox.clone(), stats.clone())),
            settings,
            stats,
            outbox,
            paths: Mutex::default(),
            unknown_bookings: Mutex::default(),
            pressure,
            responses: OnceLock::new(),
            policies: OnceLock::new(),
            sessions: OnceLock::new(),
            rates: Mutex::default(),
            peers: Mutex::new(peers),
        }
    }

    /// The cluster's key, from which hashes follow that all pickers share.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.settings.seed
    }

    /// Sets what receives the endpoints that store responses, once.
    pub fn set_responses(&self, responses: Arc<dyn StoredResponses>) {
        // A process has one table.
        let _ = self.responses.set(responses);
    }

    /// Sets the policies of models, which all pickers share, once.
    pub fn set_policies(&self, policies: Arc<ModelPolicies>) {
        // A process has one table.
        let _ = self.policies.set(policies);
    }

    /// Sets what receives the ends of sessions, once.
    pub fn set_sessions(&self, sessions: Arc<dyn Sessions>) {
        // A process has one picker.
        let _ = self.sessions.set(sessions);
    }

    /// Reports that the session whose tenant and id have this hash under the cluster's key has ended.
    pub fn session_ended(&self, session: u64, now: Timestamp) {
        self.own.lock().session_ended(session, now);
    }

    /// The Unix time of `now`, in milliseconds.
    #[must_use]
    pub fn unix_ms(&self, now: Timestamp) -> u64 {
        self.settings.origin.saturating_add(now.0 / 1_000_000)
    }

    /// Sends the last change of a model's policy, which the admin API of this picker has made.
    pub fn policy_changed(&self, model: &str, now: Timestamp) {
        let change = self.policies.get().and_then(|policies| policies::of_model(policies, model));
        if let Some(change) = change {
            self.own.lock().push(change, now);
        }
    }

    /// Reports that `endpoint` of `pool` stores the response whose id has this hash under the cluster's key.
    pub fn stored(&self, pool: &str, endpoint: &EndpointSpec, response: u64, now: Timestamp) {
        self.own.lock().stored(self.key(pool, endpoint), response, now);
    }

    /// Reports that a request of a queue's flow has ended.
    pub fn served(&self, pool: &str, served: ServedFlow, now: Timestamp) {
        let seed = self.settings.seed;
        self.own.lock().served(seal_service(seed, Pools::key(seed, pool), served), now);
    }

    /// Sets the pools of this picker. Their empty caches import the index of a peer.
    pub fn set_pools(&self, views: Vec<PoolView>) {
        let mut peers = self.peers.lock();
        let Peers { pools, joining, .. } = &mut *peers;
        pools.set(views);
        joining.set_pools(pools.keyed());
    }

    /// The counters of the exchange.
    #[must_use]
    pub fn stats(&self) -> &SyncStats {
        &self.stats
    }

    /// The name of this picker as a token of a subject.
    #[must_use]
    pub fn token(&self) -> String {
        token_of(&self.settings.name)
    }

    /// The identity of this process.
    #[must_use]
    pub fn sender(&self) -> u64 {
        self.settings.sender
    }

    /// The incarnation of an endpoint of `pool`.
    #[must_use]
    pub fn key(&self, pool: &str, spec: &EndpointSpec) -> EndpointKey {
        EndpointKey::of(self.settings.seed, pool, spec)
    }

    /// Number of bookings that peers have probably made and that have not arrived yet, and the uncached tokens of each.
    #[must_use]
    pub fn unknown_bookings(&self, now: Timestamp) -> (u32, u32) {
        self.unknown_bookings.lock().expected(now)
    }

    /// Publishes a booking at once, and follows its request.
    #[must_use]
    pub fn book(self: &Arc<Self>, pool: &Arc<str>, booking: &OwnBooking<'_>, now: Timestamp) -> SharedBooking {
        if booking.understood {
            self.unknown_bookings.lock().booked(booking.prompt_tokens.saturating_sub(booking.cached_tokens), now);
        }
        let request = self.own.lock().book(booking, &self.paths, now);
        SharedBooking { replica: self.clone(), pool: pool.clone(), request, open: true }
    }

    /// Announces those of the `lost` endpoints of `pool` of whose cache something is recorded. Call it before their
    /// records are dropped and before the snapshot that names them is published.
    pub fn announce_losses(&self, pool: &str, lost: &[EndpointId], now: Timestamp) {
        if lost.is_empty() {
            return;
        }
        let mut peers = self.peers.lock();
        let Peers { pools, losses, .. } = &mut *peers;
        losses.retain(|_, at| at.after(LOSS_KNOWN) > now);
        let Some((view, cache)) = pools.view(pool).and_then(|view| Some((view, view.cache.as_ref()?))) else { return };
        let before = view.store.load();
        let known = lost.iter().filter_map(|id| {
            let at = before.endpoints.binary_search_by_key(id, |state| state.endpoint.id).ok()?;
            before.endpoints.get(at)
        });
        for state in known {
            let key = self.key(pool, &state.endpoint.spec);
            if cache.weight(state.endpoint.id, now) > 0.0 && losses.insert(key.0, now).is_none() {
                self.own.lock().lost(key, now);
            }
        }
    }

    /// Reads a message. `from` is the sender that the transport vouches for, if it does.
    pub fn receive(&self, from: Option<u64>, message: &[u8], now: Timestamp) {
        if from.is_some_and(|from| !self.rates.lock().allow(member_of(from), message.len(), now)) {
            return add(&self.stats.excess_messages, 1);
        }
        let Some((sender, body)) = self.read(from, message) else { return };
        if from.is_some_and(|from| !self.rates.lock().charge(member_of(from), wire::cost(&body), now)) {
            return add(&self.stats.excess_messages, 1);
        }
        add(&self.stats.received_messages, 1);
        add(&self.stats.received_bytes, message.len() as u64);
        if let Body::Resend(asked) = &body {
            if !self.may_ask(sender, now) {
                return add(&self.stats.excess_messages, 1);
            }
            let mut own = self.own.lock();
            own.resend(sender, asked, &self.paths);
            if asked.pressure {
                own.send_state(sender, self.pressure.state());
            }
            if let Some(policies) = self.policies.get().filter(|_| asked.policies) {
                own.send_state(sender, policies::all(policies));
            }
            return;
        }
        match self.apply(sender, body, now) {
            Some(Body::SnapshotChunk(chunk)) => self.import(sender, chunk, now),
            Some(_) if self.serve(now).is_some() => self.outbox.wake(),
            _ => {}
        }
    }

    /// Whether a `Resend` of this peer is answered now.
    fn may_ask(&self, sender: u64, now: Timestamp) -> bool {
        let states = &mut self.peers.lock().states;
        if !admit(states, sender, now) {
            return false;
        }
        states.entry(sender).or_insert_with(|| PeerState::new(now)).may_ask(now)
    }

    /// Applies a message. Returns what remains to be done without a lock: a chunk, or a request for one.
    fn apply(&self, sender: u64, mut body: Body, now: Timestamp) -> Option<Body> {
        let mut peers = self.peers.lock();
        let Peers { pools, states, losses, joining, serving, .. } = &mut *peers;
        if !admit(states, sender, now) {
            add(&self.stats.refused_senders, 1);
            return None;
        }
        if let Body::Heartbeat(heartbeat) = &mut body {
            heartbeat.name = heartbeat.name.chars().take(MAX_NAME).collect();
            Self::drop_predecessors(states, sender, &heartbeat.name, now);
        }
        if let Body::Batch(batch) = &mut body {
            // A loss that was announced just now is no news, whoever repeats it.
            batch.events.retain(|event| match &event.kind {
                Some(v1::event::Kind::Lost(lost)) if pools.locate(lost.endpoint).is_some() => {
                    let is_known = losses.get(&lost.endpoint).is_some_and(|at| at.after(LOSS_KNOWN) > now);
                    if !is_known {
                        losses.insert(lost.endpoint, now);
                    }
                    !is_known
                }
                _ => true,
            });
            let mut unknown_bookings = self.unknown_bookings.lock();
            for event in &batch.events {
                if let Some(v1::event::Kind::Booked(booked)) = &event.kind
                    && booked.understood
                {
                    unknown_bookings.received(booked.prompt_tokens.saturating_sub(booked.cached_tokens), now);
                }
            }
        }
        let is_heartbeat = matches!(body, Body::Heartbeat(_));
        let peer = states.entry(sender).or_insert_with(|| PeerState::new(now));
        peer.last_message = now;
        let mut cx = self.apply_context(sender, pools, now);
        let asks = match body {
            Body::Batch(batch) => {
                peer.batch(batch, &mut cx);
                None
            }
            Body::Heartbeat(heartbeat) => peer.heartbeat(heartbeat, &mut cx),
            Body::Column(part) => {
                peer.full_state(part, &mut cx);
                None
            }
            Body::Resend(_) => None,
            Body::SnapshotRequest(request) => {
                serving.ask(sender, request);
                return Some(body);
            }
            Body::SnapshotChunk(_) => return Some(body),
        };
        let ended = std::mem::take(&mut peer.ended_sessions);
        self.ask(sender, asks);
        if peer.has_requests() || (is_heartbeat && joining.wants_peer()) {
            self.outbox.wake();
        }
        drop(peers);
        // Without the lock, because the picker takes its own ones.
        if let Some(sessions) = self.sessions.get() {
            ended.into_iter().for_each(|session| sessions.ended(session));
        }
        None
    }

    fn apply_context<'s>(&'s self, sender: u64, pools: &'s mut Pools, now: Timestamp) -> ApplyContext<'s> {
        let (seed, responses) = (self.settings.seed, self.responses.get().map(|responses| &**responses));
        let (paths, pressure, policies) = (&self.paths, &*self.pressure, self.policies.get().map(|all| &**all));
        let unix_ms = self.unix_ms(now);
        ApplyContext { sender, seed, pools, paths, pressure, responses, policies, unix_ms, stats: &self.stats, now }
    }

    /// The sender and the content of a message; `None` for an invalid one and for one that others get.
    fn read(&self, from: Option<u64>, message: &[u8]) -> Option<(u64, Body)> {
        let valid = wire::decode(message).filter(|read| from.is_none_or(|from| from == read.sender));
        let Some(v1::Message { sender, receiver, body, .. }) = valid else {
            add(&self.stats.invalid_messages, 1);
            return None;
        };
        let own = sender == self.settings.sender;
        // A body of a newer minor version is none that this picker knows.
        body.filter(|_| !own && (receiver == 0 || receiver == self.settings.sender)).map(|body| (sender, body))
    }

    /// Drops the state of an earlier process of the same name.
    fn drop_predecessors(states: &mut AHashMap<u64, PeerState>, sender: u64, name: &str, now: Timestamp) {
        states.retain(|other, peer| {
            let is_other = *other == sender || member_of(*other) != member_of(sender) || peer.name != name;
            is_other || now.since(peer.last_message) < 2 * HEARTBEAT_EVERY
        });
    }

    fn ask(&self, peer: u64, asks: Option<v1::Resend>) {
        if let Some(asks) = asks {
            self.send(peer, Body::Resend(asks));
        }
    }

    /// Sends a message to one peer.
    pub(crate) fn send(&self, peer: u64, body: Body) {
        let message = encode(self.settings.sender, Some(peer), body);
        add(&self.stats.sent_messages, 1);
        add(&self.stats.sent_bytes, message.len() as u64);
        self.outbox.publish(Some(peer), message);
    }

    /// Sends what is due: pending changes, the heartbeat, requests for what was missed. Drops silent peers. Returns
    /// when to call it again at the latest.
    pub fn tick(&self, now: Timestamp) -> Timestamp {
        let next = self.tick_peers(now);
        let transfers = [self.serve(now), self.pull(now)];
        transfers.into_iter().flatten().fold(next, Timestamp::min)
    }

    fn tick_peers(&self, now: Timestamp) -> Timestamp {
        let mut peers = self.peers.lock();
        let Peers { pools, states, next_heartbeat, joining, .. } = &mut *peers;
        states.retain(|_, peer| peer.last_message.after(FORGET_AFTER) > now);
        let silent = states.values_mut().filter(|peer| peer.last_message.after(SILENT_AFTER) <= now);
        let dropped = silent.map(|peer| u64::from(peer.silence())).sum();
        add(&self.stats.dropped_states, dropped);
        if dropped > 0 {
            pools.freed(now);
        }
        let mut own = self.own.lock();
        if *next_heartbeat <= now {
            *next_heartbeat = now.after(HEARTBEAT_EVERY);
            let policies = self.policies.get().map_or(0, |policies| policies::digest(policies));
            own.heartbeat(&self.settings.name, joining.joins(now), pools.ejected(now), policies);
        }
        for change in self.pressure.changes() {
            own.push(change, now);
        }
        if own.flush_at().is_some_and(|at| at <= now) {
            own.flush();
        }
        let next = own.flush_at().unwrap_or(*next_heartbeat).min(*next_heartbeat);
        drop(own);
        let live = states.iter().filter(|(_, peer)| peer.last_message.after(SILENT_AFTER) > now);
        let (before, peers) = live.fold((0, 0), |(before, peers), (sender, _)| {
            (before + usize::from(*sender < self.settings.sender), peers + 1)
        });
        self.unknown_bookings.lock().set_place(before, peers + 1);
        let mut behind = false;
        let live = states.iter_mut().filter(|(_, peer)| peer.last_message.after(SILENT_AFTER) > now);
        for (sender, peer) in live {
            let mut cx = self.apply_context(*sender, pools, now);
            let asks = peer.overdue(&mut cx);
            self.ask(*sender, asks);
            behind |= peer.has_requests();
        }
        if behind { next.min(now.after(Duration::from_millis(20))) } else { next }
    }

    /// The peers, by name.
    #[must_use]
    pub fn peers(&self, now: Timestamp) -> Vec<PeerStatus> {
        let peers = self.peers.lock();
        let status = |(sender, peer): (&u64, &PeerState)| PeerStatus {
            sender: *sender,
            name: peer.name.clone(),
            silent: now.since(peer.last_message),
            requests: peer.requests(),
            behind: peer.is_behind(),
        };
        let mut all: Vec<PeerStatus> = peers.states.iter().map(status).collect();
        all.sort_by(|a, b| (&a.name, a.sender).cmp(&(&b.name, b.sender)));
        all
    }
}

/// Whether there is a state for `sender`, or one can be made for it. When there are too many, one of a silent sender
/// makes room, or one of the picker with the most senders if the new one's has fewer.
fn admit(states: &mut AHashMap<u64, PeerState>, sender: u64, now: Timestamp) -> bool {
    if states.len() < MAX_PEERS || states.contains_key(&sender) {
        return true;
    }
    let silent = states.iter().filter(|(_, peer)| peer.last_message.after(SILENT_AFTER) <= now);
    let silent = silent.min_by_key(|(sender, peer)| (peer.last_message, **sender)).map(|(sender, _)| *sender);
    let excess = || {
        let mut senders: AHashMap<u32, usize> = AHashMap::new();
        states.keys().for_each(|sender| *senders.entry(member_of(*sender)).or_default() += 1);
        let (largest, most) =
            senders.iter().map(|(member, count)| (*member, *count)).max_by_key(|(_, count)| *count)?;
        let own = senders.get(&member_of(sender)).copied().unwrap_or(0);
        let of_largest = states.iter().filter(|(sender, _)| member_of(**sender) == largest);
        // A sender without a name has sent no heartbeat.
        let by_proof = |(sender, peer): &(&u64, &PeerState)| (!peer.name.is_empty(), peer.last_message, **sender);
        of_largest.min_by_key(by_proof).map(|(sender, _)| *sender).filter(|_| own + 1 < most)
    };
    silent.or_else(excess).and_then(|sender| states.remove(&sender)).is_some()
}

/// A booking of this picker that its peers know. Drop reports a disconnect.
#[derive(Debug)]
pub struct SharedBooking {
    replica: Arc<Replica>,
    pool: Arc<str>,
    request: u64,
    open: bool,
}

impl SharedBooking {
    /// Reports that the gateway used another endpoint.
    pub fn moved(&self, endpoint: &Endpoint, now: Timestamp) {
        let key = self.replica.key(&self.pool, &endpoint.spec);
        self.replica.own.lock().moved(self.request, key, now);
    }

    /// Reports that a split request was sent to its endpoint; `from` computes the prompt within `seconds`.
    pub fn dispatched(&self, from: Option<&Endpoint>, seconds: f64, now: Timestamp) {
        let from = from.map(|endpoint| self.replica.key(&self.pool, &endpoint.spec));
        self.replica.own.lock().dispatched(self.request, from, seconds, now);
    }

    /// Reports the first byte of the response.
    pub fn first_byte(&self, good: bool, is_first_token: bool, now: Timestamp) {
        self.replica.own.lock().first_byte(self.request, good, is_first_token, now);
    }

    /// Reports the end of the response. `keys` are the blocks that it appended to those of the prompt.
    pub fn ended(mut self, complete: bool, usage: &Usage, keys: Vec<u64>, now: Timestamp) {
        self.open = false;
        self.end(complete, usage, keys, now);
    }

    fn end(&self, complete: bool, usage: &Usage, keys: Vec<u64>, now: Timestamp) {
        let ended = v1::Ended {
            request: self.request,
            complete,
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            cached_tokens: usage.cached_tokens,
            keys,
            ..v1::Ended::default()
        };
        self.replica.own.lock().ended(ended, &self.replica.paths, now);
    }
}

impl Drop for SharedBooking {
    fn drop(&mut self) {
        if self.open {
            // The time is unknown here, so that the next call of `tick` sends it.
            self.end(false, &Usage::default(), Vec::new(), Timestamp(0));
        }
    }
}
