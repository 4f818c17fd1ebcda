//! What other parts record about requests, shared with peers: the prefixes of `prefix-affinity`, the charges of
//! `vtc-basic` and of the queues' flows, the endpoints that store responses, and the ends of sessions.

use crate::generated::v1;
use crate::seal::{seal, unseal};
use attache_scheduling::Pool;
use attache_scheduling::digest::Digest;
use attache_scheduling::plugin::UserCharge;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use std::sync::Arc;

/// Longest trail that a peer may send.
const MAX_TRAIL: usize = 64;

/// What a strategy of this picker recorded about a request.
#[derive(Clone, Copy, Debug)]
pub struct OwnRecord<'a> {
    /// Name of the strategy in the configuration.
    pub strategy: &'a str,
    /// What its `picked` returned.
    pub trail: Option<&'a Digest>,
    /// What it charged the user.
    pub charge: Option<UserCharge>,
}

/// The record as peers get it; `None` without content.
pub(crate) fn sealed(seed: u64, record: &OwnRecord<'_>) -> Option<v1::Recorded> {
    let OwnRecord { strategy, trail, charge } = *record;
    if trail.is_none() && charge.is_none() {
        return None;
    }
    let trail = trail.into_iter().flatten().map(|hash| seal(seed, *hash)).collect();
    let (user, tokens) = charge.map_or((0, 0), |charge| (seal(seed, charge.user), charge.tokens));
    Some(v1::Recorded { strategy: strategy.to_owned(), trail, user, tokens })
}

/// The strategies of a pool.
pub trait StrategyRecords: Send + Sync + std::fmt::Debug {
    /// A peer has sent a request for `model` to `endpoint`; its strategy of this name returned `trail`.
    fn observe(&self, strategy: &str, model: &str, trail: &Digest, endpoint: EndpointId, now: Timestamp);

    /// The gateway of the peer has used the endpoint `to` instead of `from`.
    fn moved(&self, record: &PeerRecord, from: EndpointId, to: EndpointId, now: Timestamp);

    /// A peer's strategy of this name has charged a user.
    fn charged(&self, strategy: &str, charge: UserCharge, now: Timestamp);
}

impl StrategyRecords for Pool {
    fn observe(&self, strategy: &str, model: &str, trail: &Digest, endpoint: EndpointId, now: Timestamp) {
        self.scheduler.choices.named(strategy).for_each(|strategy| strategy.observe(model, trail, endpoint, now));
    }

    fn moved(&self, record: &PeerRecord, from: EndpointId, to: EndpointId, now: Timestamp) {
        let PeerRecord { strategy, model, trail } = record;
        self.scheduler.choices.named(strategy).for_each(|strategy| strategy.moved(model, trail, from, to, now));
    }

    fn charged(&self, strategy: &str, charge: UserCharge, now: Timestamp) {
        self.scheduler.choices.named(strategy).for_each(|strategy| strategy.charged(charge, now));
    }
}

/// What a strategy has recorded about a request of a peer, until the request ends.
#[derive(Debug)]
pub struct PeerRecord {
    strategy: String,
    model: String,
    trail: Digest,
}

/// Longest name of a strategy or a model with a record, bytes.
const MAX_NAME: usize = 256;

/// Applies a peer's record of a request that it sent to `endpoint`. Returns what a move of the request needs.
pub(crate) fn apply(
    seed: u64,
    recorded: v1::Recorded,
    model: &str,
    records: &dyn StrategyRecords,
    endpoint: EndpointId,
    now: Timestamp,
) -> Option<Box<PeerRecord>> {
    let v1::Recorded { strategy, trail, user, tokens } = recorded;
    if strategy.len().max(model.len()) > MAX_NAME {
        return None;
    }
    if user != 0 {
        records.charged(&strategy, UserCharge { user: unseal(seed, user), tokens }, now);
    }
    let trail: Digest = trail.iter().take(MAX_TRAIL).map(|hash| unseal(seed, *hash)).collect();
    if trail.is_empty() {
        return None;
    }
    records.observe(&strategy, model, &trail, endpoint, now);
    Some(Box::new(PeerRecord { strategy, model: model.to_owned(), trail }))
}

/// Service that a flow of a queue received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServedFlow {
    /// Priority of its band.
    pub priority: i32,
    /// Hash of its name, equal on all pickers.
    pub flow: u64,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of the response.
    pub completion_tokens: u32,
}

/// The queue of a pool.
pub trait QueueFlows: Send + Sync + std::fmt::Debug {
    /// A peer has served a request of a flow.
    fn served(&self, served: ServedFlow);

    /// Requests of peers may have freed capacity.
    fn freed(self: Arc<Self>, now: Timestamp);
}

/// The service of a flow as peers get it. `pool` is the key of its pool.
pub(crate) fn seal_service(seed: u64, pool: u64, served: ServedFlow) -> v1::Served {
    let ServedFlow { priority, flow, prompt_tokens, completion_tokens } = served;
    v1::Served { pool, priority, flow: seal(seed, flow), prompt_tokens, completion_tokens }
}

/// The service that a peer reports.
pub(crate) fn unseal_service(seed: u64, served: &v1::Served) -> ServedFlow {
    let v1::Served { priority, flow, prompt_tokens, completion_tokens, .. } = *served;
    ServedFlow { priority, flow: unseal(seed, flow), prompt_tokens, completion_tokens }
}

/// The endpoints that store responses.
pub trait StoredResponses: Send + Sync + std::fmt::Debug {
    /// Endpoint `owner` of `pool` stores the response whose id has this hash under the cluster's key.
    fn stored(&self, pool: &Arc<str>, response: u64, owner: EndpointId);
}

/// What this picker remembers of the sessions of agents.
pub trait Sessions: Send + Sync + std::fmt::Debug {
    /// A peer has ended the session with this hash under the cluster's key.
    fn ended(&self, session: u64);
}
