//! The task that drives a queue: it dequeues after a timeout or a new snapshot, because the picker has no clock.

use attache_picker::queues::Queues;
use attache_pool::Published;
use attache_types::clock::Clock;
use std::sync::{Arc, Weak};
use std::task::{Wake, Waker};
use tokio::sync::{Notify, watch};
use tokio::time::timeout;

/// Wakes [`QueueTimer::follow`] before its timeout, when a queue needs an earlier check.
#[derive(Clone, Debug, Default)]
pub struct QueueTimer(Arc<EarlierCheck>);

#[derive(Debug, Default)]
struct EarlierCheck(Notify);

impl Wake for EarlierCheck {
    fn wake(self: Arc<Self>) {
        self.0.notify_one();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.notify_one();
    }
}

impl QueueTimer {
    /// The waker that [`Queues::new`] takes.
    #[must_use]
    pub fn waker(&self) -> Waker {
        self.0.clone().into()
    }

    /// Lets the queue dequeue after each new snapshot of its pool, and after [`Queues::next_check_in`] without one.
    /// Ends when the queue or the pool is dropped.
    pub async fn follow(self, queues: Weak<Queues>, mut published: watch::Receiver<Published>, clock: Clock) {
        while let Some(delay) = queues.upgrade().map(|queues| queues.next_check_in(clock.now())) {
            let woken = async {
                tokio::select! {
                    changed = published.changed() => Some(changed.is_ok()),
                    () = self.0.0.notified() => None,
                }
            };
            match timeout(delay, woken).await {
                Ok(Some(false)) => return,
                Ok(Some(true)) | Err(_) => {}
                // The queue needs an earlier check: compute the timeout again.
                Ok(None) => continue,
            }
            if let Some(queues) = queues.upgrade() {
                queues.freed(clock.now());
            }
        }
    }
}
