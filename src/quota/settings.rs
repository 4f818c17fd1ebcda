//! What the configuration says of limits: who may have what, where it is counted, what becomes of requests that can't be counted.

use super::Limits;
use std::collections::BTreeMap;
use std::time::Duration;

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
