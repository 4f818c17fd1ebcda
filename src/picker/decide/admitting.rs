//! Whether a decision may go on: quotas, the prompt's tokens, deadline, queue.

use super::{RequestState, Scope, Step};
use crate::deadline::{self, DeadlineCheck, WaitBudget};
use crate::event::{Degraded, Event};
use crate::lookup::{self, Prepared};
use crate::priority::flow_of_model;
use crate::queues::{self, AdmittedRequest, Queues};
use crate::quotas::Allowance;
use crate::reading::report_unqueued;
use crate::warming::Warming;
use attache_flow::{Asking, Way};
use attache_protocol::{Api, Request};
use attache_scheduling::RequestFacts;
use attache_scheduling::plugin::Headers;
use attache_types::error::RequestError;
use std::sync::Arc;

/// A request that is not queued, or no longer.
pub(super) struct Admission<'a> {
    /// Admission by the queue, if this call received it.
    pub(super) admitted: Option<AdmittedRequest>,
    /// The queue, in pools that shed requests and queue none.
    pub(super) sheds: Option<&'a Arc<Queues>>,
    /// The queue, in pools that queue requests.
    pub(super) holds: Option<&'a Arc<Queues>>,
}

/// Outcome of admission.
pub(super) enum Admit<'a> {
    Goes(Admission<'a>),
    Waits(Step),
}

impl<'a> RequestState<'a> {
    /// Checks the quotas of the request's tenant and model. Returned work must run first.
    ///
    /// # Errors
    /// When a limit is exceeded.
    pub(super) fn ask_quotas(&self, allowance: &mut Allowance) -> Result<Option<Warming>, RequestError> {
        let answers = self.routed.request.map_or(1, Request::answers);
        // On an unknown path, `unknownPathTokens` includes the prompt.
        let prompt_tokens = if self.q.api == Api::Other { 0 } else { self.size.load };
        let booked = RequestFacts { prompt_tokens, ..self.facts };
        allowance.ask(&self.scope.config.quotas, self.q, &booked, answers)
    }

    /// Prepares the prompt for the lookup; `None` when no cache can hold it, or it can't be parsed.
    ///
    /// # Errors
    /// Work that must run first.
    pub(crate) fn read_tokens(&self) -> Result<Option<Prepared<'a>>, Warming> {
        let prepare =
            |prefix| lookup::prepare(self.scope.observer, prefix, self.q, self.prompt_ref, self.routed.request);
        Ok(self.prefix.map(prepare).transpose()?.flatten())
    }

    /// Sheds or queues the request, if the pool is configured so, and checks its deadline.
    ///
    /// # Errors
    /// The error response for the client.
    pub(super) fn admit(&self, prepared: Option<&Prepared<'_>>) -> Result<Admit<'a>, RequestError> {
        let (q, runtime, Scope { observer, config, .. }) = (self.q, self.routed.runtime, self.scope);
        let queue = runtime.queue.as_ref();
        let asks = (self.size.unread || self.routed.request.is_some()) && !q.has_turn;
        let sheds = queue.filter(|queues| asks && queues.sheds());
        let way = self.way();
        sheds.map(|queues| queues.shed(&self.facts, way, q.now)).transpose()?;
        let holds = queue.filter(|queues| queues.asks(q, &self.facts, way, self.reads_prefix && prepared.is_some()));
        let case = DeadlineCheck {
            observer,
            config,
            runtime,
            queues: holds.map(|queues| &**queues),
            flow: self.flow(holds),
            strategy: &*self.chosen.choice.strategy,
            filter: self.chosen.filter.as_ref(),
            prepared: prepared.filter(|_| self.reads_prefix),
            prompt_ref: self.prompt_ref,
        };
        let due = match case.due(q, &self.facts, self.routed.request.is_some()) {
            Ok(due) => due,
            Err(held) => return Result::from(held).map(Admit::Waits),
        };
        let turn = holds.filter(|_| asks).map(|queues| self.ask_queue(queues, &case, way, due));
        if due.is_some() && !q.has_turn {
            case.judged(deadline::judged(turn.as_ref()));
        }
        Ok(match turn.transpose()? {
            Some(queues::EnqueueResult::Queued(parked)) => {
                Admit::Waits(Step::Queue(parked.of_pool(&runtime.pool.name)))
            }
            Some(queues::EnqueueResult::Admitted(admitted)) => {
                Admit::Goes(Admission { admitted: Some(admitted), sheds, holds })
            }
            None => Admit::Goes(Admission { admitted: None, sheds, holds }),
        })
    }

    /// Which workers may serve the request: one endpoint, a pair, or both.
    fn way(&self) -> Way {
        let pool = self.pool();
        Way::of(pool.scheduler.split(), &self.chosen.choice.name, self.call.splittable, self.size.load)
    }

    /// The flow of the request, for fairness in the queue.
    fn flow(&self, holds: Option<&Arc<Queues>>) -> Option<&str> {
        let (head, settings) = (self.q.head, &self.scope.config.settings);
        let by_program =
            settings.has_program_flows() && holds.is_some_and(|queues| queues.orders_programs(self.facts.priority));
        let program = || self.agent().filter(|_| by_program).map(|agent| &*agent.program);
        let named = || head.fairness_id().or_else(|| head.first_of(&settings.session_headers)).or_else(program);
        let trusted = || named().filter(|_| settings.trust_client_headers);
        let user = || holds.and_then(|queues| queues.user(head));
        let model = self.routed.request.and_then(|r| r.model.as_ref()).map(|m| &*m.name);
        head.tenant().or(|| trusted().or_else(user)).or_else(|| flow_of_model(self.pool(), model))
    }

    fn ask_queue(
        &self,
        queues: &Arc<Queues>,
        case: &DeadlineCheck<'_>,
        way: Way,
        due: Option<WaitBudget>,
    ) -> Result<queues::EnqueueResult, RequestError> {
        let q = self.q;
        if !q.may_wait {
            self.scope.observer.event(Event::Degraded(Degraded::NoTimeToQueue));
            if queues.report_unqueued() {
                report_unqueued(self.pool());
            }
        }
        let (found, prompt_tokens) = case.prepared.and_then(|p| p.estimate(self.scope.observer, q.now)).unzip();
        // Otherwise untrusted clients could overtake all others with a short deadline.
        let unvouched = !self.scope.config.settings.trust_client_headers && q.head.tenant().name().is_none();
        let spare = if unvouched {
            case.spare(q, &RequestFacts { headers: Headers::default(), ..self.facts }, None)
        } else {
            case.spare(q, &self.facts, due)
        };
        let facts = &RequestFacts { prompt_tokens: prompt_tokens.unwrap_or(self.size.load), ..self.facts };
        let (bytes, found) = (q.body.len() + q.head.bytes() as u64, found.as_ref());
        let (flow, answer_tokens, ttl) = (case.flow, q.body.known().map(|known| known.answer_tokens), None);
        queues.ask(q, Asking { facts, flow, bytes, answer_tokens, found, way, ttl, spare, unvouched }, due)
    }
}
