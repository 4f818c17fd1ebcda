//! The queues before a pool, as a request knows them: who may go on, who waits, and whose turn has come.
//!
//! [`FlowControl`] decides. This holds it under a lock, tells it what happens (an answer begins or ends, the pool is published anew) and wakes
//! whoever has waited. What is let through is an [`Admitted`], what waits a [`Parked`]; both give back what they hold when they are dropped.

use super::deadline::{self, Due};
use super::decide::Question;
use super::head::Head;
use crate::event::{QueueEvent, QueueObserver, QueueOutcome};
use ahash::AHashMap;
#[cfg(any(test, feature = "testing"))]
use attache_flow::Load;
use attache_flow::saturation::View;
use attache_flow::{
    Arrival, Asking, Cause, FlowControl, Gauge, Handle, Left, Need, Passage, PoolFlow, Refusal, Seat, Verdict, Way,
    asking,
};
use attache_pool::health::HealthPolicy;
use attache_pool::{PoolSnapshot, Roles, SnapshotStore};
use attache_scheduling::RequestFacts;
use attache_scheduling::plugin::ParamError;
use attache_scheduling::split::SplitPolicy;
use attache_types::clock::Timestamp;
use attache_types::error::{Reason, RequestError};
use attache_types::rng::PickRng;
use futures_channel::oneshot;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::task::Waker;
use std::time::Duration;

pub use turn::{Admitted, Parked, Waiting};

mod turn;

/// 5 ms: what is thought to be done with time is looked at no more often; a server's step takes longer.
const SHORTEST_LOOK: Duration = Duration::from_millis(5);
/// 128 endpoints: to look at fewer takes as long as a decision does, and is done whenever something happens.
const MANY_ENDPOINTS: usize = 128;
/// 1 ms: a pool of many endpoints is looked at no more often for those who wait. To look at 1,000 takes a tenth of that.
const REST: Duration = Duration::from_millis(1);

/// What comes of waiting.
pub type Turn = Result<Admitted, Refusal>;

/// The queues before one pool.
#[derive(Debug)]
pub struct Queues {
    flow: PoolFlow,
    store: Arc<SnapshotStore>,
    health: HealthPolicy,
    split: Option<SplitPolicy>,
    stale_after: Duration,
    observer: Box<dyn QueueObserver>,
    state: Mutex<State>,
    /// The last moment that anybody told: a stream that is dropped knows none.
    now: AtomicU64,
    /// Woken when [`Queues::patience`] has become shorter: somebody waits, and nobody did.
    timer: Waker,
    /// Queues before the same pool by settings of before a reload or after it.
    others: Mutex<Vec<Weak<Self>>>,
}

#[derive(Debug)]
struct State {
    control: FlowControl<oneshot::Sender<Turn>>,
    /// By which those under way hear that they are to end.
    running: AHashMap<Seat, oneshot::Sender<Refusal>>,
    rng: PickRng,
    rest: Option<Rest>,
}

/// A pool of many endpoints that was full when it was looked at last, and counts as full without a look.
#[derive(Debug)]
struct Rest {
    until: Timestamp,
    /// Something has happened since that may have made room.
    missed: bool,
}

impl State {
    /// Whether the pool rests; then it is looked at when it no longer does.
    fn rests(&mut self, now: Timestamp) -> bool {
        let Some(rest) = self.rest.as_mut().filter(|rest| now < rest.until) else { return false };
        rest.missed = true;
        true
    }

    /// Whether there is room for nobody, and somebody waits for it.
    fn is_full(&self, room: &Gauge) -> bool {
        !self.control.is_empty() && room.saturation(self.control.pending(), Need::default()) >= 1.0
    }

    /// How one that is let through hears that it is to end, if it may be told to.
    fn seat(&mut self, passage: &Passage) -> Option<Waiting<Refusal>> {
        let seat = passage.seat()?;
        let (tell, told) = oneshot::channel();
        self.running.insert(seat, tell);
        Some(Waiting(told))
    }
}

