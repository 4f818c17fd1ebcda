//! The decision in the middle of the road: understand the body, find the pool, name the endpoints.

use super::active::{ActiveConfig, PoolRuntime};
use super::ceiling::Ceiling;
use super::conversation::{self, Conversation};
use super::deadline::{self, Case};
use super::head::Head;
use super::hints::{self, Hints, RANK_HEADER};
use super::lookup::{self, Looked};
use super::picker::Picker;
use super::prefix::made::Outcome;
use super::prefix::{Asked, PoolPrefix, Tail};
use super::preset::preset;
use super::priority::{flow_of_model, priority};
use super::queues::{self, Admitted, Parked, Queues};
use super::quotas::{Allowance, Permits};
use super::reading::{UNREAD_PROMPT_TOKENS, distrusted, rename, report_ignored, understand};
use super::recording::{Notes, Sheet};
use super::split::Course;
use super::warming::Warming;
use attache_disagg::{LegApi, Mode};
use attache_flow::{Asking, Way};
use crate::event::{Degraded, Event, RequestEvent, SplitOutcome};
use crate::explained::Explained;
use attache_pool::Roles;
use attache_pool::health::ClientSlot;
use attache_pool::ledger::Ticket;
use attache_prefix::learning::Lesson;
use attache_protocol::{Api, BodyFormat, Request};
use attache_record::{Booked, Decided};
use attache_scheduling::choice::DEFAULT_STRATEGY_HEADER;
use attache_scheduling::plugin::Headers;
use attache_scheduling::router::RouteFacts;
use attache_scheduling::scheduler::{Explain, Subset};
use attache_scheduling::split::Decider;
use attache_scheduling::{Booking, Choice, Chosen, Decision, Order, PickContext, Pool, RequestFacts, Strategy};
use attache_types::clock::Timestamp;
use attache_types::error::RequestError;
use attache_types::rng::PickRng;
use rand::RngExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// The request body, as far as the gateway shows it.
#[derive(Clone, Copy, Debug)]
pub enum Seen<'a> {
    /// There is none, or it comes after the decision.
    Nothing,
    /// Its head (`BUFFERED_PARTIAL` cuts long bodies).
    Head(&'a [u8]),
    /// All of it.
    Whole(&'a [u8]),
}

impl<'a> Seen<'a> {
    pub(super) fn bytes(self) -> &'a [u8] {
        match self {
            Seen::Nothing => &[],
            Seen::Head(bytes) | Seen::Whole(bytes) => bytes,
        }
    }

    /// Bytes of it.
    pub(super) fn len(self) -> u64 {
        self.bytes().len() as u64
    }
}

/// All that a decision is made from.
#[derive(Debug)]
pub struct Question<'a> {
    /// The request's headers.
    pub head: &'a Head,
    /// The `:authority` of the gateway's own call.
    pub called: &'a str,
    /// The request's API.
    pub api: Api,
    /// The answer of the Responses API that the path names.
    pub response_id: Option<&'a str>,
    /// The gateway's choice of endpoints.
    pub subset: Option<&'a Subset>,
    /// The request's body.
    pub body: Seen<'a>,
    /// The moment.
    pub now: Timestamp,
    /// When the request came.
    pub opened: Timestamp,
    /// It was asked before: what is not at hand by now is done without.
    pub last: bool,
    /// Where the outcome of the prompt's background work is, if any was done.
    pub made: Option<&'a OnceLock<Outcome>>,
    /// There is time to wait for a turn.
    pub may_wait: bool,
    /// The decision is made at the headers, and more of the request follows: a body, or another protocol.
    pub opens: bool,
    /// Its turn has come.
    pub has_turn: bool,
    /// There is time to have another server compute the prompt before the request goes on, should the picker be the one to ask it.
    pub may_split: bool,
}

