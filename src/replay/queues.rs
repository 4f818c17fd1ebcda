//! The queues of a pool with flow control, in virtual time.
//!
//! The counterpart of `picker::queues` without lock and channels. [`FlowControl`] decides for both, from the same
//! facts ([`Asking`]) and events. One difference: generated tokens are charged to a flow at the end of a response, not
//! while it streams. Flows with long responses therefore get more than in production. Called by [`super::world`]; pure.

use super::front::{Front, Sent, facts, keys};
use attache_flow::saturation::View;
use attache_flow::{Asking, Cause, FlowControl, Left, Passage, PoolFlow, Verdict, Way, asking};
use attache_protocol::Usage;
use attache_report::served::QueueOutcome;
use attache_scheduling::PickContext;
use attache_sim::content::Contents;
use attache_types::clock::Timestamp;
use attache_types::params::ParamError;
use attache_types::rng::{self, PickRng};
use attache_workload::Request;

/// A stream of random numbers beside those of all requests.
const STREAM: u64 = u64::MAX;
/// 4 bytes of a body stand for a token of a prompt.
const BYTES_PER_TOKEN: u64 = 4;

/// The queues of a pool.
#[derive(Debug)]
pub struct PoolQueues {
    flow: PoolFlow,
    control: FlowControl<Request>,
    rng: PickRng,
}

impl PoolQueues {
    /// Empty ones, as `flow` says; `seed` is that of all that is drawn.
    ///
    /// # Errors
    /// When the ceiling can't be built.
    pub fn new(flow: PoolFlow, seed: u64) -> Result<Self, ParamError> {
        Ok(Self { control: flow.control()?, flow, rng: rng::for_request(seed, STREAM) })
    }
}

/// Outcome of a request that arrives at a queue.
#[derive(Debug)]
pub(super) enum EnqueueResult {
    /// It goes on; booked as under way where there are queues.
    Goes(Option<Passage>),
    /// It waits until its turn comes, and no longer than to this moment if there is one.
    Waits(Option<Timestamp>),
    /// The queue rejects it, for this reason.
    Refused(QueueOutcome),
}

impl Front {
    /// Whether no request is queued.
    pub(super) fn is_idle(&self) -> bool {
        self.queues.as_ref().is_none_or(|queues| queues.control.is_empty())
    }

    /// Asks for a turn for `request`. `left` gets those whose waiting this has ended.
    pub(super) fn ask(&mut self, request: &Request, base: &str, left: &mut Vec<Left<Request>>) -> EnqueueResult {
        let now = request.at;
        let headers = self.headers_of(request);
        let Some(queues) = &mut self.queues else { return EnqueueResult::Goes(None) };
        let view = View {
            pool: &self.snapshot,
            health: self.config.scheduler.health(),
            split: self.config.scheduler.split(),
            stale_after: self.config.stale_after,
            now,
        };
        let facts = facts(request, base, &headers);
        let chosen = self.config.scheduler.choices.choose(&facts).ok();
        let split = self.config.scheduler.split();
        let name = chosen.as_ref().map_or("", |chosen| &chosen.choice.name);
        let way = Way::of(split, name, split.is_some(), facts.prompt_tokens);
        if !queues.flow.admits(&facts, &view, &mut queues.rng) {
            return EnqueueResult::Refused(QueueOutcome::Shed);
        }
        if !queues.flow.settings.queue {
            let is_shed = queues.flow.sheds(facts.priority, way, &view);
            return if is_shed { EnqueueResult::Refused(QueueOutcome::Shed) } else { EnqueueResult::Goes(None) };
        }
        // As the exchange: only what the strategy looks up is known.
        let strategy = chosen.as_ref().map(|chosen| &chosen.choice.strategy);
        let cx = PickContext { request: facts, ..PickContext::new(&self.snapshot, now, self.config.stale_after) };
        let spare = strategy.and_then(|strategy| strategy.spare(&cx));
        let found = strategy.is_some_and(|strategy| strategy.reads().prefix).then(|| {
            let keys = keys(request, &mut Contents::new(self.config.block_size));
            self.cache.lookup(&mut &keys[..], now)
        });
        let ttl = queues.flow.ttl(&self.snapshot, facts.priority);
        let asking = Asking {
            facts: &facts,
            flow: request.tenant.as_deref(),
            bytes: u64::from(facts.prompt_tokens) * BYTES_PER_TOKEN,
            answer_tokens: Some(request.answer.tokens),
            found: found.as_ref(),
            way,
            ttl,
            spare,
            unvouched: false,
        };
        let (arrival, room) = (asking.arrival(&view), queues.flow.gauge(&view));
        queues.control.pool_serves(asking::serves(&self.snapshot), now);
        match queues.control.enqueue(&arrival, |_| request.clone(), &room, now, &mut queues.rng, left) {
            Verdict::Dispatch(passage) => EnqueueResult::Goes(Some(passage)),
            Verdict::Parked(_) => EnqueueResult::Waits(ttl.map(|ttl| now.after(ttl))),
            Verdict::Rejected(refusal) => EnqueueResult::Refused(fate(refusal.cause)),
        }
    }

    /// The pool may have more room than before, or somebody has waited for as long as it may.
    pub(super) fn freed(&mut self, now: Timestamp, left: &mut Vec<Left<Request>>) {
        let Some(queues) = self.queues.as_mut().filter(|queues| !queues.control.is_empty()) else { return };
        let view = View {
            pool: &self.snapshot,
            health: self.config.scheduler.health(),
            split: self.config.scheduler.split(),
            stale_after: self.config.stale_after,
            now,
        };
        queues.control.pool_serves(asking::serves(&self.snapshot), now);
        queues.control.freed(&queues.flow.gauge(&view), now, &mut queues.rng, left);
    }

    /// A request that was let through is in the books.
    pub(super) fn landed(&mut self, sent: &mut Sent) {
        if let (Some(queues), Some(passage)) = (&mut self.queues, &mut sent.passage) {
            queues.control.landed(passage);
        }
    }

    /// A request that was let through has ended, or was never sent.
    pub(super) fn gave_back(&mut self, passage: Option<Passage>, usage: &Usage, now: Timestamp) {
        let (Some(queues), Some(mut passage)) = (&mut self.queues, passage) else { return };
        let tokens = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
        queues.control.answered(&mut passage, usage.completion_tokens.map_or(0, tokens), now);
        queues.control.ended(passage, usage.prompt_tokens.map(tokens), now);
    }
}

fn fate(cause: Cause) -> QueueOutcome {
    match cause {
        Cause::BandFull | Cause::Full | Cause::SharedFull => QueueOutcome::Full,
        Cause::Expired => QueueOutcome::Expired,
        Cause::Evicted | Cause::Preempted => QueueOutcome::Evicted,
    }
}

/// Who has left the queue, and whether it goes on.
pub(super) fn why_left(left: Left<Request>) -> (Request, QueueOutcome, Option<Passage>) {
    match left {
        Left::Dispatched(_, request, passage) => (request, QueueOutcome::Passed, Some(passage)),
        Left::Refused(_, request, refusal) => (request, fate(refusal.cause), None),
    }
}
