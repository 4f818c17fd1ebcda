//! The ledger: requests that this Attaché process has sent to an endpoint and that have not ended.
//!
//! It is exact and immediate, while scraped metrics are late, so a burst between two scrapes does not go to
//! one endpoint. A [`Ticket`] adds a request on creation and removes it on Drop, so a stream that ends in any
//! way cannot leave load behind.

use super::endpoint::Endpoint;
use super::metrics::{EndpointMetrics, Reported};
use attache_types::clock::Timestamp;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// Unit of shares, a billionth: integer sums return to exactly 0.
const SHARE: f64 = 1e9;

/// Requests in flight on one endpoint. Only [`Ticket`]s change the counters.
#[derive(Debug, Default)]
pub struct EndpointLedger {
    in_flight: AtomicU32,
    prefill_tokens: AtomicU64,
    routed: AtomicU64,
    shares: AtomicU64,
    last_used: AtomicU64,
}

impl EndpointLedger {
    /// Returns the number of requests that were sent and have not ended.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.in_flight.load(Relaxed)
    }

    /// Returns the prompt tokens of the requests without a first response byte.
    #[must_use]
    pub fn prefill_tokens(&self) -> u64 {
        self.prefill_tokens.load(Relaxed)
    }

    /// Returns the number of requests ever sent.
    #[must_use]
    pub fn routed(&self) -> u64 {
        self.routed.load(Relaxed)
    }

    /// Returns when a request was last sent; 0 before the first.
    #[must_use]
    pub fn last_used(&self) -> Timestamp {
        Timestamp(self.last_used.load(Relaxed))
    }

    /// Returns the part of the endpoint that its requests use according to the SLO profile of its deployment;
    /// 1 is all of it.
    #[must_use]
    pub fn utilization(&self) -> f64 {
        self.shares.load(Relaxed) as f64 / SHARE
    }

    /// Returns the best estimate of the requests on the endpoint.
    ///
    /// Fresh metrics show the load of all clients at the time of the scrape, and the ledger shows what has
    /// changed since: `max(in_flight, waiting + running + in_flight − in_flight_at_scrape)`. Without fresh
    /// metrics, only the ledger counts.
    #[inline]
    #[must_use]
    pub fn requests(&self, fresh: Option<&Reported>) -> u32 {
        self.in_flight().saturating_add(fresh.map_or(0, |m| m.others))
    }
}

/// As [`EndpointLedger::requests`], for the metrics of `endpoint`.
#[must_use]
pub fn requests(endpoint: &Endpoint, fresh: Option<&EndpointMetrics>) -> u32 {
    endpoint.ledger.requests(fresh.map(EndpointMetrics::reported).as_ref())
}

/// One request in flight on one endpoint.
#[derive(Debug)]
pub struct Ticket {
    endpoint: Arc<Endpoint>,
    prompt_tokens: u32,
    prefilling: bool,
    share: u64,
}

impl Ticket {
    /// Adds a request with `prompt_tokens` tokens to prefill.
    #[must_use]
    pub fn book(endpoint: Arc<Endpoint>, prompt_tokens: u32) -> Self {
        endpoint.ledger.in_flight.fetch_add(1, Relaxed);
        endpoint.ledger.prefill_tokens.fetch_add(u64::from(prompt_tokens), Relaxed);
        endpoint.ledger.routed.fetch_add(1, Relaxed);
        Self { endpoint, prompt_tokens, prefilling: true, share: 0 }
    }

    /// Adds a request that is only assumed, and is not counted as sent.
    #[must_use]
    pub fn assume(endpoint: Arc<Endpoint>, prompt_tokens: u32) -> Self {
        let ticket = Self::book(endpoint, prompt_tokens);
        ticket.endpoint.ledger.routed.fetch_sub(1, Relaxed);
        ticket
    }

