//! The steps of a decision before the prompt is looked up: the model, the strategy, quotas, the prompt's keys,
//! admission.

use super::{ActiveConfig, AdmittedRequest, PoolRuntime, RequestView, Step, encodable, may_share, splittable};
use crate::conversation;
use crate::deadline::{self, DeadlineCheck, WaitBudget};
use crate::event::{Degraded, Event, Observer};
use crate::hints;
use crate::lookup::{self, Prepared};
use crate::picker::Picker;
use crate::prefix::{PoolPrefix, PromptRef};
use crate::priority::flow_of_model;
use crate::queues::{self, Queues};
use crate::quotas::Allowance;
use crate::reading::{UNREAD_PROMPT_TOKENS, distrusted, rename, report_unqueued, without_report_mode};
use crate::recording::RequestReads;
use crate::warming::Warming;
use attache_flow::{Asking, Way};
use attache_protocol::{Api, BodyFormat, Request};
use attache_scheduling::choice::Chosen;
use attache_scheduling::plugin::Headers;
use attache_scheduling::{Pool, RequestFacts};
use attache_types::error::RequestError;
use attache_types::rng::PickRng;
use std::sync::Arc;

/// The model name for the model server, and the changes to the request that follow from it.
pub(crate) struct Rewritten {
    /// Model name sent to the model server; empty if unknown.
    pub(super) target: Arc<str>,
    /// The client's model name, when Attaché replaced it.
    pub(super) renamed_from: Option<Arc<str>>,
    /// The body that replaces the seen part of the client's body.
    pub(super) new_body: Option<Vec<u8>>,
}

/// Rewrites the model name, and removes members that only Attaché may set.
///
/// # Errors
/// When the body must be parsed to remove them, and is invalid.
pub(super) fn rewrite(
    config: &ActiveConfig,
    runtime: &PoolRuntime,
    q: &RequestView<'_>,
    request: Option<&Request<'_>>,
    rng: &mut PickRng,
) -> Result<Rewritten, RequestError> {
    let pool = &runtime.pool;
    let named = request.and_then(|r| r.model.as_ref());
    // A rule of the pool outranks the header: the operator configures it, an earlier filter sets the header.
    let by_header = || config.settings.trust_client_headers.then(|| q.head.model_rewrite()).flatten().map(Arc::from);
    let rewritten = named.and_then(|m| pool.rewrite(&m.name, rng)).or_else(by_header);
    let target = rewritten.unwrap_or_else(|| named.map_or_else(|| "".into(), |m| (&*m.name).into()));
    let renamed = named.filter(|m| *m.name != *target && !m.span.is_empty());
    let body = q.body.bytes();
    let new_body = rename(q, request, renamed, &target);
    let new_body = if may_share(pool) { distrusted(q, body, new_body)? } else { new_body };
    let reads_events = || runtime.prefix.as_ref().is_some_and(|prefix| prefix.named_by_adapter);
    let new_body = match request {
        Some(request) if request.sets_report_mode && reads_events() => without_report_mode(q.api, body, new_body)?,
        _ => new_body,
    };
    Ok(Rewritten { renamed_from: renamed.map(|m| (&*m.name).into()), target, new_body })
}

/// Estimated length of the prompt before it is tokenized.
#[derive(Clone, Copy)]
pub(crate) struct PromptSize {
    /// The prompt can't be parsed: a compressed body, an unknown path, an upgraded connection.
    pub(crate) unread: bool,
    /// Estimate from the parsed body, tokens.
    pub(crate) estimated: u32,
    /// Tokens that the request counts as in queues, the ledger and limits.
    pub(crate) load: u32,
}

impl PromptSize {
    pub(super) fn of(q: &RequestView<'_>, request: Option<&Request<'_>>) -> Self {
        if let Some(known) = q.body.known() {
            return Self { unread: request.is_none(), estimated: known.prompt_tokens, load: known.prompt_tokens };
        }
        let unread = request.is_none() && (q.opens || q.body.len() > 0);
        let estimated = request.map_or(0, |r| r.prompt.estimated_tokens().0);
        // Neither the file of a form nor the prompt of an unknown path is parsed.
        let is_partly_read = q.api.body_format() == BodyFormat::Multipart || q.api == Api::Other;
        let load = if unread || is_partly_read && q.body.len() > 0 { UNREAD_PROMPT_TOKENS } else { estimated };
        Self { unread, estimated, load }
    }
}

/// What the path, the API and the body of a request permit.
#[derive(Clone, Copy, Debug)]
pub struct CallFacts {
    /// A prefill and a decode worker may share the request.
    pub splittable: bool,
    /// The request generates tokens.
    pub generates: bool,
    /// A header may name encode workers for its images and audio.
    pub encodable: bool,
    /// The time of its first token can be observed.
    pub streams: bool,
}

impl CallFacts {
    fn of(pool: &Pool, q: &RequestView<'_>, request: Option<&Request<'_>>) -> Self {
        let (api, path) = (q.api, q.head.path());
        let generates = api.generates();
        Self {
            splittable: splittable(pool, path, request),
            generates,
            encodable: encodable(pool, path),
            streams: api.first_byte_is_first_token() && request.is_some_and(|r| r.stream) || !generates,
        }
    }
}

/// The request headers for strategies.
pub(super) fn headers<'a>(
    q: &'a RequestView<'_>,
    request: Option<&Request<'_>>,
    notes: Option<&'a RequestReads<'_>>,
) -> Headers<'a> {
    // A request on an unknown path is not rejected because of its headers, so strategies do not see them.
    if q.api == Api::Other && request.is_none() {
        return Headers::default();
    }
    notes.map_or_else(|| Headers::of(q.head), RequestReads::headers)
}

