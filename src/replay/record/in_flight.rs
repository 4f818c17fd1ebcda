//! Recorded requests in flight, with the bookings of the replay's decisions. Called by [`super::player`]; pure.

use attache_picker::decide::Plan;
use attache_pool::Endpoint;
use attache_record::{Booked, RequestLeg};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use std::sync::Arc;

/// A request that has not ended.
#[derive(Debug)]
pub(super) struct OpenRequest {
    /// Number of the configuration that decided it.
    pub(super) live: u32,
    pub(super) pool: Arc<str>,
    /// The replay's plan with its bookings; `None` if the replay rejected the request.
    pub(super) plan: Option<Box<Plan>>,
    /// The endpoint of the response according to the recording; `None` after its end.
    pub(super) response: Option<EndpointId>,
    /// The same of the prefill leg; `None` if there is no such leg, too.
    pub(super) prefill: Option<EndpointId>,
    /// The recorded decision, while it is equal and the request may use a fallback.
    pub(super) fallbacks: Option<RecordedOrder>,
}

/// The recorded order of the endpoints of a decision.
#[derive(Debug)]
pub(super) struct RecordedOrder {
    /// The line of the decision.
    pub(super) line: u64,
    /// The endpoints, best first.
    pub(super) picks: Vec<EndpointId>,
    /// Reason of the decision.
    pub(super) reason: String,
}

impl RecordedOrder {
    /// Number of endpoints that the request has used once it is at `to`; `None` if Envoy chose that one itself.
    pub(super) fn used(&self, to: EndpointId) -> Option<usize> {
        self.picks.iter().position(|pick| *pick == to).map(|at| at + 1)
    }
}

impl OpenRequest {
    pub(super) fn recorded(&mut self, leg: RequestLeg) -> &mut Option<EndpointId> {
        match leg {
            RequestLeg::Response => &mut self.response,
            RequestLeg::Prefill => &mut self.prefill,
        }
    }

    /// The replay's booking of a leg; `None` if it has none, or the leg has ended.
    pub(super) fn booked(&mut self, leg: RequestLeg) -> Option<&mut Booked> {
        let plan = self.plan.as_mut()?;
        match leg {
            RequestLeg::Response => plan.booked.as_mut(),
            RequestLeg::Prefill => plan.prefill.as_deref_mut(),
        }
    }

    /// Takes the booking of a leg that has ended.
    pub(super) fn end(&mut self, leg: RequestLeg) -> Option<Booked> {
        *self.recorded(leg) = None;
        let plan = self.plan.as_mut()?;
        match leg {
            RequestLeg::Response => plan.booked.take(),
            RequestLeg::Prefill => plan.prefill.take().map(|booked| *booked),
        }
    }

    /// A leg moved to the endpoint `to`.
    pub(super) fn moved(&mut self, at: Timestamp, to: &Arc<Endpoint>, leg: RequestLeg) {
        let Some(recorded) = self.recorded(leg) else { return };
        let from = std::mem::replace(recorded, to.id);
        let Some(booked) = self.booked(leg).filter(|booked| booked.endpoint().id == from) else { return };
        booked.move_to(to, at, || {});
        if let (RequestLeg::Response, Some(plan)) = (leg, &self.plan) {
            plan.noted_elsewhere(from, to.id, at);
        }
    }
}
