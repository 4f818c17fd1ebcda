//! What a request holds of the queues: an [`Admitted`] when it was let through, a [`Parked`] while it waits.

use super::{Queues, Turn};
use crate::deadline;
use crate::event::{DeadlineOutcome, QueueEvent, QueueOutcome};
use attache_flow::{Cause, Handle, Passage, Refusal};
use attache_protocol::Usage;
use attache_types::clock::Timestamp;
use attache_types::error::RequestError;
use futures_channel::oneshot;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

/// 32 tokens of an answer are charged at once: a small part of what is under way on a server, and the lock is taken seldom.
const CHARGED_AT_ONCE: u32 = 32;

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
    pub(super) fn new(queues: Arc<Queues>, passage: Option<Passage>, eviction: Option<Waiting<Refusal>>) -> Self {
        Self { queues, passage, ended: false, eviction, come: 0, charged: 0 }
    }

    /// A request that is let through without a turn, of which the ledger alone knows.
    pub(crate) fn uncounted(queues: &Arc<Queues>) -> Self {
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
    pub(super) queues: Arc<Queues>,
    pub(super) handle: Handle,
    pub(super) priority: i32,
    pub(super) until: Option<Timestamp>,
    /// Until then its turn is of use; else it may wait no longer.
    pub(super) is_due: bool,
    pub(super) turn: Option<oneshot::Receiver<Turn>>,
    pub(super) settled: bool,
}

impl Parked {
    /// When it has waited for as long as it may; `None` when only a pool without endpoints limits it.
    #[must_use]
    pub fn until(&self) -> Option<Timestamp> {
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
        self.queues.observer.event(QueueEvent::Outcome(QueueOutcome::Expired));
        let retry_after = self.queues.state.lock().control.clears(self.priority, now);
        Some(self.refused(&Refusal { cause: Cause::Expired, retry_after }))
    }

    /// What the client is told.
    #[must_use]
    pub fn refused(&self, refusal: &Refusal) -> RequestError {
        if self.is_due && refusal.cause == Cause::Expired {
            self.queues.observer.event(QueueEvent::Deadline(DeadlineOutcome::Passed));
            return deadline::passed(refusal.retry_after);
        }
        self.queues.refused(refusal)
    }

    /// Takes it out of the queue; false when it was not there. Those who stood behind it may go where it could not.
    fn leave(&mut self, now: Timestamp) -> bool {
        let was_there = {
            let mut state = self.queues.state.lock();
            let was_there = state.control.cancel(self.handle, now).is_some();
            self.queues.observer.event(super::holds(&state));
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
            self.queues.observer.event(QueueEvent::Outcome(QueueOutcome::Left));
        }
    }
}

/// Ready when the turn of a request has come, or its end.
#[derive(Debug)]
pub struct Waiting<T = Turn>(pub(super) oneshot::Receiver<T>);

impl<T> Future for Waiting<T> {
    /// `None` when nobody will tell: the request waits no longer, or is served whatever comes.
    type Output = Option<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<T>> {
        Pin::new(&mut self.0).poll(cx).map(Result::ok)
    }
}
