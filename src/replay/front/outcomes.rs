//! Outcomes of sent requests: health of servers, bookings, quotas and queue.

use super::{Front, Sent};
use crate::legs::Patience;
use attache_picker::decide::Plan;
use attache_pool::Endpoint;
use attache_pool::health::HealthOutcome;
use attache_prefix::key::BlockKey;
use attache_protocol::Usage;
use attache_quota::Had;
use attache_types::clock::Timestamp;
use attache_workload::Request;

impl Front {
    /// Records the first byte of the response: status 200 if `good`, otherwise an error of the server. Releases the
    /// encode servers.
    pub(crate) fn first_byte(&self, sent: &mut Sent, good: bool, now: Timestamp) {
        let plan = &mut sent.plan;
        if let Some(admitted) = &mut plan.admitted {
            admitted.answers(now);
        }
        if let Some(booked) = &mut plan.booked {
            let outcome = if good { HealthOutcome::Success } else { HealthOutcome::Failure };
            // As live: a response does not say which server failed, and an ejected one explains the failure.
            let mut servers = std::iter::once(booked.endpoint()).chain(&plan.decision.encode);
            let _ = servers.any(|server| self.record(server, outcome, now));
            booked.first_byte(good, true, now);
        }
        if let Some(admitted) = &plan.admitted {
            admitted.freed(now);
        }
    }

    /// Records the outcome of a request in the health of `endpoint`.
    pub(crate) fn judge(&self, endpoint: &Endpoint, outcome: HealthOutcome, now: Timestamp) {
        self.record(endpoint, outcome, now);
    }

    /// As [`Front::judge`]. Returns true when this ejected the endpoint.
    fn record(&self, endpoint: &Endpoint, outcome: HealthOutcome, now: Timestamp) -> bool {
        // A simulated request never causes an error response itself.
        let outcome = if outcome == HealthOutcome::ErrorResponse { HealthOutcome::Failure } else { outcome };
        endpoint.health.record(outcome, now, self.runtime.pool.scheduler.health())
    }

    pub(crate) fn patience(&self) -> Patience {
        self.patience
    }

    /// Records the complete end of the response.
    pub(crate) fn ended(&mut self, mut sent: Sent, request: &Request, usage: &Usage, now: Timestamp) {
        if let Some(session) = request.session.filter(|_| !sent.echo.is_empty()) {
            self.echoes.insert(session, std::mem::take(&mut sent.echo));
        }
        let Sent { mut plan, mut contents, .. } = sent;
        let extend = |keys: &mut Vec<BlockKey>| {
            contents.push(request.answer, |content| keys.push(BlockKey(content)));
            true
        };
        if let Some(mut booked) = plan.booked.take() {
            booked.end(true, usage, extend, now);
        }
        let tokens = usage.prompt_tokens.unwrap_or(0).saturating_add(usage.completion_tokens.unwrap_or(0));
        self.close(plan, Had::Tokens(tokens), usage, true, now);
    }

    /// Releases a request that is never sent. If it was a probe, another request may probe its server.
    pub(crate) fn unsent(&self, sent: &Sent) {
        probe_lost(sent);
    }

    /// Records a failure: the server was unreachable, or the connection broke before the end of the response.
    pub(crate) fn lost(&mut self, sent: Sent, unreachable: bool, now: Timestamp) {
        if let Some(endpoint) = sent.endpoint() {
            let outcome = if unreachable { HealthOutcome::ConnectFailure } else { HealthOutcome::Failure };
            self.judge(endpoint, outcome, now);
        }
        probe_lost(&sent);
        self.cut(sent, Had::AS_BOOKED, now);
    }

    /// Records that a request was preempted. Its tenant is not charged.
    pub(crate) fn preempted(&mut self, sent: Sent, now: Timestamp) {
        probe_lost(&sent);
        self.cut(sent, Had::Nothing, now);
    }

    /// Ends a request whose response is not complete, or never began.
    pub(crate) fn cut(&mut self, sent: Sent, had: Had, now: Timestamp) {
        let mut plan = sent.plan;
        if let Some(mut booked) = plan.booked.take() {
            booked.end(false, &Usage::default(), |_| false, now);
        }
        self.close(plan, had, &Usage::default(), false, now);
    }

    /// Settles quotas and queue of a request that has ended and is released.
    fn close(&self, mut plan: Box<Plan>, had: Had, usage: &Usage, complete: bool, now: Timestamp) {
        plan.permits.drain(..).for_each(|permit| permit.settle(had));
        let served = plan.admitted.take().and_then(|admitted| admitted.end(usage, complete, now));
        if let Some((replica, served)) = self.picker.replica.as_ref().zip(served) {
            replica.served(&self.runtime.pool.name, served, now);
        }
    }
}

/// If the request was the probe of a server without an outcome yet, another request may probe that server.
fn probe_lost(sent: &Sent) {
    let decision = &sent.plan.decision;
    let own = sent.endpoint().filter(|_| decision.probe);
    let encoder = decision.encode.first().filter(|_| decision.encode_probe);
    own.into_iter().chain(encoder).for_each(|endpoint| endpoint.health.probe_lost());
}
