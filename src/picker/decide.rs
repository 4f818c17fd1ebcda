//! The decision about one request: parse the body, route it to a pool, choose the endpoints.
//!
//! [`decide`] calls the steps in their order, and [`RequestState`] is what they know. Their details:
//!
//! | file | steps |
//! |---|---|
//! | `decide/facts.rs` | the model, the size and the API of the request |
//! | `decide/reserved.rs` | the reservation that the request names |
//! | `decide/admitting.rs` | quotas, tokens, deadline, queue |
//! | `decide/placing.rs` | look up the prefix, schedule, book |
//! | `decide/keeping.rs` | explanations that are kept |
//!
//! `decide/view.rs` has the input, `decide/plan.rs` the outcome.

use super::active::{ActiveConfig, PoolRuntime};
use super::conversation;
use super::event::{Event, Observer, ReservationOutcome};
use super::hints;
use super::known::KnownRequest;
use super::picker::Picker;
use super::prefix::{PoolPrefix, PromptRef};
use super::priority::priority;
use super::queues::{AdmittedRequest, QueuedRequest};
use super::quotas::Allowance;
use super::reading::{named, report_ignored, report_unshown, understand};
use super::recording::{DecisionDraft, RequestReads};
use super::warming::Warming;
use admitting::{Admission, Admit};
use attache_protocol::Request;
use attache_request::agent::AgentIdentity;
use attache_scheduling::choice::{Chosen, DEFAULT_STRATEGY_HEADER};
use attache_scheduling::router::RouteFacts;
use attache_scheduling::{Decision, Pool, RequestFacts};
use attache_types::error::RequestError;
use attache_types::rng::PickRng;
pub use facts::CallFacts;
use facts::{PromptSize, Rewritten, headers, rewrite};
pub use keeping::explain_known;
pub(super) use placing::Unproposed;
pub use plan::Plan;
use std::cell::OnceCell;
use std::sync::Arc;
use std::time::Duration;
pub use view::{PrefillTime, RequestView, Seen};

mod admitting;
mod facts;
mod keeping;
mod placing;
mod plan;
mod reserved;
mod view;

/// Outcome of one call of [`decide`].
#[derive(Debug)]
pub enum Step {
    /// The request is decided and booked.
    Decided(Box<Plan>),
    /// Call again after this work has run. Keep the admission, if the queue has let the request through.
    Warm(Warming, Option<AdmittedRequest>),
    /// Call again after this call: it asks the shared store whether the quotas of tenant and model allow the request.
    Allow(Warming),
    /// The request is queued. Call again when it is dequeued.
    Queue(QueuedRequest),
}

/// Decides one request, as far as that is possible without waiting.
///
/// ```text
/// parse ─▶ route ─▶ choose the strategy ─▶ ask quotas ─▶ read tokens ─▶ admit ─▶ look up ─▶ schedule ─▶ book
/// ```
///
/// A request with a reservation skips quotas and queue, which have let it through, and gets the reserved endpoints.
///
/// `rng` is the generator of this request. Each call draws in this order, and a dry run draws the same:
///
/// 1. The target of a weighted model rewrite.
/// 2. Whether the decision is logged, if `exchange.explain.logRatio` is above 0.
/// 3. If decisions are recorded: a seed, from which the further numbers come. The recording has that seed.
/// 4. The strategy's ranking, the pair of a split request, the encode servers. If another request took the probe of the
///    chosen server, all three are drawn again.
///
/// # Errors
/// The error response for the client.
pub fn decide(
    picker: &Picker,
    config: &ActiveConfig,
    q: &RequestView<'_>,
    allowance: &mut Allowance,
    rng: &mut PickRng,
) -> Result<Step, RequestError> {
    let notes = RequestReads::of(picker, q);
    decide_noting(picker, config, q, notes.as_ref(), allowance, rng)
}

/// As [`decide`]. The strategy reads headers and digests through `notes`, if there are any.
///
/// # Errors
/// As [`decide`].
pub fn decide_noting(
    picker: &Picker,
    config: &ActiveConfig,
    q: &RequestView<'_>,
    notes: Option<&RequestReads<'_>>,
    allowance: &mut Allowance,
    rng: &mut PickRng,
) -> Result<Step, RequestError> {
    let scope = Scope { picker, config, observer: &*picker.observer, dry_run: false };
    if q.has_unshown_body()
        && let Some(skipped) = picker.unshown.admit(q.now)
    {
        report_unshown(q.head.path(), skipped);
    }
    let parsed = scope.parse(q)?;
    allowance.redeem(picker, q);
    let mut reserved_rng = allowance.reserved.as_ref().map(|reserved| reserved.rng.clone());
    let rng = reserved_rng.as_mut().unwrap_or(rng);
    let mut routed = scope.route(q, parsed.as_ref(), rng)?;
    let new_body = routed.rewritten.new_body.take();
    let state = RequestState::new(scope, q, notes, &routed)?;
    let step = state.decide(new_body, allowance, rng);
    if matches!(step, Err(_) | Ok(Step::Queue(_))) {
        allowance.agent = picker.programs.identify(q.head, routed.request);
    }
    step.map_err(|error| error.in_pool(&routed.runtime.pool.name))
}

