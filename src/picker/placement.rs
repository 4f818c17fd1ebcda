//! What a decision changes for later ones: updates of the prefix cache, and bookings on the chosen servers.
//!
//! Pure.

use attache_pool::PoolSnapshot;
use attache_pool::ledger::Ticket;
use attache_prefix::TenantId;
use attache_prefix::cache::{Found, PrefixCache};
use attache_prefix::key::BlockKey;
use attache_prefix::learning::PrefixUpdate;
use attache_protocol::Prompt;
use attache_scheduling::{Booking, Decision, Order};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use std::sync::Arc;
use std::time::Duration;

/// A prompt that was looked up.
#[derive(Debug)]
pub(crate) struct LookedUp<'a> {
    /// The cache in which it was looked up.
    pub(crate) cache: &'a Arc<PrefixCache>,
    /// The cached part on each endpoint.
    pub(crate) found: &'a Found,
    /// The sizes of the prompt; its text is not read.
    pub(crate) prompt: &'a Prompt<'a>,
    /// The client asks the model server not to use its cache.
    pub(crate) skips_cache: bool,
    /// The decision counts in the cache's statistics. That of a reserved request did so when it was reserved.
    pub(crate) is_counted: bool,
    /// The tenant of the request, from [`PrefixCache::tenant`].
    pub(crate) tenant: TenantId,
}

/// The block keys of a prompt.
#[derive(Debug, Default)]
pub(crate) struct PromptBlocks {
    /// Keys of the first blocks.
    pub(crate) keys: Vec<BlockKey>,
    /// These are the keys of all blocks that can be encoded, not only of those that were looked up.
    pub(crate) all: bool,
    /// The text was not too long to be encoded completely.
    pub(crate) complete: bool,
}

/// The updates of a prefix cache that follow from a decision.
#[derive(Debug)]
pub(crate) struct CacheUpdates {
    pub(crate) cache: Arc<PrefixCache>,
    /// Prompt tokens that the first pick is expected to have cached.
    pub(crate) cached_tokens: u32,
    /// The update for the first pick.
    pub(crate) first: PrefixUpdate,
    /// The update for the prefill server.
    pub(crate) prefill: Option<PrefixUpdate>,
}

fn first_pick(decision: &Decision) -> Option<EndpointId> {
    decision.picks.first().map(|endpoint| endpoint.id)
}

fn prefill_server(decision: &Decision) -> Option<EndpointId> {
    decision.split.as_ref().and_then(|split| split.prefill.first()).map(|endpoint| endpoint.id)
}

impl LookedUp<'_> {
    /// Length of the prompt, tokens.
    #[must_use]
    pub(crate) fn prompt_tokens(&self) -> u32 {
        self.found.prompt_tokens(self.prompt)
    }

    /// Whether the update of a chosen server needs the keys of all blocks, because Attaché estimates what the server
    /// caches. An engine that publishes KV events reports it.
    #[must_use]
    pub(crate) fn needs_all_blocks(&self, decision: &Decision) -> bool {
        first_pick(decision).into_iter().chain(prefill_server(decision)).any(|id| !self.found.is_exact(id))
    }

    /// Prompt tokens that an endpoint is expected to have cached.
    fn held(&self, endpoint: EndpointId) -> u32 {
        let held = self.found.tokens(self.found.depth(endpoint).any);
        if self.skips_cache { 0 } else { held.min(self.prompt_tokens()) }
    }

    /// The updates for the chosen servers. Counts the decision in the cache's statistics, if it is to be. `None` without a first pick.
    #[must_use]
    pub(crate) fn updates(self, decision: &Decision, blocks: PromptBlocks) -> Option<CacheUpdates> {
        let PromptBlocks { keys, all, complete } = blocks;
        let (first, prefill) = (first_pick(decision)?, prefill_server(decision));
        let cached_tokens = self.held(first);
        // The cached part saves work on the endpoint that prefills the prompt.
        if self.is_counted {
            self.cache.decided(self.prompt_tokens(), prefill.map_or(cached_tokens, |id| self.held(id)));
        }
        let Self { cache, found, prompt, skips_cache, tenant, .. } = self;
        let only_text = prompt.media_tokens == 0 && prompt.token_ids == 0 && prompt.count == 1;
        // A prompt that is too long to encode completely says nothing about the text of its end.
        let text_bytes = if only_text && complete { prompt.text_bytes } else { 0 };
        let tells_cached = !skips_cache && complete;
        let of = |id, keys, tells_cached| PrefixUpdate {
            tenant,
            text_bytes,
            tells_cached,
            ..found.prefix_update(id, keys, all && !found.is_exact(id))
        };
        let prefill = prefill.map(|id| of(id, keys.clone(), tells_cached));
        // The response's count of cached tokens is that of the prefill server.
        let first = of(first, keys, tells_cached && prefill.is_none());
        Some(CacheUpdates { cache: cache.clone(), cached_tokens, first, prefill })
    }
}

