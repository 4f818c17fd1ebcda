//! The decision about one request: parse the body, route it to a pool, choose the endpoints.
//!
//! [`decide`] is the order of the steps. Those before the prompt is looked up are in `decide/entering.rs`, the others
//! in `decide/placing.rs`. Explanations that are kept are made in `decide/keeping.rs`.

use super::active::{ActiveConfig, PoolRuntime};
use super::ceiling::Ceiling;
use super::conversation::Conversation;
use super::head::Head;
use super::hints::Hints;
use super::known::KnownRequest;
use super::picker::Picker;
use super::prefix::made::Outcome;
use super::prefix::{PoolPrefix, Tail};
use super::priority::priority;
use super::queues::{AdmittedRequest, QueuedRequest};
use super::quotas::{Allowance, Permits};
use super::reading::{report_ignored, report_unshown, understand};
use super::recording::RequestReads;
use super::split::PrefillOutcome;
use super::warming::Warming;
use crate::event::{DecisionTrace, SplitOutcome};
use attache_disagg::{LegApi, Mode};
use attache_pool::Roles;
use attache_pool::health::ClientSlot;
use attache_protocol::{Api, Request};
use attache_record::Booked;
use attache_scheduling::Subset;
use attache_scheduling::choice::{Choice, Chosen, DEFAULT_STRATEGY_HEADER};
use attache_scheduling::router::RouteFacts;
use attache_scheduling::split::Decider;
use attache_scheduling::{Decision, Pool, RequestFacts, Strategy};
use attache_types::clock::Timestamp;
use attache_types::error::RequestError;
use attache_types::rng::PickRng;
pub use entering::CallFacts;
use entering::{Admit, PromptSize, headers, rewrite};
pub(super) use entering::{Deciding, Rewritten, Scope};
pub use keeping::explain_known;
use placing::Placed;
pub(super) use placing::Unproposed;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

mod entering;
mod keeping;
mod placing;

/// The part of the request body that the gateway has sent.
#[derive(Clone, Copy, Debug)]
pub enum Seen<'a> {
    /// No body, or it arrives after the decision.
    Nothing,
    /// The beginning (`BUFFERED_PARTIAL` cuts long bodies).
    Head(&'a [u8]),
    /// The whole body.
    Whole(&'a [u8]),
    /// None: the request is known without one, from a simulation or a recording.
    Known(&'a KnownRequest<'a>),
}

impl<'a> Seen<'a> {
    pub(super) fn bytes(self) -> &'a [u8] {
        match self {
            Seen::Nothing | Seen::Known(_) => &[],
            Seen::Head(bytes) | Seen::Whole(bytes) => bytes,
        }
    }

    /// Length, bytes.
    pub(super) fn len(self) -> u64 {
        match self {
            Seen::Known(known) => known.bytes,
            _ => self.bytes().len() as u64,
        }
    }

    /// Whether nothing of the body is missing.
    pub(super) fn is_whole(self) -> bool {
        matches!(self, Seen::Whole(_) | Seen::Known(_))
    }

    /// The request, if it is known without a body.
    pub(super) fn known(self) -> Option<&'a KnownRequest<'a>> {
        match self {
            Seen::Known(known) => Some(known),
            _ => None,
        }
    }
}

/// The input of a decision.
#[derive(Debug)]
pub struct RequestView<'a> {
    /// The request's headers.
    pub head: &'a Head,
    /// The `:authority` of the gateway's own call.
    pub called: &'a str,
    /// The request's API.
    pub api: Api,
    /// The id of a stored response that the path names (Responses API).
    pub response_id: Option<&'a str>,
    /// The endpoints that the gateway allows.
    pub subset: Option<&'a Subset>,
    /// The request's body.
    pub body: Seen<'a>,
    /// The time of the decision.
    pub now: Timestamp,
    /// The time at which the request's headers arrived.
    pub opened: Timestamp,
    /// The last attempt: the decision does without prompt keys that are not computed yet.
    pub last: bool,
    /// The outcome of the background work on the prompt, if any was started.
    pub made: Option<&'a OnceLock<Outcome>>,
    /// The gateway's body mode leaves time to queue the request.
    pub may_wait: bool,
    /// The decision is made at the headers, and a body or an upgraded connection follows.
    pub opens: bool,
    /// The queue has dequeued the request.
    pub has_turn: bool,
    /// The time for a prefill on another worker, if Attaché calls that worker.
    pub prefill_time: PrefillTime,
    /// Times the steps, if the request is sampled for traces.
    pub trace: Option<&'a dyn DecisionTrace>,
}

