//! What later decisions count of a request in flight: bookings on its endpoints, its ranks, its admission by the queue.

use crate::hints::Hints;
use crate::queues::AdmittedRequest;
use attache_pool::Endpoint;
use attache_protocol::Usage;
use attache_record::Booked;
use attache_scheduling::Strategy;
use attache_scheduling::digest::Digest;
use attache_sync::ServedFlow;
use attache_types::clock::Timestamp;
use std::sync::Arc;

/// The bookings of one request. Dropping them releases them.
#[derive(Debug)]
pub(super) struct OpenBookings {
    /// On the endpoint that responds, and on encode workers.
    pub(super) response: Booked,
    /// On the prefill worker, if a sidecar calls it.
    pub(super) prefill: Option<Box<Booked>>,
    /// Has the ranks of the request.
    pub(super) hints: Hints,
    /// The strategy that chose the endpoint for this model, and what it needs to move its records.
    pub(super) strategy: Arc<dyn Strategy>,
    pub(super) model: Arc<str>,
    pub(super) trail: Option<Box<Digest>>,
    /// The admission by the queue, in pools with a queue. Dropped last: the request that is dequeued by that must see
    /// all other bookings released.
    pub(super) admitted: Option<AdmittedRequest>,
}

impl OpenBookings {
    /// The endpoint that responds, as far as it is known.
    pub(super) fn endpoint(&self) -> &Arc<Endpoint> {
        self.response.endpoint()
    }

    /// The response headers have arrived, which may end the request's preemptibility.
    pub(super) fn responds(&mut self, now: Timestamp) {
        self.admitted.iter_mut().for_each(|admitted| admitted.answers(now));
    }

    /// Envoy has retried on `served`: the booking and the strategy's records move there.
    pub(super) fn move_to(&mut self, served: &Arc<Endpoint>, now: Timestamp) {
        let Self { strategy, model, trail, .. } = self;
        let from = self.response.endpoint().id;
        self.response.move_to(served, now, || {
            trail.iter().for_each(|trail| strategy.moved(model, trail, from, served.id, now));
        });
        // The rank belongs to the endpoint that was tried first.
        self.hints.rank = None;
    }

    /// The first byte of the response body has arrived. `is_first_token`: exactly with the first token.
    pub(super) fn first_byte(&mut self, good: bool, is_first_token: bool, now: Timestamp) {
        self.response.first_byte(good, is_first_token, now);
        // The sidecar has completed the prefill before, but does not report when.
        self.prefill.iter_mut().for_each(|prefill| prefill.first_byte(good, false, now));
    }

    /// The request needs less capacity from now on, so the queue may dequeue another one.
    pub(super) fn free_capacity(&self, now: Timestamp) {
        self.admitted.iter().for_each(|admitted| admitted.freed(now));
    }

    /// Charges the request's flow for about `tokens` tokens of the response in total.
    pub(super) fn generated(&mut self, tokens: u32, now: Timestamp) {
        self.admitted.iter_mut().for_each(|admitted| admitted.answered(tokens, now));
    }

    /// Releases the prefill worker that a sidecar called.
    pub(super) fn end_prefill(&mut self, complete: bool, usage: &Usage, now: Timestamp) {
        if let Some(mut prefill) = self.prefill.take() {
            prefill.end(complete, &Usage { completion_tokens: None, ..*usage }, |_| false, now);
        }
    }

    /// The endpoints are released, so the queue may dequeue another request. Returns what the flow was served.
    pub(super) fn end_admission(&mut self, complete: bool, usage: &Usage, now: Timestamp) -> Option<ServedFlow> {
        self.admitted.take()?.end(usage, complete, now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::Plan;
    use crate::decide::tests::fixture::{NOW, Parts};
    use attache_disagg::Mode;

    fn bookings(plan: Plan) -> OpenBookings {
        OpenBookings {
            response: plan.booked.unwrap(),
            prefill: plan.prefill,
            hints: plan.hints,
            strategy: plan.strategy,
            model: plan.target,
            trail: plan.decision.trail,
            admitted: plan.admitted,
        }
    }

    #[test]
    fn first_byte_frees_the_tokens_of_the_prompt_and_drop_the_rest() {
        let fixture = Parts::default().build();
        let mut bookings = bookings(*fixture.chat(&"word ".repeat(100)).unwrap());
        let endpoint = bookings.endpoint().clone();
        let load = || (endpoint.ledger.in_flight(), endpoint.ledger.prefill_tokens() > 0);
        assert_eq!(load(), (1, true));
        bookings.first_byte(true, true, NOW);
        assert_eq!(load(), (1, false));
        drop(bookings);
        assert_eq!(load(), (0, false));
    }

    #[test]
    fn bookings_of_a_retried_request_move_to_the_serving_endpoint() {
        let fixture = Parts::default().build();
        let mut bookings = bookings(*fixture.chat("hello").unwrap());
        let served = fixture.snapshot.load().endpoints[2].endpoint.clone();
        bookings.move_to(&served, NOW);
        assert_eq!((bookings.endpoint().id, fixture.in_flight()), (served.id, vec![0, 0, 1]));
    }

    #[test]
    fn prefill_worker_is_released_at_the_end_and_not_twice() {
        let disagg = Some(Mode::Header { source_tokens: None });
        let fixture = Parts { disagg, roles: &["prefill", "decode", "decode"], ..Parts::default() }.build();
        let mut bookings = bookings(*fixture.chat("hello").unwrap());
        assert_eq!(fixture.in_flight(), [1, 1, 0]);
        bookings.end_prefill(true, &Usage::default(), NOW);
        bookings.end_prefill(true, &Usage::default(), NOW);
        assert_eq!(fixture.in_flight(), [0, 1, 0]);
        bookings.response.end(true, &Usage::default(), |_| false, NOW);
        assert_eq!(fixture.in_flight(), [0, 0, 0]);
    }
}
