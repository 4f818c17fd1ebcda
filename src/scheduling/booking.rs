//! All that a routed request changes of what later decisions see, from its decision to the end of its answer: the ledger, the endpoint's
//! expected work, and what its cache is thought to hold.
//!
//! Made by the exchange for real requests and by `replay` for simulated ones, in the same order, so that a replay is the same picker.
//! Everything is given back on Drop. Pure.

use attache_pool::ledger::Ticket;
use attache_pool::speed::{Reservation, Work};
use attache_pool::{Endpoint, EndpointMetrics, LoraState, PoolSnapshot};
use attache_prefix::cache::PrefixCache;
use attache_prefix::key::BlockKey;
use attache_prefix::learning::{Learning, Lesson};
use attache_protocol::Usage;
use attache_types::clock::Timestamp;
use std::sync::Arc;
use std::time::Duration;

/// What is known of a request when it is booked.
#[derive(Debug)]
pub struct Order<'a> {
    /// The model or adapter that the server is asked for.
    pub model: &'a str,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Those of them that its endpoint is thought to hold.
    pub cached_tokens: u32,
    /// It was read, so that its work is known: a speed can be learned from it.
    pub understood: bool,
    /// Its first token will be seen as it comes.
    pub streams: bool,
    /// Another server computes its prompt, which arrives here later: nothing is expected of the endpoint until [`Booking::dispatch`].
    pub arrives: bool,
    /// The part of its endpoint that it takes, where its strategy knows.
    pub share: f64,
    /// What its prompt teaches, and whom.
    pub lesson: Option<(Arc<PrefixCache>, Lesson)>,
}

/// What a prompt of `prompt_tokens`, of which `cached_tokens` are cached, would have an endpoint compute that reports the adapters `lora`.
pub(super) fn work(prompt_tokens: u32, cached_tokens: u32, lora: Option<&LoraState>, model: &str) -> Work {
    Work {
        prompt_tokens,
        uncached_tokens: prompt_tokens.saturating_sub(cached_tokens),
        adapter_cold: lora.is_some_and(|l| l.lacks(model)),
    }
}

/// What `endpoint` reports, unless that is too old.
fn fresh<'s>(
    endpoint: &Endpoint,
    snapshot: &'s PoolSnapshot,
    stale_after: Duration,
    now: Timestamp,
) -> Option<&'s EndpointMetrics> {
    let state = snapshot.position(endpoint.spec.address).and_then(|p| snapshot.get(p))?;
    state.fresh_metrics(now, stale_after)
}

/// One routed request.
#[derive(Debug)]
pub struct Booking {
    ticket: Ticket,
    reservation: Option<Reservation>,
    learning: Option<Learning>,
    /// What it will be, of a request that has not been dispatched.
    later: Option<Later>,
}

/// A request that is booked and not sent yet.
#[derive(Clone, Copy, Debug)]
struct Later {
    work: Work,
    streams: bool,
    /// Seconds to the first token of a prompt that is there, as the decision saw it.
    first_token: f64,
}

/// How a request's prompt comes to be on its endpoint.
#[derive(Clone, Copy, Debug)]
pub enum Dispatch<'p> {
    /// Another server has computed it, or will have in so many seconds.
    Arrives(&'p Endpoint, f64),
    /// It computes it itself.
    Whole,
}

impl Booking {
    /// Books `order` on `endpoint`, of which `snapshot` says what it reports; metrics older than `stale_after` say nothing.
    #[must_use]
    pub fn new(
        endpoint: Arc<Endpoint>,
        snapshot: &PoolSnapshot,
        stale_after: Duration,
        order: Order<'_>,
        now: Timestamp,
    ) -> Self {
        let Order { model, prompt_tokens, cached_tokens, understood, streams, arrives, share, lesson } = order;
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
        // Before the ticket: what is expected of the endpoint is what it has to do without this request.
        let reservation =
            (understood && !arrives).then(|| Reservation::begin(endpoint.clone(), fresh, work, streams, now));
        let learning = lesson.map(|(cache, lesson)| Learning::begin(cache, lesson, endpoint.id, now));
        // What is cached is not computed again, nor what arrives.
        let to_prefill = if arrives { 0 } else { work.uncached_tokens };
        Self { ticket: Ticket::book(endpoint, to_prefill).sharing(share).used_at(now), reservation, learning, later }
    }

    /// The request, whose prompt was to arrive from elsewhere, is sent off.
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

    /// The endpoint that is booked.
    #[must_use]
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        self.ticket.endpoint()
    }

    /// Seconds from the booking to the first token, as predicted; 0 where nothing is expected of the endpoint.
    #[must_use]
    pub fn expected(&self) -> f64 {
        self.reservation.as_ref().map_or(0.0, Reservation::expected)
    }

    /// Whether the answer's own blocks can be learned.
    #[must_use]
    pub fn learns_answer(&self) -> bool {
        self.learning.as_ref().is_some_and(Learning::is_whole)
    }

    /// Envoy served the request elsewhere: everything follows.
    pub fn move_to(&mut self, endpoint: &Arc<Endpoint>, now: Timestamp) {
        if let Some(reservation) = &mut self.reservation {
            reservation.move_to(endpoint.clone(), now);
        }
        self.ticket.move_to(endpoint.clone());
        if let Some(learning) = &mut self.learning {
            learning.move_to(endpoint.id, now);
        }
    }

    /// The first byte of the answer has come. `good` is a status of 2xx; `tells` says that this byte is the first token and no other.
    pub fn first_byte(&mut self, good: bool, tells: bool, now: Timestamp) {
        self.ticket.first_byte();
        if let Some(reservation) = &mut self.reservation {
            reservation.first_token(tells && good, now);
        }
        if let Some(learning) = &mut self.learning {
            learning.first_byte(good, self.ticket.endpoint().id, now);
        }
    }

    /// The answer has ended, `complete` or cut off, and told `usage`. `extend` adds the answer's keys to the prompt's; false when it can't.
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
