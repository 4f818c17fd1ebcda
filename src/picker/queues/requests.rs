//! What a request holds of a queue: a [`QueuedRequest`] while it is queued, an [`AdmittedRequest`] once it is
//! dispatched.

use super::{DequeueResult, Queues};
use crate::deadline;
use crate::event::{DeadlineOutcome, QueueEvent, QueueOutcome};
use attache_flow::{Cause, Handle, Passage, Refusal, SharedFlow};
use attache_protocol::Usage;
use attache_sync::ServedFlow;
use attache_types::clock::Timestamp;
use attache_types::error::RequestError;
use futures_channel::oneshot;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

/// 32 tokens of a response are charged to its flow at once. That is few compared with a server's in-flight tokens, and
/// keeps the lock rarely taken.
const CHARGED_AT_ONCE: u32 = 32;

/// A dispatched request, until its response ends. Dropping it counts as an incomplete response.
#[derive(Debug)]
pub struct AdmittedRequest {
    queues: Arc<Queues>,
    /// `None` after the end, and for a request that flow control does not count.
    passage: Option<Passage>,
    ended: bool,
    eviction: Option<QueueSignal<Refusal>>,
    /// Tokens of its response that have arrived.
    output: u32,
    /// Tokens of its response that were charged to its flow.
    charged: u32,
}

impl AdmittedRequest {
    pub(super) fn new(queues: Arc<Queues>, passage: Option<Passage>, eviction: Option<QueueSignal<Refusal>>) -> Self {
        Self { queues, passage, ended: false, eviction, output: 0, charged: 0 }
    }

    /// A request that only the ledger counts: it was dispatched without flow control, but its end frees capacity.
    pub(crate) fn uncounted(queues: &Arc<Queues>) -> Self {
        Self::new(queues.clone(), None, None)
    }

    /// The request is booked in the ledger, which replaces flow control's estimate of its load.
    pub fn landed(&mut self) {
        if let Some(passage) = &mut self.passage {
            self.queues.state.lock().control.landed(passage);
            self.queues.freed(self.queues.last_now());
        }
    }

    /// Becomes ready when a more important request preempts this one. Returned once; `None` if it is not preemptible.
    pub fn eviction(&mut self) -> Option<QueueSignal<Refusal>> {
        self.eviction.take()
    }

    /// Whether a more important request may preempt this one.
    #[must_use]
    pub fn is_preemptible(&self) -> bool {
        self.passage.as_ref().is_some_and(|passage| passage.seat().is_some())
    }

    /// The response begins to reach the client, which may end the request's preemptibility.
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
        // If this request was being preempted, the queue must choose another one.
        self.queues.freed(now);
    }

    /// The request needs less capacity from now on: its prefill has ended, or moved to another server.
    pub fn freed(&self, now: Timestamp) {
        self.queues.freed(now);
    }

    /// Records that about `tokens` tokens of the response have arrived in total. They are charged to the request's flow
    /// while it runs, so a flow with long responses in flight yields to flows with none.
    pub fn answered(&mut self, tokens: u32, now: Timestamp) {
        self.output = tokens;
        if let Some(passage) = self.passage.as_mut().filter(|_| tokens >= self.charged.saturating_add(CHARGED_AT_ONCE))
        {
            self.charged = tokens;
            self.queues.state.lock().control.answered(passage, tokens, now);
        }
    }

    /// The response has ended and the ledger has released the request. `whole`: the response was complete. Returns what
    /// the request's flow was served, for other pickers.
    pub fn end(mut self, usage: &Usage, whole: bool, now: Timestamp) -> Option<ServedFlow> {
        self.give_back(usage, whole, now)
    }

    fn give_back(&mut self, usage: &Usage, whole: bool, now: Timestamp) -> Option<ServedFlow> {
        if std::mem::replace(&mut self.ended, true) {
            return None;
        }
        let mut served = None;
        if let Some(mut passage) = self.passage.take() {
            let tokens = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
            let reported = usage.completion_tokens.map(tokens);
            // A count that the server reports before the end is a lower bound.
            let output = if whole { reported.unwrap_or(self.output) } else { reported.unwrap_or(0).max(self.output) };
            if !whole || output == 0 {
                passage.cut();
            }
            let mut state = self.queues.state.lock();
            state.control.answered(&mut passage, output, now);
            if let Some(seat) = passage.seat() {
                state.running.remove(&seat);
            }
            let input = usage.prompt_tokens.map(tokens);
            served = state.control.shared_flow(&passage).map(|SharedFlow { priority, hash }| ServedFlow {
                priority,
                flow: hash,
                prompt_tokens: input.unwrap_or(passage.prompt_tokens()),
                completion_tokens: output,
            });
            state.control.ended(passage, input, now);
        }
        // Requests that flow control does not count free capacity as well.
        self.queues.freed(now);
        served
    }
}

