//! Renews a decision after the request waited for its prompt: checks whether the servers that were picked for the
//! response are still available.

use super::Scheduler;
use crate::least_request::LeastRequest;
use crate::plugin::{PickContext, Strategy as _};
use crate::{Decision, Ranking};
use attache_pool::health::Availability;
use attache_pool::{Endpoint, EndpointState, PoolSnapshot, Roles};
use attache_types::error::{Reason, RequestError};
use attache_types::rng::PickRng;
use std::sync::Arc;

impl Scheduler {
    /// Replaces the picks of `decision` if the first one must not get the request any more. That is so if it left the
    /// pool, is draining, or was ejected since. Returns the new first pick.
    /// It is the next pick that can serve, else the endpoint with the fewest requests among those that can continue
    /// from `prefill`'s result. If there is none, the first pick stays as long as it is in the pool. `unprobed` gets a
    /// server that this request was to probe and does not.
    ///
    /// # Errors
    /// 503 `no_ready_endpoint` if it left the pool too; errors of the request's filters.
    pub fn renew(
        &self,
        decision: &mut Decision,
        cx: &PickContext<'_>,
        prefill: Option<&Endpoint>,
        unprobed: impl FnOnce(&Endpoint),
        rng: impl FnOnce() -> PickRng,
    ) -> Result<Option<Arc<Endpoint>>, RequestError> {
        if self.is_up_to_date(decision, cx) {
            return Ok(None);
        }
        let filter = self.choices.choose(&cx.request)?.filter;
        let cx = PickContext { filter: filter.as_ref(), ..*cx };
        let before = decision.picks.first().map(|first| first.id);
        self.succeed(decision, &cx, prefill, unprobed, &mut rng())?;
        Ok(decision.picks.first().filter(|first| Some(first.id) != before).cloned())
    }

    fn is_up_to_date(&self, decision: &Decision, cx: &PickContext<'_>) -> bool {
        // If the decision already accepted an ejected endpoint or its probe, ejection is not a change.
        let known = decision.probe || decision.ejection_ignored;
        decision.picks.first().is_some_and(|first| self.may_answer(first, known, cx))
    }

    fn may_answer(&self, endpoint: &Endpoint, known: bool, cx: &PickContext<'_>) -> bool {
        let stays = state_of(cx.snapshot, endpoint).is_some_and(|state| state.serves(Roles::DECODE));
        stays && (known || endpoint.health.availability(cx.now, &self.health) != Availability::Ejected)
    }

    fn succeed(
        &self,
        decision: &mut Decision,
        cx: &PickContext<'_>,
        prefill: Option<&Endpoint>,
        unprobed: impl FnOnce(&Endpoint),
        rng: &mut PickRng,
    ) -> Result<(), RequestError> {
        let goes_on = |endpoint: &Endpoint| match (prefill, &self.split) {
            (Some(prefill), Some(policy)) => policy.pairs(prefill, endpoint),
            _ => true,
        };
        let mut picks = decision.picks.clone();
        picks.retain(|endpoint| self.may_answer(endpoint, false, cx) && goes_on(endpoint));
        if picks.is_empty() {
            let mut others = self.open(cx, Roles::DECODE, |_| {});
            // A half-open endpoint needs a probe, which only a decision grants.
            let healthy =
                |e: &Endpoint| e.health.availability(cx.now, &self.health) != Availability::HalfOpen && goes_on(e);
            others.retain(|c| healthy(&c.state.endpoint));
            let mut ranking = Ranking::new(self.wanted);
            LeastRequest.rank(cx, &others, rng, &mut ranking);
            picks = ranking.decide().map(|ranked| ranked.picks).unwrap_or_default();
        }
        let Some(first) = decision.picks.first() else { return Ok(()) };
        if picks.is_empty() {
            return if state_of(cx.snapshot, first).is_some() { Ok(()) } else { Err(gone()) };
        }
        if decision.probe {
            unprobed(first);
            decision.probe = false;
        }
        decision.picks = picks;
        decision.reason = "in place of a server that has gone";
        Ok(())
    }
}

/// Current state of the endpoint; `None` if another endpoint has its address now.
fn state_of<'s>(snapshot: &'s PoolSnapshot, endpoint: &Endpoint) -> Option<&'s EndpointState> {
    let state = snapshot.position(endpoint.spec.address).and_then(|position| snapshot.get(position))?;
    Some(state).filter(|state| state.endpoint.id == endpoint.id)
}

fn gone() -> RequestError {
    let message = "the server that was to answer has left the pool while the prompt was computed, and no other goes on \
                   from that";
    RequestError::new(Reason::NoReadyEndpoint, message)
}
