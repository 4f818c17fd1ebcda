//! Tenants, their rate limits and the Redis that stores them.

use attache_quota::OnStoreFailure;
use std::time::Duration;

/// 512 tokens, a long paragraph: reserved for a response that the request does not limit.
pub(crate) const DEFAULT_ANSWER_TOKENS: u32 = 512;
/// 1,024 tokens, a short prompt and a long paragraph: reserved for a request of an unknown API.
pub(crate) const DEFAULT_UNKNOWN_PATH_TOKENS: u32 = 1_024;
/// 50 ms for Redis: a hundred times a typical round trip, and far below Envoy's 200 ms for a message.
pub(crate) const DEFAULT_STORE_TIMEOUT: Duration = Duration::from_millis(50);
/// 10 s between two reads of the SLO profiles in Redis, as in AIBrix.
pub(crate) const DEFAULT_PROFILE_REFRESH: Duration = Duration::from_secs(10);
/// 10 s for which a tenant's record is cached, so that a change takes effect soon.
pub(crate) const DEFAULT_RECORD_TTL: Duration = Duration::from_secs(10);
/// 1,000 names: more would make scrapes slow.
pub(crate) const MAX_TOP_NAMES: usize = 1_000;

/// A Redis server, and how requests use it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisSettings {
    /// `redis://` or, over TLS, `rediss://`.
    pub url: String,
    /// How long a request waits for Redis.
    pub timeout: Duration,
    /// How a request is handled after that time.
    pub on_failure: OnStoreFailure,
    /// Time between two reads of the SLO profiles.
    pub profile_refresh: Duration,
}
