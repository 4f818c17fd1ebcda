//! The queues before a pool, as the exchange knows them: who may go on, who waits, and whose turn has come.
//!
//! [`FlowControl`] decides. This holds it under a lock, tells it what happens (an answer begins or ends, the pool is published anew) and wakes
//! whoever has waited. What is let through is an [`Admitted`], what waits a [`Parked`]; both give back what they hold when they are dropped.

use super::decide::Question;
use crate::clock::Timestamp;
use crate::error::{Reason, RequestError};
use crate::flow::saturation::View;
use crate::flow::{Arrival, Cause, FlowControl, Gauge, Handle, Left, Passage, PoolFlow, Refusal, Verdict};
use crate::pool::speed::Work;
use crate::pool::{PoolSnapshot, Roles, SnapshotStore};
use crate::protocol::Usage;
use crate::rng::PickRng;
use crate::scheduling::facts::prediction::Targets;
use crate::scheduling::plugin::ParamError;
use crate::scheduling::{Candidate, PickContext, RequestFacts};
use crate::telemetry::queues::{Fate, QueueMetrics};
use parking_lot::Mutex;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::oneshot;

/// The flow of requests whose tenant nobody names, as GIE has it.
const DEFAULT_FLOW: &str = "default-flow";

/// What comes of waiting.
pub type Turn = Result<Admitted, Refusal>;

/// The queues before one pool.
#[derive(Debug)]
pub struct Queues {
    flow: PoolFlow,
    store: Arc<SnapshotStore>,
    stale_after: Duration,
    metrics: QueueMetrics,
    state: Mutex<State>,
    /// The last moment that anybody told: a stream that is dropped knows none.
    now: AtomicU64,
}

#[derive(Debug)]
struct State {
    control: FlowControl<oneshot::Sender<Turn>>,
    rng: PickRng,
}

/// What comes of asking for a turn.
#[derive(Debug)]
pub enum Asked {
    /// It goes on; booked as under way, unless nothing counts it.
    Goes(Option<Admitted>),
    /// It waits.
    Waits(Parked),
}

impl Queues {
    /// Queues as `flow` says, before the pool in `store`.
    ///
    /// # Errors
    /// When the ceiling can't be built.
    pub fn new(
        flow: PoolFlow,
        store: Arc<SnapshotStore>,
        stale_after: Duration,
        metrics: QueueMetrics,
        rng: PickRng,
    ) -> Result<Arc<Self>, ParamError> {
        let control = FlowControl::new(flow.settings.clone(), flow.ceiling()?);
        let state = Mutex::new(State { control, rng });
        Ok(Arc::new(Self { flow, store, stale_after, metrics, state, now: AtomicU64::new(0) }))
    }

    /// Whether these are the queues that `flow` asks for, before the pool in `store`.
    #[must_use]
    pub fn are(&self, flow: &PoolFlow, store: &Arc<SnapshotStore>, stale_after: Duration) -> bool {
        self.flow.said == flow.said && Arc::ptr_eq(&self.store, store) && self.stale_after == stale_after
    }

    /// Asks for a turn for the request that `q` is about.
    ///
    /// # Errors
    /// The refusal that the client gets.
    pub fn ask(
        self: &Arc<Self>,
        q: &Question<'_>,
        facts: &RequestFacts<'_>,
        flow: Option<&str>,
    ) -> Result<Asked, RequestError> {
        let snapshot = self.store.load_full();
        self.admits(q, facts, &snapshot)?;
        let ttft = Targets::of(facts).ttft_ms;
        let arrival = Arrival {
            priority: facts.priority,
            flow: flow.unwrap_or(DEFAULT_FLOW),
            bytes: q.body.len(),
            prompt_tokens: facts.prompt_tokens,
            answer_tokens: None,
            work: work(&snapshot, facts.prompt_tokens, q.now),
            ttl: None,
            ttft: (ttft > 0.0).then(|| Duration::from_secs_f64(ttft.min(1e9) / 1e3)),
        };
        if !q.may_wait {
            return self.now_or_never(&arrival, &snapshot, q.now);
        }
        let mut turn = None;
        let verdict = self.change(q.now, |state, gauge, left| {
            let keep = |_: Handle| {
                let (tell, told) = oneshot::channel();
                turn = Some(told);
                tell
            };
            state.control.enqueue(&arrival, keep, &gauge, q.now, &mut state.rng, left)
        });
        match verdict {
            Verdict::Dispatch(passage) => {
                self.metrics.fate(Fate::Passed);
                Ok(Asked::Goes(Some(Admitted { queues: self.clone(), passage: Some(passage) })))
            }
            Verdict::Parked(handle) => {
                let until = q.now.after(self.flow.settings.ttl);
                let (priority, queues) = (arrival.priority, self.clone());
                Ok(Asked::Waits(Parked { queues, handle, priority, until, turn, settled: false }))
            }
            Verdict::Rejected(refusal) => {
                self.metrics.fate(Fate::Full);
                Err(refused(&refusal))
            }
        }
    }