impl Drop for AdmittedRequest {
    fn drop(&mut self) {
        let now = self.queues.last_now();
        let _ = self.give_back(&Usage::default(), false, now);
    }
}

/// A queued request, until it leaves the queue. Dropping it means that its client disconnected.
#[derive(Debug)]
pub struct QueuedRequest {
    pub(super) queues: Arc<Queues>,
    /// The name of the pool, for rejections.
    pub(super) pool: Option<Arc<str>>,
    pub(super) handle: Handle,
    pub(super) priority: i32,
    pub(super) until: Option<Timestamp>,
    /// `until` follows from the request's deadline, not from the queue's time limit.
    pub(super) is_due: bool,
    pub(super) receiver: Option<oneshot::Receiver<DequeueResult>>,
    pub(super) settled: bool,
}

impl QueuedRequest {
    /// The same request, whose rejections name this pool.
    #[must_use]
    pub fn of_pool(mut self, pool: &Arc<str>) -> Self {
        self.pool = Some(pool.clone());
        self
    }

    /// When it expires; `None` if it expires only in a pool without endpoints.
    #[must_use]
    pub fn until(&self) -> Option<Timestamp> {
        self.until
    }

    /// Becomes ready when the request leaves the queue. Returned once.
    pub fn waiting(&mut self) -> Option<QueueSignal> {
        self.receiver.take().map(QueueSignal)
    }

    /// The request has left the queue and its [`DequeueResult`] was received.
    pub fn settle(mut self) {
        self.settled = true;
    }

    /// Removes the request at [`QueuedRequest::until`] and returns the error response. `None` if it has left the queue
    /// already, and its [`QueueSignal`] is about to say how.
    pub fn expire(&mut self, now: Timestamp) -> Option<RequestError> {
        self.leave(now).then_some(())?;
        self.queues.observer.event(QueueEvent::Outcome(QueueOutcome::Expired));
        let retry_after = self.queues.state.lock().control.clears(self.priority, now);
        Some(self.refused(&Refusal { cause: Cause::Expired, retry_after }))
    }

    /// The error response for a refused request.
    #[must_use]
    pub fn refused(&self, refusal: &Refusal) -> RequestError {
        let error = self.refusal(refusal);
        match &self.pool {
            Some(pool) => error.in_pool(pool),
            None => error,
        }
    }

    fn refusal(&self, refusal: &Refusal) -> RequestError {
        if self.is_due && refusal.cause == Cause::Expired {
            self.queues.observer.event(QueueEvent::Deadline(DeadlineOutcome::Passed));
            return deadline::passed(refusal.retry_after);
        }
        self.queues.refused(refusal)
    }

    /// Removes it from the queue; false if it was not there. Requests behind it may fit where it did not.
    fn leave(&mut self, now: Timestamp) -> bool {
        let was_there = {
            let mut state = self.queues.state.lock();
            let was_there = state.control.cancel(self.handle, now).is_some();
            self.queues.report_depth(&state);
            was_there
        };
        self.settled |= was_there;
        if was_there {
            self.queues.freed(now);
        }
        was_there
    }
}

/// The client disconnected.
impl Drop for QueuedRequest {
    fn drop(&mut self) {
        let now = self.queues.last_now();
        if !self.settled && self.leave(now) {
            self.queues.observer.event(QueueEvent::Outcome(QueueOutcome::Left));
        }
    }
}

/// Becomes ready when the queue dequeues, refuses or preempts the request.
#[derive(Debug)]
pub struct QueueSignal<T = DequeueResult>(pub(super) oneshot::Receiver<T>);

impl<T> Future for QueueSignal<T> {
    /// `None` if the queue dropped the sender: the request is no longer queued, or no longer preemptible.
    type Output = Option<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<T>> {
        Pin::new(&mut self.0).poll(cx).map(Result::ok)
    }
}
