//! What Redis is told of requests that have ended: each at once, and again while it can't be told, until its place there is free anyhow.

use super::{LEASE, Place, RedisStore};
use crate::quota::{Change, Wall};
use crate::redis_link::LinkError;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

/// 16,384 that wait for Redis to be back, some 20 MB: about as many as a picker has requests under way, and while Redis is away no more are booked there.
pub(super) const MAX_WAITING: usize = 16_384;
/// 64 of those told at once, which leaves the connection to requests.
const TOLD_AT_ONCE: usize = 64;
/// 500 ms between two tries with a connection that is there: what is wrong then does not pass at once.
const AGAIN: Duration = Duration::from_millis(500);

/// The end of a request.
#[derive(Debug)]
pub(super) struct End {
    pub(super) name: Arc<str>,
    pub(super) place: Place,
    /// What it changes in the windows of `at`.
    pub(super) change: Change,
    pub(super) at: Wall,
}

impl End {
    /// What is left to be told after it came to nothing for that reason. A place is free however often it is given back; what is counted is counted once,
    /// so it is told again only where it surely was not. The second in which it ended is over.
    fn after(self, failure: &LinkError) -> Self {
        let change = if failure.may_have_run() { Change::default() } else { self.change };
        Self { change: Change { second_requests: 0, ..change }, ..self }
    }
}

/// All that have not been told.
pub(super) struct Ends {
    untold: TaskTracker,
    waiting: Semaphore,
    at_once: Semaphore,
    /// Called for each that is given up.
    lost: Box<dyn Fn() + Send + Sync>,
    /// That some are given up has been said since Redis was told of any.
    is_said: AtomicBool,
}

impl Ends {
    pub(super) fn new(lost: impl Fn() + Send + Sync + 'static) -> Self {
        Self {
            untold: TaskTracker::new(),
            waiting: Semaphore::new(MAX_WAITING),
            at_once: Semaphore::new(TOLD_AT_ONCE),
            lost: Box::new(lost),
            is_said: AtomicBool::new(false),
        }
    }

    /// Runs what tells of one beside everything else.
    pub(super) fn spawn(&self, telling: impl Future<Output = ()> + Send + 'static, runtime: &Handle) {
        self.untold.spawn_on(telling, runtime);
    }

    /// Waits until all have been told, or are given up.
    pub(super) async fn told(&self) {
        self.untold.close();
        self.untold.wait().await;
    }

    /// Tells `store` of `end`.
    pub(super) async fn tell(&self, store: &RedisStore, end: End) {
        let failure = match store.tell(&end).await {
            Ok(()) => return self.heard(),
            Err(failure) => failure,
        };
        if let Ok(_place) = self.waiting.try_acquire()
            && tokio::time::timeout(LEASE, Box::pin(self.tell_again(store, end, failure))).await.is_ok()
        {
            return;
        }
        (self.lost)();
        if !self.is_said.swap(true, Relaxed) {
            let minutes = LEASE.as_secs() / 60;
            tracing::warn!(
                minutes,
                "redis is not told of requests that have ended: their places are kept for that long"
            );
        }
    }

    fn heard(&self) {
        self.is_said.store(false, Relaxed);
    }

    async fn tell_again(&self, store: &RedisStore, mut end: End, mut failure: LinkError) {
        let mut connected = store.link.connected();
        loop {
            tracing::debug!(error = %failure, "the end of a request is told to redis once more");
            end = end.after(&failure);
            // An error says that the link has gone, and nothing comes any more: until the lease ends.
            if connected.wait_for(|is| *is).await.is_err() {
                return std::future::pending().await;
            }
            let told = match self.at_once.acquire().await {
                Ok(_one) => store.tell(&end).await,
                Err(_) => return,
            };
            match told {
                Ok(()) => return self.heard(),
                Err(error) => failure = error,
            }
            tokio::time::sleep(AGAIN).await;
        }
    }
}