/// What comes of asking for a turn.
#[derive(Debug)]
pub enum Asked {
    /// It goes on.
    Goes(Admitted),
    /// It waits.
    Waits(Parked),
}

impl Queues {
    /// Queues as `flow` says, before the pool in `store`, of which endpoints are ejected by `health` and requests are split by `split`.
    ///
    /// # Errors
    /// When the ceiling can't be built.
    #[expect(clippy::too_many_arguments, reason = "each is a part that the queues hold")]
    pub fn new(
        flow: PoolFlow,
        store: Arc<SnapshotStore>,
        health: HealthPolicy,
        split: Option<SplitPolicy>,
        stale_after: Duration,
        observer: Box<dyn QueueObserver>,
        rng: PickRng,
        timer: Waker,
    ) -> Result<Arc<Self>, ParamError> {
        let control = flow.control()?;
        let state = Mutex::new(State { control, running: AHashMap::new(), rng, rest: None });
        let (now, others) = (AtomicU64::new(0), Mutex::default());
        Ok(Arc::new(Self { flow, store, health, split, stale_after, observer, state, now, timer, others }))
    }

    /// These take the place of `old`, before which requests may wait or be under way still: what makes room there makes room here, and the
    /// other way round.
    pub fn replace(self: &Arc<Self>, old: &Arc<Self>) {
        let older = old.others.lock().clone();
        for other in older.iter().filter_map(Weak::upgrade).chain([old.clone()]) {
            self.others.lock().push(Arc::downgrade(&other));
            other.others.lock().push(Arc::downgrade(self));
        }
    }

    /// Whether these are the queues that `flow` asks for, before the pool in `store`.
    #[must_use]
    pub fn are(
        &self,
        flow: &PoolFlow,
        store: &Arc<SnapshotStore>,
        health: &HealthPolicy,
        split: Option<&SplitPolicy>,
        stale_after: Duration,
    ) -> bool {
        let same_policies = self.health == *health && self.split.as_ref() == split;
        let same_pool = Arc::ptr_eq(&self.store, store) && same_policies && self.stale_after == stale_after;
        let room = |flow: &PoolFlow| flow.settings.shared.as_ref().map(Arc::as_ptr);
        let same_users = self.flow.settings.user_header == flow.settings.user_header;
        self.flow.said == flow.said && room(&self.flow) == room(flow) && same_users && same_pool
    }

    /// How long a request of `flow` that can't wait for long would wait for its turn, as far as that is known.
    pub(super) fn wait(&self, facts: &RequestFacts<'_>, flow: Option<&str>, now: Timestamp) -> Duration {
        let (ttl, spare) = (Some(Duration::ZERO), Some(0.0));
        let (way, answer_tokens, found) = (Way::default(), None, None);
        let asking = Asking { facts, flow, bytes: 0, answer_tokens, found, way, ttl, spare, unvouched: false };
        let snapshot = self.store.load();
        let view = self.view(&snapshot, now);
        let (arrival, room) = (asking.arrival(&view), self.flow.gauge(&view));
        self.state.lock().control.wait(&arrival, &room, now).unwrap_or_default()
    }

