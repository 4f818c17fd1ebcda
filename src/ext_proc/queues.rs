//! The queues before a pool, as the exchange knows them: who may go on, who waits, and whose turn has come.
//!
//! [`FlowControl`] decides. This holds it under a lock, tells it what happens (an answer begins or ends, the pool is published anew) and wakes
//! whoever has waited. What is let through is an [`Admitted`], what waits a [`Parked`]; both give back what they hold when they are dropped.

use super::deadline::{self, Due};
use super::decide::Question;
use crate::clock::{Clock, Timestamp};
use crate::error::{Reason, RequestError};
#[cfg(test)]
use crate::flow::Load;
use crate::flow::saturation::View;
use crate::flow::{
    Arrival, Asking, Cause, FlowControl, Gauge, Handle, Left, Passage, PoolFlow, Refusal, Seat, Verdict,
};
use crate::pool::health::HealthPolicy;
use crate::pool::{PoolSnapshot, Published, Roles, SnapshotStore};
use crate::protocol::Usage;
use crate::rng::PickRng;
use crate::scheduling::RequestFacts;
use crate::scheduling::plugin::ParamError;
use crate::telemetry::deadlines::Judged;
use crate::telemetry::queues::{Fate, QueueMetrics};
use ahash::AHashMap;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::timeout;

/// 5 ms: what is thought to be done with time is looked at no more often; a server's step takes longer.
const SHORTEST_LOOK: Duration = Duration::from_millis(5);
/// 32 tokens of an answer are charged at once: a small part of what is under way on a server, and the lock is taken seldom.
const CHARGED_AT_ONCE: u32 = 32;

/// What comes of waiting.
pub type Turn = Result<Admitted, Refusal>;

/// The queues before one pool.
#[derive(Debug)]
pub struct Queues {
    flow: PoolFlow,
    store: Arc<SnapshotStore>,
    health: HealthPolicy,
    stale_after: Duration,
    metrics: QueueMetrics,
    state: Mutex<State>,
    /// The last moment that anybody told: a stream that is dropped knows none.
    now: AtomicU64,
    /// Told when somebody waits and nobody did.
    waits: Arc<Notify>,
    /// Queues before the same pool by settings of before a reload or after it.
    others: Mutex<Vec<Weak<Self>>>,
}

#[derive(Debug)]
struct State {
    control: FlowControl<oneshot::Sender<Turn>>,
    /// By which those under way hear that they are to end.
    running: AHashMap<Seat, oneshot::Sender<Refusal>>,
    rng: PickRng,
}

impl State {
    /// How one that is let through hears that it is to end, if it may be told to.
    fn seat(&mut self, passage: &Passage) -> Option<Waiting<Refusal>> {
        let seat = passage.seat()?;
        let (tell, told) = oneshot::channel();
        self.running.insert(seat, tell);
        Some(Waiting(told))
    }

