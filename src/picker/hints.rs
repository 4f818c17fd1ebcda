//! What servers are told in headers beside where a request goes, where the configuration asks for it: the data-parallel
//! rank that should serve it, and the server that holds more of its prompt. Pure; called by the decision.

use super::head::Head;
use super::lookup::PromptLookup;
use super::prefix::PoolPrefix;
use attache_disagg::Mode;
use attache_pool::health::Availability;
use attache_pool::ranks::RankBooking;
use attache_pool::{Endpoint, EndpointState, PoolSnapshot};
use attache_scheduling::{Decision, Pool};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use std::sync::Arc;

/// The rank that vLLM serves a request on, where one port stands for several.
pub const RANK_HEADER: &str = "x-data-parallel-rank";
/// The server that llm-d's sidecar fetches a prompt's beginning from.
pub const SOURCE_HEADER: &str = "x-kv-cache-source-host-port";

/// Whether something is told that follows from who holds a prompt: then that is looked up, whatever the strategy reads.
#[must_use]
pub(super) fn are_by_prefix(pool: &Pool, prefix: &PoolPrefix) -> bool {
    prefix.choose_rank && prefix.ranks_tell
        || matches!(pool.disagg.as_deref(), Some(Mode::Header { source_tokens: Some(_) }))
}

/// What is told of one request.
#[derive(Debug, Default)]
pub struct Hints {
    /// The rank of the server that answers.
    pub rank: Option<RankBooking>,
    /// The rank of the server that computes the prompt for it, when we ask it ourselves.
    pub prefill_rank: Option<RankBooking>,
    /// Who holds more of the prompt than the server that computes it.
    pub source: Option<Arc<Endpoint>>,
    /// A client names a rank, where that is the picker's to do.
    pub drops_rank: bool,
}

impl Hints {
    /// What there is to tell of a request that has been decided on, whose prompt was `looked` up if it could be.
    pub(super) fn of(
        pool: &Pool,
        prefix: &PoolPrefix,
        looked: Option<&PromptLookup<'_>>,
        decision: &Decision,
        snapshot: &PoolSnapshot,
        head: &Head,
        now: Timestamp,
    ) -> Self {
        let mut hints = Self::default();
        let computing = decision.split.as_ref().and_then(|split| split.prefill.first());
        let sidecar = matches!(pool.disagg.as_deref(), Some(Mode::Header { .. }));
        // A sidecar sends the headers that it gets to both servers, whose ranks have nothing to do with each other.
        if prefix.choose_rank && !(sidecar && computing.is_some()) {
            let book = |endpoint: &Arc<Endpoint>| {
                let depths = looked.map(|looked| looked.found.ranks(endpoint.id)).unwrap_or_default();
                let state = snapshot.endpoints.iter().find(|state| state.endpoint.id == endpoint.id);
                let page = state.and_then(|state| state.fresh_metrics(now, pool.stale_after));
                RankBooking::choose(endpoint, &depths, page)
            };
            hints.rank = decision.picks.first().and_then(book);
            // Servers that are asked at once meet by a number that says which rank of the prefill server computes.
            let meet = computing.is_some_and(|c| pool.disagg.as_deref().is_some_and(|mode| mode.meets(c)));
            hints.prefill_rank = computing.filter(|_| !meet).and_then(book);
        }
        if let (Some(Mode::Header { source_tokens: Some(least) }), Some(computing), Some(looked)) =
            (pool.disagg.as_deref(), computing.or(decision.picks.first()), looked)
        {
            let serves = |state: &EndpointState| {
                let availability = state.endpoint.health.availability(now, pool.scheduler.health());
                !state.is_draining() && matches!(availability, Availability::Open | Availability::SlowStart(_))
            };
            hints.source = source(looked, computing.id, *least, snapshot, &head.request_id(), serves);
        }
        hints
    }

    /// The request headers that say it: names and values.
    pub fn headers(&self) -> impl Iterator<Item = (&'static str, String)> {
        let rank = self.rank.as_ref().map(|booking| (RANK_HEADER, booking.rank().to_string()));
        rank.into_iter().chain(self.source.as_ref().map(|endpoint| (SOURCE_HEADER, endpoint.authority.to_string())))
    }
}

/// The server that a prompt's beginning should be fetched from: holds at least `least` tokens more than the one that
/// computes it, and at most a block less than the one that holds most. Of several, one by chance (the request's id),
/// the likelier the fewer requests wait there: hot prefixes lie on many servers, and all may give. Source: llm-d's
/// `p2p-source-producer`.
fn source(
    looked: &PromptLookup<'_>,
    computing: EndpointId,
    least: u32,
    snapshot: &PoolSnapshot,
    request_id: &str,
    serves: impl Fn(&EndpointState) -> bool,
) -> Option<Arc<Endpoint>> {
    let (found, prompt) = (&looked.found, looked.prompt_tokens());
    // What is still on its way can't be fetched.
    let held = |id: EndpointId| found.tokens(found.held(id).any).min(prompt);
    let wanted = held(computing).saturating_add(least.max(1));
    let more = snapshot.endpoints.iter().map(|state| (state, held(state.endpoint.id)));
    let more: Vec<(&EndpointState, u32)> =
        more.filter(|(state, tokens)| *tokens >= wanted && state.endpoint.id != computing && serves(state)).collect();
    let most = more.iter().map(|(_, tokens)| *tokens).max()?;
    let near = more.iter().filter(|(_, tokens)| tokens.saturating_add(found.tokens(1)) >= most);
    let weighed: Vec<(&EndpointState, f64)> = near
        .map(|(state, _)| (*state, 1.0 / (1.0 + f64::from(state.metrics().map_or(0, |metrics| metrics.waiting)))))
        .collect();
    let total: f64 = weighed.iter().map(|(_, weight)| weight).sum();
    let mut left = total * (f64::from(xxhash_rust::xxh3::xxh3_64(request_id.as_bytes()) as u32) / 4_294_967_296.0);
    let chosen = weighed.iter().find(|(_, weight)| {
        left -= weight;
        left < 0.0
    });
    chosen.or(weighed.last()).map(|(state, _)| state.endpoint.clone())
}
