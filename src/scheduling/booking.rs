//! All that a routed request changes of what later decisions see, from its decision to the end of its answer: the ledger, the endpoint's
//! expected work, and what its cache is thought to hold.
//!
//! Made by the exchange for real requests and by `replay` for simulated ones, in the same order, so that a replay is the same picker.
//! Everything is given back on Drop. Pure.

use crate::clock::Timestamp;
use crate::pool::ledger::Ticket;
use crate::pool::speed::{Reservation, Work};
use crate::pool::{Endpoint, EndpointMetrics};
use crate::prefix::cache::PrefixCache;
use crate::prefix::key::BlockKey;
use crate::prefix::learning::{Learning, Lesson};
use crate::protocol::Usage;
use std::sync::Arc;

/// What is known of a request when it is booked.
#[derive(Debug)]
pub struct Order {
    /// What its endpoint will have to compute.
    pub work: Work,
    /// It was read, so that its work is known: a speed can be learned from it.
    pub understood: bool,
    /// Its first token will be seen as it comes.
    pub streams: bool,
    /// What its prompt teaches, and whom.
    pub lesson: Option<(Arc<PrefixCache>, Lesson)>,
}

/// One routed request.
#[derive(Debug)]
pub struct Booking {
    ticket: Ticket,
    reservation: Option<Reservation>,
    learning: Option<Learning>,
}

impl Booking {
    /// Books `order` on `endpoint`, which reports `fresh`.
    #[must_use]
    pub fn new(endpoint: Arc<Endpoint>, fresh: Option<&EndpointMetrics>, order: Order, now: Timestamp) -> Self {
        let Order { work, understood, streams, lesson } = order;
        // Before the ticket: what is expected of the endpoint is what it has to do without this request.
        let reservation = understood.then(|| Reservation::begin(endpoint.clone(), fresh, work, streams, now));
        let learning = lesson.map(|(cache, lesson)| Learning::begin(cache, lesson, endpoint.id, now));
        // What is cached is not computed again.
        Self { ticket: Ticket::book(endpoint, work.uncached_tokens), reservation, learning }
    }

    /// The endpoint that is booked.
    #[must_use]
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        self.ticket.endpoint()
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
