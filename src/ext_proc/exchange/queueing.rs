//! The exchange of a queued request, and of one that is preempted.
//!
//! ```text
//! Collecting ─end of body─▶ (no capacity) ─▶ Queued ─dequeued─▶ Collecting ─▶ (decide, with the body so far)
//!                                               └─ expired or evicted ─▶ Refused
//! Prefilling, Flowing, Ended ─preempted─▶ Refused
//! ```

use super::token_wait::DecisionPoint;
use super::{Actions, BodyEnd, Exchange, RequestSide};
use attache_flow::Refusal;
use attache_picker::event::{End, Limit};
use attache_picker::queues::{self, AdmittedRequest, DequeueResult, QueueSignal, QueuedRequest};
use attache_types::clock::Timestamp;
use attache_types::error::{Reason, RequestError};
use envoy_types::pb::envoy::service::ext_proc::v3::HttpBody;

/// What an exchange holds of its pool's queue.
#[derive(Debug, Default)]
pub(super) struct QueueState {
    queued: Option<(QueuedRequest, DecisionPoint)>,
    /// More of its body arrived while it was queued. The queue's byte limit does not count that part.
    late: bool,
    /// Set between the dequeue and the decision.
    admitted: Option<AdmittedRequest>,
    /// Becomes ready when the request is preempted.
    eviction: Option<QueueSignal<Refusal>>,
}

impl QueueState {
    pub(super) fn deadline(&self) -> Option<Timestamp> {
        self.queued.as_ref().and_then(|(queued, ..)| queued.until())
    }

    /// Whether the queue will say something about the request.
    pub(super) fn expects_results(&self) -> bool {
        self.queued.is_some() || self.eviction.is_some()
    }

    /// Whether it is queued and more of its body has arrived since.
    pub(super) fn is_late(&self) -> bool {
        self.queued.is_some() && self.late
    }

    pub(super) fn is_dequeued(&self) -> bool {
        self.admitted.is_some()
    }

    /// The body of the queued request is complete.
    pub(super) fn ends(&mut self, close: BodyEnd) {
        if let Some((_, point)) = self.queued.as_mut().filter(|(_, point)| point.is_open()) {
            *point = DecisionPoint::Body(close);
        }
    }

    /// Keeps the admission for the next decision attempt.
    pub(super) fn keep(&mut self, result: Option<AdmittedRequest>) {
        self.admitted = result.or(self.admitted.take());
    }

    pub(super) fn take_admitted(&mut self) -> Option<AdmittedRequest> {
        self.admitted.take()
    }

    /// The request is decided and booked in the ledger.
    pub(super) fn landed(&mut self, admitted: &mut AdmittedRequest) {
        admitted.landed();
        self.eviction = admitted.eviction();
    }
}

impl Exchange {
    /// Becomes ready when the queue dequeues the request; the caller then sends [`Event::Dequeued`](super::Event::Dequeued). Returned once.
    pub fn waiting(&mut self) -> Option<QueueSignal> {
        self.queueing.queued.as_mut().and_then(|(queued, ..)| queued.waiting())
    }

    /// Becomes ready when a more important request preempts this one; the caller then sends [`Event::Evicted`](super::Event::Evicted).
    /// Returned once.
    pub fn eviction(&mut self) -> Option<QueueSignal<Refusal>> {
        self.queueing.eviction.take()
    }

    /// Preempts the request. If its response has not begun, the client gets an error response; otherwise Envoy resets
    /// it.
    pub(super) fn on_evicted(&mut self, refusal: &Refusal, now: Timestamp, out: &mut Actions) {
        if self.request != RequestSide::Prefilling
            && !self.in_flight.as_ref().is_some_and(|in_flight| in_flight.is_preemptible())
        {
            return;
        }
        self.abandon_split(now);
        self.refuse_in_flight(End::Evicted, &queues::preemption_error(refusal), now, out);
    }

    pub(super) fn enqueue(&mut self, queued: QueuedRequest, point: DecisionPoint) {
        self.request = RequestSide::Queued;
        self.queueing.queued = Some((queued, point));
    }

    /// Buffers more of the body of a queued request. Rejects the request if the body exceeds the limits of bodies.
    pub(super) fn on_queued_body(&mut self, message: HttpBody, now: Timestamp, out: &mut Actions) {
        // Envoy 1.35 to 1.37 ended long bodies twice.
        if !self.queueing.queued.as_ref().is_some_and(|(_, point)| point.is_open()) {
            return;
        }
        self.read_form(&message.body);
        self.collect(message.body, now);
        self.queueing.late = true;
        if message.end_of_stream {
            self.queueing.ends(BodyEnd::Whole);
        }
        let limits = &self.config.limits;
        let exceeded = if self.body.len() > self.max_held_bytes() {
            Limit::BodyBytes
        } else if !self.processor.uploads.make_way(&self.processor.picker.buffered, limits, now) {
            Limit::BufferedBytes
        } else {
            return;
        };
        self.processor.metrics.limits.count(exceeded);
        let message = "the pool is full, and the request's body is too long to be buffered while it is queued";
        self.refuse(&RequestError::new(Reason::Overloaded, message), now, out);
    }

    /// The request left the queue. `None`: the queue dropped it without a result, so it would wait forever.
    pub(super) fn on_dequeue(&mut self, result: Option<DequeueResult>, now: Timestamp, out: &mut Actions) {
        let Some((queued, point)) = self.queueing.queued.take() else { return };
        let Some(result) = result else {
            tracing::error!("queued request lost");
            let error = RequestError::new(Reason::Internal, "the endpoint picker lost this queued request");
            return self.refuse(&error, now, out);
        };
        match result {
            Ok(admitted) => {
                queued.settle();
                self.queueing.admitted = Some(admitted);
                self.request = RequestSide::Collecting;
                match point {
                    DecisionPoint::Headers(end_of_stream) => self.decide_at_headers(end_of_stream, now, out),
                    DecisionPoint::Body(close) => self.decide_on_body(close, now, out),
                }
            }
            Err(refusal) => {
                let error = queued.refused(&refusal);
                queued.settle();
                self.refuse(&error, now, out);
            }
        }
    }

    pub(super) fn on_queued_deadline(&mut self, now: Timestamp, out: &mut Actions) {
        let expired = self.queueing.queued.as_mut().and_then(|(queued, ..)| queued.expire(now));
        if let Some(error) = expired {
            self.queueing.queued = None;
            self.refuse(&error, now, out);
        }
    }
}
