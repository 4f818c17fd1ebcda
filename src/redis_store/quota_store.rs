//! What tenants and models have had, in a Redis that several pickers share. It owns the two scripts that change the counters; the figures are
//! [`attache_quota`]'s. What AIBrix keeps of single tenants there is read by [`users`].
//!
//! | key | what | kept for |
//! |---|---|---|
//! | `aibrix:<tenant>_RPM_CURRENT:<minute mod 64>` | requests of the minute, as AIBrix's gateway counts them | 2 minutes |
//! | `aibrix:<tenant>_TPM_CURRENT:<minute mod 64>` | tokens of the minute, likewise | 2 minutes |
//! | `attache:<tenant>_RPD:<day>`, `attache:<tenant>_TPD:<day>` | requests and tokens of the day | 2 days |
//! | `attache:<tenant>_RPS_CURRENT:<second mod 64>` | requests of the second | 2 seconds |
//! | `attache:<tenant>_RUNNING` | a sorted set: one member a request under way, by when its place is free at the latest | [`LEASE`] |
//!
//! Of a model they begin with `attache_model:` in place of `aibrix:` and `attache:`, but for the requests of a second, which AIBrix's gateway counts too:
//! `aibrix_model:<model>_MODEL_RPS_CURRENT:<second mod 64>`.
//!
//! What has no bound is not counted, but for the requests and tokens of a tenant's minute, which answers tell: names that clients make up leave nothing
//! behind where nothing bounds them.
//!
//! A script runs as one step in Redis, so that no two pickers take the same place. Windows are those of the picker's wall clock, as AIBrix's gateway has
//! them; how long places are kept Redis itself knows (`TIME`, before writing: Redis 5 or newer), so that no picker's clock frees those of others. The keys
//! of one tenant or model lie in different slots: one Redis or its replicas, no cluster. Called by
//! `ext_proc::redis_quotas`.

mod ends;
pub mod users;

use crate::redis_link::{LinkError, RedisLink};
use attache_quota::{Bound, Change, Claim, Place, Refused, Subject, Taken, Use, Wall, Windows};
use ends::{End, Ends};
use redis::{Script, ScriptInvocation};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// 10 minutes: a place that nobody gave back, because its picker died, is free again. An answer that takes longer no longer counts.
pub const LEASE: Duration = Duration::from_secs(600);
/// Windows that AIBrix's gateway tells apart by their keys.
const AIBRIX_WINDOWS: u64 = 64;
/// Counted without a bound.
const UNBOUNDED: i64 = -1;
/// Not counted either.
const UNCOUNTED: i64 = -2;

/// What both scripts begin with: counters that stop at 2^52, which Lua's numbers hold exactly and `INCRBY` never overflows from. A counter that holds no
/// number ends the script before it changes anything.
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

/// Looks at all bounds and books a request in what is counted. Returns the number of the bound that is used up, from 1, or 0 with what was used of the minute.
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

/// Sets right what a request that has ended had, after it has freed its place: what can't be counted keeps no place. A counter that has gone, with a
/// Redis that lost its memory, owes nothing.
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
    subject: Subject,
    take: Script,
    end: Script,
    ends: Ends,
    /// Tells this process's requests from those of others.
    process: u64,
    requests: AtomicU64,
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("link", &self.link).finish_non_exhaustive()
    }
}

impl RedisStore {
    /// Counts what `subject`s have in the Redis of `link`; `process` tells its requests from those of other pickers. `lost` is called when Redis will not
    /// be told that a request has ended.
    #[must_use]
    pub fn new(link: Arc<RedisLink>, subject: Subject, process: u64, lost: impl Fn() + Send + Sync + 'static) -> Self {
        let (take, end) = (Script::new(TAKE), Script::new(END));
        Self { link, subject, take, end, ends: Ends::new(lost), process, requests: AtomicU64::new(0) }
    }

    /// The Redis that it counts in.
    #[must_use]
    pub fn link(&self) -> &Arc<RedisLink> {
        &self.link
    }

    /// Books what is claimed.
    ///
    /// # Errors
    /// When Redis gives no answer; what is used up is an answer. A place that it may have given all the same is given back.
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

    /// A request that was booked has ended: changes what `change` says of the windows of `at`, and frees its place. Nobody waits for that; while Redis
    /// can't be told it is tried again.
    pub fn end(self: &Arc<Self>, name: Arc<str>, place: Place, change: Change, at: Wall) {
        let (store, end) = (self.clone(), End { name, place, change, at });
        self.ends.spawn(async move { store.ends.tell(&store, end).await }, self.link.runtime());
    }

    /// Waits until Redis has been told of all that has ended.
    pub async fn told(&self) {
        self.ends.told().await;
    }

    async fn tell(&self, end: &End) -> Result<(), LinkError> {
        let mut script = self.end.prepare_invoke();
        keys(&mut script, self.subject, &end.name, end.at);
        script.arg(&end.counts()).arg(self.member(end.place));
        self.link.run::<i64>(&script).await.map(drop)
    }

    fn member(&self, place: Place) -> String {
        format!("{:016x}-{:x}", self.process, place.request)
    }

    /// Whether answers tell what was had of it, whatever its bound.
    fn tells(&self, bound: Bound) -> bool {
        self.subject == Subject::Tenant && matches!(bound, Bound::RequestsPerMinute | Bound::TokensPerMinute)
    }
}

/// The counters of the tenant or model of this name at `at`, in the order of [`Bound::ALL`].
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