/// What all decisions of a stream share.
#[derive(Clone, Copy)]
pub(crate) struct Scope<'a> {
    pub(crate) picker: &'a Picker,
    pub(crate) config: &'a ActiveConfig,
    /// Receives the events of the decision; silent in a dry run.
    pub(crate) observer: &'a dyn Observer,
    /// The decision is only explained: it books nothing, takes no probe, and no strategy remembers it.
    pub(crate) dry_run: bool,
}

/// A request with its pool and its model.
pub(crate) struct Routed<'a> {
    pub(crate) runtime: &'a Arc<PoolRuntime>,
    /// The parsed body; `None` if it can't be parsed.
    pub(crate) request: Option<&'a Request<'a>>,
    rewritten: Rewritten,
}

impl<'a> Scope<'a> {
    /// Parses the body; `None` if there is none, or if it can't be parsed but the request is routed anyway. A simulated
    /// request without a model gets the pool's default model.
    ///
    /// # Errors
    /// The body is invalid.
    pub(crate) fn parse(self, q: &RequestView<'a>) -> Result<Option<Request<'a>>, RequestError> {
        match q.body {
            // A recorded request has had its model already.
            Seen::Known(KnownRequest { request: Some(request), recorded: None, .. }) if request.model.is_none() => {
                named(self.config, q, request.clone()).map(Some)
            }
            Seen::Known(_) => Ok(None),
            _ => understand(self.observer, &self.picker.unread_forms, self.config, q),
        }
    }

    /// The pool of the request, and the model name that its servers know.
    ///
    /// # Errors
    /// The error response for the client.
    pub(crate) fn route(
        self,
        q: &RequestView<'a>,
        parsed: Option<&'a Request<'a>>,
        rng: &mut PickRng,
    ) -> Result<Routed<'a>, RequestError> {
        let known = q.body.known();
        let request = parsed.or(known.and_then(|known| known.request.as_ref()));
        let model = request.and_then(|r| r.model.as_ref()).map(|m| &*m.name);
        let runtime = match q.pool.or(known.map(|known| known.pool)) {
            Some(name) => self.config.named(name, model)?,
            None => {
                let facts = RouteFacts { model, authority: q.head.authority(), called: q.called };
                self.config.route(facts, |name| q.head.get(name))?
            }
        };
        let rewritten = rewrite(self.config, runtime, q, request, rng);
        let rewritten = rewritten.map_err(|error| error.in_pool(&runtime.pool.name))?;
        q.trace.inspect(|trace| trace.entered(&runtime.pool.name, &rewritten.target));
        Ok(Routed { runtime, request, rewritten })
    }
}

/// A request whose pool and strategy are known.
pub(crate) struct RequestState<'a> {
    pub(crate) scope: Scope<'a>,
    pub(crate) routed: &'a Routed<'a>,
    pub(crate) q: &'a RequestView<'a>,
    /// Notes the headers and digests that the strategy reads, if decisions are recorded or replayed.
    notes: Option<&'a RequestReads<'a>>,
    pub(crate) size: PromptSize,
    pub(crate) facts: RequestFacts<'a>,
    pub(crate) call: CallFacts,
    pub(crate) chosen: Chosen<'a>,
    /// Computes and looks up the prompt's keys, if the strategy or hint headers need them, or they are recorded.
    prefix: Option<&'a Arc<PoolPrefix>>,
    /// The strategy reads cached tokens of each endpoint.
    reads_prefix: bool,
    pub(crate) prompt_ref: PromptRef<'a>,
    /// The agent of the request, once a step has asked for it.
    identity: OnceCell<Option<Box<AgentIdentity>>>,
    /// The decision of the reservation that the request uses.
    pub(crate) reserved: Option<Decision>,
}