/// What was decided, and what the rest of the stream needs of it.
#[derive(Debug)]
pub struct Plan {
    /// The endpoints.
    pub decision: Decision,
    /// The pool.
    pub runtime: Arc<PoolRuntime>,
    /// The slot of the client, in which the health of endpoints counts its errors.
    pub client: ClientSlot,
    /// What named them.
    pub strategy: Arc<dyn Strategy>,
    /// The profile that named the strategy.
    pub profile: Option<Arc<str>>,
    /// The body was read: the decision rests on more than load.
    pub understood: bool,
    /// Estimated length of the prompt, tokens.
    pub prompt_tokens: u32,
    /// Answers asked for to each of its prompts.
    pub choices: u32,
    /// The most tokens that it can cost.
    pub(super) ceiling: Ceiling,
    /// The model that the server is asked for; empty when unknown.
    pub target: Arc<str>,
    /// Tokens of the prompt that the first pick is thought to hold, what is on its way there included.
    pub matched_tokens: u32,
    /// What the first pick has booked for the request.
    pub booked: Option<Booked>,
    /// What the server that computes the prompt for the first pick has booked, when the decision splits the request.
    pub prefill: Option<Box<Booking>>,
    /// What encode servers have booked for its images and sounds, until the answer begins.
    pub encoding: Vec<Ticket>,
    /// Two servers might share it.
    pub splittable: bool,
    /// How the prompt comes to be computed elsewhere, once that is known.
    pub course: Option<Course>,
    /// The id that both servers know the request by, when the client gave none.
    pub request_id: Option<Box<str>>,
    /// What is kept of it between its turns, where two servers share it and decode servers keep something.
    pub conversation: Option<Box<Conversation>>,
    /// What servers are told beside where it goes.
    pub hints: Hints,
    /// What the keys of the answer follow from, when they are learned.
    pub tail: Option<(Arc<PoolPrefix>, Tail)>,
    /// The model that the client asked for, when the server is asked for another.
    pub renamed_from: Option<Arc<str>>,
    /// The body to send in place of what was seen of the client's.
    pub new_body: Option<Vec<u8>>,
    /// Length of what was seen of the client's body, bytes.
    pub seen: usize,
    /// What is booked for it, where its tenant or its model has limits.
    pub permits: Permits,
    /// Its turn, where turns are taken. The last to be dropped: whoever is let through by that finds the books closed.
    pub admitted: Option<Admitted>,
}

impl Plan {
    /// What became of the request, if two servers might have shared it.
    #[must_use]
    pub fn split_outcome(&self) -> Option<SplitOutcome> {
        match &self.course {
            Some(course) if course.failure.is_some() => Some(SplitOutcome::Local),
            Some(_) => Some(SplitOutcome::Split),
            None => self.splittable.then_some(SplitOutcome::Whole),
        }
    }

    /// Another server computes the prompt.
    #[must_use]
    pub fn is_split(&self) -> bool {
        self.decision.split.is_some()
    }

    /// Its servers are asked at the same time, and the one that answers waits for the other.
    #[must_use]
    pub fn meets(&self) -> bool {
        let prefill = self.decision.split.as_ref().and_then(|split| split.prefill.first());
        prefill.is_some_and(|server| self.runtime.pool.disagg.as_deref().is_some_and(|mode| mode.meets(server)))
    }

    /// The length of the new body, of which `announced` is the old one; `None` when nothing changes or it is not known.
    #[must_use]
    pub fn new_length(&self, announced: Option<u64>) -> Option<u64> {
        let new = self.new_body.as_ref()?.len() as u64;
        // What was not seen goes on behind it.
        let unseen = announced.map_or(0, |a| a.saturating_sub(self.seen as u64));
        Some(new + unseen)
    }
}

/// What a prompt teaches.
#[derive(Debug)]
pub struct Taught {
    /// Where its keys come from.
    pub prefix: Arc<PoolPrefix>,
    /// About the caches.
    pub lesson: Lesson,
    /// About the cache of the server that computes the prompt for another.
    pub prefill: Option<Lesson>,
    /// What the answer goes on from.
    pub tail: Option<Tail>,
}

/// What comes of a question.
#[derive(Debug)]
pub enum Step {
    /// The endpoints.
    Decided(Box<Plan>),
    /// Ask again when this has run. A turn that the request has been given by now is its own until then.
    Warm(Warming, Option<Admitted>),
    /// Ask again when this has run: it tells whether the request's tenant, and its model, may have it.
    Allow(Warming),
    /// Ask again when its turn has come.
    Park(Parked),
}

