//! Usage of tenants and models in a Redis that several Attaché processes share. This module owns the two scripts that
//! change the counters; the values are [`attache_quota`]'s. [`users`] reads AIBrix's records of single tenants.
//!
//! | key | content | kept for |
//! |---|---|---|
//! | `aibrix:<tenant>_RPM_CURRENT:<minute mod 64>` | requests of the minute, as AIBrix's gateway counts | 2 minutes |
//! | `aibrix:<tenant>_TPM_CURRENT:<minute mod 64>` | tokens of the minute, likewise | 2 minutes |
//! | `attache:<tenant>_RPD:<day>`, `attache:<tenant>_TPD:<day>` | requests and tokens of the day | 2 days |
//! | `attache:<tenant>_RPS_CURRENT:<second mod 64>` | requests of the second | 2 seconds |
//! | `attache:<tenant>_RUNNING` | a sorted set: one member per running request, by its expiry | `LEASE` |
//!
//! For a model, keys begin with `attache_model:` in place of `aibrix:` and `attache:`, except for the requests of a
//! second, which AIBrix's gateway counts too: `aibrix_model:<model>_MODEL_RPS_CURRENT:<second mod 64>`.
//!
//! Only limited values are counted, so names that clients invent leave no keys. Exceptions are the requests and tokens
//! of a tenant's minute, which responses report.
//!
//! A script runs as one step in Redis, so no two processes get the same slot. Windows follow the wall clock of the
//! process, as in AIBrix's gateway. Expiry of slots follows Redis's own clock (`TIME` before writing: Redis 5 or
//! newer), so that no process frees the slots of others. The keys of one tenant or model are in different hash slots:
//! use one Redis with its replicas, not a cluster. Called by `ext_proc::redis_quotas`.

mod ends;
pub mod users;

use crate::redis_link::{LinkError, RedisLink};
use attache_quota::{Bound, Change, Claim, Place, Refused, Subject, Taken, Use, Wall, Windows};
use ends::{EndedRequest, Ends};
use redis::{Script, ScriptInvocation};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Lifetime of a slot, 10 minutes: then a slot whose process has died is free again. A response that
/// takes longer no longer counts.
pub(crate) const LEASE: Duration = Duration::from_secs(600);
/// Number of windows that AIBrix's gateway distinguishes by their keys.
const AIBRIX_WINDOWS: u64 = 64;
/// Argument of a script: count without a limit.
const UNBOUNDED: i64 = -1;
/// Argument of a script: do not count.
const UNCOUNTED: i64 = -2;

/// Common start of both scripts: counters that stop at 2^52, which Lua's numbers represent exactly and from which
/// `INCRBY` cannot overflow. A counter that is not a number ends the script before it changes anything.
macro_rules! bounded {
    () => {
        r"
local most = 4503599627370496
local function used(key)
  local count = tonumber(redis.call('GET', key) or '0')
  if not count then error('ERR value is not an integer or out of range') end
  return count
end
local function add(key, count)
  return redis.call('INCRBY', key, string.format('%.0f', math.min(count, most - used(key))))
end
"
    };
}

/// Checks all limits and counts a request. Returns the number of the exceeded limit, from 1, or 0 with
/// the usage of the minute.
const TAKE: &str = concat!(
    bounded!(),
    r"
local wanted = { 1, tonumber(ARGV[7]), 1, tonumber(ARGV[8]), 1, 1 }
local lease, id, time = tonumber(ARGV[9]), ARGV[10], redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[6], '-inf', now)
local had = { used(KEYS[1]), used(KEYS[2]), used(KEYS[3]), used(KEYS[4]), used(KEYS[5]), redis.call('ZCARD', KEYS[6]) }
for i = 1, 6 do
  local limit = tonumber(ARGV[i])
  if limit >= 0 and (had[i] >= limit or had[i] + wanted[i] > limit) then return { i, 0, 0 } end
end
local function counted(i) return tonumber(ARGV[i]) >= -1 end
local function count(i, keep)
  if not counted(i) then return 0 end
  local sum = add(KEYS[i], wanted[i])
  redis.call('PEXPIRE', KEYS[i], keep)
  return sum
end
count(1, 172800000)
count(2, 172800000)
local requests = count(3, 120000)
local all = count(4, 120000)
count(5, 2000)
if counted(6) then
  redis.call('ZADD', KEYS[6], now + lease, id)
  redis.call('PEXPIRE', KEYS[6], lease)
end
return { 0, requests, all }
"
);

/// Frees the slot of a request that has ended, and then corrects the counters, so that a counter error cannot keep the
/// slot. A counter that no longer exists, because Redis lost its memory, is not created.
const END: &str = concat!(
    bounded!(),
    r"
redis.call('ZREM', KEYS[6], ARGV[6])
local keep = { 172800000, 172800000, 120000, 120000, 2000 }
for i = 1, 5 do
  local count = tonumber(ARGV[i])
  if count ~= 0 then
    if add(KEYS[i], count) < 0 then redis.call('DEL', KEYS[i]) end
    if redis.call('PTTL', KEYS[i]) == -1 then redis.call('PEXPIRE', KEYS[i], keep[i]) end
  end
end
return 0
"
);

/// The reason for which Redis did not decide about a request.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The request to Redis failed.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// Redis returned a value that the scripts never return.
    #[error("redis answered {0:?}")]
    Odd(Vec<i64>),
}

