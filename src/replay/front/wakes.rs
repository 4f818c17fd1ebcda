//! The signals of the picker's queues in virtual time: which requests leave the queue or are preempted, in order.
//!
//! Live, an executor polls each request that a signal wakes. Here, [`Wakes`] lists its number, and the simulation polls
//! it after the event in which it was woken.

use parking_lot::Mutex;
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll, Wake, Waker};

/// Requests that were woken, and whether the timer was.
#[derive(Debug, Default)]
pub(crate) struct Wakes {
    woken: Mutex<VecDeque<u64>>,
    timer: Arc<TimerWake>,
}

/// The timer of the queues was woken.
#[derive(Debug, Default)]
struct TimerWake(AtomicBool);

impl Wake for TimerWake {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Relaxed);
    }
}

/// One request.
struct RequestWake {
    number: u64,
    wakes: Arc<Wakes>,
}

impl Wake for RequestWake {
    fn wake(self: Arc<Self>) {
        self.wakes.woken.lock().push_back(self.number);
    }
}

impl Wakes {
    /// The waker of the queues' timer.
    pub(super) fn timer(&self) -> Waker {
        self.timer.clone().into()
    }

    /// Whether the timer was woken since the last call.
    pub(crate) fn take_timer(&self) -> bool {
        self.timer.0.swap(false, Relaxed)
    }

    /// The next request that was woken.
    pub(crate) fn next(&self) -> Option<u64> {
        self.woken.lock().pop_front()
    }

    /// The result of the signal of the request with this number. Otherwise the signal will wake it.
    pub(super) fn poll<S: Future + Unpin>(self: &Arc<Self>, number: u64, signal: &mut S) -> Option<S::Output> {
        let waker = Waker::from(Arc::new(RequestWake { number, wakes: self.clone() }));
        match Pin::new(signal).poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(result) => Some(result),
            Poll::Pending => None,
        }
    }
}
