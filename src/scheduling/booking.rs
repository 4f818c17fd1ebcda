//! Effects of a routed request on later decisions, from its decision to the end of its response. They are the ledger,
//! the endpoint's expected work, and the expected content of its cache.
//!
//! `ext_proc` creates bookings for real requests and `replay` for simulated ones, in the same order, so a replay
//! decides in the same way. Drop reverts everything. Pure.

use attache_pool::ledger::Ticket;
use attache_pool::speed::{Reservation, Work};
use attache_pool::{Endpoint, EndpointMetrics, LoraState, PoolSnapshot};
use attache_prefix::cache::PrefixCache;
use attache_prefix::key::BlockKey;
use attache_prefix::learning::{Learning, PrefixUpdate};
use attache_protocol::Usage;
use attache_types::clock::Timestamp;
use std::sync::Arc;
use std::time::Duration;

/// Facts about a request at the time of booking.
#[derive(Debug)]
pub struct Order<'a> {
    /// Name of the model or adapter on the server.
    pub model: &'a str,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Prompt tokens that the endpoint is expected to have cached.
    pub cached_tokens: u32,
    /// Whether the request was parsed, so its work is known and the endpoint's speed can be learned from it.
    pub understood: bool,
    /// Whether the response streams, so the time of its first token is observed.
    pub streams: bool,
    /// Whether another server prefills the prompt. The endpoint has no expected work until [`Booking::dispatch`].
    pub arrives: bool,
    /// Share of its endpoint that the request takes, if the strategy knows it; else 0.
    pub share: f64,
    /// Updates of the prefix cache that the prompt causes.
    pub prefix_update: Option<(Arc<PrefixCache>, PrefixUpdate)>,
}

/// Work of a prompt of `prompt_tokens`, of which `cached_tokens` are cached, on an endpoint that reports the adapters
/// `lora`.
pub(super) fn work(prompt_tokens: u32, cached_tokens: u32, lora: Option<&LoraState>, model: &str) -> Work {
    Work {
        prompt_tokens,
        uncached_tokens: prompt_tokens.saturating_sub(cached_tokens),
        adapter_cold: lora.is_some_and(|l| l.lacks(model)),
    }
}

/// Metrics of `endpoint`, unless they are stale.
fn fresh<'s>(
    endpoint: &Endpoint,
    snapshot: &'s PoolSnapshot,
    stale_after: Duration,
    now: Timestamp,
) -> Option<&'s EndpointMetrics> {
    let state = snapshot.position(endpoint.spec.address).and_then(|p| snapshot.get(p))?;
    state.fresh_metrics(now, stale_after)
}

/// The booking of one routed request.
#[derive(Debug)]
pub struct Booking {
    ticket: Ticket,
    reservation: Option<Reservation>,
    learning: Option<Learning>,
    /// Expected work of a request that is not dispatched yet.
    later: Option<Later>,
}

/// A request that a peer has probably sent to an endpoint and that this picker does not know yet.
#[derive(Debug)]
pub struct AssumedBooking {
    _ticket: Ticket,
    _reservation: Reservation,
}

impl AssumedBooking {
    /// Assumes a request for `model` that computes this many tokens on `endpoint`, until it is dropped.
    #[must_use]
    pub fn new(
        endpoint: Arc<Endpoint>,
        snapshot: &PoolSnapshot,
        stale_after: Duration,
        (model, uncached_tokens): (&str, u32),
        now: Timestamp,
    ) -> Self {
        let fresh = fresh(&endpoint, snapshot, stale_after, now);
        let work = work(uncached_tokens, 0, fresh.and_then(|m| m.lora.as_ref()), model);
        // The prediction must not include this request's own load.
        let reservation = Reservation::assume(endpoint.clone(), fresh, work, now);
        Self { _ticket: Ticket::assume(endpoint, work.uncached_tokens), _reservation: reservation }
    }
}

/// A request that is booked and not dispatched yet.
#[derive(Clone, Copy, Debug)]
struct Later {
    work: Work,
    streams: bool,
    /// Predicted seconds to the first token once the prompt has arrived, as of the decision.
    first_token: f64,
}

/// Where the prompt of a request is computed.
#[derive(Clone, Copy, Debug)]
pub enum Dispatch<'p> {
    /// On another server, which has finished or needs this many more seconds.
    Arrives(&'p Endpoint, f64),
    /// On the endpoint itself.
    Whole,
}