/// Decides.
///
/// # Errors
/// The refusal that the client gets.
pub fn decide(
    picker: &Picker,
    config: &ActiveConfig,
    q: &Question<'_>,
    allowance: &mut Allowance,
    rng: &mut PickRng,
) -> Result<Step, RequestError> {
    let request = understand(picker, config, q)?;
    let asked = request.as_ref().and_then(|r| r.model.as_ref());
    let facts = RouteFacts { model: asked.map(|m| &*m.name), authority: q.head.authority(), called: q.called };
    let runtime = config.route(facts, |name| q.head.get(name))?;
    let pool = &runtime.pool;

    // A rule of the pool beats the header: the operator's word over an earlier filter's.
    let by_header = || config.settings.trust_client_headers.then(|| q.head.model_rewrite()).flatten().map(Arc::from);
    let rewritten = asked.and_then(|m| pool.rewrite(&m.name, rng)).or_else(by_header);
    let target = rewritten.unwrap_or_else(|| asked.map_or_else(|| "".into(), |m| (&*m.name).into()));
    let renamed = asked.filter(|m| *m.name != *target && !m.span.is_empty());
    let body = q.body.bytes();
    let new_body = rename(body, request.as_ref(), renamed, &target);
    let new_body = if may_share(pool) { distrusted(q, body, new_body)? } else { new_body };

    // Work of which nothing can be read: a compressed body, an unknown path, a connection that is upgraded.
    let unread = request.is_none() && (q.opens || q.body.len() > 0);
    let estimated = request.as_ref().map_or(0, |r| r.prompt.estimated_tokens().0);
    // A form's file is not read, nor what an unknown path takes besides its model.
    let is_partly_read = q.api.body_format() == BodyFormat::Multipart || q.api == Api::Other;
    let load = if unread || is_partly_read && q.body.len() > 0 { UNREAD_PROMPT_TOKENS } else { estimated };
    let priority = priority(config, pool, q.head.objective(), asked.map(|m| &*m.name));
    let notes = Notes::of(picker, q);
    let headers = notes.as_ref().map_or_else(|| Headers::of(q.head), Notes::headers);
    let facts = RequestFacts {
        model: &target,
        prompt_tokens: estimated,
        max_tokens: request.as_ref().and_then(|r| r.max_tokens),
        priority,
        // What is asked for on a path that we don't know is not refused, whatever its headers say.
        headers: if q.api == Api::Other && request.is_none() { Headers::default() } else { headers },
        prompt: request.as_ref().map(|r| &r.prompt),
        payload: Some(body),
        waited: if q.has_turn { q.now.since(q.opened) } else { Duration::ZERO },
        digests: notes.as_ref().map(|n| &n.digests),
    };
    let Chosen { choice, profile, filter } = pool.scheduler.choices.choose(&facts)?;
    if q.head.names_strategy() && pool.scheduler.choices.report_ignored() {
        report_ignored(pool, DEFAULT_STRATEGY_HEADER);
    }
    let answers = request.as_ref().map_or(1, Request::answers);
    // On an unknown path `unknownPathTokens` stands for the prompt too.
    let booked = RequestFacts { prompt_tokens: if q.api == Api::Other { 0 } else { load }, ..facts };
    if let Some(asking) = allowance.ask(&config.quotas, q, &booked, answers)? {
        return Ok(Step::Allow(asking));
    }
    let reads = choice.strategy.reads().prefix;
    let prefix = runtime.prefix.as_ref().filter(|prefix| reads || hints::are_by_prefix(pool, prefix));
    let whole = prefix.is_some_and(|prefix| conversation::wants_tokens(pool, prefix));
    let content_type = q.head.content_type();
    let asking = Asked { api: q.api, body, content_type, target: &target, keeps_ids: whole };
    let prepare = |prefix| lookup::prepare(picker, prefix, q, asking, request.as_ref());
    let prepared = match prefix.map(prepare).transpose() {
        Ok(prepared) => prepared.flatten(),
        Err(warming) => return Ok(Step::Warm(warming, None)),
    };
    let before_pool = runtime.queue.as_ref();
    let asks = (unread || request.is_some()) && !q.has_turn;
    let sheds = before_pool.filter(|queues| asks && !queues.hold_requests());
    let may_split = before_pool.is_some() && splittable(pool, q.head.path(), request.as_ref());
    let way = Way::of(pool.scheduler.split(), &choice.name, may_split, load);
    sheds.map(|queues| queues.shed(&facts, way, q.now)).transpose()?;
    let before_pool = before_pool.filter(|queues| queues.hold_requests());
    let queues = before_pool.filter(|_| asks);
    let named = || q.head.fairness_id().or_else(|| q.head.first_of(&config.settings.session_headers));
    let trusted = || named().filter(|_| config.settings.trust_client_headers);
    let user = || before_pool.and_then(|queues| queues.user(q.head));
    let flow = q.head.tenant().or(|| trusted().or_else(user)).or_else(|| flow_of_model(pool, asked.map(|m| &*m.name)));
    let case = Case {
        picker,
        config,
        runtime,
        queues: before_pool.map(|queues| &**queues),
        flow,
        strategy: &*choice.strategy,
        filter: filter.as_ref(),
        prepared: prepared.as_ref().filter(|_| reads),
        asked: asking,
    };
    let due = match case.due(q, &facts, request.is_some()) {
        Ok(due) => due,
        Err(held) => return held.into(),
    };
    let ask = |queues: &Arc<Queues>| {
        let (found, prompt_tokens) = case.prepared.and_then(|p| p.glance(picker, q.now)).unzip();
        // Else whoever names the shortest deadline would go before everybody.
        let unvouched = !config.settings.trust_client_headers && q.head.tenant().name().is_none();
        let spare = if unvouched {
            case.spare(q, &RequestFacts { headers: Headers::default(), ..facts }, None)
        } else {
            case.spare(q, &facts, due)
        };
        let facts = &RequestFacts { prompt_tokens: prompt_tokens.unwrap_or(load), ..facts };
        let (bytes, found) = (q.body.len() + q.head.bytes() as u64, found.as_ref());
        let (flow, answer_tokens, ttl) = (case.flow, None, None);
        let asking = Asking { facts, flow, bytes, answer_tokens, found, way, ttl, spare, unvouched };
        queues.ask(q, asking, due)
    };
    let turn = queues.map(ask);
    if due.is_some() && !q.has_turn {
        case.judged(deadline::judged(turn.as_ref()));
    }
    let admitted = match turn.transpose()? {
        Some(queues::Asked::Waits(parked)) => return Ok(Step::Park(parked)),
        Some(queues::Asked::Goes(admitted)) => Some(admitted),
        None => None,
    };
    let settings = config.settings.explain;
    let log = settings.log_ratio > 0.0 && rng.random_bool(settings.log_ratio.min(1.0));
    let explain = if log || settings.metadata { Explain::Yes } else { Explain::No };
    // From here to the booking it is one step of the recording.
    let mut sheet = Sheet::begin(picker, rng);
    let snapshot = pool.store.load();
    let looked = prepared.as_ref().map(|p| Looked::up(picker, config, p, q, asking, &snapshot, whole)).transpose();
    let mut looked = match looked {
        Ok(looked) => looked.flatten(),
        Err(warming) => return Ok(Step::Warm(warming, admitted)),
    };
    let prompt_tokens = looked.as_ref().filter(|_| reads).map_or(load, Looked::prompt_tokens);
    let streams = q.api.first_byte_is_first_token() && request.as_ref().is_some_and(|r| r.stream);
    let streams = streams || !q.api.generates();
    if let Some(sheet) = &mut sheet {
        let prompt = looked.as_mut().map(|l| l.recorded(q));
        sheet.asks(|line| {
            *line = Decided {
                at: q.now,
                live: config.number,
                pool: pool.name.clone(),
                model: target.clone(),
                readable: request.is_some(),
                estimated: load,
                max_tokens: facts.max_tokens,
                priority,
                waited: facts.waited,
                subset: q.subset.map(|s| s.entries().collect()),
                policy: picker.policies.of(&target),
                prompt,
                streams,
                strategy: choice.name.clone(),
                ..std::mem::take(line)
            };
        });
    }
    let mut splittable = splittable(pool, q.head.path(), request.as_ref());
    let in_time = match pool.disagg.as_deref() {
        Some(Mode::Direct(direct)) if splittable && !direct.is_together_in(&snapshot) => q.may_split,
        // Nobody is waited for; what is to be changed of the body must be here.
        Some(Mode::Direct(_)) => matches!(q.body, Seen::Whole(_)),
        Some(Mode::Header { .. }) | None => true,
    };
    if splittable && !in_time {
        splittable = false;
        let asked = pool.scheduler.split().filter(|policy| policy.asks(&choice.name));
        asked.into_iter().for_each(|_| picker.observer.event(Event::Degraded(Degraded::NoTimeToSplit)));
    }
    let mut conversation = looked.as_mut().filter(|_| splittable).and_then(|looked| {
        let tenant = looked.prefix().tenant(q.head);
        lookup::guarded(picker, || Conversation::begin(pool, looked, tenant, &target, &snapshot, q.now)).flatten()
    });
    let cx = PickContext {
        request: RequestFacts { prompt_tokens, ..facts },
        filter: filter.as_ref(),
        prefix: looked.as_ref().filter(|_| reads).map(|l| &l.found),
        policy: picker.policies.of(&target),
        splittable,
        generates: q.api.generates(),
        encodable: encodable(pool, q.head.path()),
        ..PickContext::new(&snapshot, q.now, pool.stale_after)
    };
    let previous = q.response_id.or_else(|| request.as_ref().and_then(|r| r.previous_response_id.as_deref()));
    let named = preset(picker, config, q, &cx, &pool.name, previous)?;
    let is_preset = named.is_some();
    let decision = match named {
        Some(decision) => Ok(decision),
        None => {
            let rng = sheet.as_mut().map_or(rng, |sheet| &mut sheet.rng);
            schedule(picker, config, pool, &choice, request.is_some(), |strategy| {
                pool.scheduler.decide(strategy, &cx, q.subset, explain, rng)
            })
        }
    };
    let decision = match decision {
        Ok(decision) => decision,
        Err(error) => {
            if let Some(sheet) = sheet {
                sheet.refused(notes.as_ref(), &error);
            }
            return Err(error);
        }
    };
    if log {
        Explained { pool: &pool.name, strategy: &choice.name, model: &target, prompt_tokens, decision: &decision }
            .emit();
    }
    if let Some(signal) = decision.lacking {
        picker.observer.event(Event::Degraded(Degraded::Lacking(signal)));
    }
    if decision.diverted {
        runtime.observer.event(RequestEvent::Diverted { model: &target, now: q.now });
    }
    if pool.rules.is_stale() {
        picker.observer.event(Event::Degraded(Degraded::DiscoveryStale));
    }
    if decision.ejection_ignored {
        picker.observer.event(Event::Degraded(Degraded::AllEjected));
    }
    let share = decision.picks.first().map_or(0.0, |picked| choice.strategy.share(&cx, picked));
    let told = runtime.prefix.as_ref().filter(|_| q.api.prefills());
    let hints = told.map(|prefix| Hints::of(pool, prefix, looked.as_ref(), &decision, &snapshot, q.head, q.now));
    // That of a client that is not trusted is removed whatever is chosen.
    let chooses_rank = config.settings.trust_client_headers && runtime.prefix.as_ref().is_some_and(|p| p.choose_rank);
    let drops_rank = chooses_rank && q.head.has(RANK_HEADER);
    let hints = Hints { drops_rank, ..hints.unwrap_or_default() };
    // Beside what is held of it stands its length, whatever the strategy goes by.
    let prompt_tokens = looked.as_ref().map_or(prompt_tokens, Looked::prompt_tokens);
    let (matched_tokens, taught) = looked.map(|l| l.learn(&decision, q)).unzip();
    let (matched_tokens, understood) = (matched_tokens.unwrap_or(0), request.is_some());
    let mut prefill_lesson = None;
    let (lesson, tail) = match taught {
        Some(Taught { prefix, lesson, prefill, tail }) => {
            prefill_lesson = prefill.map(|lesson| (prefix.cache.clone(), lesson));
            (Some((prefix.cache.clone(), lesson)), tail.map(|tail| (prefix, tail)))
        }
        None => (None, None),
    };
    let booked = decision.picks.first().map(|picked| {
        let arrives = decision.split.is_some();
        let cached_tokens = matched_tokens;
        let order = Order { model: &target, prompt_tokens, cached_tokens, understood, streams, arrives, share, lesson };
        let book = || Booking::new(picked.clone(), &snapshot, pool.stale_after, order, q.now);
        match sheet {
            Some(mut sheet) => {
                sheet.asks(|line| line.preset = is_preset);
                sheet.booked(notes.as_ref(), &decision, matched_tokens, book)
            }
            None => Booked::new(book(), None),
        }
    });
    if decision.split.is_none() {
        conversation = None;
    }
    let prefill = decision.split.as_ref().and_then(|split| {
        let (endpoint, cached_tokens) = (split.prefill.first()?.clone(), split.prefill_cached);
        let lesson = prefill_lesson;
        // Its answer is one token long: its first is its end.
        let (streams, arrives, share) = (true, false, 0.0);
        let order = Order { model: &target, prompt_tokens, cached_tokens, understood, streams, arrives, share, lesson };
        Some(Box::new(Booking::new(endpoint, &snapshot, pool.stale_after, order, q.now)))
    });
    sheds.inspect(|queues| queues.passed());
    let encoding = decision.encode.iter().map(|encoder| Ticket::book(encoder.clone(), 0)).collect();
    let matched_tokens = decision.split.as_ref().map_or(matched_tokens, |split| split.prefill_cached);
    Ok(Step::Decided(Box::new(Plan {
        decision,
        matched_tokens,
        booked,
        prefill,
        encoding,
        splittable,
        course: None,
        request_id: None,
        conversation,
        hints,
        tail,
        understood,
        prompt_tokens,
        choices: request.as_ref().map_or(1, |r| r.choices),
        ceiling: Ceiling::of(q, request.as_ref()),
        renamed_from: renamed.map(|m| (&*m.name).into()),
        new_body,
        seen: body.len(),
        permits: Permits::new(),
        // Who takes no turn takes room all the same, which those who wait hear of when it ends.
        admitted: admitted.or_else(|| before_pool.filter(|_| !q.has_turn).map(Admitted::uncounted)),
        strategy: choice.strategy,
        profile,
        runtime: runtime.clone(),
        client: q.head.client(),
        target,
    })))
}

