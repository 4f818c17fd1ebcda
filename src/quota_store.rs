//! What tenants have had, in a Redis that several pickers share. It owns the connection and the two scripts that change the counters; the
//! figures are [`crate::quota`]'s.
//!
//! | key | what | kept for |
//! |---|---|---|
//! | `aibrix:<tenant>_RPM_CURRENT:<minute mod 64>` | requests of the minute, as AIBrix's gateway counts them | 2 minutes |
//! | `aibrix:<tenant>_TPM_CURRENT:<minute mod 64>` | tokens of the minute, likewise | 2 minutes |
//! | `attache:<tenant>_RPD:<day>`, `attache:<tenant>_TPD:<day>` | requests and tokens of the day | 2 days |
//! | `attache:<tenant>_RUNNING` | a sorted set: one member a request under way, by when its place is free at the latest | [`LEASE`] |
//!
//! A script runs as one step in Redis, so that no two pickers take the same place. The keys of one tenant lie in different slots: one Redis or
//! its replicas, no cluster. What waits for an answer is the caller's concern, and how long. Called by `ext_proc::quotas`; may import `quota`.

use crate::quota::{Bound, Change, Limits, Refused, Taken, Use, Wall};
use arc_swap::ArcSwapOption;
use futures_util::FutureExt;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, RedisError, Script, ScriptInvocation};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore};
use tokio_util::sync::{CancellationToken, DropGuard};

/// 10 minutes: a place that nobody gave back, because its picker died, is free again. An answer that takes longer no longer counts.
pub const LEASE: Duration = Duration::from_secs(600);
/// Windows of minutes that AIBrix's gateway tells apart by their keys.
const AIBRIX_WINDOWS: u64 = 64;
/// 1 s for Redis to answer before the connection is thought to be dead. Requests do not wait for that.
const DEAD_AFTER: Duration = Duration::from_secs(1);
/// 500 ms between two tries to connect.
const RECONNECT: Duration = Duration::from_millis(500);
/// 1 s between two signs of life, so that a Redis that has gone is known before a request asks it.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Questions under way at once: more are a sign that Redis can't keep up, and would only pile up.
const MAX_QUESTIONS: usize = 1_024;
/// A bound that a tenant has not.
const UNBOUNDED: i64 = -1;

/// Looks at all bounds and books a request. Returns the number of the bound that is used up, from 1, or 0 with what was used of the minute.
const TAKE: &str = r"
local function used(key) return tonumber(redis.call('GET', key) or '0') end
local tokens, now, lease, id = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), ARGV[9]
redis.call('ZREMRANGEBYSCORE', KEYS[5], '-inf', now)
local had = { used(KEYS[1]), used(KEYS[2]), used(KEYS[3]), used(KEYS[4]), redis.call('ZCARD', KEYS[5]) }
for i = 1, 5 do
  local limit = tonumber(ARGV[i])
  local wanted = 1
  if i == 2 or i == 4 then wanted = math.min(tokens, limit) end
  if limit >= 0 and (had[i] >= limit or had[i] + wanted > limit) then return { i, 0, 0 } end
end
local function add(key, count, keep)
  local sum = redis.call('INCRBY', key, count)
  redis.call('PEXPIRE', key, keep)
  return sum
end
add(KEYS[1], 1, 172800000)
add(KEYS[2], ARGV[6], 172800000)
local requests = add(KEYS[3], 1, 120000)
local all = add(KEYS[4], ARGV[6], 120000)
redis.call('ZADD', KEYS[5], now + lease, id)
redis.call('PEXPIRE', KEYS[5], lease)
return { 0, requests, all }
";

/// Sets right what a request that has ended had, and frees its place. A counter that has gone, with a Redis that lost its memory, owes nothing.
const END: &str = r"
for i = 1, 4 do
  local count = tonumber(ARGV[i])
  if count ~= 0 then
    if redis.call('INCRBY', KEYS[i], count) < 0 then redis.call('DEL', KEYS[i]) end
    if redis.call('PTTL', KEYS[i]) == -1 then redis.call('PEXPIRE', KEYS[i], (i > 2) and 120000 or 172800000) end
  end
