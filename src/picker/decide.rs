//! The decision in the middle of a request: understand the body, find the pool, name the endpoints.
//!
//! [`decide`] is the order of the steps. Those before the prompt is looked up are in `decide/entering.rs`, the others
//! in `decide/placing.rs`.

use super::active::{ActiveConfig, PoolRuntime};
use super::ceiling::Ceiling;
use super::conversation::Conversation;
use super::head::Head;
use super::hints::Hints;
use super::picker::Picker;
use super::prefix::made::Outcome;
use super::prefix::{PoolPrefix, Tail};
use super::priority::priority;
use super::queues::{Admitted, Parked};
use super::quotas::{Allowance, Permits};
use super::reading::understand;
use super::recording::Notes;
use super::split::Course;
use super::warming::Warming;
use crate::event::SplitOutcome;
use attache_disagg::{LegApi, Mode};
use attache_pool::Roles;
use attache_pool::health::ClientSlot;
use attache_pool::ledger::Ticket;
use attache_prefix::learning::Lesson;
use attache_protocol::{Api, Request};
use attache_record::Booked;
use attache_scheduling::choice::Chosen;
use attache_scheduling::router::RouteFacts;
use attache_scheduling::scheduler::Subset;
use attache_scheduling::split::Decider;
use attache_scheduling::{Booking, Decision, Pool, RequestFacts, Strategy};
use attache_types::clock::Timestamp;
use attache_types::error::RequestError;
use attache_types::rng::PickRng;
use entering::{Admit, Deciding, PromptSize, Shared, choose, headers, rewrite};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

mod entering;
mod placing;

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
    /// There is time to have another server compute the prompt before the request goes on, should the picker be the one
    /// to ask it.
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
/// ```text
/// understand ─▶ route ─▶ rewrite ─▶ choose ─▶ quotas ─▶ read ─▶ admit ─▶ look up ─▶ schedule ─▶ book
/// ```
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
    let request = request.as_ref();
    let model = request.and_then(|r| r.model.as_ref()).map(|m| &*m.name);
    let facts = RouteFacts { model, authority: q.head.authority(), called: q.called };
    let runtime = config.route(facts, |name| q.head.get(name))?;
    let rewritten = rewrite(config, &runtime.pool, q, request, rng)?;
    let notes = Notes::of(picker, q);
    let size = PromptSize::of(q, request);
    let facts = RequestFacts {
        model: &rewritten.target,
        prompt_tokens: size.estimated,
        max_tokens: request.and_then(|r| r.max_tokens),
        priority: priority(config, &runtime.pool, q.head.objective(), model),
        headers: headers(q, request, notes.as_ref()),
        prompt: request.map(|r| &r.prompt),
        payload: Some(q.body.bytes()),
        waited: if q.has_turn { q.now.since(q.opened) } else { Duration::ZERO },
        digests: notes.as_ref().map(|n| &n.digests),
    };
    let chosen = choose(&runtime.pool, q, &facts)?;
    let deciding = Deciding::new(Shared { picker, config, runtime }, q, request, size, facts, &chosen);
    if let Some(question) = deciding.ask_quotas(allowance)? {
        return Ok(Step::Allow(question));
    }
    let prepared = match deciding.read() {
        Ok(prepared) => prepared,
        Err(warming) => return Ok(Step::Warm(warming, None)),
    };
    match deciding.admit(prepared.as_ref())? {
        Admit::Waits(step) => Ok(step),
        Admit::Goes(admission) => {
            let placed = deciding.place(prepared.as_ref(), admission, notes.as_ref(), rng)?;
            let Chosen { choice, profile, .. } = chosen;
            Ok(placed.into_step(rewritten, choice.strategy, profile))
        }
    }
}

/// Whether two servers may share a request: readable, in an API of which the pool's servers know how, of one prompt and
/// one answer but where servers can do nothing else.
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

/// Whether two servers of the pool may share a request: where only a strategy splits, there must be a server for
/// prompts.
fn may_share(pool: &Pool) -> bool {
    let by_strategy = pool.scheduler.split().is_some_and(|policy| policy.decider == Decider::Strategy);
    pool.disagg.is_some() && (!by_strategy || pool.store.load().endpoints.iter().any(|s| s.serves(Roles::PREFILL)))
}

/// Whether a sidecar in front of the server that answers may be told who encodes a request's images and sounds. Chat
/// completions only: llm-d's sidecar looks for items in `messages`, and some of its versions take whatever has the
/// header for one.
pub(super) fn encodable(pool: &Pool, path: &str) -> bool {
    let api = LegApi::from_path(path).filter(|api| *api == LegApi::ChatCompletions);
    matches!(pool.disagg.as_deref(), Some(Mode::Header { .. })) && api.is_some()
}