    /// Asks for a turn for the request that `q` is about, which may be `due`: then it waits only if its turn is predicted to come in time.
    /// `spare` is what it may wait, in seconds, by whoever knows its objective.
    ///
    /// # Errors
    /// The refusal that the client gets.
    pub fn ask(
        self: &Arc<Self>,
        q: &Question<'_>,
        asking: Asking<'_>,
        due: Option<Due>,
    ) -> Result<Asked, RequestError> {
        let snapshot = self.store.load_full();
        self.admits(asking.facts, &snapshot, q.now)?;
        let ttl = self.flow.ttl(&snapshot, asking.facts.priority);
        let due = due.filter(|due| ttl.is_none_or(|ttl| due.within < ttl));
        let ttl = due.map(|due| due.within).or(ttl);
        let arrival = Asking { ttl, ..asking }.arrival(&self.view(&snapshot, q.now));
        if !q.may_wait {
            return self.now_or_never(&arrival, &snapshot, q.now);
        }
        let mut turn = None;
        let verdict = self.change(q.now, |state, gauge, left| {
            let wait = due.and_then(|due| Some((due, state.control.wait(&arrival, &gauge, q.now)?)));
            if let Some((due, wait)) = wait.filter(|(due, wait)| wait > &due.within) {
                return Err(wait.saturating_sub(due.within));
            }
            let keep = |_: Handle| {
                let (tell, told) = oneshot::channel();
                turn = Some(told);
                tell
            };
            let verdict = state.control.enqueue(&arrival, keep, &gauge, q.now, &mut state.rng, left);
            let eviction = if let Verdict::Dispatch(passage) = &verdict { state.seat(passage) } else { None };
            if state.control.len() == 1 {
                self.timer.wake_by_ref();
            }
            Ok((verdict, eviction))
        });
        let verdict = verdict.map_err(|after| {
            self.observer.event(QueueEvent::Outcome(QueueOutcome::Shed));
            deadline::late("the queue before the pool is too long for the time that this request asks for", after)
        });
        let (verdict, eviction) = verdict?;
        match verdict {
            Verdict::Dispatch(passage) => {
                self.observer.event(QueueEvent::Outcome(QueueOutcome::Passed));
                Ok(Asked::Goes(Admitted::new(self.clone(), Some(passage), eviction)))
            }
            Verdict::Parked(handle) => {
                let until = ttl.map(|ttl| q.now.after(ttl));
                let (priority, queues, is_due) = (arrival.priority, self.clone(), due.is_some());
                Ok(Asked::Waits(Parked { queues, handle, priority, until, is_due, turn, settled: false }))
            }
            Verdict::Rejected(refusal) => {
                self.observer.event(QueueEvent::Outcome(QueueOutcome::Full));
                Err(self.refused(&refusal))
            }
        }
    }

    /// Whether requests wait; else [`Queues::shed`] alone is asked.
    #[must_use]
    pub fn hold_requests(&self) -> bool {
        self.flow.settings.queue
    }