end
redis.call('ZREM', KEYS[5], ARGV[5])
return 0
";

/// Why Redis gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// There is no connection.
    #[error("no connection to redis")]
    Away,
    /// Too many questions are under way.
    #[error("{MAX_QUESTIONS} questions to redis are under way")]
    Busy,
    /// It did not understand, or the connection broke.
    #[error("redis: {0}")]
    Failed(#[from] RedisError),
    /// It said something that no script of ours says.
    #[error("redis answered {0:?}")]
    Odd(Vec<i64>),
}

/// The connection, and word that it is of no use any more.
#[derive(Default)]
struct Link {
    connection: ArcSwapOption<MultiplexedConnection>,
    broken: Notify,
}

/// A Redis that counts.
pub struct RedisStore {
    url: String,
    link: Arc<Link>,
    places: Semaphore,
    take: Script,
    end: Script,
    /// Tells this process's requests from those of others.
    process: u64,
    requests: AtomicU64,
    runtime: Handle,
    _stop: DropGuard,
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL may hold a password.
        f.debug_struct("RedisStore").field("connected", &self.link.connection.load().is_some()).finish_non_exhaustive()
    }
}

/// A request's place among those that run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place(u64);

impl RedisStore {
    /// Connects to `url` from now on, on the runtime of the caller, until it is dropped; `told` is called with true when there is a connection, and
    /// with false when it is gone.
    ///
    /// # Errors
    /// When the URL is none of Redis.
    pub fn start(
        url: &str,
        process: u64,
        told: impl Fn(bool) + Send + Sync + 'static,
    ) -> Result<Arc<Self>, RedisError> {
        let client = Client::open(url)?;
        let (link, stop) = (Arc::<Link>::default(), CancellationToken::new());
        let store = Arc::new(Self {
            url: url.to_owned(),
            link: link.clone(),
            places: Semaphore::new(MAX_QUESTIONS),
            take: Script::new(TAKE),
            end: Script::new(END),
            process,
            requests: AtomicU64::new(0),
            runtime: Handle::current(),
            _stop: stop.clone().drop_guard(),
        });
        tokio::spawn(async move { stop.run_until_cancelled(keep(client, &link, told)).await });
        Ok(store)
    }

    /// Whether this is the one at `url`.
    #[must_use]
    pub fn is_at(&self, url: &str) -> bool {
        self.url == url
    }

    /// Where its questions run: the threads that serve requests may end before an answer comes.
    #[must_use]
    pub fn runtime(&self) -> &Handle {
        &self.runtime
    }

    async fn ask<T: redis::FromRedisValue>(&self, script: &mut ScriptInvocation<'_>) -> Result<T, StoreError> {
        let Ok(_place) = self.places.try_acquire() else { return Err(StoreError::Busy) };
        let connection = self.link.connection.load_full().ok_or(StoreError::Away)?;
        let answer = script.invoke_async(&mut MultiplexedConnection::clone(&connection)).await;
        answer.map_err(|error| {
            let current = || self.link.connection.load().as_ref().is_some_and(|c| Arc::ptr_eq(c, &connection));
            if (error.is_io_error() || error.is_connection_dropped() || error.is_timeout()) && current() {
                self.link.broken.notify_one();
            }
            StoreError::Failed(error)
        })
    }

