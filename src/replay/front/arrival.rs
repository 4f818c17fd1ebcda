//! Requests before their decision, and the outcome of an attempt to decide one.

use super::Sent;
use super::wakes::Wakes;
use attache_flow::Refusal;
use attache_picker::head::Head;
use attache_picker::queues::{AdmittedRequest, DequeueResult, QueueSignal, QueuedRequest};
use attache_picker::quotas::Allowance;
use attache_types::clock::Timestamp;
use attache_types::error::RequestError;
use attache_types::rng::PickRng;
use attache_workload::Request;
use std::sync::Arc;

/// A request before its decision.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) request: Request,
    pub(super) head: Head,
    /// Each attempt draws the same numbers, as in the exchange.
    pub(super) rng: PickRng,
    pub(super) allowance: Allowance,
    /// Set between the dequeue and the decision.
    pub(super) admitted: Option<AdmittedRequest>,
}

/// A queued request.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) arrival: Arrival,
    pub(super) queued: QueuedRequest,
    pub(super) signal: Option<QueueSignal>,
}

impl Waiting {
    /// When its time in the queue ends, if it is limited.
    pub(crate) fn until(&self) -> Option<Timestamp> {
        self.queued.until()
    }

    /// How the request leaves the queue, if it does now.
    pub(crate) fn dequeued(&mut self, number: u64, wakes: &Arc<Wakes>) -> Option<DequeueResult> {
        let result = wakes.poll(number, self.signal.as_mut()?)?;
        self.signal = None;
        result
    }

    /// The request, which the queue has let through.
    pub(crate) fn admitted(self, admitted: AdmittedRequest) -> Arrival {
        self.queued.settle();
        Arrival { admitted: Some(admitted), ..self.arrival }
    }

    /// The request, which the queue has refused, and the error response.
    pub(crate) fn refused(self, refusal: &Refusal) -> (Arrival, RequestError) {
        let error = self.queued.refused(refusal);
        self.queued.settle();
        (self.arrival, error)
    }

    /// The error response if the request expires now; `None` if it has left the queue already.
    pub(crate) fn expire(&mut self, now: Timestamp) -> Option<RequestError> {
        self.queued.expire(now)
    }
}

/// Outcome of one attempt to decide a request.
pub(crate) enum Attempted {
    /// It is decided and booked.
    Sent(Request, Box<Sent>),
    /// It is queued.
    Waits(Box<Waiting>),
    /// It is rejected.
    Refused(Request, RequestError),
}