    /// How long a request that comes now would wait; `None` when it would go on, or nobody knows.
    fn wait(&mut self, arrival: &Arrival<'_>, room: &Gauge, now: Timestamp) -> Option<Duration> {
        let ahead = self.control.ahead(arrival, room, now)?;
        self.control.wait(ahead, now)
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
    /// Queues as `flow` says, before the pool in `store`, of which endpoints are ejected by `health`.
    ///
    /// # Errors
    /// When the ceiling can't be built.
    pub fn new(
        flow: PoolFlow,
        store: Arc<SnapshotStore>,
        health: HealthPolicy,
        stale_after: Duration,
        metrics: QueueMetrics,
        rng: PickRng,
    ) -> Result<Arc<Self>, ParamError> {
        let control = flow.control()?;
        let state = Mutex::new(State { control, running: AHashMap::new(), rng });
        let (now, waits, others) = (AtomicU64::new(0), Arc::default(), Mutex::default());
        Ok(Arc::new(Self { flow, store, health, stale_after, metrics, state, now, waits, others }))
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
        stale_after: Duration,
    ) -> bool {
        let same_pool = Arc::ptr_eq(&self.store, store) && self.health == *health && self.stale_after == stale_after;
        let room = |flow: &PoolFlow| flow.settings.shared.as_ref().map(Arc::as_ptr);
        self.flow.said == flow.said && room(&self.flow) == room(flow) && same_pool
    }

    /// How long a request of `flow` that can't wait for long would wait for its turn, as far as that is known.
    pub(super) fn wait(&self, facts: &RequestFacts<'_>, flow: Option<&str>, now: Timestamp) -> Duration {
        let (ttl, spare) = (Some(Duration::ZERO), Some(0.0));
        let asking = Asking { facts, flow, bytes: 0, answer_tokens: None, found: None, ttl, spare };
        let snapshot = self.store.load();
        let view = self.view(&snapshot, now);
        let (arrival, room) = (asking.arrival(&view), self.flow.gauge(&view));
        self.state.lock().wait(&arrival, &room, now).unwrap_or_default()
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
        self.admits(&asking, &snapshot, q.now)?;
        let due = due.filter(|due| due.within < self.flow.settings.ttl);
        let ttl = due.map_or(self.flow.settings.ttl, |due| due.within);
        let arrival = Asking { ttl: Some(ttl), ..asking }.arrival(&self.view(&snapshot, q.now));
        if !q.may_wait {
            return self.now_or_never(&arrival, &snapshot, q.now);
        }
        let mut turn = None;
        let verdict = self.change(q.now, |state, gauge, left| {
            let wait = due.and_then(|due| Some((due, state.wait(&arrival, &gauge, q.now)?)));
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
                self.waits.notify_one();
            }
            Ok((verdict, eviction))
        });
        let verdict = verdict.map_err(|after| {
            self.metrics.fate(Fate::Shed);
            deadline::late("the queue before the pool is too long for the time that this request asks for", after)
        });
        let (verdict, eviction) = verdict?;
        match verdict {
            Verdict::Dispatch(passage) => {
                self.metrics.fate(Fate::Passed);
                Ok(Asked::Goes(Admitted::new(self.clone(), Some(passage), eviction)))
            }
            Verdict::Parked(handle) => {
                let until = q.now.after(ttl);
                let (priority, queues, is_due) = (arrival.priority, self.clone(), due.is_some());
                Ok(Asked::Waits(Parked { queues, handle, priority, until, is_due, turn, settled: false }))
            }
            Verdict::Rejected(refusal) => {
                self.metrics.fate(Fate::Full);
                Err(self.refused(&refusal))
            }
        }
    }

    /// What can't wait goes on if there is room, or if it is not sheddable.
    fn now_or_never(
        self: &Arc<Self>,
        arrival: &Arrival<'_>,
        pool: &PoolSnapshot,
        now: Timestamp,
    ) -> Result<Asked, RequestError> {
        let pending = self.state.lock().control.pending();
        if self.gauge(pool, now).saturation(pending, 0.0) < 1.0 {
            self.metrics.fate(Fate::Passed);
        } else if arrival.priority < 0 {
            self.metrics.fate(Fate::Shed);
            let error = because(pool, Reason::Shed, "the pool is full, and this request is sheddable");
            return Err(retry(error, self.state.lock().control.clears(arrival.priority, now)));
        } else {
            self.metrics.fate(Fate::Unqueued);
        }
        Ok(Asked::Goes(Admitted::uncounted(self)))
    }

    fn admits(&self, asking: &Asking<'_>, pool: &PoolSnapshot, now: Timestamp) -> Result<(), RequestError> {
        if self.flow.admitters.is_empty() {
            return Ok(());
        }
        let mut state = self.state.lock();
        if self.flow.admits(asking.facts, &self.view(pool, now), &mut state.rng) {
            return Ok(());
        }
        self.metrics.fate(Fate::Shed);
        let error = because(pool, Reason::Shed, "the pool can't serve this request in time, and it is sheddable");
        Err(retry(error, state.control.clears(asking.facts.priority, now)))
    }

    fn gauge(&self, pool: &PoolSnapshot, now: Timestamp) -> Gauge {
        self.flow.gauge(&self.view(pool, now))
    }