/// Usage counters in one Redis.
pub struct RedisStore {
    link: Arc<RedisLink>,
    subject: Subject,
    take: Script,
    end: Script,
    ends: Ends,
    /// Distinguishes this process's requests from those of other processes.
    process: u64,
    requests: AtomicU64,
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("link", &self.link).finish_non_exhaustive()
    }
}

impl RedisStore {
    /// Creates counters of `subject`s in the Redis of `link`; `process` distinguishes its requests from those of other
    /// processes. `lost` is called when the end of a request cannot be written to Redis.
    #[must_use]
    pub fn new(link: Arc<RedisLink>, subject: Subject, process: u64, lost: impl Fn() + Send + Sync + 'static) -> Self {
        let (take, end) = (Script::new(TAKE), Script::new(END));
        Self { link, subject, take, end, ends: Ends::new(lost), process, requests: AtomicU64::new(0) }
    }

    /// Returns the connection to its Redis.
    #[must_use]
    pub fn link(&self) -> &Arc<RedisLink> {
        &self.link
    }

    /// Reserves the claimed quota.
    ///
    /// # Errors
    /// [`StoreError`] when Redis does not respond; a rejection is not an error. A slot that Redis may have given
    /// all the same is freed.
    pub async fn take(
        self: &Arc<Self>,
        claim: &Claim,
        at: Wall,
    ) -> Result<Result<(Taken, Place), Refused>, StoreError> {
        let counted = Bound::ALL.map(|bound| claim.limits.of(bound).is_some() || self.tells(bound));
        let place = Place { request: self.requests.fetch_add(1, Relaxed), counted };
        let taken = Taken::by(claim, at.windows(), Use::default());
        let mut script = self.take.prepare_invoke();
        keys(&mut script, self.subject, &claim.name, at);
        for bound in Bound::ALL {
            let without = if self.tells(bound) { UNBOUNDED } else { UNCOUNTED };
            script.arg(claim.limits.of(bound).map_or(without, |limit| i64::try_from(limit).unwrap_or(i64::MAX)));
        }
        script.arg(taken.of_day).arg(taken.of_minute).arg(millis(LEASE)).arg(self.member(place));
        let answer: Vec<i64> = match self.link.run(&script).await {
            Ok(answer) => answer,
            Err(error) => {
                if error.may_have_run() && claim.limits.concurrency.is_some() {
                    self.end(claim.name.clone(), place, Change::default(), at);
                }
                return Err(error.into());
            }
        };
        let [used_up, requests, all] = answer[..] else { return Err(StoreError::Odd(answer)) };
        if used_up == 0 {
            let count = |n: i64| u64::try_from(n).unwrap_or(0);
            let used = Use { requests: count(requests), tokens: count(all) };
            return Ok(Ok((Taken { used, ..taken }, place)));
        }
        let bound = usize::try_from(used_up - 1).ok().and_then(|i| Bound::ALL.get(i).copied());
        let Some((bound, limit)) = bound.and_then(|b| Some((b, claim.limits.of(b)?))) else {
            return Err(StoreError::Odd(answer));
        };
        Ok(Err(Refused { bound, limit, retry_after: bound.retry_after(at) }))
    }

    /// Records the end of a request: applies `change` to the windows of `at`, and frees its slot. It runs in the
    /// background, and is retried while Redis is unavailable.
    pub fn end(self: &Arc<Self>, name: Arc<str>, place: Place, change: Change, at: Wall) {
        let (store, end) = (self.clone(), EndedRequest { name, place, change, at });
        self.ends.spawn(async move { store.ends.write(&store, end).await }, self.link.runtime());
    }

    /// Waits until all ends have been written to Redis.
    pub async fn written(&self) {
        self.ends.written().await;
    }

    async fn write(&self, end: &EndedRequest) -> Result<(), LinkError> {
        let mut script = self.end.prepare_invoke();
        keys(&mut script, self.subject, &end.name, end.at);
        script.arg(&end.counts()).arg(self.member(end.place));
        self.link.run::<i64>(&script).await.map(drop)
    }

    fn member(&self, place: Place) -> String {
        format!("{:016x}-{:x}", self.process, place.request)
    }

    /// Whether responses report the usage, even without a limit.
    fn tells(&self, bound: Bound) -> bool {
        self.subject == Subject::Tenant && matches!(bound, Bound::RequestsPerMinute | Bound::TokensPerMinute)
    }
}

/// Adds the counter keys of the tenant or model of this name at `at`, in the order of [`Bound::ALL`].
fn keys(script: &mut ScriptInvocation<'_>, subject: Subject, name: &str, at: Wall) {
    let Windows { second, minute, day } = at.windows();
    let (second, minute) = (second % AIBRIX_WINDOWS, minute % AIBRIX_WINDOWS);
    let (ours, of_minutes) = match subject {
        Subject::Tenant => ("attache", "aibrix"),
        Subject::Model => ("attache_model", "attache_model"),
    };
    let of_second = match subject {
        Subject::Tenant => format!("{ours}:{name}_RPS_CURRENT:{second}"),
        Subject::Model => format!("aibrix_model:{name}_MODEL_RPS_CURRENT:{second}"),
    };
    script
        .key(format!("{ours}:{name}_RPD:{day}"))
        .key(format!("{ours}:{name}_TPD:{day}"))
        .key(format!("{of_minutes}:{name}_RPM_CURRENT:{minute}"))
        .key(format!("{of_minutes}:{name}_TPM_CURRENT:{minute}"))
        .key(of_second)
        .key(format!("{ours}:{name}_RUNNING"));
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
