//! The task that looks at a queue when time has passed or its pool is published anew: the picker has no clock of its
//! own.

use attache_picker::queues::Queues;
use attache_pool::Published;
use attache_types::clock::Clock;
use std::sync::{Arc, Weak};
use std::task::{Wake, Waker};
use tokio::sync::{Notify, watch};
use tokio::time::timeout;

/// Tells [`QueueTimer::follow`] that its queue is to be looked at earlier than it had planned.
#[derive(Clone, Debug, Default)]
pub struct QueueTimer(Arc<Told>);

#[derive(Debug, Default)]
struct Told(Notify);

impl Wake for Told {
    fn wake(self: Arc<Self>) {
        self.0.notify_one();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.notify_one();
    }
}

impl QueueTimer {
    /// For [`Queues::new`].
    #[must_use]
    pub fn waker(&self) -> Waker {
        self.0.clone().into()
    }

    /// Tells the queues of every new snapshot of their pool, and when time has passed in which there was none. Ends
    /// with the queues, or the pool.
    pub async fn follow(self, queues: Weak<Queues>, mut published: watch::Receiver<Published>, clock: Clock) {
        while let Some(patience) = queues.upgrade().map(|queues| queues.patience(clock.now())) {
            let told = async {
                tokio::select! {
                    changed = published.changed() => Some(changed.is_ok()),
                    () = self.0.0.notified() => None,
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
}
