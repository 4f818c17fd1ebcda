//! What the model servers of a pool do at one time: requests that wait, by role, and prompts that are computed.

use super::PoolView;
use attache_pool::{Counter, Roles};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;

/// Requests that wait on the servers of a role, as fresh scrapes report them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct RoleWaiting {
    /// Servers with fresh metrics.
    pub(crate) servers: u32,
    /// Requests that wait on all of them.
    pub(crate) requests: u32,
}

impl RoleWaiting {
    /// Waiting requests of a server on average.
    pub(crate) fn each(self) -> f64 {
        f64::from(self.requests) / f64::from(self.servers.max(1))
    }
}

/// Requests that wait on prefill servers and on decode servers. Servers with both roles are in neither.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Waiting {
    pub(crate) prefill: RoleWaiting,
    pub(crate) decode: RoleWaiting,
}

impl Waiting {
    /// The requests that wait now.
    pub(crate) fn of(view: &PoolView, now: Timestamp) -> Self {
        let mut all = Self::default();
        for state in &view.store.load().endpoints {
            let roles = state.endpoint.roles;
            let role = match (roles.has(Roles::PREFILL), roles.has(Roles::DECODE)) {
                (true, false) => &mut all.prefill,
                (false, true) => &mut all.decode,
                _ => continue,
            };
            if let Some(metrics) = state.fresh_metrics(now, view.stale_after) {
                role.servers += 1;
                role.requests = role.requests.saturating_add(metrics.waiting);
            }
        }
        all
    }
}

/// What an endpoint has computed, and which events of it came.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct EndpointWork {
    /// Prompt tokens that its process has computed: those without the cached ones.
    pub(crate) computed: f64,
    /// Messages with KV events.
    pub(crate) frames: u64,
}

/// What the servers of a pool did at one reading.
#[derive(Clone, Debug, Default)]
pub(crate) struct PoolWork {
    /// Requests that wait in the queue of the pool.
    pub(crate) queued: i64,
    pub(crate) waiting: Waiting,
    /// The endpoints whose KV events are read.
    pub(crate) events: BTreeMap<EndpointId, EndpointWork>,
    /// Prompt tokens of all responses.
    pub(crate) prompt_tokens: u64,
    /// Of prompts that were looked up: the tokens that the prefix index expected in caches.
    pub(crate) expected_tokens: u64,
    /// Of the same prompts: the tokens that servers reported as cached.
    pub(crate) cached_tokens: u64,
}

impl PoolWork {
    /// The work of the endpoints of a pool now.
    pub(crate) fn of(view: &PoolView, now: Timestamp) -> Self {
        let (snapshot, residents) = (view.store.load(), view.prefix.residents().load());
        let work = |state: &attache_pool::EndpointState| {
            let metrics = state.fresh_metrics(now, view.stale_after)?;
            let prompts = metrics.counters.get(Counter::PromptTokens)?;
            let computed = prompts - metrics.prefix_hits.unwrap_or(0.0);
            let frames = residents.get(&state.endpoint.id)?.frames();
            Some((state.endpoint.id, EndpointWork { computed, frames }))
        };
        let events = if view.kv_events.is_some() {
            snapshot.endpoints.iter().filter_map(work).collect()
        } else {
            Default::default()
        };
        let prefix = view.prefix.stats();
        Self {
            queued: view.queue.requests.get(),
            waiting: Waiting::of(view, now),
            events,
            prompt_tokens: view.metrics.totals().prompt_tokens,
            expected_tokens: prefix.foretold_tokens.load(Relaxed),
            cached_tokens: prefix.reported_tokens.load(Relaxed),
        }
    }
}