/// Whether two servers may share a request: readable, in an API of which the pool's servers know how, of one prompt and one answer but where
/// servers can do nothing else.
pub(super) fn splittable(pool: &Pool, path: &str, request: Option<&Request<'_>>) -> bool {
    let (Some(mode), Some(request), Some(api)) = (pool.disagg.as_deref(), request, LegApi::from_path(path)) else {
        return false;
    };
    // What a server has computed of a response lives there, and so does its next turn.
    let alone = request.previous_response_id.is_none() && request.conversation.is_none();
    let one = request.choices == 1 && request.prompt.count <= 1 && !request.opaque_prompt;
    let shared = match mode {
        Mode::Header { .. } => one,
        // Where nobody serves it whole, the connector has the word on several prompts and answers.
        Mode::Direct(direct) => direct.connector.speaks(api) && (one || !direct.connector.serves_whole()),
    };
    shared && alone && !request.skips_cache
}

/// Whether two servers of the pool may share a request: where only a strategy splits, there must be a server for prompts.
fn may_share(pool: &Pool) -> bool {
    let by_strategy = pool.scheduler.split().is_some_and(|policy| policy.decider == Decider::Strategy);
    pool.disagg.is_some() && (!by_strategy || pool.store.load().endpoints.iter().any(|s| s.serves(Roles::PREFILL)))
}

