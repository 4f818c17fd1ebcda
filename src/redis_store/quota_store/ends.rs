//! Writes the ends of requests to Redis: each at once, and with retries while Redis is
//! unavailable, until the slot expires.

use super::{LEASE, RedisStore};
use crate::redis_link::LinkError;
use attache_quota::{Change, Place, Wall};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

/// Most ends that wait for Redis, 16,384 or some 20 MB: about as many as a process has running requests. While Redis is
/// unavailable, no new ones are counted there.
pub(super) const MAX_WAITING: usize = 16_384;
/// Most retries at the same time, which leaves the connection to requests.
const RETRIES_AT_ONCE: usize = 64;
/// First pause between two attempts with an open connection: such an error does not pass at once.
const AGAIN: Duration = Duration::from_millis(500);
/// Longest pause between attempts, since many ends may be waiting; each pause is twice the previous one until then.
const AGAIN_AT_LAST: Duration = Duration::from_secs(30);

/// The end of one request.
#[derive(Debug)]
pub(super) struct EndedRequest {
    pub(super) name: Arc<str>,
    pub(super) place: Place,
    /// Its changes in the windows of `at`.
    pub(super) change: Change,
    pub(super) at: Wall,
}

impl EndedRequest {
    /// Returns what remains to be written after a failed attempt. Freeing a slot twice does no harm. Counts must be
    /// applied once, so they are retried only if they were certainly not applied. The second in which it ended is over.
    fn after(self, failure: &LinkError) -> Self {
        let change = if failure.may_have_run() { Change::default() } else { self.change };
        Self { change: Change { second_requests: 0, ..change }, ..self }
    }

    /// Returns its changes of the counters, in the order of [`attache_quota::Bound::ALL`] without the last
    /// one, whose slot it frees.
    pub(super) fn counts(&self) -> [i64; 5] {
        let Change { second_requests, minute_requests, minute_tokens, day_requests, day_tokens } = self.change;
        let [of_day, tokens_of_day, of_minute, tokens_of_minute, of_second, _] = self.place.counted;
        let where_counted = |is_counted, count| if is_counted { count } else { 0 };
        [
            where_counted(of_day, day_requests),
            where_counted(tokens_of_day, day_tokens),
            where_counted(of_minute, minute_requests),
            where_counted(tokens_of_minute, minute_tokens),
            where_counted(of_second, second_requests),
        ]
    }

    /// Whether it changes nothing in Redis.
    fn is_nothing(&self) -> bool {
        let [.., has_place] = self.place.counted;
        !has_place && self.counts() == [0; 5]
    }
}

/// All ends that have not been written.
pub(super) struct Ends {
    unwritten: TaskTracker,
    waiting: Semaphore,
    at_once: Semaphore,
    /// Called for each end that is given up.
    lost: Box<dyn Fn() + Send + Sync>,
    /// Whether giving up was logged since the last successful write.
    is_said: AtomicBool,
}

impl Ends {
    pub(super) fn new(lost: impl Fn() + Send + Sync + 'static) -> Self {
        Self {
            unwritten: TaskTracker::new(),
            waiting: Semaphore::new(MAX_WAITING),
            at_once: Semaphore::new(RETRIES_AT_ONCE),
            lost: Box::new(lost),
            is_said: AtomicBool::new(false),
        }
    }

    /// Runs the write of one end in the background.
    pub(super) fn spawn(&self, write: impl Future<Output = ()> + Send + 'static, runtime: &Handle) {
        self.unwritten.spawn_on(write, runtime);
    }

    /// Waits until all ends have been written or given up.
    pub(super) async fn written(&self) {
        self.unwritten.close();
        self.unwritten.wait().await;
    }

    /// Writes `end` to `store`.
    pub(super) async fn write(&self, store: &RedisStore, end: EndedRequest) {
        let Some(left) = self.write_once(store, end).await else { return };
        if let Ok(_place) = self.waiting.try_acquire()
            && tokio::time::timeout(LEASE, Box::pin(self.write_again(store, left))).await.is_ok()
        {
            return;
        }
        (self.lost)();
        if !self.is_said.swap(true, Relaxed) {
            let minutes = LEASE.as_secs() / 60;
            tracing::warn!(
                minutes,
                "ends of requests can't be written to Redis; their concurrency slots stay in use for that many minutes"
            );
        }
    }

    /// Makes one attempt. Returns what remains to be written, if anything.
    async fn write_once(&self, store: &RedisStore, end: EndedRequest) -> Option<EndedRequest> {
        if end.is_nothing() {
            return None;
        }
        let Err(error) = store.write(&end).await else {
            self.is_said.store(false, Relaxed);
            return None;
        };
        tracing::debug!(%error, "end of a request can't be written to Redis");
        Some(end.after(&error)).filter(|left| !left.is_nothing())
    }

    async fn write_again(&self, store: &RedisStore, mut end: EndedRequest) {
        let mut connected = store.link.connected();
        for pause in pauses() {
            // Neither wait can fail: the channel and the semaphore live as long as `store` and `self`.
            drop(connected.wait_for(|is| *is).await);
            let one_of_few = self.at_once.acquire().await;
            let Some(left) = self.write_once(store, end).await else { return };
            drop(one_of_few);
            end = left;
            tokio::time::sleep(pause).await;
        }
    }
}

/// Returns the pauses between attempts, without an end.
pub(super) fn pauses() -> impl Iterator<Item = Duration> {
    std::iter::successors(Some(AGAIN), |pause| Some(AGAIN_AT_LAST.min(*pause * 2)))
}