/// How long the gateway's body mode lets a prefill take before the request is dispatched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefillTime {
    /// No time: the body is not complete, or not shown.
    None,
    /// The gateway's message timeout runs.
    MessageTimeout,
    /// As long as the configuration allows.
    Unbounded,
}

impl RequestView<'_> {
    /// Whether a body follows that the gateway does not show before the decision, although its API has a model there.
    pub(super) fn has_unshown_body(&self) -> bool {
        self.opens && self.head.method() == "POST" && self.api != Api::Other && matches!(self.body, Seen::Nothing)
    }
}

/// A decision, with everything that the rest of the stream needs.
#[derive(Debug)]
pub struct Plan {
    /// The chosen endpoints.
    pub decision: Decision,
    /// The pool of the request.
    pub runtime: Arc<PoolRuntime>,
    /// The slot of the client, in which the health of endpoints counts its errors.
    pub client: ClientSlot,
    /// The strategy that chose them.
    pub strategy: Arc<dyn Strategy>,
    /// Name of the strategy, as configurations and headers spell it.
    pub strategy_name: Arc<str>,
    /// The profile that selected the strategy.
    pub profile: Option<Arc<str>>,
    /// The body was parsed, so the decision considers more than load.
    pub understood: bool,
    /// Estimated length of the prompt, tokens.
    pub prompt_tokens: u32,
    /// Limit of the response, tokens; `None` if the request sets none.
    pub(super) max_tokens: Option<u32>,
    /// Priority of the request.
    pub(super) priority: i32,
    /// Requested responses for each prompt.
    pub choices: u32,
    /// The most tokens that the request can cost.
    pub(super) ceiling: Ceiling,
    /// Model name sent to the model server; empty if unknown.
    pub target: Arc<str>,
    /// Estimated prompt tokens in the cache of the server that computes the prompt, requests in flight included.
    pub matched_tokens: u32,
    /// The same in the cache of the first pick.
    pub pick_matched_tokens: u32,
    /// The booking on the first pick, and on encode workers.
    pub booked: Option<Booked>,
    /// The booking on the prefill worker, when the decision splits the request.
    pub prefill: Option<Box<Booked>>,
    /// A prefill and a decode worker may share the request.
    pub splittable: bool,
    /// How the prefill on another worker went, once that is known.
    pub prefill_outcome: Option<PrefillOutcome>,
    /// The request id for both workers, when the client sent none.
    pub request_id: Option<Box<str>>,
    /// State of the conversation between turns, when workers share it and decode workers keep blocks.
    pub conversation: Option<Box<Conversation>>,
    /// Headers for the model server besides the destination.
    pub hints: Hints,
    /// The end of the prompt's key chain, when keys of the response are recorded.
    pub tail: Option<(Arc<PoolPrefix>, Tail)>,
    /// The client's model name, when Attaché replaced it.
    pub renamed_from: Option<Arc<str>>,
    /// The body that replaces the seen part of the client's body.
    pub new_body: Option<Vec<u8>>,
    /// Length of the seen part of the client's body, bytes.
    pub seen: usize,
    /// Reservations in the quotas of its tenant and its model.
    pub permits: Permits,
    /// Time in the queue; `None` if the request was not queued.
    pub queued: Option<Duration>,
    /// The request's place among those that the queue has let through. Dropped last: the request that is dequeued by
    /// that must see all other bookings released.
    pub admitted: Option<AdmittedRequest>,
}