    /// Sets the part of the endpoint that the request uses until it ends. Call it at most once.
    #[must_use]
    pub fn sharing(mut self, share: f64) -> Self {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "not negative; a request takes no thousand endpoints"
        )]
        let share = (share.clamp(0.0, 1e3) * SHARE).round() as u64;
        self.endpoint.ledger.shares.fetch_add(share, Relaxed);
        self.share = share;
        self
    }

    /// Sets the time at which the request is sent.
    #[must_use]
    pub fn used_at(self, now: Timestamp) -> Self {
        self.endpoint.ledger.last_used.fetch_max(now.0, Relaxed);
        self
    }

    /// The endpoint of the request.
    #[must_use]
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    /// Adds `prompt_tokens` that this endpoint computes after all, instead of receiving them from another one.
    pub fn prefills(&mut self, prompt_tokens: u32) {
        if self.prefilling {
            self.endpoint.ledger.prefill_tokens.fetch_add(u64::from(prompt_tokens), Relaxed);
            self.prompt_tokens += prompt_tokens;
        }
    }

    /// Records the first byte of the response: the prompt is computed.
    pub fn first_byte(&mut self) {
        if std::mem::take(&mut self.prefilling) {
            self.endpoint.ledger.prefill_tokens.fetch_sub(u64::from(self.prompt_tokens), Relaxed);
        }
    }

    /// Moves the request to the endpoint that Envoy used instead, as after a retry.
    pub fn move_to(&mut self, endpoint: Arc<Endpoint>) {
        if endpoint.id == self.endpoint.id {
            return;
        }
        let (prefilling, used) = (self.prefilling, self.endpoint.ledger.last_used());
        let moved = Ticket::book(endpoint, self.prompt_tokens).sharing(self.share as f64 / SHARE).used_at(used);
        *self = moved;
        if !prefilling {
            self.first_byte();
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.first_byte();
        self.endpoint.ledger.in_flight.fetch_sub(1, Relaxed);
        self.endpoint.ledger.shares.fetch_sub(self.share, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EndpointSpec;
    use attache_types::ids::EndpointId;

    fn endpoint(id: u32) -> Arc<Endpoint> {
        let port = 8000 + u16::try_from(id).unwrap();
        Arc::new(Endpoint::new(EndpointId(id), EndpointSpec::at(([127, 0, 0, 1], port).into())))
    }

    #[test]
    fn ticket_adds_and_removes_its_request() {
        let e = endpoint(0);
        let mut ticket = Ticket::book(e.clone(), 100);
        assert_eq!((e.ledger.in_flight(), e.ledger.prefill_tokens()), (1, 100));
        ticket.first_byte();
        ticket.first_byte();
        assert_eq!((e.ledger.in_flight(), e.ledger.prefill_tokens()), (1, 0));
        drop(ticket);
        assert_eq!((e.ledger.in_flight(), e.ledger.prefill_tokens(), e.ledger.routed()), (0, 0, 1));
    }

    #[test]
    fn ticket_moves_to_the_served_endpoint() {
        let (a, b) = (endpoint(0), endpoint(1));
        let mut ticket = Ticket::book(a.clone(), 7);
        ticket.move_to(b.clone());
        assert_eq!((a.ledger.in_flight(), a.ledger.prefill_tokens()), (0, 0));
        assert_eq!((b.ledger.in_flight(), b.ledger.prefill_tokens()), (1, 7));
        ticket.first_byte();
        ticket.move_to(a.clone());
        assert_eq!((a.ledger.in_flight(), a.ledger.prefill_tokens()), (1, 0));
        drop(ticket);
        assert_eq!((a.ledger.in_flight(), b.ledger.in_flight()), (0, 0));
    }

    #[test]
    fn shares_return_to_zero() {
        let (a, b) = (endpoint(0), endpoint(1));
        let mut one = Ticket::book(a.clone(), 0).sharing(0.1);
        let two = Ticket::book(a.clone(), 0).sharing(0.7);
        assert!((a.ledger.utilization() - 0.8).abs() < 1e-9);
        one.move_to(b.clone());
        assert_eq!((a.ledger.utilization(), b.ledger.utilization()), (0.7, 0.1));
        drop((one, two));
        assert_eq!((a.ledger.utilization(), b.ledger.utilization()), (0.0, 0.0));
        drop(Ticket::book(a.clone(), 0).sharing(f64::INFINITY));
        assert_eq!(a.ledger.utilization(), 0.0);
    }

    #[test]
    fn ledger_corrects_fresh_metrics_and_counts_alone_without_them() {
        let e = endpoint(0);
        let page = |in_flight_at_scrape| EndpointMetrics {
            waiting: 3,
            running: 4,
            in_flight_at_scrape,
            ..EndpointMetrics::default()
        };
        let _one = Ticket::book(e.clone(), 0);
        let _two = Ticket::book(e.clone(), 0);
        // Our requests were all sent after the scrape.
        assert_eq!(requests(&e, Some(&page(0))), 9);
        // The scrape includes both of our requests.
        assert_eq!(requests(&e, Some(&page(2))), 7);
        // The scrape included five of our requests, of which three have ended since.
        assert_eq!(requests(&e, Some(&page(5))), 4);
        // Our own requests in flight count even if the scrape missed them.
        assert_eq!(requests(&e, Some(&page(9))), 2);
        assert_eq!(requests(&e, None), 2);
    }
}
