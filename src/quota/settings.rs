//! What the configuration says of limits: who may have what, where it is counted, what becomes of requests that can't
//! be counted.

use super::{Claim, Limits, Subject};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Rate limits of tenants or of models.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantSettings {
    /// Limits of each tenant that is not named, and of all requests without a tenant together.
    pub default: Limits,
    /// Limits of named tenants, or of models by their names on model servers.
    pub overrides: BTreeMap<String, Limits>,
    /// Tokens reserved for a response that the request does not limit. For models, most tokens reserved for the
    /// response of any request.
    pub answer_tokens: u32,
    /// How requests of an unknown API are handled, whose tokens can't be estimated.
    pub unknown_paths: UnknownPaths,
    /// Tokens reserved for each of them; 0 for models.
    pub unknown_path_tokens: u32,
    /// Where usage is counted.
    pub store: CountIn,
    /// Limits of single tenants in Redis, if they are looked up.
    pub user_records: Option<UserRecordSettings>,
}

impl TenantSettings {
    /// What `tenant` may have.
    #[must_use]
    pub fn limits(&self, tenant: &str) -> &Limits {
        self.overrides.get(tenant).unwrap_or(&self.default)
    }

    /// The claim of a request of the tenant or model `name`: its prompt has `prompt` tokens, and its response at most
    /// `answer`.
    #[must_use]
    pub fn claim(&self, subject: Subject, name: Arc<str>, prompt: u64, answer: u64) -> Claim {
        Claim {
            limits: *self.limits(&name),
            is_named: self.overrides.contains_key(&*name),
            name,
            prompt,
            answer: match subject {
                Subject::Tenant => answer,
                // One request with a high `max_tokens` must not use up the quota that all tenants of a model share.
                // Tokens beyond the usual length are charged when the response has ended.
                Subject::Model => answer.min(self.answer_tokens.into()),
            },
        }
    }
}

/// How Attaché handles a request of an unknown API from a tenant with token limits. `GET`, `HEAD` and `OPTIONS` cost
/// nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum UnknownPaths {
    /// Reserve a flat number of tokens, until the response reports its usage.
    #[default]
    Estimate,
    /// Reject it with status 403.
    Reject,
}

/// Where the usage of tenants is counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CountIn {
    /// In this process alone.
    #[default]
    Memory,
    /// In Redis, shared with other pickers.
    Redis,
}

/// How limits of single tenants are looked up: AIBrix's records `aibrix-users/<name>` in Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserRecordSettings {
    /// How tenants without a record are handled.
    pub unknown: OnUnknownUser,
    /// How long a record is cached after it was read.
    pub ttl: Duration,
}

/// How requests of a tenant without a record are handled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnUnknownUser {
    /// The default limits apply.
    #[default]
    Default,
    /// Reject them with status 500, as AIBrix's gateway does.
    Refuse,
}

/// How Attaché handles a request while Redis does not respond.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnStoreFailure {
    /// Admit it: limits exist for fairness, and an outage would affect all.
    #[default]
    Allow,
    /// Reject it with status 503.
    Refuse,
}