    /// Books a request of `tokens` for `tenant`.
    ///
    /// # Errors
    /// When Redis gives no answer; what is used up is an answer.
    pub async fn take(
        &self,
        tenant: &str,
        limits: &Limits,
        tokens: u64,
        at: Wall,
    ) -> Result<Result<(Taken, Place), Refused>, StoreError> {
        let place = Place(self.requests.fetch_add(1, Relaxed));
        let mut script = self.take.prepare_invoke();
        keys(&mut script, tenant, at);
        for bound in Bound::ALL {
            script.arg(limits.of(bound).map_or(UNBOUNDED, |limit| i64::try_from(limit).unwrap_or(i64::MAX)));
        }
        script.arg(tokens).arg(millis(at.0)).arg(millis(LEASE)).arg(self.member(place));
        let answer: Vec<i64> = self.ask(&mut script).await?;
        let [used_up, requests, all] = answer[..] else { return Err(StoreError::Odd(answer)) };
        if used_up == 0 {
            let count = |n: i64| u64::try_from(n).unwrap_or(0);
            let used = Use { requests: count(requests), tokens: count(all) };
            return Ok(Ok((Taken { minute: at.minute(), day: at.day(), tokens, used }, place)));
        }
        let bound = usize::try_from(used_up - 1).ok().and_then(|i| Bound::ALL.get(i).copied());
        let Some((bound, limit)) = bound.and_then(|b| Some((b, limits.of(b)?))) else {
            return Err(StoreError::Odd(answer));
        };
        Ok(Err(Refused { bound, limit, retry_after: bound.retry_after(at) }))
    }

    /// A request that was booked has ended: changes what `change` says of the windows of `at`, and frees its place. Nobody waits for that.
    pub fn end(self: &Arc<Self>, tenant: Arc<str>, place: Place, change: Change, at: Wall) {
        let store = self.clone();
        self.runtime.spawn(async move {
            let mut script = store.end.prepare_invoke();
            keys(&mut script, &tenant, at);
            for count in [change.day_requests, change.day_tokens, change.minute_requests, change.minute_tokens] {
                script.arg(count);
            }
            script.arg(store.member(place));
            if let Err(error) = store.ask::<i64>(&mut script).await {
                tracing::debug!(%error, "what a request had is not told to redis");
            }
        });
    }

    fn member(&self, place: Place) -> String {
        format!("{:016x}-{:x}", self.process, place.0)
    }
}

/// Returns when the connection is of no use any more: a question came to nothing, or a sign of life that is asked for now and then.
async fn until_broken(link: &Link, mut connection: MultiplexedConnection) {
    while tokio::time::timeout(HEARTBEAT, link.broken.notified()).await.is_err() {
        if redis::cmd("PING").query_async::<String>(&mut connection).await.is_err() {
            return;
        }
    }
}

/// A connection that somebody is told of, until it is gone.
struct Connected<'a, T: Fn(bool)>(&'a T);

impl<'a, T: Fn(bool)> Connected<'a, T> {
    fn new(told: &'a T) -> Self {
        told(true);
        Self(told)
    }
}

impl<T: Fn(bool)> Drop for Connected<'_, T> {
    fn drop(&mut self) {
        (self.0)(false);
    }
}

/// Connects again and again.
async fn keep(client: Client, link: &Link, told: impl Fn(bool)) {
    let config =
        AsyncConnectionConfig::new().set_connection_timeout(Some(DEAD_AFTER)).set_response_timeout(Some(DEAD_AFTER));
    loop {
        match client.get_multiplexed_async_connection_with_config(&config).await {
            Ok(connection) => {
                tracing::info!("connected to redis");
                // Word of the connection before this one.
                let _ = link.broken.notified().now_or_never();
                link.connection.store(Some(Arc::new(connection.clone())));
                let connected = Connected::new(&told);
                until_broken(link, connection).await;
                link.connection.store(None);
                drop(connected);
                tracing::warn!("the connection to redis broke");
            }
            Err(error) => tracing::warn!(%error, "no connection to redis"),
        }
        tokio::time::sleep(RECONNECT).await;
    }
}

/// The counters of `tenant` at `at`, in the order of [`Bound::ALL`].
fn keys(script: &mut ScriptInvocation<'_>, tenant: &str, at: Wall) {
    let (minute, day) = (at.minute() % AIBRIX_WINDOWS, at.day());
    script
        .key(format!("attache:{tenant}_RPD:{day}"))
        .key(format!("attache:{tenant}_TPD:{day}"))
        .key(format!("aibrix:{tenant}_RPM_CURRENT:{minute}"))
        .key(format!("aibrix:{tenant}_TPM_CURRENT:{minute}"))
        .key(format!("attache:{tenant}_RUNNING"));
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
