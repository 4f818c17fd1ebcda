//! Requests in the queues of flow control, before their decision. Called by [`super::World`]; pure.

use super::World;
use crate::front::model;
use crate::queue::SimEvent;
use crate::queues::{self, EnqueueResult};
use attache_flow::Left;
use attache_report::served::{Ending, QueueOutcome, Queued};
use attache_types::clock::Timestamp;
use attache_workload::Request;
use std::sync::Arc;

impl World<'_> {
    /// A request arrives: it is decided, queued or rejected.
    pub(super) fn arrive(&mut self, request: Request) {
        let now = request.at;
        self.outcome.requests += 1;
        let base = self.base();
        if !self.front.quotas.reserve(&request, model(&request, &base), now) {
            return self.end_early(&request, None, Ending::Refused, now);
        }
        let mut left = Vec::new();
        let asked = self.front.ask(&request, &base, &mut left);
        // They were there before it.
        self.leave(left, now);
        match asked {
            EnqueueResult::Goes(None) => self.decide(request, None, now),
            EnqueueResult::Goes(passage) => {
                self.tell(&request, QueueOutcome::Passed, now);
                self.decide(request, passage, now);
            }
            EnqueueResult::Waits(until) => until.into_iter().for_each(|until| self.queue.push(until, SimEvent::Turn)),
            EnqueueResult::Refused(fate) => {
                self.tell(&request, fate, now);
                self.end_early(&request, None, Ending::Refused, now);
            }
        }
    }

    /// The model that a request without an adapter asks for.
    pub(super) fn base(&self) -> Arc<str> {
        self.servers.first().map_or_else(|| Arc::from(""), |s| s.engine.config().model.clone())
    }

    fn tell(&mut self, request: &Request, fate: QueueOutcome, now: Timestamp) {
        let (number, at, priority) = (request.number, request.at, request.priority);
        let (tenant, waited) = (request.tenant.as_deref(), now.since(at));
        self.observer.queued(&Queued { number, at, priority, tenant, waited, fate });
    }

    /// Those who wait are looked at when all that happens in this moment has happened.
    pub(super) fn freed(&mut self, at: Timestamp) {
        if !self.front.is_idle() && self.turn != Some(at) {
            self.turn = Some(at);
            self.queue.push(at, SimEvent::Turn);
        }
    }

    /// Those who wait are looked at.
    pub(super) fn turn(&mut self, now: Timestamp) {
        self.turn = None;
        let mut left = Vec::new();
        self.front.freed(now, &mut left);
        self.leave(left, now);
    }

    /// Ends requests that left the queue without a decision.
    fn leave(&mut self, left: Vec<Left<Request>>, now: Timestamp) {
        for left in left {
            let (request, fate, passage) = queues::why_left(left);
            self.tell(&request, fate, now);
            match passage {
                Some(_) => self.decide(request, passage, now),
                None => self.end_early(&request, None, Ending::Refused, now),
            }
        }
    }
}