/// Facts about a decided request that its bookings need.
#[derive(Debug)]
pub(crate) struct BookingRequest<'a> {
    /// Name of the model or adapter on the servers.
    pub(crate) model: &'a str,
    /// Length of the prompt, tokens.
    pub(crate) prompt_tokens: u32,
    /// The request was parsed, so its work is known.
    pub(crate) understood: bool,
    /// The time of the first token can be observed.
    pub(crate) streams: bool,
    /// Share of the first pick that the request takes, by its strategy; else 0.
    pub(crate) share: f64,
    /// Updates of the prefix cache; `None` without a lookup.
    pub(crate) updates: Option<CacheUpdates>,
}

/// The bookings of one request on all its servers.
#[derive(Debug)]
pub(crate) struct Bookings {
    /// On the first pick.
    pub(crate) first: Booking,
    /// On the prefill server, when the request is split.
    pub(crate) prefill: Option<Booking>,
    /// On the encode servers of its images and audio.
    pub(crate) encoding: Vec<Ticket>,
}

impl Bookings {
    /// Books a decision at `now`. `snapshot` has the metrics of its servers; those older than `stale_after` are
    /// ignored. `None` without a first pick.
    #[must_use]
    pub(crate) fn of(
        decision: &Decision,
        request: BookingRequest<'_>,
        snapshot: &PoolSnapshot,
        stale_after: Duration,
        now: Timestamp,
    ) -> Option<Self> {
        let BookingRequest { model, prompt_tokens, understood, streams, share, updates } = request;
        let cached_tokens = updates.as_ref().map_or(0, |updates| updates.cached_tokens);
        let (prefix_update, prefill_update) = match updates {
            Some(CacheUpdates { cache, first, prefill, .. }) => {
                (Some((cache.clone(), first)), prefill.map(|update| (cache, update)))
            }
            None => (None, None),
        };
        let first = decision.picks.first()?.clone();
        let arrives = decision.split.is_some();
        let order = Order { model, prompt_tokens, cached_tokens, understood, streams, arrives, share, prefix_update };
        let first = Booking::new(first, snapshot, stale_after, order, now);
        let prefill = decision.split.as_ref().and_then(|split| {
            let (endpoint, cached_tokens) = (split.prefill.first()?.clone(), split.prefill_cached);
            let order = Order {
                model,
                prompt_tokens,
                cached_tokens,
                understood,
                // Its response is one token long: its first token is its end.
                streams: true,
                arrives: false,
                share: 0.0,
                prefix_update: prefill_update,
            };
            Some(Booking::new(endpoint, snapshot, stale_after, order, now))
        });
        let encoding = decision.encode.iter().map(|encoder| Ticket::book(encoder.clone(), 0)).collect();
        Some(Self { first, prefill, encoding })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attache_pool::{Endpoint, EndpointSpec, EndpointState};
    use attache_prefix::cache::{BlockUnit, CacheConfig};
    use attache_scheduling::{Ranking, Split};

    const NOW: Timestamp = Timestamp(1_000);
    const STALE_AFTER: Duration = Duration::from_secs(2);

    fn pool() -> (PoolSnapshot, Arc<PrefixCache>) {
        let endpoint = |id: u32| {
            let spec = EndpointSpec::at(([10, 0, 0, 1], 8000 + id as u16).into());
            EndpointState::new(Arc::new(Endpoint::new(EndpointId(id), spec)), None)
        };
        let snapshot = PoolSnapshot::new(1, true, (0..3).map(endpoint).collect());
        let cache = Arc::new(PrefixCache::new(&CacheConfig {
            claim_every_block: false,
            unit: BlockUnit::Tokens(16),
            max_bytes: 1 << 20,
            tenant_share: 1.0,
            claim_life: Duration::from_secs(1),
            seed: 7,
        }));
        cache.reconcile(&snapshot);
        (snapshot, cache)
    }

    fn keys(blocks: u64) -> Vec<BlockKey> {
        (1..=blocks).map(BlockKey).collect()
    }

    /// A decision for the endpoint 0; the endpoint 1 computes the prompt, if it is `split`.
    fn decision(snapshot: &PoolSnapshot, split: bool) -> Decision {
        let endpoint = |i: usize| snapshot.endpoints[i].endpoint.clone();
        let mut ranking = Ranking::new(1);
        ranking.push(&endpoint(0));
        let prefill = [endpoint(1)].into_iter().collect();
        let split = split.then(|| Box::new(Split { prefill, prefill_cached: 32, probe: false, reason: "" }));
        Decision { split, encode: vec![endpoint(2)], ..ranking.decide().unwrap() }
    }

    /// The updates of a prompt of 5 blocks, of which the endpoint 1 has cached 2.
    fn updates(cache: &Arc<PrefixCache>, decision: &Decision, skips_cache: bool) -> CacheUpdates {
        cache.record(EndpointId(1), &keys(2), TenantId(0), NOW);
        let found = cache.lookup(&mut &keys(5)[..], NOW);
        let prompt = Prompt { token_ids: 80, count: 1, ..Prompt::default() };
        let looked =
            LookedUp { cache, found: &found, prompt: &prompt, skips_cache, is_counted: true, tenant: TenantId(0) };
        assert!(looked.needs_all_blocks(decision));
        looked.updates(decision, PromptBlocks { keys: keys(5), all: true, complete: true }).unwrap()
    }

    #[test]
    fn split_request_is_booked_on_all_its_servers_until_they_are_released() {
        let (snapshot, cache) = pool();
        let decision = decision(&snapshot, true);
        let updates = updates(&cache, &decision, false);
        let request = BookingRequest {
            model: "m",
            prompt_tokens: 80,
            understood: true,
            streams: true,
            share: 0.0,
            updates: Some(updates),
        };
        let bookings = Bookings::of(&decision, request, &snapshot, STALE_AFTER, NOW).unwrap();
        let load = |i: usize| {
            let ledger = &snapshot.endpoints[i].endpoint.ledger;
            (ledger.in_flight(), ledger.prefill_tokens())
        };
        // The prefill server computes what it has not cached, and the server of the response nothing.
        assert_eq!([load(0), load(1), load(2)], [(1, 0), (1, 48), (1, 0)]);
        let found = cache.lookup(&mut &keys(5)[..], NOW);
        assert_eq!([0, 1, 2].map(|id| found.depth(EndpointId(id)).any), [5, 5, 0], "speculative entries");
        drop(bookings);
        assert_eq!([load(0), load(1), load(2)], [(0, 0); 3]);
    }

    #[test]
    fn cached_tokens_are_those_of_the_server_that_computes_the_prompt() {
        for (split, counted) in [(true, 32), (false, 0)] {
            let (snapshot, cache) = pool();
            let updates = updates(&cache, &decision(&snapshot, split), false);
            assert_eq!(updates.cached_tokens, 0, "the first pick has cached nothing");
            let stats = cache.stats();
            assert_eq!(stats.matched_tokens.load(std::sync::atomic::Ordering::Relaxed), counted);
            assert_eq!(updates.first.tells_cached, !split, "a response reports the cached tokens of one server");
            assert_eq!(
                updates.prefill.map(|update| (update.foretold, update.tells_cached)),
                split.then_some((32, true))
            );
        }
    }

    #[test]
    fn request_that_skips_the_cache_uses_no_cached_tokens_and_corrects_no_estimate() {
        let (snapshot, cache) = pool();
        let updates = updates(&cache, &decision(&snapshot, true), true);
        assert_eq!(cache.stats().matched_tokens.load(std::sync::atomic::Ordering::Relaxed), 0);
        assert!(!updates.prefill.unwrap().tells_cached);
    }
}