    /// Whose request it is, by the header of the pool's own configuration.
    #[must_use]
    pub fn user<'h>(&self, head: &'h Head) -> Option<&'h str> {
        let user = head.get(self.flow.settings.user_header?)?.trim();
        Some(user).filter(|user| !user.is_empty())
    }

    /// Lets a request pass that never waits, unless it is sheddable and the pool is saturated, or an admitter refuses it.
    ///
    /// # Errors
    /// The refusal that the client gets.
    pub fn shed(&self, facts: &RequestFacts<'_>, way: Way, now: Timestamp) -> Result<(), RequestError> {
        let snapshot = self.store.load();
        self.admits(facts, &snapshot, now)?;
        if self.flow.sheds(facts.priority, way, &self.view(&snapshot, now)) {
            return Err(self.saturated(facts.priority, &snapshot, now));
        }
        Ok(())
    }

    /// Counts a request that [`Self::shed`] has let pass and that is decided: it may have been asked about twice.
    pub fn passed(&self) {
        self.observer.event(QueueEvent::Outcome(QueueOutcome::Passed));
    }

    fn saturated(&self, priority: i32, pool: &PoolSnapshot, now: Timestamp) -> RequestError {
        self.observer.event(QueueEvent::Outcome(QueueOutcome::Shed));
        let error = because(pool, Reason::Shed, "the pool is saturated, and this request is sheddable");
        retry(error, self.state.lock().control.clears(priority, now))
    }

    /// What can't wait goes on if there is room, or if it is not sheddable.
    fn now_or_never(
        self: &Arc<Self>,
        arrival: &Arrival<'_>,
        pool: &PoolSnapshot,
        now: Timestamp,
    ) -> Result<Asked, RequestError> {
        let pending = self.state.lock().control.pending();
        let short = Need { work: 0.0, ..arrival.need };
        if self.gauge(pool, now).saturation(pending, short) < 1.0 {
            self.observer.event(QueueEvent::Outcome(QueueOutcome::Passed));
        } else if arrival.priority < 0 {
            return Err(self.saturated(arrival.priority, pool, now));
        } else {
            self.observer.event(QueueEvent::Outcome(QueueOutcome::Unqueued));
        }
        Ok(Asked::Goes(Admitted::uncounted(self)))
    }

    fn admits(&self, facts: &RequestFacts<'_>, pool: &PoolSnapshot, now: Timestamp) -> Result<(), RequestError> {
        if self.flow.admitters.is_empty() {
            return Ok(());
        }
        let mut state = self.state.lock();
        if self.flow.admits(facts, &self.view(pool, now), &mut state.rng) {
            return Ok(());
        }
        self.observer.event(QueueEvent::Outcome(QueueOutcome::Shed));
        let error = because(pool, Reason::Shed, "the pool can't serve this request in time, and it is sheddable");
        Err(retry(error, state.control.clears(facts.priority, now)))
    }

    fn gauge(&self, pool: &PoolSnapshot, now: Timestamp) -> Gauge {
        self.flow.gauge(&self.view(pool, now))
    }

    fn view<'v>(&'v self, pool: &'v PoolSnapshot, now: Timestamp) -> View<'v> {
        View { pool, health: &self.health, split: self.split.as_ref(), stale_after: self.stale_after, now }
    }

    /// Changes the queues and wakes whoever has left them by that. The pool is looked at under the lock: what was let through is then either
    /// counted as on its way or in the ledger. While it rests it is not looked at, and full.
    fn change<R>(
        self: &Arc<Self>,
        now: Timestamp,
        change: impl FnOnce(&mut State, Gauge, &mut Vec<Left<oneshot::Sender<Turn>>>) -> R,
    ) -> R {
        self.now.fetch_max(now.0, Relaxed);
        let mut left = Vec::new();
        let (result, turns, evicted) = {
            let mut state = self.state.lock();
            let is_told = state.rest.as_ref().is_some_and(|rest| rest.missed);
            let rests = state.rests(now);
            let snapshot = self.store.load();
            let gauge = if rests { Gauge::FULL } else { self.gauge(&snapshot, now) };
            state.control.pool_serves(asking::serves(&snapshot), now);
            let result = change(&mut state, gauge, &mut left);
            let turns: SmallVec<[_; 2]> = left.into_iter().map(|left| self.turn(&mut state, left)).collect();
            // Nobody is to end before it has been seen that there is no room.
            let evicted = if rests { None } else { state.control.evict_running(&gauge, now) };
            let evicted = evicted.and_then(|(seat, refusal)| Some((state.running.remove(&seat)?, refusal)));
            if !rests {
                let rests = snapshot.endpoints.len() >= MANY_ENDPOINTS && state.is_full(&gauge);
                state.rest = rests.then(|| Rest { until: now.after(REST), missed: false });
            } else if !is_told {
                self.timer.wake_by_ref();
            }
            self.observer.event(holds(&state));
            (result, turns, evicted)
        };
        // Not under the lock: what nobody takes is given back, which takes it.
        for (sender, turn) in turns {
            drop(sender.send(turn));
        }
        if let Some((sender, refusal)) = evicted {
            let _ = sender.send(refusal);
        }
        result
    }

    /// What is told to one that waits no longer.
    fn turn(self: &Arc<Self>, state: &mut State, left: Left<oneshot::Sender<Turn>>) -> (oneshot::Sender<Turn>, Turn) {
        match left {
            Left::Dispatched(_, sender, passage) => {
                self.observer.event(QueueEvent::Waited(passage.waited));
                let eviction = state.seat(&passage);
                (sender, Ok(Admitted::new(self.clone(), Some(passage), eviction)))
            }
            Left::Refused(_, sender, refusal) => {
                self.observer.event(QueueEvent::Outcome(if refusal.cause == Cause::Expired {
                    QueueOutcome::Expired
                } else {
                    QueueOutcome::Evicted
                }));
                (sender, Err(refusal))
            }
        }
    }

    /// The pool may have more room than before, or time has passed.
    pub fn freed(self: &Arc<Self>, now: Timestamp) {
        self.look(now);
        let others = {
            let mut others = self.others.lock();
            others.retain(|other| other.strong_count() > 0);
            others.clone()
        };
        // What is on its way is in no books that others see; they are told when it is.
        if !others.is_empty() && self.state.lock().control.pending().requests == 0 {
            others.iter().filter_map(Weak::upgrade).for_each(|other| other.look(now));
        }
    }

    fn look(self: &Arc<Self>, now: Timestamp) {
        {
            let control = &mut self.state.lock().control;
            if control.is_empty() {
                // Nobody waits, so nobody leaves by that: flows are forgotten that have been quiet for long.
                if control.next_deadline().is_some_and(|due| due <= now) {
                    control.expire(now, &mut Vec::new());
                }
                return;
            }
        }
        self.change(now, |state, gauge, left| state.control.freed(&gauge, now, &mut state.rng, left));
    }

    /// How soon the pool is to be looked at if nothing is told: when it has rested and something was told meanwhile; when pages are believed no
    /// longer, since the last ones say nothing any more then; before that where somebody waits and time alone is thought to make room.
    #[must_use]
    pub fn patience(&self, now: Timestamp) -> Duration {
        let expires = {
            let state = self.state.lock();
            if state.control.is_empty() {
                return self.stale_after;
            }
            if let Some(rest) = state.rest.as_ref().filter(|rest| rest.missed) {
                return rest.until.since(now);
            }
            if state.control.takes_turns() {
                return SHORTEST_LOOK;
            }
            state.control.next_deadline().map(|at| at.since(now))
        };
        let soon = self.flow.detector.changes_in(&self.view(&self.store.load(), now));
        let soonest = soon.into_iter().chain(expires).min().map(|soon| soon.max(SHORTEST_LOOK));
        soonest.map_or(self.stale_after, |soon| soon.min(self.stale_after))
    }

    /// What the client is told.
    fn refused(&self, refusal: &Refusal) -> RequestError {
        let (reason, message) = named(refusal.cause);
        retry(because(&self.store.load(), reason, message), refusal.retry_after)
    }

    /// Nobody waits, and nothing is under way.
    #[cfg(any(test, feature = "testing"))]
    pub fn assert_books_closed(&self) {
        let state = self.state.lock();
        let pending = state.control.pending();
        assert_eq!((state.control.books(), pending, state.running.len()), ((0, 0, 0, 0), Load::default(), 0));
    }

    /// The moment that was told last.
    fn last_now(&self) -> Timestamp {
        Timestamp(self.now.load(Relaxed))
    }
}