/// The parts that all decisions of a stream share.
#[derive(Clone, Copy)]
pub(crate) struct Scope<'a> {
    pub(crate) picker: &'a Picker,
    pub(crate) config: &'a ActiveConfig,
    /// Receives the events of the decision; silent in a dry run.
    pub(crate) observer: &'a dyn Observer,
    /// The decision is only explained: it books nothing, takes no probe, and no strategy remembers it.
    pub(crate) dry_run: bool,
}

/// A request whose pool and strategy are known.
pub(crate) struct Deciding<'a> {
    pub(crate) scope: Scope<'a>,
    pub(crate) runtime: &'a Arc<PoolRuntime>,
    pub(crate) q: &'a RequestView<'a>,
    /// The parsed body.
    pub(crate) request: Option<&'a Request<'a>>,
    pub(crate) size: PromptSize,
    pub(crate) facts: RequestFacts<'a>,
    pub(crate) call: CallFacts,
    pub(crate) chosen: &'a Chosen<'a>,
    /// Computes and looks up the prompt's keys, if the strategy or hint headers need them, or they are recorded.
    pub(crate) prefix: Option<&'a Arc<PoolPrefix>>,
    /// The strategy reads cached tokens of each endpoint.
    pub(crate) reads_prefix: bool,
    pub(crate) prompt_ref: PromptRef<'a>,
}

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

impl<'a> Deciding<'a> {
    pub(super) fn new(
        scope: Scope<'a>,
        runtime: &'a Arc<PoolRuntime>,
        q: &'a RequestView<'a>,
        request: Option<&'a Request<'a>>,
        size: PromptSize,
        facts: RequestFacts<'a>,
        chosen: &'a Chosen<'a>,
    ) -> Self {
        let pool = &runtime.pool;
        let reads_prefix = chosen.choice.strategy.reads().prefix;
        let recorded = q.body.known().and_then(|known| known.recorded.as_ref());
        let looks_up = reads_prefix || recorded.is_some_and(|recorded| recorded.looked_up);
        let prefix = runtime.prefix.as_ref().filter(|prefix| looks_up || hints::are_by_prefix(pool, prefix));
        let call = recorded.map_or_else(|| CallFacts::of(pool, q, request), |recorded| recorded.call);
        let keeps_ids = prefix.is_some_and(|prefix| conversation::wants_tokens(pool, prefix));
        let (body, content_type) = (attache_protocol::without_mark(q.body.bytes()), q.head.content_type());
        let prompt_ref = PromptRef { api: q.api, body, content_type, target: facts.model, keeps_ids };
        Self { scope, runtime, q, request, size, facts, call, chosen, prefix, reads_prefix, prompt_ref }
    }

    pub(crate) fn pool(&self) -> &'a Arc<Pool> {
        &self.runtime.pool
    }

    /// Checks the quotas of the request's tenant and model. Returned work must run first.
    ///
    /// # Errors
    /// When a limit is exceeded.
    pub(super) fn ask_quotas(&self, allowance: &mut Allowance) -> Result<Option<Warming>, RequestError> {
        let answers = self.request.map_or(1, Request::answers);
        // On an unknown path, `unknownPathTokens` includes the prompt.
        let prompt_tokens = if self.q.api == Api::Other { 0 } else { self.size.load };
        let booked = RequestFacts { prompt_tokens, ..self.facts };
        allowance.ask(&self.scope.config.quotas, self.q, &booked, answers)
    }

    /// Prepares the prompt for the lookup; `None` when no cache can hold it, or it can't be parsed.
    ///
    /// # Errors
    /// Work that must run first.
    pub(crate) fn read(&self) -> Result<Option<Prepared<'a>>, Warming> {
        let prepare = |prefix| lookup::prepare(self.scope.observer, prefix, self.q, self.prompt_ref, self.request);
        Ok(self.prefix.map(prepare).transpose()?.flatten())
    }

    /// Sheds or queues the request, if the pool is configured so, and checks its deadline.
    ///
    /// # Errors
    /// The error response for the client.
    pub(super) fn admit(&self, prepared: Option<&Prepared<'_>>) -> Result<Admit<'a>, RequestError> {
        let (q, runtime, Scope { observer, config, .. }) = (self.q, self.runtime, self.scope);
        let queue = runtime.queue.as_ref();
        let asks = (self.size.unread || self.request.is_some()) && !q.has_turn;
        let sheds = queue.filter(|queues| asks && !queues.hold_requests());
        let way = self.way();
        sheds.map(|queues| queues.shed(&self.facts, way, q.now)).transpose()?;
        let holds = queue.filter(|queues| queues.hold_requests());
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
        let due = match case.due(q, &self.facts, self.request.is_some()) {
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
    fn flow(&self, holds: Option<&Arc<Queues>>) -> Option<&'a str> {
        let (head, settings) = (self.q.head, &self.scope.config.settings);
        let named = || head.fairness_id().or_else(|| head.first_of(&settings.session_headers));
        let trusted = || named().filter(|_| settings.trust_client_headers);
        let user = || holds.and_then(|queues| queues.user(head));
        let model = self.request.and_then(|r| r.model.as_ref()).map(|m| &*m.name);
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

    /// Whether the whole body has arrived.
    pub(super) fn is_whole(&self) -> bool {
        self.q.body.is_whole()
    }
}