    fn view<'v>(&'v self, pool: &'v PoolSnapshot, now: Timestamp) -> View<'v> {
        View { pool, health: &self.health, stale_after: self.stale_after, now }
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
        let (result, turns, evicted) = {
            let mut state = self.state.lock();
            let gauge = self.gauge(&self.store.load(), now);
            let result = change(&mut state, gauge, &mut left);
            let turns: SmallVec<[_; 2]> = left.into_iter().map(|left| self.turn(&mut state, left)).collect();
            let evicted = state.control.evict_running(&gauge, now);
            let evicted = evicted.and_then(|(seat, refusal)| Some((state.running.remove(&seat)?, refusal)));
            self.metrics.holds(state.control.len(), state.control.bytes());
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
                self.metrics.waited(passage.waited);
                let eviction = state.seat(&passage);
                (sender, Ok(Admitted::new(self.clone(), Some(passage), eviction)))
            }
            Left::Refused(_, sender, refusal) => {
                self.metrics.fate(if refusal.cause == Cause::Expired { Fate::Expired } else { Fate::Evicted });
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

    /// How soon the pool is to be looked at if nothing is told: when pages are believed no longer, since the last ones say nothing any more then;
    /// before that where somebody waits and time alone is thought to make room.
    fn patience(&self, now: Timestamp) -> Duration {
        if self.state.lock().control.is_empty() {
            return self.stale_after;
        }
        let soon = self.flow.detector.changes_in(&self.view(&self.store.load(), now));
        soon.map_or(self.stale_after, |soon| soon.max(SHORTEST_LOOK).min(self.stale_after))
    }

    /// Tells the queues of every new snapshot of their pool, and when time has passed in which there was none. Ends with the queues, or the pool.
    pub async fn follow(queues: Weak<Self>, mut published: watch::Receiver<Published>, clock: Clock) {
        let Some(waits) = queues.upgrade().map(|queues| queues.waits.clone()) else { return };
        while let Some(patience) = queues.upgrade().map(|queues| queues.patience(clock.now())) {
            let told = async {
                tokio::select! {
                    changed = published.changed() => Some(changed.is_ok()),
                    () = waits.notified() => None,
                }
            };
            match timeout(patience, told).await {
                Ok(Some(false)) => return,
                Ok(Some(true)) | Err(_) => {}
                // How soon is to be thought over.
                Ok(None) => continue,
            }
            if let Some(queues) = queues.upgrade() {
                queues.freed(clock.now());
            }
        }
    }

    /// What the client is told.
    fn refused(&self, refusal: &Refusal) -> RequestError {
        let (reason, message) = named(refusal.cause);
        retry(because(&self.store.load(), reason, message), refusal.retry_after)
    }

    /// Nobody waits, and nothing is under way.
    #[cfg(test)]
    pub(super) fn assert_books_closed(&self) {
        let state = self.state.lock();
        let pending = state.control.pending();
        assert_eq!((state.control.books(), pending, state.running.len()), ((0, 0, 0, 0), Load::default(), 0));
    }

    /// The moment that was told last.
    fn last_now(&self) -> Timestamp {
        Timestamp(self.now.load(Relaxed))
    }
}

fn retry(error: RequestError, after: Duration) -> RequestError {
    RequestError { retry_after: Some(after), ..error }
}

/// What the cause of a refusal is called.
fn named(cause: Cause) -> (Reason, &'static str) {
    match cause {
        Cause::BandFull => (Reason::QueueFull, "as many requests of this priority wait as may"),
        Cause::Full => (Reason::QueueFull, "as many requests wait as may"),
        Cause::RoomTaken => {
            (Reason::QueueFull, "requests before other pools hold what may wait before all of them together")
        }
        Cause::Expired => (Reason::QueueTimeout, "the request has waited for as long as it may"),
        Cause::Evicted => (Reason::Evicted, "the request gave way to another while it waited"),
        Cause::Outranked => (Reason::Evicted, "the request is sheddable and gave way to one that is more important"),
    }
}

/// What the client is told of a request that was under way.
pub(super) fn outranked(refusal: &Refusal) -> RequestError {
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

/// A request that was let through, until its answer has ended or it is dropped.
#[derive(Debug)]
pub struct Admitted {
    queues: Arc<Queues>,
    /// `None` when nothing counts it, and when it has ended.
    passage: Option<Passage>,
    ended: bool,
    eviction: Option<Waiting<Refusal>>,
    /// Tokens of its answer that have come, and those of them that are charged.
    come: u32,
    charged: u32,
}

impl Admitted {
    fn new(queues: Arc<Queues>, passage: Option<Passage>, eviction: Option<Waiting<Refusal>>) -> Self {
        Self { queues, passage, ended: false, eviction, come: 0, charged: 0 }
    }

    /// A request that is let through without a turn, of which the ledger alone knows.
    pub(super) fn uncounted(queues: &Arc<Queues>) -> Self {
        Self::new(queues.clone(), None, None)
    }

    /// It is in the ledger, which knows better than what was thought of it on its way how much room is left.
    pub fn landed(&mut self) {
        if let Some(passage) = &mut self.passage {
            self.queues.state.lock().control.landed(passage);
            self.queues.freed(self.queues.last_now());
        }
    }

    /// What is ready when it is to end for the sake of a more important request. Given once.
    pub fn eviction(&mut self) -> Option<Waiting<Refusal>> {
        self.eviction.take()
    }

    /// Whether it may be ended for the sake of a more important request.
    #[must_use]
    pub fn gives_way(&self) -> bool {
        self.passage.as_ref().is_some_and(|passage| passage.seat().is_some())
    }

    /// Its answer goes on to the client.
    pub fn answers(&mut self, now: Timestamp) {
        let Some((passage, seat)) = self.passage.as_mut().and_then(|passage| passage.seat().map(|s| (passage, s)))
        else {
            return;
        };
        {
            let mut state = self.queues.state.lock();
            state.control.answers(passage);
            if passage.seat().is_some() {
                return;
            }
            state.running.remove(&seat);
        }
        // Somebody else is to end in its place, should it have been told to.
        self.queues.freed(now);
    }

    /// It takes less of the pool than before: its prompt is computed, or another server sees to that.
    pub fn freed(&self, now: Timestamp) {
        self.queues.freed(now);
    }

    /// So many tokens of its answer have come, or about as many. They are charged by and by: a flow with long answers under way waits for
    /// those with none.
    pub fn answered(&mut self, tokens: u32, now: Timestamp) {
        self.come = tokens;
        if let Some(passage) = self.passage.as_mut().filter(|_| tokens >= self.charged.saturating_add(CHARGED_AT_ONCE))
        {
            self.charged = tokens;
            self.queues.state.lock().control.answered(passage, tokens, now);
        }
    }

    /// Its answer has ended, as a whole or not, and the ledger has let it go.
    pub fn end(mut self, usage: &Usage, whole: bool, now: Timestamp) {
        self.give_back(usage, whole, now);
    }

    fn give_back(&mut self, usage: &Usage, whole: bool, now: Timestamp) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        if let Some(mut passage) = self.passage.take() {
            let tokens = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
            let told = usage.completion_tokens.map(tokens);
            // What is told before the end is a beginning.
            let output = if whole { told.unwrap_or(self.come) } else { told.unwrap_or(0).max(self.come) };
            if !whole || output == 0 {
                passage.cut();
            }
            let mut state = self.queues.state.lock();
            state.control.answered(&mut passage, output, now);
            if let Some(seat) = passage.seat() {
                state.running.remove(&seat);
            }
            state.control.ended(passage, usage.prompt_tokens.map(tokens), now);
        }
        // Whether it was counted or not, what it took of the pool is free.
        self.queues.freed(now);
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let now = self.queues.last_now();
        self.give_back(&Usage::default(), false, now);
    }
}

/// A request that waits, until its turn comes or it is dropped.
#[derive(Debug)]
pub struct Parked {
    queues: Arc<Queues>,
    handle: Handle,
    priority: i32,
    until: Timestamp,
    /// Until then its turn is of use; else it may wait no longer.
    is_due: bool,
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
        self.leave(now).then_some(())?;
        self.queues.metrics.fate(Fate::Expired);
        let retry_after = self.queues.state.lock().control.clears(self.priority, now);
        Some(self.refused(&Refusal { cause: Cause::Expired, retry_after }))
    }

    /// What the client is told.
    pub(super) fn refused(&self, refusal: &Refusal) -> RequestError {
        if self.is_due && refusal.cause == Cause::Expired {
            self.queues.metrics.deadlines.judged(Judged::Passed);
            return deadline::passed(refusal.retry_after);
        }
        self.queues.refused(refusal)
    }

    /// Takes it out of the queue; false when it was not there. Those who stood behind it may go where it could not.
    fn leave(&mut self, now: Timestamp) -> bool {
        let was_there = {
            let mut state = self.queues.state.lock();
            let was_there = state.control.cancel(self.handle, now).is_some();
            self.queues.metrics.holds(state.control.len(), state.control.bytes());
            was_there
        };
        self.settled |= was_there;
        if was_there {
            self.queues.freed(now);
        }
        was_there
    }
}

/// The client has left.
impl Drop for Parked {
    fn drop(&mut self) {
        let now = self.queues.last_now();
        if !self.settled && self.leave(now) {
            self.queues.metrics.fate(Fate::Left);
        }
    }
}

/// Ready when the turn of a request has come, or its end.
#[derive(Debug)]
pub struct Waiting<T = Turn>(oneshot::Receiver<T>);

impl<T> Future for Waiting<T> {
    /// `None` when nobody will tell: the request waits no longer, or is served whatever comes.
    type Output = Option<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<T>> {
        Pin::new(&mut self.0).poll(cx).map(Result::ok)
    }
}
