//! Defaults of what tenants may have, the Redis where that stands, and whose names become labels of metrics.

use attache_quota::OnStoreFailure;
use std::collections::BTreeSet;
use std::time::Duration;

/// 512 tokens: a long paragraph, booked for an answer whose request does not bound it.
pub const DEFAULT_ANSWER_TOKENS: u32 = 512;
/// 1,024 tokens: a short prompt and a long paragraph, booked for a request on a path of no known API.
pub const DEFAULT_UNKNOWN_PATH_TOKENS: u32 = 1_024;
/// 50 ms for Redis: a hundred times what it takes nearby, and far below Envoy's 200 ms for a message.
pub const DEFAULT_STORE_TIMEOUT: Duration = Duration::from_millis(50);
/// 10 s between two looks at the SLO profiles in Redis: as often as AIBrix looks.
pub const DEFAULT_PROFILE_REFRESH: Duration = Duration::from_secs(10);
/// 10 s for which a tenant's record counts once it has been read: a change takes effect while somebody still waits for it.
pub const DEFAULT_RECORD_TTL: Duration = Duration::from_secs(10);
/// 20 names: what fits on a graph.
pub const DEFAULT_TOP_NAMES: usize = 20;
/// 1,000 names: more make scrapes slow.
pub const MAX_TOP_NAMES: usize = 1_000;

/// A Redis, and how requests deal with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisSettings {
    /// `redis://` or, over TLS, `rediss://`.
    pub url: String,
    /// How long a request waits.
    pub timeout: Duration,
    /// What becomes of it then.
    pub on_failure: OnStoreFailure,
    /// Between two looks at the SLO profiles there.
    pub profile_refresh: Duration,
}

/// Whose names become labels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelSettings {
    /// Of models.
    pub models: NameSettings,
    /// Of tenants.
    pub tenants: NameSettings,
}

/// Which names become labels; all others share one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameSettings {
    /// These always.
    pub allow: BTreeSet<String>,
    /// And so many of those seen most often.
    pub top: usize,
}

impl Default for NameSettings {
    fn default() -> Self {
        Self { allow: BTreeSet::new(), top: DEFAULT_TOP_NAMES }
    }
}