/// Whether a sidecar in front of the server that answers may be told who encodes a request's images and sounds. Chat completions only: llm-d's
/// sidecar looks for items in `messages`, and some of its versions take whatever has the header for one.
pub(super) fn encodable(pool: &Pool, path: &str) -> bool {
    let api = LegApi::from_path(path).filter(|api| *api == LegApi::ChatCompletions);
    matches!(pool.disagg.as_deref(), Some(Mode::Header { .. })) && api.is_some()
}

/// Asks the algorithm; one that panics is replaced by load alone for this request, and so is one that has nothing to read.
fn schedule(
    picker: &Picker,
    config: &ActiveConfig,
    pool: &Pool,
    chosen: &Choice,
    readable: bool,
    mut decide: impl FnMut(&dyn Strategy) -> Result<Decision, RequestError>,
) -> Result<Decision, RequestError> {
    if !readable {
        return decide(&*config.least_loaded);
    }
    match catch_unwind(AssertUnwindSafe(|| decide(&*chosen.strategy))) {
        Ok(decision) => decision,
        Err(_) => {
            picker.observer.event(Event::Panic);
            picker.observer.event(Event::Degraded(Degraded::StrategyPanic));
            tracing::error!(pool = %pool.name, strategy = %chosen.name, "strategy panicked; the request is routed by the fewest requests");
            decide(&*config.least_loaded)
        }
    }
}