/// What the queues hold.
fn holds(state: &State) -> QueueEvent {
    QueueEvent::Holds { requests: state.control.len(), bytes: state.control.bytes() }
}

fn retry(error: RequestError, after: Duration) -> RequestError {
    RequestError { retry_after: Some(after), ..error }
}

/// What the cause of a refusal is called.
fn named(cause: Cause) -> (Reason, &'static str) {
    match cause {
        Cause::BandFull => (Reason::QueueFull, "the queue of this priority is full"),
        Cause::Full => (Reason::QueueFull, "the queue of the pool is full"),
        Cause::SharedFull => (Reason::QueueFull, "the queue capacity that all pools share is used up"),
        Cause::Expired => (Reason::QueueTimeout, "the request waited in the queue until its time limit"),
        Cause::Evicted => (Reason::Evicted, "the request was evicted from the queue for another one"),
        Cause::Preempted => (Reason::Evicted, "the request is sheddable and was preempted by a more important one"),
    }
}

/// What the client is told of a request that was under way.
#[must_use]
pub fn outranked(refusal: &Refusal) -> RequestError {
    let (reason, message) = named(refusal.cause);
    retry(RequestError::new(reason, message), refusal.retry_after)
}

/// Why a request is refused: first of all that there is nobody who could serve it.
fn because(pool: &PoolSnapshot, reason: Reason, message: &'static str) -> RequestError {
    if pool.endpoints.iter().any(|e| e.serves(Roles::DECODE)) {
        return RequestError::new(reason, message);
    }
    RequestError::new(Reason::NoReadyEndpoint, format!("no endpoint of the pool is ready, and {message}"))
}
