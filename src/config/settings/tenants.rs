//! Tenants, their rate limits, the Redis that stores them, and names that become metric labels.

use attache_quota::OnStoreFailure;
use std::collections::BTreeSet;
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
/// 20 names, as many as a graph can show.
pub(crate) const DEFAULT_TOP_NAMES: usize = 20;
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

/// Names that become metric labels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelSettings {
    /// Label values for models.
    pub models: NameSettings,
    /// Label values for tenants.
    pub tenants: NameSettings,
}

/// Names that become label values; all others share one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameSettings {
    /// Names that always get a label value.
    pub allow: BTreeSet<String>,
    /// Number of further names, chosen by frequency.
    pub top: usize,
}

impl Default for NameSettings {
    fn default() -> Self {
        Self { allow: BTreeSet::new(), top: DEFAULT_TOP_NAMES }
    }
}