impl<'a> RequestState<'a> {
    /// Chooses the strategy of the request.
    ///
    /// # Errors
    /// The request names a strategy or a profile that it must not use.
    pub(crate) fn new(
        scope: Scope<'a>,
        q: &'a RequestView<'a>,
        notes: Option<&'a RequestReads<'a>>,
        routed: &'a Routed<'a>,
    ) -> Result<Self, RequestError> {
        let Routed { runtime, request, rewritten } = routed;
        let (pool, request, known) = (&runtime.pool, *request, q.body.known());
        let model = request.and_then(|r| r.model.as_ref()).map(|m| &*m.name);
        let size = PromptSize::of(q, request);
        let facts = RequestFacts {
            model: &rewritten.target,
            prompt_tokens: size.estimated,
            max_tokens: request.and_then(|r| r.max_tokens),
            priority: match known {
                Some(known) => known.priority,
                None => priority(scope.config, pool, q.head.objective(), model),
            },
            headers: headers(q, request, notes),
            prompt: known.and_then(|known| known.text).or(request.map(|r| &r.prompt)),
            payload: known.is_none().then(|| q.body.bytes()),
            waited: if q.has_turn { q.now.since(q.opened) } else { Duration::ZERO },
            digests: notes.map(|n| &n.digests),
        };
        let chosen = pool.scheduler.choices.choose(&facts).map_err(|error| error.in_pool(&pool.name))?;
        let reads_prefix = chosen.choice.strategy.reads().prefix;
        let recorded = known.and_then(|known| known.recorded.as_ref());
        let looks_up = reads_prefix || recorded.is_some_and(|recorded| recorded.looked_up);
        let prefix = runtime.prefix.as_ref().filter(|prefix| looks_up || hints::are_by_prefix(pool, prefix));
        let call = recorded.map_or_else(|| CallFacts::of(pool, q, request), |recorded| recorded.call);
        let keeps_ids = prefix.is_some_and(|prefix| conversation::wants_tokens(pool, prefix));
        let (body, content_type) = (attache_protocol::without_mark(q.body.bytes()), q.head.content_type());
        let prompt_ref = PromptRef { api: q.api, body, content_type, target: facts.model, keeps_ids };
        let (identity, reserved) = (OnceCell::new(), None);
        Ok(Self {
            scope,
            routed,
            q,
            notes,
            size,
            facts,
            call,
            chosen,
            prefix,
            reads_prefix,
            prompt_ref,
            identity,
            reserved,
        })
    }

    /// The agent that sent the request, if the request names it.
    pub(crate) fn agent(&self) -> Option<&AgentIdentity> {
        let identify = || self.scope.picker.programs.identify(self.q.head, self.routed.request);
        self.identity.get_or_init(identify).as_deref()
    }

    pub(crate) fn pool(&self) -> &'a Arc<Pool> {
        &self.routed.runtime.pool
    }

    /// The steps after the choice of the strategy. `new_body` replaces the seen part of the client's body.
    ///
    /// # Errors
    /// The error response for the client.
    fn decide(
        mut self,
        new_body: Option<Vec<u8>>,
        allowance: &mut Allowance,
        rng: &mut PickRng,
    ) -> Result<Step, RequestError> {
        if self.q.head.names_strategy() && self.pool().scheduler.choices.report_ignored() {
            report_ignored(self.pool(), DEFAULT_STRATEGY_HEADER);
        }
        self.take_over(allowance);
        if let Some(question) = self.ask_quotas(allowance)? {
            return Ok(Step::Allow(question));
        }
        let prepared = match self.read_tokens() {
            Ok(prepared) => prepared,
            Err(warming) => return Ok(Step::Warm(warming, None)),
        };
        let admission = match allowance.reserved.as_mut() {
            Some(reserved) => Admission { admitted: reserved.admitted.take(), sheds: None, holds: None },
            None => match self.admit(prepared.as_ref())? {
                Admit::Goes(admission) => admission,
                Admit::Waits(step) => return Ok(step),
            },
        };
        // Before the recording is locked, since the end of a booking is a line of it.
        allowance.reserved.iter_mut().for_each(|reserved| reserved.unbook());
        let began = self.begin_explanation();
        let (log, explain) = self.explains(began.is_some(), rng);
        // The recording is locked from here to the booking, so that both are one step of it.
        let mut draft = DecisionDraft::begin(self.scope.picker, rng);
        let snapshot = self.pool().store.load();
        let proposal = match self.propose(prepared.as_ref(), &snapshot, explain, draft.as_mut(), rng) {
            Ok(proposal) => proposal,
            Err(Unproposed::Warm(warming)) => return Ok(Step::Warm(warming, admission.admitted)),
            Err(Unproposed::Refused(error)) => {
                self.refuse(&error, draft, began, &snapshot);
                return Err(error);
            }
        };
        let explanation = self.explanation(began, &snapshot, Some(&proposal));
        self.report(&proposal, &snapshot, log);
        let scope = self.scope;
        let plan = self.book(proposal, &snapshot, draft, admission, new_body);
        if let Some(mut reserved) = allowance.reserved.take() {
            reserved.hand_over_probes();
            scope.observer.event(Event::Reservation(ReservationOutcome::Used));
        }
        scope.keep(explanation, Ok(&plan.decision));
        Ok(Step::Decided(plan))
    }
}

#[cfg(test)]
pub(crate) mod tests;