impl Plan {
    /// How the request was served, if it could be split.
    #[must_use]
    pub fn split_outcome(&self) -> Option<SplitOutcome> {
        match &self.prefill_outcome {
            Some(prefill_outcome) if prefill_outcome.failure.is_some() => Some(SplitOutcome::Local),
            Some(_) => Some(SplitOutcome::Split),
            None => self.splittable.then_some(SplitOutcome::Whole),
        }
    }

    /// Whether anything depends on the body of the response to this request of `api`: token counts, the model name.
    #[must_use]
    pub fn reads_response(&self, api: Api) -> bool {
        api.reports_usage() || self.renamed_from.is_some() || !self.permits.is_empty()
    }

    /// A prefill worker prefills the prompt.
    #[must_use]
    pub fn is_split(&self) -> bool {
        self.decision.split.is_some()
    }

    /// Both workers get the request at the same time, and the decode worker waits for the prefill worker.
    #[must_use]
    pub fn meets(&self) -> bool {
        let prefill = self.decision.split.as_ref().and_then(|split| split.prefill.first());
        prefill.is_some_and(|server| self.runtime.pool.disagg.as_deref().is_some_and(|mode| mode.meets(server)))
    }

    /// The length of the new body, bytes, where `announced` is the client's `content-length`. `None` when nothing
    /// changes.
    #[must_use]
    pub fn new_length(&self, announced: Option<u64>) -> Option<u64> {
        let new = self.new_body.as_ref()?.len() as u64;
        // The unseen rest of the client's body follows the new part.
        let unseen = announced.map_or(0, |a| a.saturating_sub(self.seen as u64));
        Some(new + unseen)
    }
}

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
/// understand ─▶ route ─▶ rewrite ─▶ choose ─▶ ask quotas ─▶ read ─▶ admit ─▶ look up ─▶ schedule ─▶ book
/// ```
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
    let entered = enter(scope, None, q, notes, rng, |deciding, rng| {
        if q.head.names_strategy() && deciding.pool().scheduler.choices.report_ignored() {
            report_ignored(deciding.pool(), DEFAULT_STRATEGY_HEADER);
        }
        if let Some(question) = deciding.ask_quotas(allowance)? {
            return Ok(Progress::Stops(Step::Allow(question)));
        }
        let prepared = match deciding.read() {
            Ok(prepared) => prepared,
            Err(warming) => return Ok(Progress::Stops(Step::Warm(warming, None))),
        };
        match deciding.admit(prepared.as_ref())? {
            Admit::Waits(step) => Ok(Progress::Stops(step)),
            Admit::Goes(admission) => deciding.place(prepared.as_ref(), admission, notes, rng).map(Progress::Placed),
        }
    })?;
    Ok(match entered.outcome {
        Progress::Stops(step) => step,
        Progress::Placed(placed) => placed.into_step(entered.rewritten, entered.choice, entered.profile),
    })
}

/// How far a live decision came.
#[expect(clippy::large_enum_variant, reason = "it lives for one call; a box would cost each request an allocation")]
enum Progress {
    /// It waits for something.
    Stops(Step),
    Placed(Placed),
}

/// The outcome of a decision's later steps, with the results of the first ones.
pub(super) struct Entered<R> {
    pub(super) outcome: R,
    pub(super) rewritten: Rewritten,
    pub(super) choice: Choice,
    pub(super) profile: Option<Arc<str>>,
}

