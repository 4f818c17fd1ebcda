//! Request headers for model servers, if configured: the data-parallel rank that should serve the request, and the
//! endpoint from which to fetch more of its prompt's blocks. No I/O.

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

/// The data-parallel rank on which vLLM serves the request, if one port has several ranks.
pub const RANK_HEADER: &str = "x-data-parallel-rank";
/// The endpoint from which llm-d's sidecar fetches blocks of the prompt.
pub const SOURCE_HEADER: &str = "x-kv-cache-source-host-port";

/// Whether a header depends on cached blocks. Then the prompt is looked up even if the strategy does not need it.
#[must_use]
pub(super) fn are_by_prefix(pool: &Pool, prefix: &PoolPrefix) -> bool {
    prefix.choose_rank && prefix.ranks_tell
        || matches!(pool.disagg.as_deref(), Some(Mode::Header { source_tokens: Some(_) }))
}

/// The header values of one request.
#[derive(Debug, Default)]
pub struct Hints {
    /// The rank on the endpoint that serves the response.
    pub rank: Option<RankBooking>,
    /// The rank on the prefill worker, if Attaché calls that worker.
    pub prefill_rank: Option<RankBooking>,
    /// An endpoint with more cached blocks of the prompt than the endpoint that prefills it.
    pub source: Option<Arc<Endpoint>>,
    /// Remove the client's rank header, because Attaché chooses the rank.
    pub drops_rank: bool,
}

impl Hints {
    /// The header values of a decided request. `lookup`: that of its prompt, if there is one.
    pub(super) fn of(
        pool: &Pool,
        prefix: &PoolPrefix,
        lookup: Option<&PromptLookup<'_>>,
        decision: &Decision,
        snapshot: &PoolSnapshot,
        head: &Head,
        now: Timestamp,
    ) -> Self {
        let mut hints = Self::default();
        let computing = decision.split.as_ref().and_then(|split| split.prefill.first());
        let sidecar = matches!(pool.disagg.as_deref(), Some(Mode::Header { .. }));
        // A sidecar sends its headers to both workers, but their ranks are unrelated.
        if prefix.choose_rank && !(sidecar && computing.is_some()) {
            let book = |endpoint: &Arc<Endpoint>| {
                let depths = lookup.map(|lookup| lookup.found.ranks(endpoint.id)).unwrap_or_default();
                let state = snapshot.endpoints.iter().find(|state| state.endpoint.id == endpoint.id);
                let metrics = state.and_then(|state| state.fresh_metrics(now, pool.stale_after));
                RankBooking::choose(endpoint, &depths, metrics)
            };
            hints.rank = decision.picks.first().and_then(book);
            // Workers that get the request at once agree on an id, which determines the rank of the prefill worker.
            let meet = computing.is_some_and(|c| pool.disagg.as_deref().is_some_and(|mode| mode.meets(c)));
            hints.prefill_rank = computing.filter(|_| !meet).and_then(book);
        }
        if let (Some(Mode::Header { source_tokens: Some(least) }), Some(computing), Some(lookup)) =
            (pool.disagg.as_deref(), computing.or(decision.picks.first()), lookup)
        {
            let serves = |state: &EndpointState| {
                let availability = state.endpoint.health.availability(now, pool.scheduler.health());
                !state.is_draining() && matches!(availability, Availability::Open | Availability::SlowStart(_))
            };
            hints.source = source(lookup, computing.id, *least, snapshot, &head.request_id(), serves);
        }
        hints
    }

    /// The request headers: names and values.
    pub fn headers(&self) -> impl Iterator<Item = (&'static str, String)> {
        let rank = self.rank.as_ref().map(|booking| (RANK_HEADER, booking.rank().to_string()));
        rank.into_iter().chain(self.source.as_ref().map(|endpoint| (SOURCE_HEADER, endpoint.authority.to_string())))
    }
}

/// The endpoint from which the blocks of a prompt should be fetched.
///
/// Candidates have at least `least` cached tokens more than the prefilling endpoint, and at most one block less than
/// the endpoint with most. One of them is drawn by the request id, with a weight that falls with its queue depth. So
/// all endpoints with a popular prefix share the fetches. Source: llm-d's `p2p-source-producer`.
fn source(
    lookup: &PromptLookup<'_>,
    computing: EndpointId,
    least: u32,
    snapshot: &PoolSnapshot,
    request_id: &str,
    serves: impl Fn(&EndpointState) -> bool,
) -> Option<Arc<Endpoint>> {
    let (found, prompt) = (&lookup.found, lookup.prompt_tokens());
    // Blocks that are still being prefilled can't be fetched.
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
