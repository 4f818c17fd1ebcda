//! Requests before their decision: arrival, queues of flow control, preemption. Called by [`super::World`]; pure.

use super::World;
use super::encode_legs::PendingEncode;
use super::prefill_legs::PendingPrefill;
use crate::front::{Arrival, Attempted, Front};
use crate::queue::SimEvent;
use attache_picker::queues::DequeueResult;
use attache_report::served::{Ending, QueueOutcome, Queued};
use attache_types::clock::Timestamp;
use attache_types::error::Reason;
use attache_workload::Request;
use std::sync::Arc;

impl World<'_> {
    /// A request arrives: it is decided, queued or rejected.
    pub(super) fn arrive(&mut self, request: Request) {
        let now = request.at;
        self.pickers.iter().for_each(|picker| picker.set_time(now));
        self.outcome.requests += 1;
        let arrival = self.pickers.of(request.number).arrival(request);
        self.attempt(arrival, now);
        self.settle_queues(now);
        self.exchange(now);
    }

    /// Makes one attempt to decide a request.
    fn attempt(&mut self, arrival: Arrival, now: Timestamp) {
        let base = self.base();
        match self.pickers.of_mut(arrival.request.number).decide(arrival, &base, now) {
            Attempted::Sent(request, sent) => {
                if sent.plan.admitted.is_some() {
                    self.report_queued(&request, QueueOutcome::Passed, now);
                }
                self.send(request, *sent, now);
            }
            Attempted::Waits(waiting) => {
                let number = waiting.arrival.request.number;
                if let Some(until) = waiting.until() {
                    self.queue.push(until, SimEvent::Expire(number));
                }
                self.waiting.insert(number, *waiting);
                self.wake(number, now);
            }
            Attempted::Refused(request, error) => {
                if let Some(outcome) = self.pickers.first().queues().and_then(|_| outcome_of(error.reason)) {
                    self.report_queued(&request, outcome, now);
                }
                self.end_early(&request, None, (Ending::Refused, error.reason.code()), now);
            }
        }
    }

    /// The model that a request without an adapter asks for.
    pub(super) fn base(&self) -> Arc<str> {
        self.servers.first().map_or_else(|| Arc::from(""), |s| s.config.model.clone())
    }

    fn report_queued(&mut self, request: &Request, outcome: QueueOutcome, now: Timestamp) {
        let (number, at, priority) = (request.number, request.at, request.priority);
        let (tenant, waited) = (request.tenant.as_deref(), now.since(at));
        self.observer.queued(&Queued { number, at, priority, tenant, waited, outcome });
    }

    /// The pool has published a snapshot: queued requests may fit now.
    pub(super) fn freed(&mut self, now: Timestamp) {
        if self.pickers.first().queues().is_some() {
            self.pickers.iter().filter_map(Front::queues).for_each(|queues| queues.freed(now));
            self.check_later(now);
        }
    }

    /// Schedules the next check of the queues, as the queues' timer does.
    fn check_later(&mut self, now: Timestamp) {
        let queues = self.pickers.iter().filter_map(Front::queues).filter(|_| !self.waiting.is_empty());
        let at = queues.map(|queues| now.after(queues.next_check_in(now))).min();
        if let Some(at) = at.filter(|at| self.check != Some(*at)) {
            self.queue.push(at, SimEvent::CheckQueues);
        }
        self.check = at;
    }

    /// A scheduled check of the queues is due, unless another one has replaced it.
    pub(super) fn check_queues(&mut self, now: Timestamp) {
        if self.check == Some(now) {
            self.check = None;
            self.freed(now);
        }
    }

    /// Handles all requests that the queues have let through, refused or preempted since the last call.
    pub(super) fn settle_queues(&mut self, now: Timestamp) {
        if self.pickers.first().queues().is_none() {
            return;
        }
        while let Some(number) = self.next_woken() {
            self.wake(number, now);
        }
        if self.pickers.iter().fold(false, |woken, picker| picker.wakes.take_timer() | woken) {
            self.check_later(now);
        }
    }

    /// The next request that its picker has woken.
    fn next_woken(&self) -> Option<u64> {
        self.pickers.iter().find_map(|picker| picker.wakes.next())
    }

    /// A signal of the request with this number may be ready.
    pub(super) fn wake(&mut self, number: u64, now: Timestamp) {
        let wakes = self.pickers.of(number).wakes.clone();
        if let Some(waiting) = self.waiting.get_mut(&number) {
            if let Some(result) = waiting.dequeued(number, &wakes) {
                self.dequeue(number, result, now);
            }
        } else if self.flying.get_mut(&number).is_some_and(|flying| flying.sent.preempted(number, &wakes)) {
            self.preempt(number, now);
        } else if self.encodes.get_mut(&number).is_some_and(|encode| encode.sent.preempted(number, &wakes)) {
            if let Some(PendingEncode { request, sent, .. }) = self.abandon_encode(number, now) {
                self.end_preempted(&request, None, now);
                self.pickers.of_mut(number).preempted(sent, now);
            }
        } else if self.prefills.get_mut(&number).is_some_and(|prefill| prefill.sent.preempted(number, &wakes)) {
            self.abandon(number, now);
            if let Some(PendingPrefill { request, sent, legs }) = self.prefills.remove(&number) {
                // The queues must find the prefill server free.
                drop(legs);
                self.end_preempted(&request, None, now);
                self.pickers.of_mut(number).preempted(sent, now);
            }
        }
    }

    /// A request leaves its queue.
    fn dequeue(&mut self, number: u64, result: DequeueResult, now: Timestamp) {
        let Some(waiting) = self.waiting.remove(&number) else { return };
        match result {
            Ok(admitted) => self.attempt(waiting.admitted(admitted), now),
            Err(refusal) => {
                let (arrival, error) = waiting.refused(&refusal);
                self.reject(&arrival, error.reason, now);
            }
        }
    }

    /// The time in the queue of the request with this number has ended, if it still waits.
    pub(super) fn expire(&mut self, number: u64, now: Timestamp) {
        let Some(error) = self.waiting.get_mut(&number).and_then(|waiting| waiting.expire(now)) else { return };
        if let Some(waiting) = self.waiting.remove(&number) {
            self.reject(&waiting.arrival, error.reason, now);
        }
    }

    /// Rejects a request that was queued.
    fn reject(&mut self, arrival: &Arrival, reason: Reason, now: Timestamp) {
        // If no endpoint is ready, the queue gives that as the reason.
        self.report_queued(&arrival.request, outcome_of(reason).unwrap_or(QueueOutcome::Expired), now);
        self.end_early(&arrival.request, None, (Ending::Refused, reason.code()), now);
    }

    /// A request in flight is preempted for a more important one.
    fn preempt(&mut self, number: u64, now: Timestamp) {
        let Some(flying) = self.flying.remove(&number) else { return };
        self.advance(flying.server, now);
        if let Some(server) = self.servers.get_mut(flying.server) {
            server.cancel(now, super::JobId(number));
        }
        self.schedule(flying.server);
        self.end_preempted(&flying.request, u32::try_from(flying.server).ok(), now);
        self.pickers.of_mut(number).preempted(flying.sent, now);
    }

    fn end_preempted(&mut self, request: &Request, endpoint: Option<u32>, now: Timestamp) {
        self.report_queued(request, QueueOutcome::Evicted, now);
        self.end_early(request, endpoint, (Ending::Refused, Reason::Evicted.code()), now);
    }
}

/// How a request with this error left the queue, if the queue or an admitter caused it.
fn outcome_of(reason: Reason) -> Option<QueueOutcome> {
    match reason {
        Reason::Shed | Reason::DeadlineUnmet => Some(QueueOutcome::Shed),
        Reason::QueueFull => Some(QueueOutcome::Full),
        Reason::QueueTimeout | Reason::DeadlinePassed => Some(QueueOutcome::Expired),
        Reason::Evicted => Some(QueueOutcome::Evicted),
        _ => None,
    }
}