/// The first steps of every decision, live or as a dry run: the parsed body, the pool (the one of this name, if `pool`
/// is set), the model, the strategy. Then the later steps: `rest`.
///
/// # Errors
/// The error response for the client.
pub(super) fn enter<R>(
    scope: Scope<'_>,
    pool: Option<&str>,
    q: &RequestView<'_>,
    notes: Option<&RequestReads<'_>>,
    rng: &mut PickRng,
    rest: impl FnOnce(&Deciding<'_>, &mut PickRng) -> Result<R, RequestError>,
) -> Result<Entered<R>, RequestError> {
    let config = scope.config;
    let known = q.body.known();
    let parsed =
        if known.is_some() { None } else { understand(scope.observer, &scope.picker.unread_forms, config, q)? };
    let request = known.map_or(parsed.as_ref(), |known| known.request.as_ref());
    let model = request.and_then(|r| r.model.as_ref()).map(|m| &*m.name);
    let runtime = match pool {
        Some(name) => config.named(name, model)?,
        None => {
            let facts = RouteFacts { model, authority: q.head.authority(), called: q.called };
            config.route(facts, |name| q.head.get(name))?
        }
    };
    let in_pool = |error: RequestError| error.in_pool(&runtime.pool.name);
    let rewritten = rewrite(config, runtime, q, request, rng).map_err(in_pool)?;
    q.trace.inspect(|trace| trace.entered(&runtime.pool.name, &rewritten.target));
    let size = PromptSize::of(q, request);
    let facts = RequestFacts {
        model: &rewritten.target,
        prompt_tokens: size.estimated,
        max_tokens: request.and_then(|r| r.max_tokens),
        priority: match known {
            Some(known) => known.priority,
            None => priority(config, &runtime.pool, q.head.objective(), model),
        },
        headers: headers(q, request, notes),
        prompt: known.and_then(|known| known.text).or(request.map(|r| &r.prompt)),
        payload: known.is_none().then(|| q.body.bytes()),
        waited: if q.has_turn { q.now.since(q.opened) } else { Duration::ZERO },
        digests: notes.map(|n| &n.digests),
    };
    let chosen = runtime.pool.scheduler.choices.choose(&facts).map_err(in_pool)?;
    let outcome = rest(&Deciding::new(scope, runtime, q, request, size, facts, &chosen), rng).map_err(in_pool)?;
    let Chosen { choice, profile, .. } = chosen;
    Ok(Entered { outcome, choice, profile, rewritten })
}

/// Whether a prefill and a decode worker may share a request: it is parsed, its API can be split in this pool, and it
/// has one prompt and one response. Connectors whose workers serve no whole requests may allow several.
pub(super) fn splittable(pool: &Pool, path: &str, request: Option<&Request<'_>>) -> bool {
    let (Some(mode), Some(request), Some(api)) = (pool.disagg.as_deref(), request, LegApi::from_path(path)) else {
        return false;
    };
    // A stored response is on one server, so its next turn goes there.
    let alone = request.previous_response_id.is_none() && request.conversation.is_none();
    let one = request.choices == 1 && request.prompt.count <= 1 && !request.opaque_prompt;
    let shared = match mode {
        Mode::Header { .. } => one,
        // If no worker serves whole requests, the connector decides about several prompts and responses.
        Mode::Direct(direct) => direct.connector.speaks(api) && (one || !direct.connector.serves_whole()),
    };
    shared && alone && !request.skips_cache
}

/// Whether the pool splits requests. If the strategy decides about splits, the pool must have a prefill worker.
fn may_share(pool: &Pool) -> bool {
    let by_strategy = pool.scheduler.split().is_some_and(|policy| policy.decider == Decider::Strategy);
    pool.disagg.is_some() && (!by_strategy || pool.store.load().endpoints.iter().any(|s| s.serves(Roles::PREFILL)))
}

/// Whether a header may name encode workers for images and audio to the sidecar of the decode worker. Chat completions
/// only: llm-d's sidecar looks for items in `messages`, and some versions treat every request with the header as one.
pub(super) fn encodable(pool: &Pool, path: &str) -> bool {
    let api = LegApi::from_path(path).filter(|api| *api == LegApi::ChatCompletions);
    matches!(pool.disagg.as_deref(), Some(Mode::Header { .. })) && api.is_some()
}

#[cfg(test)]
pub(crate) mod tests;