    /// What can't wait goes on if there is room, or if it is not sheddable.
    fn now_or_never(&self, arrival: &Arrival<'_>, pool: &PoolSnapshot, now: Timestamp) -> Result<Asked, RequestError> {
        let pending = self.state.lock().control.pending();
        if self.gauge(pool, now).saturation(pending) < 1.0 {
            self.metrics.fate(Fate::Passed);
        } else if arrival.priority < 0 {
            self.metrics.fate(Fate::Shed);
            let error = RequestError::new(Reason::Shed, "the pool is full, and this request is sheddable");
            return Err(retry(error, self.state.lock().control.clears(arrival.priority, now)));
        } else {
            self.metrics.fate(Fate::Unqueued);
        }
        Ok(Asked::Goes(None))
    }

    fn admits(&self, q: &Question<'_>, facts: &RequestFacts<'_>, pool: &PoolSnapshot) -> Result<(), RequestError> {
        if self.flow.admitters.is_empty() {
            return Ok(());
        }
        let cx = PickContext { request: *facts, ..PickContext::new(pool, q.now, self.stale_after) };
        let serving = pool.endpoints.iter().filter(|e| e.serves(Roles::DECODE));
        let candidates: Vec<_> = serving.map(|e| Candidate::new(e, q.now, self.stale_after, 0)).collect();
        let mut state = self.state.lock();
        if self.flow.admitters.iter().all(|a| a.admits(&cx, &candidates, &mut state.rng)) {
            return Ok(());
        }
        self.metrics.fate(Fate::Shed);
        let error = RequestError::new(Reason::Shed, "the pool can't serve this request in time, and it is sheddable");
        Err(retry(error, state.control.clears(facts.priority, q.now)))
    }

    fn gauge(&self, pool: &PoolSnapshot, now: Timestamp) -> Gauge {
        self.flow.detector.gauge(&View { pool, stale_after: self.stale_after, now })
    }

    /// Changes the queues and wakes whoever has left them by that. The pool is looked at under the lock: what was let through is then either
    /// counted as on its way or in the ledger.
    fn change<R>(
        self: &Arc<Self>,
        now: Timestamp,
        change: impl FnOnce(&mut State, Gauge, &mut Vec<Left<oneshot::Sender<Turn>>>) -> R,
    ) -> R {
        self.now.fetch_max(now.0, Relaxed);
        let mut left = Vec::new();
        let result = {
            let mut state = self.state.lock();
            let gauge = self.gauge(&self.store.load(), now);
            let result = change(&mut state, gauge, &mut left);
            self.metrics.holds(state.control.len(), state.control.bytes());
            result
        };
        // Not under the lock: what nobody takes is given back, which takes it.
        for left in left {
            let (sender, turn) = match left {
                Left::Dispatched(_, sender, passage) => {
                    self.metrics.waited(passage.waited);
                    (sender, Ok(Admitted { queues: self.clone(), passage: Some(passage) }))
                }
                Left::Refused(_, sender, refusal) => {
                    self.metrics.fate(if refusal.cause == Cause::Expired { Fate::Expired } else { Fate::Evicted });
                    (sender, Err(refusal))
                }
            };
            drop(sender.send(turn));
        }
        result
    }

    /// The pool may have more room than before.
    pub fn freed(self: &Arc<Self>, now: Timestamp) {
        if self.state.lock().control.is_empty() {
            return;
        }
        self.change(now, |state, gauge, left| state.control.freed(&gauge, now, &mut state.rng, left));
    }

    /// The moment that was told last.
    fn last_now(&self) -> Timestamp {
        Timestamp(self.now.load(Relaxed))
    }
}