impl Booking {
    /// Books `order` on `endpoint`, whose metrics are in `snapshot`; those older than `stale_after` are ignored.
    #[must_use]
    pub fn new(
        endpoint: Arc<Endpoint>,
        snapshot: &PoolSnapshot,
        stale_after: Duration,
        order: Order<'_>,
        now: Timestamp,
    ) -> Self {
        let Order { model, prompt_tokens, cached_tokens, understood, streams, arrives, share, prefix_update } = order;
        let fresh = fresh(&endpoint, snapshot, stale_after, now);
        let work = work(prompt_tokens, cached_tokens, fresh.and_then(|m| m.lora.as_ref()), model);
        let later = (understood && arrives).then(|| Later {
            work,
            streams,
            first_token: {
                let reported = fresh.map(EndpointMetrics::reported);
                endpoint.speed.forecast(&endpoint.ledger, reported.as_ref(), work.received(), now).1.first_token
            },
        });
        // Before the ticket: the prediction must not include this request's own load.
        let reservation =
            (understood && !arrives).then(|| Reservation::begin(endpoint.clone(), fresh, work, streams, now));
        let learning = prefix_update.map(|(cache, update)| Learning::begin(cache, update, endpoint.id, now));
        // Cached tokens are not computed again, nor is a prompt from another server.
        let to_prefill = if arrives { 0 } else { work.uncached_tokens };
        Self { ticket: Ticket::book(endpoint, to_prefill).sharing(share).used_at(now), reservation, learning, later }
    }

    /// Records that the request is sent, whose prompt was to come from another server.
    pub fn dispatch(&mut self, how: Dispatch<'_>, snapshot: &PoolSnapshot, stale_after: Duration, now: Timestamp) {
        let Some(Later { work, streams, first_token }) = self.later.take() else { return };
        let endpoint = self.ticket.endpoint().clone();
        let fresh = fresh(&endpoint, snapshot, stale_after, now);
        self.reservation = Some(match how {
            Dispatch::Arrives(from, seconds) => {
                let expected = (from.place.nearness(endpoint.place), seconds + first_token);
                Reservation::arriving(endpoint.clone(), fresh, work, expected, streams, now)
            }
            Dispatch::Whole => {
                self.ticket.prefills(work.uncached_tokens);
                Reservation::begin(endpoint.clone(), fresh, work, streams, now)
            }
        });
    }

    /// Adds the updates of the prefix cache, where the blocks of the prompt become known after the booking. `begun`:
    /// the response has begun, so the endpoint has computed the prompt.
    pub fn learn(&mut self, cache: Arc<PrefixCache>, update: PrefixUpdate, begun: bool, now: Timestamp) {
        self.learning = Some(Learning::begin(cache, update, self.endpoint().id, now));
        if begun {
            self.learn_first_byte(true, now);
        }
    }

    /// The booked endpoint.
    #[must_use]
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        self.ticket.endpoint()
    }

    /// Predicted seconds from the booking to the first token; 0 without an expectation.
    #[must_use]
    pub fn expected(&self) -> f64 {
        self.reservation.as_ref().map_or(0.0, Reservation::expected)
    }

    /// Prompt tokens that the endpoint is expected to have cached; 0 without a lookup.
    #[must_use]
    pub fn foretold(&self) -> u32 {
        self.learning.as_ref().map_or(0, Learning::foretold)
    }

    /// Whether the blocks of the response can be recorded in the prefix cache.
    #[must_use]
    pub fn learns_answer(&self) -> bool {
        self.learning.as_ref().is_some_and(Learning::is_whole)
    }

    /// Moves the booking to the endpoint that Envoy used instead of the picked one.
    pub fn move_to(&mut self, endpoint: &Arc<Endpoint>, now: Timestamp) {
        if let Some(reservation) = &mut self.reservation {
            reservation.move_to(endpoint.clone(), now);
        }
        self.ticket.move_to(endpoint.clone());
        if let Some(learning) = &mut self.learning {
            learning.move_to(endpoint.id, now);
        }
    }

    /// Records the first byte of the response. `good`: the status is 2xx. `is_first_token`: this byte contains
    /// exactly the first token.
    pub fn first_byte(&mut self, good: bool, is_first_token: bool, now: Timestamp) {
        self.ticket.first_byte();
        if let Some(reservation) = &mut self.reservation {
            reservation.first_token(is_first_token && good, now);
        }
        self.learn_first_byte(good, now);
    }

    /// Updates the prefix cache, and gives the pool the share of recomputed blocks that the cache has learned.
    fn learn_first_byte(&mut self, good: bool, now: Timestamp) {
        if let Some(learning) = &mut self.learning {
            let endpoint = self.ticket.endpoint();
            learning.first_byte(good, endpoint.id, now);
            endpoint.speed.pool().set_recomputed(learning.recomputed());
        }
    }

    /// Records the end of the response, `complete` or not, with its `usage`. `extend` appends the block keys of the
    /// response to those of the prompt; it returns false if it cannot.
    pub fn end(
        mut self,
        complete: bool,
        usage: &Usage,
        extend: impl FnOnce(&mut Vec<BlockKey>) -> bool,
        now: Timestamp,
    ) {
        if let Some(mut reservation) = self.reservation.take().filter(|_| complete) {
            reservation.ended(usage.completion_tokens, now);
        }
        if let Some(learning) = self.learning.take() {
            learning.end(usage, extend, self.ticket.endpoint().id, now);
        }
    }
}
