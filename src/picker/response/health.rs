//! What a response shows of the health of the servers that worked on its request.

use super::{Origin, ResponseHead, Routed};
use crate::event::Event;
use crate::picker::Picker;
use attache_pool::Endpoint;
use attache_pool::health::{Availability, Observation, Outcome, Verdict};
use attache_types::clock::Timestamp;
use std::sync::Arc;

impl Routed {
    /// Envoy may have retried on another endpoint. The booking moves there, and the endpoint that was tried first
    /// counts as failed. A request that failed on every endpoint may be the cause itself.
    pub(super) fn follow(&mut self, head: &ResponseHead<'_>, now: Timestamp, picker: &Picker) {
        let Some(served) = head.served.filter(|a| *a != self.picked.spec.address) else { return };
        // An earlier endpoint may have fetched the blocks, so they are left to their lease.
        self.plan.prefill_outcome.iter_mut().for_each(|prefill_outcome| prefill_outcome.pinned = None);
        let snapshot = self.plan.runtime.pool.store.load();
        if let Some(state) = snapshot.position(served).and_then(|p| snapshot.get(p)) {
            self.probes = false;
            let failed_everywhere = head.origin == Origin::Server && head.status >= 500;
            let outcome = if failed_everywhere { Outcome::ErrorResponse } else { Outcome::ConnectFailure };
            self.record(&self.picked.clone(), outcome, now, picker);
            let (plan, picked, to) = (&self.plan, self.picked.id, &state.endpoint);
            self.booking.move_to(to, now, || plan.noted_elsewhere(picked, to.id, now));
            // The rank belongs to the endpoint that was tried first.
            self.plan.hints.rank = None;
        }
    }

    /// Records what a response head shows about the health of its endpoints. `waits`: the decode worker may still wait
    /// for the prompt.
    pub(super) fn judge(&mut self, head: &ResponseHead<'_>, waits: bool, now: Timestamp, picker: &Picker) {
        let outcome = match head.origin {
            Origin::Unreachable => Some(Outcome::ConnectFailure),
            Origin::Gateway => None,
            Origin::Server => Outcome::of_status(head.status),
        };
        let Some(outcome) = outcome else { return };
        if outcome == Outcome::ErrorResponse && self.one_has_gone(now) {
            return;
        }
        // Only the body will show that the endpoint works.
        if head.is_good() && waits {
            return;
        }
        self.probes = false;
        let ejected = self.record(&self.booking.endpoint().clone(), outcome, now, picker);
        if outcome == Outcome::ConnectFailure || ejected {
            return;
        }
        // A sidecar does not say which server failed. The failing one fails in every combination, so it reaches the
        // limit first. Once it is ejected, the others are not blamed.
        if let Some(prefill) = self.plan.prefill.as_ref().map(|booking| booking.endpoint().clone()) {
            self.probes_prefill = false;
            if self.record(&prefill, outcome, now, picker) {
                return;
            }
        }
        for (nth, encoder) in self.plan.decision.encode.clone().iter().enumerate() {
            self.probes_encoder &= nth != 0;
            if self.record(encoder, outcome, now, picker) {
                return;
            }
        }
    }

    /// Whether a server that worked on this request has been ejected since. That explains the error response. A server
    /// that is used although it is ejected proves nothing.
    fn one_has_gone(&self, now: Timestamp) -> bool {
        let (plan, decision) = (&self.plan, &self.plan.decision);
        let away = |endpoint: &Endpoint, probes: bool| {
            !probes && endpoint.health.availability(now, plan.runtime.pool.scheduler.health()) == Availability::Ejected
        };
        let prefill = plan.prefill_outcome.as_ref().and_then(|prefill_outcome| prefill_outcome.prefill.as_ref());
        let probed = decision.split.as_ref().is_some_and(|split| split.probe);
        let prompts = prefill.is_some_and(|prefill| away(prefill, probed));
        let gone = |(nth, encoder): (usize, &Arc<Endpoint>)| away(encoder, nth == 0 && self.probes_encoder);
        let encoder = decision.encode.iter().enumerate().any(gone);
        let is_alone = prefill.is_none() && decision.encode.is_empty();
        let own = !is_alone && !decision.ejection_ignored && away(self.booking.endpoint(), self.probes);
        own || prompts || encoder
    }

    /// True when this ejected the endpoint.
    pub(super) fn record(&self, endpoint: &Endpoint, outcome: Outcome, now: Timestamp, picker: &Picker) -> bool {
        let pool = &self.plan.runtime.pool;
        let observation = Observation { outcome, api: self.api, client: self.plan.client };
        let verdict = self.booking.tape().judge(endpoint, observation, now, pool.scheduler.health(), &pool.store);
        picker.observer.event(Event::Health(verdict));
        if verdict == Verdict::Ejected {
            tracing::warn!(pool = %pool.name, endpoint = %endpoint.authority, ?outcome, "endpoint ejected");
        }
        verdict == Verdict::Ejected
    }
}