/// Seconds of an endpoint that the prompt is expected to take, were nothing of it cached.
fn work(pool: &PoolSnapshot, prompt_tokens: u32, now: Timestamp) -> f64 {
    let work = Work { prompt_tokens, uncached_tokens: prompt_tokens, adapter_cold: false };
    let live = pool.endpoints.iter().find(|e| e.serves(Roles::DECODE)).map(|e| e.live());
    live.map_or(0.0, |live| live.speed.forecast(&live.ledger, None, work, now).1.own_prefill)
}

fn retry(error: RequestError, after: Duration) -> RequestError {
    RequestError { retry_after: Some(after), ..error }
}

/// What the client is told.
pub(super) fn refused(refusal: &Refusal) -> RequestError {
    let (reason, message) = match refusal.cause {
        Cause::BandFull => (Reason::QueueFull, "as many requests of this priority wait as may"),
        Cause::Full => (Reason::QueueFull, "as many requests wait as may"),
        Cause::Expired => (Reason::QueueTimeout, "the request has waited for as long as it may"),
        Cause::Evicted => (Reason::Evicted, "the request gave way to another while it waited"),
    };
    retry(RequestError::new(reason, message), refusal.retry_after)
}

/// A request that was let through, until its answer has ended or it is dropped.
#[derive(Debug)]
pub struct Admitted {
    queues: Arc<Queues>,
    passage: Option<Passage>,
}

impl Admitted {
    /// It is in the ledger.
    pub fn landed(&mut self) {
        if let Some(passage) = &mut self.passage {
            self.queues.state.lock().control.landed(passage);
        }
    }

    /// Its answer has begun: its prompt is computed.
    pub fn began(&self, now: Timestamp) {
        self.queues.freed(now);
    }

    /// Its answer has ended, and the ledger has let it go.
    pub fn end(mut self, usage: &Usage, now: Timestamp) {
        self.give_back(usage, now);
    }

    fn give_back(&mut self, usage: &Usage, now: Timestamp) {
        let Some(mut passage) = self.passage.take() else { return };
        let tokens = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
        {
            let mut state = self.queues.state.lock();
            let output = usage.completion_tokens.map_or(0, tokens);
            state.control.answered(&mut passage, output, now);
            state.control.ended(passage, usage.prompt_tokens.map(tokens), now);
        }
        self.queues.freed(now);
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let now = self.queues.last_now();
        self.give_back(&Usage::default(), now);
    }
}

/// A request that waits, until its turn comes or it is dropped.
#[derive(Debug)]
pub struct Parked {
    queues: Arc<Queues>,
    handle: Handle,
    priority: i32,
    until: Timestamp,
    turn: Option<oneshot::Receiver<Turn>>,
    settled: bool,
}

impl Parked {
    /// When it has waited for as long as it may.
    #[must_use]
    pub fn until(&self) -> Timestamp {
        self.until
    }

    /// What is ready when its turn has come. Given once.
    pub fn waiting(&mut self) -> Option<Waiting> {
        self.turn.take().map(Waiting)
    }

    /// Its turn has been told.
    pub fn settle(mut self) {
        self.settled = true;
    }

    /// It has waited for as long as it may; `None` when its turn is on its way.
    pub fn expire(&mut self, now: Timestamp) -> Option<RequestError> {
        let taken = self.take(now)?;
        drop(taken);
        self.queues.metrics.fate(Fate::Expired);
        let retry_after = self.queues.state.lock().control.clears(self.priority, now);
        Some(refused(&Refusal { cause: Cause::Expired, retry_after }))
    }

    /// Takes it out of the queue.
    fn take(&mut self, now: Timestamp) -> Option<oneshot::Sender<Turn>> {
        let mut state = self.queues.state.lock();
        let taken = state.control.cancel(self.handle, now);
        self.settled |= taken.is_some();
        self.queues.metrics.holds(state.control.len(), state.control.bytes());
        taken
    }
}

/// The client has left.
impl Drop for Parked {
    fn drop(&mut self) {
        let now = self.queues.last_now();
        if !self.settled && self.take(now).is_some() {
            self.queues.metrics.fate(Fate::Left);
        }
    }
}

/// Ready when the turn of a request has come.
#[derive(Debug)]
pub struct Waiting(oneshot::Receiver<Turn>);

impl Future for Waiting {
    /// `None` when nobody will tell: the request waits no longer.
    type Output = Option<Turn>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Turn>> {
        Pin::new(&mut self.0).poll(cx).map(Result::ok)
    }
}
