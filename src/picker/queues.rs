//! The queue of one pool: admits, queues, sheds and preempts requests.
//!
//! [`FlowControl`] decides. [`Queues`] holds it under a lock, and reports to it when a response begins or ends and when
//! the pool publishes a new snapshot. An admitted request holds an [`AdmittedRequest`], a queued one a
//! [`QueuedRequest`]. Both release what they hold on drop.

use super::deadline::{self, WaitBudget};
use super::decide::RequestView;
use super::head::Head;
use crate::event::{QueueEvent, QueueObserver, QueueOutcome};
use ahash::AHashMap;
#[cfg(any(test, feature = "testing"))]
use attache_flow::Load;
use attache_flow::saturation::View;
use attache_flow::saturation::recompute::Recompute;
use attache_flow::{
    Arrival, Asking, Cause, FlowControl, Gauge, Handle, Left, Need, Passage, PoolFlow, Refusal, Seat, SharedFlow,
    Verdict, Way, asking,
};
use attache_pool::health::HealthPolicy;
use attache_pool::{PoolSnapshot, Roles, SnapshotStore};
use attache_scheduling::RequestFacts;
use attache_scheduling::facts::prediction::Targets;
use attache_scheduling::plugin::ParamError;
use attache_scheduling::split::SplitPolicy;
use attache_sync::{QueueFlows, ServedFlow};
use attache_types::clock::Timestamp;
use attache_types::error::{Reason, RequestError};
use attache_types::rng::PickRng;
use futures_channel::oneshot;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::task::Waker;
use std::time::Duration;

pub use requests::{AdmittedRequest, QueueSignal, QueuedRequest};

mod requests;

/// 5 ms: shortest time between checks for capacity that time alone is predicted to free. A model server's step takes
/// longer.
const MIN_CHECK_INTERVAL: Duration = Duration::from_millis(5);
/// 128 endpoints: from this size on, a full pool is measured at most once every [`FULL_PAUSE`]. Measuring a smaller
/// pool costs about as much as a decision, so every event does it.
const MANY_ENDPOINTS: usize = 128;
/// 1 ms: how long a large pool that was full counts as full without a new measurement. To measure 1,000 endpoints takes
/// a tenth of that.
const FULL_PAUSE: Duration = Duration::from_millis(1);

/// How a queued request leaves the queue: admitted, or refused because it expired or was evicted.
pub type DequeueResult = Result<AdmittedRequest, Refusal>;

/// The queue of one pool.
#[derive(Debug)]
pub struct Queues {
    flow: PoolFlow,
    store: Arc<SnapshotStore>,
    health: HealthPolicy,
    split: Option<SplitPolicy>,
    stale_after: Duration,
    observer: Box<dyn QueueObserver>,
    state: Mutex<State>,
    /// The latest time that a caller passed. A stream that is dropped has no time of its own.
    now: AtomicU64,
    /// Queued requests, as of the last change.
    waiting: AtomicUsize,
    /// Woken when [`Queues::next_check_in`] may have become shorter, as when the first request is queued.
    timer: Waker,
    /// Whether a request that could not be queued for the gateway's body mode is still to be reported.
    may_report_unqueued: AtomicBool,
    /// Queues of the same pool, with the settings before or after a reload.
    others: Mutex<Vec<Weak<Self>>>,
}

#[derive(Debug)]
struct State {
    control: FlowControl<oneshot::Sender<DequeueResult>>,
    /// For each preemptible request in flight: delivers its preemption.
    running: AHashMap<Seat, oneshot::Sender<Refusal>>,
    rng: PickRng,
    pause: Option<FullPause>,
}

/// A large pool that was full at the last measurement, and counts as full without a new one until `until`.
#[derive(Debug)]
struct FullPause {
    until: Timestamp,
    /// An event during the pause may have freed capacity.
    missed: bool,
}

