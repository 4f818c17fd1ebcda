//! Publishes the bookings of a request to the other pickers of the cluster, before the gateway gets the decision.

use crate::active::PoolRuntime;
use crate::hints::Hints;
use crate::placement::{BookingRequest, CacheUpdates};
use attache_pool::Endpoint;
use attache_pool::ranks::RankBooking;
use attache_prefix::cache::PrefixCache;
use attache_prefix::learning::PrefixUpdate;
use attache_scheduling::{Decision, Pool};
use attache_sync::{BookedBlocks, CacheLossSink, OwnBooking, OwnRecord, PoolView, QueueFlows, Replica, SharedBooking};
use attache_types::clock::Timestamp;
use std::sync::Arc;

impl PoolRuntime {
    /// The pool as the exchange with peers needs it. `losses` receives the caches that peers report as lost.
    #[must_use]
    pub fn shared_view(&self, losses: Arc<dyn CacheLossSink>) -> PoolView {
        let Self { pool, prefix, queue, .. } = self;
        PoolView {
            name: pool.name.clone(),
            store: pool.store.clone(),
            cache: prefix.as_ref().map(|prefix| prefix.cache.clone()),
            health: pool.scheduler.health().clone(),
            stale_after: pool.stale_after,
            records: pool.clone(),
            flows: queue.clone().map(|queue| queue as Arc<dyn QueueFlows>),
            losses,
        }
    }
}

/// The bookings of one request as other pickers see them.
#[derive(Debug)]
pub(crate) struct SharedBookings {
    /// On the server of the response.
    pub(crate) first: SharedBooking,
    /// On the prefill server of a split request.
    pub(crate) prefill: Option<SharedBooking>,
    /// On the encode servers of its images and audio.
    pub(crate) encoding: Vec<SharedBooking>,
}

impl SharedBookings {
    /// Publishes the bookings of `decision`, and what its strategy recorded. `None` without a first pick.
    pub(crate) fn publish(
        replica: &Arc<Replica>,
        pool: &Pool,
        decision: &Decision,
        request: &BookingRequest<'_>,
        (record, hints): (OwnRecord<'_>, &Hints),
        now: Timestamp,
    ) -> Option<Self> {
        let updates = request.updates.as_ref();
        let book = |endpoint: &Endpoint, cached_tokens, update: Option<&PrefixUpdate>, is_prefill: bool| {
            let blocks = updates.zip(update).and_then(|(updates, update)| blocks(&updates.cache, endpoint, update));
            let booking = OwnBooking {
                endpoint: replica.key(&pool.name, &endpoint.spec),
                prompt_tokens: request.prompt_tokens,
                cached_tokens,
                understood: request.understood,
                // A prefill's response is one token long: its first token is its end.
                streams: is_prefill || request.streams,
                arrives: !is_prefill && decision.split.is_some(),
                model: request.model,
                share: if is_prefill { 0.0 } else { request.share },
                rank: if is_prefill { &hints.prefill_rank } else { &hints.rank }.as_ref().map(RankBooking::rank),
                record: (!is_prefill).then_some(record),
                blocks,
            };
            replica.book(&pool.name, &booking, now)
        };
        let cached = updates.map_or(0, |updates: &CacheUpdates| updates.cached_tokens);
        let first = book(decision.picks.first()?, cached, updates.map(|updates| &updates.first), false);
        let prefill = decision.split.as_ref().and_then(|split| {
            let update = updates.and_then(|updates| updates.prefill.as_ref());
            Some(book(split.prefill.first()?, split.prefill_cached, update, true))
        });
        let encode = |encoder: &Arc<Endpoint>| {
            let endpoint = replica.key(&pool.name, &encoder.spec);
            replica.book(&pool.name, &OwnBooking::bare(endpoint, request.model), now)
        };
        Some(Self { first, prefill, encoding: decision.encode.iter().map(encode).collect() })
    }
}

/// The blocks of a prompt; `None` for an endpoint whose KV events all pickers read.
fn blocks<'u>(cache: &PrefixCache, endpoint: &Endpoint, update: &'u PrefixUpdate) -> Option<BookedBlocks<'u>> {
    (cache.learns(endpoint.id) && !update.keys.is_empty()).then_some(BookedBlocks {
        keys: &update.keys,
        whole: update.whole,
        tenant: update.tenant.0,
        text_bytes: update.text_bytes,
        own_keys: update.own_keys,
        tells_cached: update.tells_cached,
    })
}
