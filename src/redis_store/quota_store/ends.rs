//! What Redis is told of requests that have ended: each at once, and again while it can't be told, until its place there is free anyhow.

use super::{LEASE, RedisStore};
use crate::redis_link::LinkError;
use attache_quota::{Change, Place, Wall};
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
/// 500 ms between the first two tries with a connection that is there: what is wrong then does not pass at once.
const AGAIN: Duration = Duration::from_millis(500);
/// 30 s between later ones, since many may be waiting: each pause is twice the one before until then.
const AGAIN_AT_LAST: Duration = Duration::from_secs(30);

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

    /// What it changes of what is counted, in the order of [`attache_quota::Bound::ALL`] without the last, of which it gives a place back.
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

    /// It leaves everything in Redis as it is.
    fn is_nothing(&self) -> bool {
        let [.., has_place] = self.place.counted;
        !has_place && self.counts() == [0; 5]
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
        let Some(left) = self.tell_once(store, end).await else { return };
        if let Ok(_place) = self.waiting.try_acquire()
            && tokio::time::timeout(LEASE, Box::pin(self.tell_again(store, left))).await.is_ok()
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

    /// What is left to be told afterwards, if anything is.
    async fn tell_once(&self, store: &RedisStore, end: End) -> Option<End> {
        if end.is_nothing() {
            return None;
        }
        let Err(error) = store.tell(&end).await else {
            self.is_said.store(false, Relaxed);
            return None;
        };
        tracing::debug!(%error, "end of a request can't be written to Redis");
        Some(end.after(&error)).filter(|left| !left.is_nothing())
    }

    async fn tell_again(&self, store: &RedisStore, mut end: End) {
        let mut connected = store.link.connected();
        for pause in pauses() {
            // Neither fails: what they wait for is there for as long as `store` and `self` are.
            drop(connected.wait_for(|is| *is).await);
            let one_of_few = self.at_once.acquire().await;
            let Some(left) = self.tell_once(store, end).await else { return };
            drop(one_of_few);
            end = left;
            tokio::time::sleep(pause).await;
        }
    }
}

/// How long to wait after each try. There is no last one.
pub(super) fn pauses() -> impl Iterator<Item = Duration> {
    std::iter::successors(Some(AGAIN), |pause| Some(AGAIN_AT_LAST.min(*pause * 2)))
}
