//! Who a tenant is, what it may have, the Redis where that stands, and whose names become labels of metrics.

use attache_quota::Limits;
use std::collections::{BTreeMap, BTreeSet};
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

/// How a request's tenant is found. Whoever can write there is trusted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantRule {
    /// Where its name is.
    pub source: TenantSource,
    /// A header of clients that must not reach servers, lower case: it claims to name the tenant and does not.
    pub strip: Option<String>,
}

/// Where a tenant's name is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TenantSource {
    /// In a header that a filter before this one sets, lower case.
    Header(String),
    /// In Envoy's dynamic metadata, as the JWT filter leaves claims there.
    Metadata {
        /// The filter that wrote it.
        namespace: String,
        /// The keys that lead to it, from the outermost.
        path: Vec<String>,
    },
}

/// What tenants may have; or models, of whom each is one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantSettings {
    /// Whoever is not named, and all requests without a tenant together.
    pub default: Limits,
    /// Tenants that are, or models by the servers' names.
    pub overrides: BTreeMap<String, Limits>,
    /// Tokens booked for an answer whose request does not bound it; of a model, for all answers of any request at most.
    pub answer_tokens: u32,
    /// What becomes of requests on paths of no known API, whose tokens can't be estimated.
    pub unknown_paths: UnknownPaths,
    /// Tokens booked for each of them; 0 for models.
    pub unknown_path_tokens: u32,
    /// Where it is counted.
    pub store: CountIn,
    /// Tenants' own limits in Redis, where they are looked up.
    pub user_records: Option<UserRecordSettings>,
}

impl TenantSettings {
    /// What `tenant` may have.
    #[must_use]
    pub fn limits(&self, tenant: &str) -> &Limits {
        self.overrides.get(tenant).unwrap_or(&self.default)
    }
}

/// What becomes of a request on a path of no known API, of a tenant whose tokens are limited. `GET`, `HEAD` and `OPTIONS` cost nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum UnknownPaths {
    /// A flat number of tokens is booked for it, until its response reports a number.
    #[default]
    Estimate,
    /// It is rejected with 403.
    Reject,
}

/// Where what tenants have had is counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CountIn {
    /// In this process, for itself.
    #[default]
    Memory,
    /// In Redis, with other pickers.
    Redis,
}

/// How tenants' own limits are looked up: AIBrix's records `aibrix-users/<name>` in Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserRecordSettings {
    /// What becomes of who has none.
    pub unknown: OnUnknownUser,
    /// How long a record counts once it has been read.
    pub ttl: Duration,
}

/// What becomes of a tenant without a record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnUnknownUser {
    /// It may have what is the default.
    #[default]
    Default,
    /// It is refused with 500, as AIBrix's gateway does.
    Refuse,
}

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

/// What becomes of a request that nobody can count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnStoreFailure {
    /// It goes on: limits are there to be fair, and an outage is not.
    #[default]
    Allow,
    /// 503.
    Refuse,
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
