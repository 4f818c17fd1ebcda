//! What tenants have had, in a Redis that several pickers share. It owns the two scripts that change the counters; the figures are
//! [`crate::quota`]'s. What AIBrix keeps of single tenants there is read by [`users`].
//!
//! | key | what | kept for |
//! |---|---|---|
//! | `aibrix:<tenant>_RPM_CURRENT:<minute mod 64>` | requests of the minute, as AIBrix's gateway counts them | 2 minutes |
//! | `aibrix:<tenant>_TPM_CURRENT:<minute mod 64>` | tokens of the minute, likewise | 2 minutes |
//! | `attache:<tenant>_RPD:<day>`, `attache:<tenant>_TPD:<day>` | requests and tokens of the day | 2 days |
//! | `attache:<tenant>_RUNNING` | a sorted set: one member a request under way, by when its place is free at the latest | [`LEASE`] |
//!
//! A script runs as one step in Redis, so that no two pickers take the same place. The keys of one tenant lie in different slots: one Redis or
//! its replicas, no cluster. Called by `ext_proc::quotas`; may import `quota`, `redis_link`.

pub mod users;

use crate::quota::{Bound, Change, Limits, Refused, Taken, Use, Wall};
use crate::redis_link::{LinkError, RedisLink};
use redis::{Script, ScriptInvocation};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// 10 minutes: a place that nobody gave back, because its picker died, is free again. An answer that takes longer no longer counts.
pub const LEASE: Duration = Duration::from_secs(600);
/// Windows of minutes that AIBrix's gateway tells apart by their keys.
const AIBRIX_WINDOWS: u64 = 64;
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

/// Why Redis did not say whether a request may go on.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// It gave no answer.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// It said something that no script of ours says.
    #[error("redis answered {0:?}")]
    Odd(Vec<i64>),
}

/// A Redis that counts.
pub struct RedisStore {
    link: Arc<RedisLink>,
    take: Script,
    end: Script,
    /// Tells this process's requests from those of others.
    process: u64,
    requests: AtomicU64,
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("link", &self.link).finish_non_exhaustive()
    }
}

/// A request's place among those that run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place(u64);

impl RedisStore {
    /// Counts in the Redis of `link`; `process` tells its requests from those of other pickers.
    #[must_use]
    pub fn new(link: Arc<RedisLink>, process: u64) -> Self {
        let (take, end) = (Script::new(TAKE), Script::new(END));
        Self { link, take, end, process, requests: AtomicU64::new(0) }
    }

    /// The Redis that it counts in.
    #[must_use]
    pub fn link(&self) -> &Arc<RedisLink> {
        &self.link
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
        let answer: Vec<i64> = self.link.run(&script).await?;
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
        self.link.runtime().spawn(async move {
            let mut script = store.end.prepare_invoke();
            keys(&mut script, &tenant, at);
            for count in [change.day_requests, change.day_tokens, change.minute_requests, change.minute_tokens] {
                script.arg(count);
            }
            script.arg(store.member(place));
            if let Err(error) = store.link.run::<i64>(&script).await {
                tracing::debug!(%error, "what a request had is not told to redis");
            }
        });
    }

    fn member(&self, place: Place) -> String {
        format!("{:016x}-{:x}", self.process, place.0)
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
