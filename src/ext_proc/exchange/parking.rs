//! The exchange of a request that waits for its turn.
//!
//! ```text
//! Collecting ─end of body─▶ (no room) ─▶ QueuedRequest ─its turn─▶ Collecting ─▶ (decide, with the body as it stands then)
//!                                           └─ waited too long, gave way ─▶ Refused
//! Prefilling, Flowing, Ended ─gives way while it is under way─▶ Refused
//! ```

use super::*;
use attache_picker::queues::{self, AdmittedRequest, QueuedRequest, DequeueResult, QueueSignal};

/// What a request waits with.
#[derive(Debug, Default)]
pub(super) struct Parking {
    parked: Option<(QueuedRequest, Stood)>,
    /// More of its body came while it waited, which the queue has not counted.
    late: bool,
    /// Its turn has come, and it is not decided yet.
    admitted: Option<AdmittedRequest>,
    /// Ready when it is to give way.
    eviction: Option<QueueSignal<Refusal>>,
}

impl Parking {
    pub(super) fn deadline(&self) -> Option<Timestamp> {
        self.parked.as_ref().and_then(|(parked, ..)| parked.until())
    }

    /// Whether it waits and more of its body has come meanwhile.
    pub(super) fn is_late(&self) -> bool {
        self.parked.is_some() && self.late
    }

    pub(super) fn has_turn(&self) -> bool {
        self.admitted.is_some()
    }

    /// The body of a request that waits has come to its end.
    pub(super) fn ends(&mut self, close: Close) {
        if let Some((_, stood)) = self.parked.as_mut().filter(|(_, stood)| stood.is_open()) {
            *stood = Stood::Body(close);
        }
    }

    /// Keeps a turn for the decision that follows.
    pub(super) fn keep(&mut self, turn: Option<AdmittedRequest>) {
        self.admitted = turn.or(self.admitted.take());
    }

    pub(super) fn take_turn(&mut self) -> Option<AdmittedRequest> {
        self.admitted.take()
    }

    /// It is decided, and in the ledger.
    pub(super) fn landed(&mut self, admitted: &mut AdmittedRequest) {
        admitted.landed();
        self.eviction = admitted.eviction();
    }
}

impl Exchange {
    /// Becomes ready when the queue dequeues the request; the caller then sends [`Event::Turn`]. Returned once.
    pub fn waiting(&mut self) -> Option<QueueSignal> {
        self.parking.parked.as_mut().and_then(|(parked, ..)| parked.waiting())
    }

    /// Becomes ready when a more important request preempts this one; the caller then sends [`Event::Evicted`].
    /// Returned once.
    pub fn eviction(&mut self) -> Option<QueueSignal<Refusal>> {
        self.parking.eviction.take()
    }

    /// While nothing of its answer has gone on, the client is told why; an answer that has begun is cut by Envoy.
    pub(super) fn on_evicted(&mut self, refusal: &Refusal, now: Timestamp, out: &mut Actions) {
        if self.request != RequestSide::Prefilling && !self.routed.as_ref().is_some_and(|routed| routed.is_preemptible()) {
            return;
        }
        self.abandon_split();
        if let Some(routed) = self.routed.take() {
            routed.end(End::Evicted, now, &self.processor.picker);
        }
        self.refuse(&queues::preemption_error(refusal), now, out);
    }

    pub(super) fn park(&mut self, parked: QueuedRequest, stood: Stood) {
        self.request = RequestSide::Queued;
        self.parking.parked = Some((parked, stood));
    }

    /// More of a body whose request was parked before its end. It is held until its turn, and refused where that takes
    /// more memory than any body may.
    pub(super) fn on_parked_body(&mut self, message: HttpBody, now: Timestamp, out: &mut Actions) {
        // Envoy 1.35 to 1.37 ended long bodies twice.
        if !self.parking.parked.as_ref().is_some_and(|(_, stood)| stood.is_open()) {
            return;
        }
        self.collect(message.body, now);
        self.parking.late = true;
        if message.end_of_stream {
            self.parking.ends(Close::Whole);
        }
        let limits = &self.config.limits;
        let exceeded = if self.body.len() > limits.max_body_bytes {
            Limit::BodyBytes
        } else if !self.processor.uploads.make_way(&self.processor.picker.buffered, limits, now) {
            Limit::BufferedBytes
        } else {
            return;
        };
        self.processor.metrics.limit(exceeded);
        let message = "the pool is full, and the request's body is too long to be held until its turn";
        self.refuse(&RequestError::new(Reason::Overloaded, message), now, out);
    }

    /// Its turn, or `None` when nobody will tell, though it still waits: then it would do so for ever.
    pub(super) fn on_turn(&mut self, turn: Option<DequeueResult>, now: Timestamp, out: &mut Actions) {
        let Some((parked, stood)) = self.parking.parked.take() else { return };
        let Some(turn) = turn else {
            tracing::error!("queued request lost");
            let error = RequestError::new(Reason::Internal, "the endpoint picker lost this queued request");
            return self.refuse(&error, now, out);
        };
        match turn {
            Ok(admitted) => {
                parked.settle();
                self.parking.admitted = Some(admitted);
                self.request = RequestSide::Collecting;
                match stood {
                    Stood::Headers(end_of_stream) => self.decide_at_headers(end_of_stream, now, out),
                    Stood::Body(close) => self.decide_on_body(close, now, out),
                }
            }
            Err(refusal) => {
                let error = parked.refused(&refusal);
                parked.settle();
                self.refuse(&error, now, out);
            }
        }
    }

    pub(super) fn on_parked_deadline(&mut self, now: Timestamp, out: &mut Actions) {
        let expired = self.parking.parked.as_mut().and_then(|(parked, ..)| parked.expire(now));
        if let Some(error) = expired {
            self.parking.parked = None;
            self.refuse(&error, now, out);
        }
    }
}
