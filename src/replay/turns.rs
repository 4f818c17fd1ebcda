//! The queues before the pool: who goes on, who waits, and whose turn has come, in virtual time.
//!
//! What `picker::queues` is to the exchange, without its lock and its channels: [`FlowControl`] decides for both, what it is told of a request
//! is [`Asking`]'s, and it hears of the same events, but for the tokens of answers under way: flows are charged for those when the answer has ended,
//! so those with long ones come off better here than live. Called by [`super::world`]; pure.

use super::front::{Front, Sent, facts, keys};
use attache_flow::saturation::View;
use attache_flow::{Asking, Cause, FlowControl, Left, Passage, PoolFlow, Verdict, Way, asking};
use attache_protocol::Usage;
use attache_report::served::Fate;
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
pub struct Turns {
    flow: PoolFlow,
    control: FlowControl<Request>,
    rng: PickRng,
}

impl Turns {
    /// Empty ones, as `flow` says; `seed` is that of all that is drawn.
    ///
    /// # Errors
    /// When the ceiling can't be built.
    pub fn new(flow: PoolFlow, seed: u64) -> Result<Self, ParamError> {
        Ok(Self { control: flow.control()?, flow, rng: rng::for_request(seed, STREAM) })
    }
}

/// What comes of asking for a turn.
#[derive(Debug)]
pub(super) enum Asked {
    /// It goes on; booked as under way where there are queues.
    Goes(Option<Passage>),
    /// It waits until its turn comes, and no longer than to this moment if there is one.
    Waits(Option<Timestamp>),
    /// It is turned away.
    Refused(Fate),
}

impl Front {
    /// Whether nobody waits.
    pub(super) fn is_idle(&self) -> bool {
        self.turns.as_ref().is_none_or(|turns| turns.control.is_empty())
    }

    /// Asks for a turn for `request`. `left` gets those whose waiting this has ended.
    pub(super) fn ask(&mut self, request: &Request, base: &str, left: &mut Vec<Left<Request>>) -> Asked {
        let now = request.at;
        let headers = self.headers_of(request);
        let Some(turns) = &mut self.turns else { return Asked::Goes(None) };
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
        if !turns.flow.admits(&facts, &view, &mut turns.rng) {
            return Asked::Refused(Fate::Shed);
        }
        if !turns.flow.settings.queue {
            let is_shed = turns.flow.sheds(facts.priority, way, &view);
            return if is_shed { Asked::Refused(Fate::Shed) } else { Asked::Goes(None) };
        }
        // As the exchange: only what the strategy looks up is known.
        let strategy = chosen.as_ref().map(|chosen| &chosen.choice.strategy);
        let cx = PickContext { request: facts, ..PickContext::new(&self.snapshot, now, self.config.stale_after) };
        let spare = strategy.and_then(|strategy| strategy.spare(&cx));
        let found = strategy.is_some_and(|strategy| strategy.reads().prefix).then(|| {
            let keys = keys(request, &mut Contents::new(self.config.block_size));
            self.cache.lookup(&mut &keys[..], now)
        });
        let ttl = turns.flow.ttl(&self.snapshot, facts.priority);
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
        let (arrival, room) = (asking.arrival(&view), turns.flow.gauge(&view));
        turns.control.pool_serves(asking::serves(&self.snapshot), now);
        match turns.control.enqueue(&arrival, |_| request.clone(), &room, now, &mut turns.rng, left) {
            Verdict::Dispatch(passage) => Asked::Goes(Some(passage)),
            Verdict::Parked(_) => Asked::Waits(ttl.map(|ttl| now.after(ttl))),
            Verdict::Rejected(refusal) => Asked::Refused(fate(refusal.cause)),
        }
    }

    /// The pool may have more room than before, or somebody has waited for as long as it may.
    pub(super) fn freed(&mut self, now: Timestamp, left: &mut Vec<Left<Request>>) {
        let Some(turns) = self.turns.as_mut().filter(|turns| !turns.control.is_empty()) else { return };
        let view = View {
            pool: &self.snapshot,
            health: self.config.scheduler.health(),
            split: self.config.scheduler.split(),
            stale_after: self.config.stale_after,
            now,
        };
        turns.control.pool_serves(asking::serves(&self.snapshot), now);
        turns.control.freed(&turns.flow.gauge(&view), now, &mut turns.rng, left);
    }

    /// A request that was let through is in the books.
    pub(super) fn landed(&mut self, sent: &mut Sent) {
        if let (Some(turns), Some(passage)) = (&mut self.turns, &mut sent.passage) {
            turns.control.landed(passage);
        }
    }

    /// A request that was let through has ended, or was never sent.
    pub(super) fn gave_back(&mut self, passage: Option<Passage>, usage: &Usage, now: Timestamp) {
        let (Some(turns), Some(mut passage)) = (&mut self.turns, passage) else { return };
        let tokens = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
        turns.control.answered(&mut passage, usage.completion_tokens.map_or(0, tokens), now);
        turns.control.ended(passage, usage.prompt_tokens.map(tokens), now);
    }
}

fn fate(cause: Cause) -> Fate {
    match cause {
        Cause::BandFull | Cause::Full | Cause::SharedFull => Fate::Full,
        Cause::Expired => Fate::Expired,
        Cause::Evicted | Cause::Preempted => Fate::Evicted,
    }
}

/// Who has left the queue, and whether it goes on.
pub(super) fn told(left: Left<Request>) -> (Request, Fate, Option<Passage>) {
    match left {
        Left::Dispatched(_, request, passage) => (request, Fate::Passed, Some(passage)),
        Left::Refused(_, request, refusal) => (request, fate(refusal.cause), None),
    }
}