impl State {
    /// Whether the pool counts as full without a measurement. If so, the end of the pause triggers a check.
    fn is_paused(&mut self, now: Timestamp) -> bool {
        let Some(pause) = self.pause.as_mut().filter(|pause| now < pause.until) else { return false };
        pause.missed = true;
        true
    }

    /// Whether requests are queued and the pool has no capacity for any of them.
    fn is_full(&self, gauge: &Gauge) -> bool {
        !self.control.is_empty() && gauge.saturation(self.control.pending(), Need::default()) >= 1.0
    }

    /// The preemption signal of an admitted request; `None` if it is not preemptible.
    fn seat(&mut self, passage: &Passage) -> Option<QueueSignal<Refusal>> {
        let seat = passage.seat()?;
        let (sender, receiver) = oneshot::channel();
        self.running.insert(seat, sender);
        Some(QueueSignal(receiver))
    }
}

/// How admission handled a request that it did not refuse.
#[derive(Debug)]
pub enum EnqueueResult {
    /// The pool has capacity: the request is dispatched at once.
    Admitted(AdmittedRequest),
    /// The request is queued.
    Queued(QueuedRequest),
}

impl Queues {
    /// The queue that `flow` configures for the pool in `store`. `health` says which endpoints are ejected, `split` how
    /// requests are split.
    ///
    /// # Errors
    /// The plugin of `flowControl.ceiling` rejects its parameters.
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
        let state = Mutex::new(State { control, running: AHashMap::new(), rng, pause: None });
        let (now, waiting, others) = (AtomicU64::new(0), AtomicUsize::new(0), Mutex::default());
        let may_report_unqueued = AtomicBool::new(true);
        Ok(Arc::new(Self {
            flow,
            store,
            health,
            split,
            stale_after,
            observer,
            state,
            now,
            waiting,
            timer,
            may_report_unqueued,
            others,
        }))
    }

    /// Replaces `old` after a reload. Requests of `old` may still be queued or in flight, and use the same endpoints.
    /// So capacity that is freed in one of the two triggers a check in the other.
    pub fn replace(self: &Arc<Self>, old: &Arc<Self>) {
        let older = old.others.lock().clone();
        for other in older.iter().filter_map(Weak::upgrade).chain([old.clone()]) {
            self.others.lock().push(Arc::downgrade(&other));
            other.others.lock().push(Arc::downgrade(self));
        }
    }

    /// Whether [`Queues::new`] with these arguments would build the same queue.
    #[must_use]
    pub fn matches(
        &self,
        flow: &PoolFlow,
        store: &Arc<SnapshotStore>,
        health: &HealthPolicy,
        split: Option<&SplitPolicy>,
        stale_after: Duration,
    ) -> bool {
        let same_policies = self.health == *health && self.split.as_ref() == split;
        let same_pool = Arc::ptr_eq(&self.store, store) && same_policies && self.stale_after == stale_after;
        let shared = |flow: &PoolFlow| flow.settings.shared.as_ref().map(Arc::as_ptr);
        let same_users = self.flow.settings.user_header == flow.settings.user_header;
        let same_room = self.flow.settings.max_bytes == flow.settings.max_bytes;
        self.flow.said == flow.said && shared(&self.flow) == shared(flow) && same_room && same_users && same_pool
    }

    /// Predicted queueing time of a request of `flow` whose deadline leaves no spare time; zero if unknown.
    pub(super) fn wait(&self, facts: &RequestFacts<'_>, flow: Option<&str>, now: Timestamp) -> Duration {
        let (ttl, spare) = (Some(Duration::ZERO), Some(0.0));
        let (way, answer_tokens, found) = (Way::default(), None, None);
        let asking = Asking { facts, flow, bytes: 0, answer_tokens, found, way, ttl, spare, unvouched: false };
        let snapshot = self.store.load();
        let view = self.view(&snapshot, now);
        let (arrival, gauge) = (asking.arrival(&view), self.flow.gauge(&view));
        self.state.lock().control.wait(&arrival, &gauge, now).unwrap_or_default()
    }

    /// Admits or queues the request of `q`. A request with a deadline has a `due` budget: it is queued only if it is
    /// predicted to be dequeued within that budget, and expires at its end.
    ///
    /// # Errors
    /// The error response for the client: the queue is full or too long for the deadline, or the request is shed.
    pub fn ask(
        self: &Arc<Self>,
        q: &RequestView<'_>,
        asking: Asking<'_>,
        due: Option<WaitBudget>,
    ) -> Result<EnqueueResult, RequestError> {
        let snapshot = self.store.load_full();
        self.admits(asking.facts, &snapshot, q.now)?;
        let ttl = self.flow.ttl(&snapshot, asking.facts.priority);
        let due = due.filter(|due| ttl.is_none_or(|ttl| due.within < ttl));
        let ttl = due.map(|due| due.within).or(ttl);
        let mut arrival = Asking { ttl, ..asking }.arrival(&self.view(&snapshot, q.now));
        if self.flow.holds_long_prompts() {
            // A held prompt of one priority must not delay the requests of another one.
            arrival.priority = 0;
        }
        if !q.may_wait {
            return self.admit_unqueued(&arrival, &snapshot, q.now);
        }
        let mut receiver = None;
        let verdict = self.change(q.now, |state, gauge, left| {
            let wait = due.and_then(|due| Some((due, state.control.wait(&arrival, &gauge, q.now)?)));
            if let Some((due, wait)) = wait.filter(|(due, wait)| wait > &due.within) {
                return Err(wait.saturating_sub(due.within));
            }
            let keep = |_: Handle| {
                let (sender, received) = oneshot::channel();
                receiver = Some(received);
                sender
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
            deadline::late("the queue is too long for the request's deadline", after)
        });
        let (verdict, eviction) = verdict?;
        match verdict {
            Verdict::Dispatch(passage) => {
                // Elsewhere it counts once it is decided, if the pool sheds, or not at all.
                if !self.flow.holds_long_prompts() {
                    self.passed();
                }
                Ok(EnqueueResult::Admitted(AdmittedRequest::new(self.clone(), Some(passage), eviction)))
            }
            Verdict::Parked(handle) => {
                let until = ttl.map(|ttl| q.now.after(ttl));
                let (priority, queues, is_due) = (arrival.priority, self.clone(), due.is_some());
                Ok(EnqueueResult::Queued(QueuedRequest {
                    pool: None,
                    queues,
                    handle,
                    priority,
                    until,
                    is_due,
                    receiver,
                    settled: false,
                }))
            }
            Verdict::Rejected(_) if self.flow.holds_long_prompts() => {
                Ok(EnqueueResult::Admitted(AdmittedRequest::uncounted(self)))
            }
            Verdict::Rejected(refusal) => {
                self.observer.event(QueueEvent::Outcome(QueueOutcome::Full));
                Err(self.refused(&refusal))
            }
        }
    }

    /// Whether to report that the gateway's body mode leaves no time to queue requests. True once.
    pub(crate) fn report_unqueued(&self) -> bool {
        self.may_report_unqueued.load(Relaxed) && self.may_report_unqueued.swap(false, Relaxed)
    }

    /// Whether the pool queues requests.
    #[must_use]
    pub fn hold_requests(&self) -> bool {
        self.flow.queueing.is_some()
    }

    /// Whether the pool refuses sheddable requests instead of queueing them: [`Queues::shed`] applies.
    pub(super) fn sheds(&self) -> bool {
        self.flow.shedding.is_some() || !self.hold_requests()
    }

    /// Whether a request asks the queue for its turn. Where only long prompts are queued, those do not wait that are
    /// urgent, that two servers share, whose cached part is unknown (`knows_prefix`), or whose gateway leaves no time.
    /// Most pools hold nothing back most of the time, and then none asks.
    pub(super) fn asks(&self, q: &RequestView<'_>, facts: &RequestFacts<'_>, way: Way, knows_prefix: bool) -> bool {
        if !self.flow.holds_long_prompts() {
            return self.hold_requests();
        }
        let pool = self.store.load();
        if Recompute::is_idle(&pool) && self.waiting.load(Relaxed) == 0 {
            return false;
        }
        let is_urgent = facts.priority > 0 || Targets::of(facts).bounds().is_some();
        q.may_wait && knows_prefix && way == Way::Whole && !is_urgent && asking::serves(&pool)
    }

    /// The user that the pool's `user_header` names; `None` without such a header in the configuration or the request.
    #[must_use]
    pub fn user<'h>(&self, head: &'h Head) -> Option<&'h str> {
        let user = head.get(self.flow.settings.user_header?)?.trim();
        Some(user).filter(|user| !user.is_empty())
    }

    /// Whether the order of flows among requests of this priority is made for programs of agents.
    pub(super) fn orders_programs(&self, priority: i32) -> bool {
        self.flow.settings.band(priority).fairness.orders_programs()
    }

    /// The program of this name has ended: its flow begins anew.
    pub(super) fn end_program(&self, name: &str) {
        self.state.lock().control.end_program(name);
    }

    /// Admits a request without queueing it, unless it is sheddable and the pool is saturated, or an admitter refuses
    /// it.
    ///
    /// # Errors
    /// The error response for the client.
    pub fn shed(&self, facts: &RequestFacts<'_>, way: Way, now: Timestamp) -> Result<(), RequestError> {
        let snapshot = self.store.load();
        self.admits(facts, &snapshot, now)?;
        if self.flow.sheds(facts.priority, way, &self.view(&snapshot, now)) {
            return Err(self.saturated(facts.priority, &snapshot, now));
        }
        Ok(())
    }

    /// Counts a request that [`Self::shed`] admitted, once it is decided. One request may call `shed` twice.
    pub fn passed(&self) {
        self.observer.event(QueueEvent::Outcome(QueueOutcome::Passed));
    }

    fn saturated(&self, priority: i32, pool: &PoolSnapshot, now: Timestamp) -> RequestError {
        self.observer.event(QueueEvent::Outcome(QueueOutcome::Shed));
        let error = with_readiness(pool, Reason::Shed, "the pool is saturated, and this request is sheddable");
        retry(error, self.state.lock().control.clears(priority, now))
    }

    /// Admits a request that can't be queued. A sheddable one is shed if the pool has no capacity for it.
    fn admit_unqueued(
        self: &Arc<Self>,
        arrival: &Arrival<'_>,
        pool: &PoolSnapshot,
        now: Timestamp,
    ) -> Result<EnqueueResult, RequestError> {
        let pending = self.state.lock().control.pending();
        let short = Need { work: 0.0, ..arrival.need };
        if self.gauge(pool, now).saturation(pending, short) < 1.0 {
            self.observer.event(QueueEvent::Outcome(QueueOutcome::Passed));
        } else if arrival.priority < 0 {
            return Err(self.saturated(arrival.priority, pool, now));
        } else {
            self.observer.event(QueueEvent::Outcome(QueueOutcome::Unqueued));
        }
        Ok(EnqueueResult::Admitted(AdmittedRequest::uncounted(self)))
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
        let error =
            with_readiness(pool, Reason::Shed, "the pool can't serve this request in time, and it is sheddable");
        Err(retry(error, state.control.clears(facts.priority, now)))
    }

    fn gauge(&self, pool: &PoolSnapshot, now: Timestamp) -> Gauge {
        self.flow.gauge(&self.view(pool, now))
    }

    fn view<'v>(&'v self, pool: &'v PoolSnapshot, now: Timestamp) -> View<'v> {
        View { pool, health: &self.health, split: self.split.as_ref(), stale_after: self.stale_after, now }
    }

    /// Applies `change` and notifies the requests that leave the queue because of it.
    ///
    /// The pool is measured under the lock, so that each admitted request is either in the ledger or counted as
    /// pending. During a [`FullPause`] the pool is not measured and counts as full.
    fn change<R>(
        self: &Arc<Self>,
        now: Timestamp,
        change: impl FnOnce(&mut State, Gauge, &mut Vec<Left<oneshot::Sender<DequeueResult>>>) -> R,
    ) -> R {
        self.now.fetch_max(now.0, Relaxed);
        let mut left = Vec::new();
        let (result, outcomes, evicted) = {
            let mut state = self.state.lock();
            let was_missed = state.pause.as_ref().is_some_and(|pause| pause.missed);
            let is_paused = state.is_paused(now);
            let snapshot = self.store.load();
            let gauge = if is_paused { Gauge::FULL } else { self.gauge(&snapshot, now) };
            state.control.pool_serves(asking::serves(&snapshot), now);
            let result = change(&mut state, gauge, &mut left);
            let outcomes: SmallVec<[_; 2]> = left.into_iter().map(|left| self.outcome_of(&mut state, left)).collect();
            // No request is preempted unless a measurement shows that the pool is full.
            let evicted = if is_paused { None } else { state.control.evict_running(&gauge, now) };
            let evicted = evicted.and_then(|(seat, refusal)| Some((state.running.remove(&seat)?, refusal)));
            if !is_paused {
                let pauses = snapshot.endpoints.len() >= MANY_ENDPOINTS && state.is_full(&gauge);
                state.pause = pauses.then(|| FullPause { until: now.after(FULL_PAUSE), missed: false });
            } else if !was_missed {
                self.timer.wake_by_ref();
            }
            self.report_depth(&state);
            (result, outcomes, evicted)
        };
        // Without the lock: if the receiver is gone, dropping the `AdmittedRequest` takes the lock.
        for (sender, turn) in outcomes {
            drop(sender.send(turn));
        }
        if let Some((sender, refusal)) = evicted {
            let _ = sender.send(refusal);
        }
        result
    }

    /// Counts a request that left the queue, and returns what its sender delivers.
    fn outcome_of(
        self: &Arc<Self>,
        state: &mut State,
        left: Left<oneshot::Sender<DequeueResult>>,
    ) -> (oneshot::Sender<DequeueResult>, DequeueResult) {
        match left {
            Left::Dispatched(_, sender, passage) => {
                self.observer.event(QueueEvent::Waited(passage.waited));
                let eviction = state.seat(&passage);
                (sender, Ok(AdmittedRequest::new(self.clone(), Some(passage), eviction)))
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

    /// Dequeues what the pool now has capacity for. Called when capacity may have been freed, and after
    /// [`Queues::next_check_in`].
    pub fn freed(self: &Arc<Self>, now: Timestamp) {
        self.check_capacity(now);
        let others = {
            let mut others = self.others.lock();
            others.retain(|other| other.strong_count() > 0);
            others.clone()
        };
        // Other queues do not see this queue's pending requests. They are checked once those are in the ledger.
        if !others.is_empty() && self.state.lock().control.pending().requests == 0 {
            others.iter().filter_map(Weak::upgrade).for_each(|other| other.check_capacity(now));
        }
    }

    fn check_capacity(self: &Arc<Self>, now: Timestamp) {
        {
            let control = &mut self.state.lock().control;
            if control.is_empty() {
                // The queue is empty, so `expire` only forgets idle flows.
                if control.next_deadline().is_some_and(|due| due <= now) {
                    control.expire(now, &mut Vec::new());
                }
                return;
            }
        }
        self.change(now, |state, gauge, left| state.control.freed(&gauge, now, &mut state.rng, left));
    }

    /// Time until [`Queues::freed`] must be called even if no event occurs.
    ///
    /// At the latest after `stale_after`, when the last scraped metrics become stale. Earlier, if requests are queued:
    /// when a [`FullPause`] with a missed event ends, when a request expires, or when time alone may free capacity.
    #[must_use]
    pub fn next_check_in(&self, now: Timestamp) -> Duration {
        let expires = {
            let state = self.state.lock();
            if state.control.is_empty() {
                return self.stale_after;
            }
            if let Some(pause) = state.pause.as_ref().filter(|pause| pause.missed) {
                return pause.until.since(now);
            }
            if state.control.takes_turns() {
                return MIN_CHECK_INTERVAL;
            }
            state.control.next_deadline().map(|at| at.since(now))
        };
        let snapshot = self.store.load();
        let view = self.view(&snapshot, now);
        let soon = self.flow.queueing.as_ref().and_then(|queueing| queueing.changes_in(&view));
        let soonest = soon.into_iter().chain(expires).min().map(|soon| soon.max(MIN_CHECK_INTERVAL));
        soonest.map_or(self.stale_after, |soon| soon.min(self.stale_after))
    }

    /// The error response for a refused request.
    fn refused(&self, refusal: &Refusal) -> RequestError {
        let (reason, message) = reason_of(refusal.cause);
        retry(with_readiness(&self.store.load(), reason, message), refusal.retry_after)
    }

    /// Priority and queue depth of each band, the highest priority first.
    #[must_use]
    pub fn band_depths(&self) -> Vec<(i32, u64)> {
        self.state.lock().control.bands().map(|(priority, requests, _)| (priority, requests)).collect()
    }

    /// Asserts that no request is queued, pending or in flight.
    #[cfg(any(test, feature = "testing"))]
    pub fn assert_books_closed(&self) {
        let state = self.state.lock();
        let pending = state.control.pending();
        assert_eq!((state.control.books(), pending, state.running.len()), ((0, 0, 0, 0), Load::default(), 0));
    }

    fn report_depth(&self, state: &State) {
        let requests = state.control.len();
        self.waiting.store(requests, Relaxed);
        self.observer.event(QueueEvent::Holds { requests, bytes: state.control.bytes() });
    }

    /// The latest time that a caller passed.
    fn last_now(&self) -> Timestamp {
        Timestamp(self.now.load(Relaxed))
    }
}

fn retry(error: RequestError, after: Duration) -> RequestError {
    RequestError { retry_after: Some(after), ..error }
}

/// Error code and message for the cause of a refusal.
fn reason_of(cause: Cause) -> (Reason, &'static str) {
    match cause {
        Cause::BandFull => (Reason::QueueFull, "the queue of this priority is full"),
        Cause::Full => (Reason::QueueFull, "the queue of the pool is full"),
        Cause::SharedFull => (Reason::QueueFull, "the queue capacity that all pools share is used up"),
        Cause::Expired => (Reason::QueueTimeout, "the request waited in the queue until its time limit"),
        Cause::Evicted => (Reason::Evicted, "the request was evicted from the queue for another one"),
        Cause::Preempted => (Reason::Evicted, "the request is sheddable and was preempted by a more important one"),
    }
}

/// The error response for a request that was preempted in flight.
#[must_use]
pub fn preemption_error(refusal: &Refusal) -> RequestError {
    let (reason, message) = reason_of(refusal.cause);
    retry(RequestError::new(reason, message), refusal.retry_after)
}

/// An error with this reason and message. If no endpoint of the pool is ready, that is the reason instead.
fn with_readiness(pool: &PoolSnapshot, reason: Reason, message: &'static str) -> RequestError {
    if pool.endpoints.iter().any(|e| e.serves(Roles::DECODE)) {
        return RequestError::new(reason, message);
    }
    RequestError::new(Reason::NoReadyEndpoint, format!("no endpoint of the pool is ready, and {message}"))
}

impl QueueFlows for Queues {
    fn freed(self: Arc<Self>, now: Timestamp) {
        Queues::freed(&self, now);
    }

    fn served(&self, served: ServedFlow) {
        let ServedFlow { priority, flow: hash, prompt_tokens, completion_tokens } = served;
        self.state.lock().control.served(SharedFlow { priority, hash }, prompt_tokens, completion_tokens);
    }
}
