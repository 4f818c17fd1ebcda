//! Tenants, rate limits, Redis, and names that become metric labels.

use super::{At, Fields, Node, Opt, Read, Sink, word};
use crate::settings::{CountIn, OnStoreFailure, OnUnknownUser, UnknownPaths};
use attache_config_schema::document::Value;
use std::time::Duration;

sections! {
    /// Where the tenant's name is found.
    Tenant {
        "header" => header: String,
        "metadata" => metadata: String,
        "path" => path: Vec<At<String>>,
    }
    /// Rate limits of tenants.
    Tenants {
        "default" => default: TenantLimits,
        "overrides" => overrides: Vec<(At<String>, At<TenantLimits>)>,
        "answerTokens" => answer_tokens: u32,
        "unknownPaths" => unknown_paths: UnknownPaths = word,
        "unknownPathTokens" => unknown_path_tokens: u32,
        "store" => store: CountIn = word,
        "userRecords" => user_records: UserRecords,
    }
    /// Rate limits of models over all clients.
    Models {
        "default" => default: TenantLimits,
        "overrides" => overrides: Vec<(At<String>, At<TenantLimits>)>,
        "answerTokens" => answer_tokens: u32,
        "store" => store: CountIn = word,
    }
    /// Limits of one tenant or model.
    TenantLimits {
        "requestsPerSecond" => requests_per_second: LimitValue,
        "requestsPerMinute" => requests_per_minute: LimitValue,
        "tokensPerMinute" => tokens_per_minute: LimitValue,
        "concurrency" => concurrency: LimitValue,
        "requestsPerDay" => requests_per_day: LimitValue,
        "tokensPerDay" => tokens_per_day: LimitValue,
    }
    /// Limits of single tenants in Redis.
    UserRecords {
        "unknown" => unknown: OnUnknownUser = word,
        "ttl" => ttl: Duration,
    }
    /// A Redis server, and how requests use it.
    Redis {
        "url" => url: String,
        "timeout" => timeout: Duration,
        "onFailure" => on_failure: OnStoreFailure = word,
        "profileRefresh" => profile_refresh: Duration,
    }
    /// Names that become metric labels.
    Labels {
        "models" => models: Names,
        "tenants" => tenants: Names,
    }
    /// Names that become label values; all others share one.
    Names {
        "allow" => allow: Vec<At<String>>,
        "top" => top: usize,
    }
}

/// A limit: a number, or `unlimited`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitValue(pub Option<u64>);

impl Read for LimitValue {
    fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self> {
        match &node.value {
            Value::Text(word) if word == "unlimited" => Some(Self(None)),
            Value::Int(_) => u64::read(node, path, sink).map(|n| Self(Some(n))),
            _ => {
                sink.wrong_type(node, path, "a whole number or `unlimited`");
                None
            }
        }
    }
}
