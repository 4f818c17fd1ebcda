//! The reservation that a request names: whether it still holds, and what the request takes over of it.

use super::RequestState;
use crate::ceiling::Ceiling;
use crate::event::{Event, ReservationOutcome};
use crate::quotas::Allowance;
use crate::reservations::{RequestSize, ReservedRequest};
use attache_pool::health::Availability;
use attache_pool::{Endpoint, PoolSnapshot};
use attache_scheduling::Decision;
use std::sync::Arc;

/// Why a reserved endpoint gets the request.
const RESERVED: &str = "reserved for this request before";

impl RequestState<'_> {
    /// What the request may ask for.
    fn size(&self) -> RequestSize {
        let request = self.routed.request;
        RequestSize {
            model: self.routed.rewritten.target.clone(),
            max_tokens: self.facts.max_tokens,
            choices: request.map_or(1, |request| request.choices),
            ceiling: Ceiling::of(self.q, request),
        }
    }

    /// The decision of a reservation, if the request may use it; otherwise why not.
    pub(crate) fn honour(&self, reserved: &ReservedRequest) -> Result<Decision, ReservationOutcome> {
        let (pool, snapshot) = (self.pool(), self.pool().store.load());
        let is_split = reserved.decision.split.is_some();
        let matches = reserved.runtime.pool.name == pool.name
            && reserved.size.covers(&self.size())
            && (!is_split || self.may_split(&snapshot));
        if !matches {
            return Err(ReservationOutcome::Mismatched);
        }
        let mut decision = reserved.decision.clone();
        let even_ejected = decision.ejection_ignored;
        let may_serve = |endpoint: &Arc<Endpoint>| self.may_serve(endpoint, &snapshot, even_ejected);
        let split = decision.split.as_ref();
        let are_there = decision.picks.first().is_some_and(may_serve)
            && split.is_none_or(|split| split.prefill.first().is_some_and(may_serve));
        if !are_there {
            return Err(ReservationOutcome::EndpointGone);
        }
        decision.picks.retain(|pick| may_serve(pick));
        decision.reason = RESERVED;
        decision.split.iter_mut().for_each(|split| split.reason = RESERVED);
        // The first decision has counted these.
        (decision.diverted, decision.lacking, decision.ejection_ignored) = (false, None, false);
        Ok(decision)
    }

    /// Whether an endpoint that was chosen before is in the pool, takes requests, and is allowed by the gateway.
    fn may_serve(&self, endpoint: &Arc<Endpoint>, snapshot: &PoolSnapshot, even_ejected: bool) -> bool {
        let policy = self.pool().scheduler.health();
        let is_it = |state: &&attache_pool::EndpointState| state.endpoint.id == endpoint.id;
        let is_open = || even_ejected || endpoint.health.availability(self.q.now, policy) != Availability::Ejected;
        let in_subset = || self.q.subset.is_none_or(|subset| subset.allows(endpoint.spec.address));
        let there = snapshot.endpoints.iter().find(is_it);
        there.is_some_and(|state| !state.endpoint.spec.draining) && is_open() && in_subset()
    }

    /// Takes over the reservation that `allowance` has, with its places in the limits and in the queue. A reservation
    /// that does not hold is released and counted, and the request is decided as any other.
    pub(super) fn take_over(&mut self, allowance: &mut Allowance) {
        let Some(reserved) = allowance.reserved.as_mut() else { return };
        match self.honour(reserved) {
            Ok(decision) => {
                self.reserved = Some(decision);
                allowance.adopt();
            }
            Err(outcome) => {
                self.scope.observer.event(Event::Reservation(outcome));
                allowance.reserved = None;
            }
        }
    }
}
