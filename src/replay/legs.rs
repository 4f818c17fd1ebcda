//! A request whose prompt another server computes, at the picker: which prefill server is asked, and what comes of it.
//!
//! The exchange's part without its wire (`picker::split`): what is settled when is [`Prefilling`]'s, for both. A pool that leaves the
//! prefill to sidecars is played as if the picker asked. Called by [`super::world`]; pure.

use super::front::{Front, Sent, facts};
use attache_disagg::attempts::{Attempt, Bounds};
use attache_disagg::{Failure, Fallback, Next};
use attache_pool::Endpoint;
use attache_protocol::Usage;
use attache_scheduling::prefilling::Prefilling;
use attache_scheduling::{Decision, Dispatch, PickContext, Strategy};
use attache_types::clock::Timestamp;
use attache_types::error::RequestError;
use attache_types::rng;
use attache_workload::Request;
use std::sync::Arc;

/// How long prefill servers are waited for, and what becomes of a request whose prompt none has computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Over all tries.
    pub bounds: Bounds,
    /// When they have failed.
    pub fallback: Fallback,
}

impl Default for Patience {
    fn default() -> Self {
        let bounds = Bounds { timeout: attache_disagg::policy::DEFAULT_PREFILL_TIMEOUT, hedge_after: None };
        Self { bounds, fallback: Fallback::default() }
    }
}

/// A request whose prompt is being computed.
#[derive(Debug)]
pub(super) struct Legs {
    pub(super) prefilling: Prefilling,
    /// Tokens of the prompt that the prefill server was thought to hold.
    pub(super) foretold: u32,
    /// Who is to answer, and who might in its place.
    pub(super) decision: Decision,
    /// What decided, and may have noted the request.
    pub(super) strategy: Arc<dyn Strategy>,
}

/// What a request whose prompt was to be computed has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Came {
    /// Nothing yet.
    Waiting,
    /// The server of this try is to be asked.
    Ask(Attempt),
    /// It goes on to its decode server, and its prompt follows.
    Computed,
    /// It goes on to its decode server, which computes the prompt itself.
    Local,
    /// It can't be served.
    Refused,
}

impl Front {
    /// A prefill server has computed the prompt, and has told `usage`.
    pub(super) fn computed(&self, legs: &mut Legs, attempt: Attempt, usage: &Usage, now: Timestamp) -> Came {
        match legs.prefilling.computed(attempt, usage, now, |server, outcome| self.judge(server, outcome, now)) {
            true => Came::Computed,
            false => Came::Waiting,
        }
    }

    /// A prefill server has not.
    pub(super) fn failed(&self, legs: &mut Legs, attempt: Attempt, failure: Failure, now: Timestamp) -> Came {
        let judge = |server: &Endpoint, outcome| self.judge(server, outcome, now);
        self.follow(&legs.prefilling.failed(attempt, failure, now, judge))
    }

    /// The moment of [`Prefilling::deadline`] has come.
    pub(super) fn late(&self, legs: &mut Legs, now: Timestamp) -> Came {
        self.follow(&legs.prefilling.late(now, |server, outcome| self.judge(server, outcome, now)))
    }

    fn follow(&self, next: &Next) -> Came {
        match next {
            Next::Wait => Came::Waiting,
            Next::Send(attempt) => Came::Ask(*attempt),
            Next::GiveUp(_) if self.patience().fallback == Fallback::Fail => Came::Refused,
            Next::GiveUp(_) => Came::Local,
        }
    }

    /// A request whose prompt was to be computed elsewhere, and was by `prefill`, is sent to its decode server, or to another one when that has
    /// gone meanwhile.
    ///
    /// # Errors
    /// When no other goes on from the prompt.
    pub(super) fn dispatch(
        &mut self,
        request: &Request,
        base: &str,
        sent: &mut Sent,
        legs: &mut Legs,
        prefill: Option<&Endpoint>,
        now: Timestamp,
    ) -> Result<(), RequestError> {
        let headers = self.headers_of(request);
        let facts = facts(request, base, &headers);
        let cx = PickContext { request: facts, ..PickContext::new(&self.snapshot, now, self.stale_after()) };
        let (seed, sequence) = (self.config.seed, &mut self.sequence);
        let rng = || {
            *sequence += 1;
            rng::for_request(seed, *sequence - 1)
        };
        let Legs { decision, strategy, .. } = legs;
        if let Some(server) = self.config.scheduler.renew(decision, &cx, None, prefill, rng)? {
            let first = sent.booking.endpoint().id;
            sent.booking.move_to(&server, now);
            if let Some(trail) = &decision.trail {
                strategy.moved(facts.model, trail, first, server.id, now);
            }
        }
        sent.probe = decision.probe;
        let how = prefill.map_or(Dispatch::Whole, |server| Dispatch::Arrives(server, 0.0));
        sent.booking.dispatch(how, &self.snapshot, self.stale_after(), now);
        Ok(())
    }
}
