//! Limits on requests, tenants and models, and the Redis that counts them.

use super::declare::{self, Kind, Setting};
use crate::defaults::MIN_INTERVAL;
use crate::settings::tenants::{
    DEFAULT_ANSWER_TOKENS, DEFAULT_PROFILE_REFRESH, DEFAULT_RECORD_TTL, DEFAULT_STORE_TIMEOUT,
    DEFAULT_UNKNOWN_PATH_TOKENS,
};
use crate::settings::{CountIn, OnStoreFailure, OnUnknownUser, UnknownPaths};
use attache_config_schema::decode::{Bytes, Read, Sink};
use attache_config_schema::diagnostic::At;
use attache_config_schema::document::{Node, Value};
use attache_types::limits::Limits;
use std::time::Duration;

/// Bytes of at least 1.
const fn up_to(bytes: u64) -> std::ops::RangeInclusive<Bytes> {
    Bytes(1)..=Bytes(bytes)
}

sections! {
    /// Limits on requests, tenants and models. `src/types/limits.rs` has the reason of each default.
    LimitsSection fills Limits {
        /// Largest body of a request.
        "maxBodyBytes" => max_body_bytes: Bytes {
            default: Bytes(Limits::default().max_body_bytes); range: up_to(1 << 32); unit: "bytes";
        },
        /// Bodies of all requests and unfinished messages. Beyond it slow uploads end first, then the largest.
        "maxBufferedBytes" => max_buffered_bytes: Bytes {
            default: Bytes(Limits::default().max_buffered_bytes); range: up_to(1 << 40); unit: "bytes";
        },
        /// Unfinished uploads of one tenant; without a tenant, of one client connection if Envoy sends `connection.id`.
        "maxUploadBytesPerClient" => max_upload_bytes_per_client: Bytes {
            absent: "half of `maxBufferedBytes`"; range: up_to(1 << 40); unit: "bytes";
        },
        /// Slowest upload, from the first byte of a body.
        "minUploadRate" => min_upload_rate: Bytes {
            default: Bytes(Limits::default().min_upload_rate); range: up_to(1 << 32); unit: "bytes/s";
        },
        /// Time for which an upload may be slower than that.
        "uploadGrace" => upload_grace: Duration {
            default: Limits::default().upload_grace; range: Duration::from_secs(1)..;
        },
        /// Deepest nesting of a JSON body.
        "maxJsonDepth" => max_json_depth: u32 { default: Limits::default().max_json_depth; range: 1..=128; unit: "levels"; },
        /// Values and keys in a JSON body.
        "maxJsonValues" => max_json_values: u32 { default: Limits::default().max_json_values; range: 1..; unit: "values"; },
        /// Messages of a conversation.
        "maxMessages" => max_messages: u32 { default: Limits::default().max_messages; range: 1..; unit: "messages"; },
        /// Prompts of a batch.
        "maxPrompts" => max_prompts: u32 { default: Limits::default().max_prompts; range: 1..; unit: "prompts"; },
        /// Length of a model's name.
        "maxModelBytes" => max_model_bytes: Bytes {
            default: Bytes(Limits::default().max_model_bytes.into()); range: up_to(4096); unit: "bytes";
        },
        /// Length of a `cache_salt`.
        "maxCacheSaltBytes" => max_cache_salt_bytes: Bytes {
            default: Bytes(Limits::default().max_cache_salt_bytes.into()); range: up_to(65_536); unit: "bytes";
        },
        /// Headers of a request. Envoy's limit (`max_request_headers_kb`) is 60 KiB by default, with the headers that Attaché
        /// adds.
        "maxHeaderBytes" => max_header_bytes: Bytes {
            default: Bytes(Limits::default().max_header_bytes.into()); range: up_to(16 << 20); unit: "bytes";
        },
        /// Number of headers of a request. Envoy's limit (`max_request_headers_count`) is 100 by default, with the headers
        /// that Attaché adds.
        "maxHeaders" => max_headers: u32 { default: Limits::default().max_headers; range: 1..=65_535; unit: "headers"; },
        /// How much of a form is held until its `model` arrives; 64 KiB at most if no rule depends on the model.
        "maxMultipartSniffBytes" => max_multipart_sniff_bytes: Bytes {
            default: Bytes(Limits::default().max_multipart_sniff_bytes.into()); range: up_to(1 << 30); unit: "bytes";
        },
        /// Time from the headers of a request to its last byte.
        "requestTimeout" => request_timeout: Duration { default: Limits::default().request_timeout; range: MIN_INTERVAL..; },
        /// Time from the opening of a stream to Envoy's first message.
        "idleTimeout" => idle_timeout: Duration { default: Limits::default().idle_timeout; range: MIN_INTERVAL..; },
        /// Open ext-proc streams of all gateways. One address may have three quarters of them.
        "maxStreams" => max_streams: u32 {
            default: Limits::default().max_streams; range: 1..; unit: "streams"; restart: true;
        },
        /// Open ext-proc streams of one connection; a gateway opens another one beyond it. `max_concurrent_streams` of the
        /// picker's cluster in Envoy must not be higher.
        "maxStreamsPerConnection" => max_streams_per_connection: u32 {
            default: Limits::default().max_streams_per_connection; range: 1..; unit: "streams"; restart: true;
        },
        /// Rate limits of tenants.
        "tenants" => tenants: Tenants { absent: "no limits"; },
        /// Rate limits of models over all clients.
        "models" => models: Models { absent: "no limits"; },
    }
    /// Rate limits of tenants.
    Tenants {
        /// Limits of each tenant without limits of its own.
        "default" => default: TenantLimits { absent: "unlimited"; },
        /// Limits by tenant. Keys that are absent have the value of `default`.
        "overrides" => overrides: Vec<(At<String>, At<TenantLimits>)> { absent: "none"; },
        /// Tokens that are booked for a response whose request sets no maximum.
        "answerTokens" => answer_tokens: u32 { default: DEFAULT_ANSWER_TOKENS; unit: "tokens"; },
        /// Requests on paths of no known API. `reject` answers 403 if the tokens of the tenant are limited.
        "unknownPaths" => unknown_paths: UnknownPaths { default: UnknownPaths::default(); },
        /// Tokens that are booked for a request on a path of no known API.
        "unknownPathTokens" => unknown_path_tokens: u32 { default: DEFAULT_UNKNOWN_PATH_TOKENS; unit: "tokens"; },
        /// Where requests and tokens are counted.
        "store" => store: CountIn { default: CountIn::default(); },
        /// Limits of single tenants in Redis.
        "userRecords" => user_records: UserRecords { absent: "none"; },
    }
    /// Rate limits of models over all clients.
    Models {
        /// Limits of each model without limits of its own.
        "default" => default: TenantLimits { absent: "unlimited"; },
        /// Limits by model. Keys that are absent have the value of `default`.
        "overrides" => overrides: Vec<(At<String>, At<TenantLimits>)> { absent: "none"; },
        /// Tokens that are booked for a response whose request sets no maximum.
        "answerTokens" => answer_tokens: u32 { default: DEFAULT_ANSWER_TOKENS; unit: "tokens"; },
        /// Where requests and tokens are counted.
        "store" => store: CountIn { default: CountIn::default(); },
    }
    /// Limits of one tenant or model, each a number or `unlimited`.
    TenantLimits {
        /// Requests that begin in one second.
        "requestsPerSecond" => requests_per_second: LimitValue { absent: "`unlimited`"; unit: "requests/s"; },
        /// Requests that begin in one minute.
        "requestsPerMinute" => requests_per_minute: LimitValue { absent: "`unlimited`"; unit: "requests/min"; },
        /// Tokens of prompts and responses in one minute.
        "tokensPerMinute" => tokens_per_minute: LimitValue { absent: "`unlimited`"; unit: "tokens/min"; },
        /// Requests at the same time.
        "concurrency" => concurrency: LimitValue { absent: "`unlimited`"; unit: "requests"; },
        /// Requests that begin on one day, in UTC.
        "requestsPerDay" => requests_per_day: LimitValue { absent: "`unlimited`"; unit: "requests/day"; },
        /// Tokens of prompts and responses on one day, in UTC.
        "tokensPerDay" => tokens_per_day: LimitValue { absent: "`unlimited`"; unit: "tokens/day"; },
    }
    /// Limits of single tenants in Redis.
    UserRecords {
        /// Requests of tenants without a record: the limits of `default`, or status 500 as in AIBrix's gateway.
        "unknown" => unknown: OnUnknownUser { default: OnUnknownUser::default(); },
        /// Time for which a record that was read is used.
        "ttl" => ttl: Duration { default: DEFAULT_RECORD_TTL; range: MIN_INTERVAL..; },
    }
    /// A Redis server, and how requests use it.
    Redis {
        /// `redis://host:port/database`, or `rediss://` over TLS.
        "url" => url: String { absent: "required"; },
        /// Longest wait of a request for Redis. Envoy allows 200 ms for a message by default.
        "timeout" => timeout: Duration { default: DEFAULT_STORE_TIMEOUT; range: MIN_INTERVAL..=Duration::from_secs(5); },
        /// Requests while Redis does not answer.
        "onFailure" => on_failure: OnStoreFailure { default: OnStoreFailure::default(); },
        /// Interval in which SLO profiles are read.
        "profileRefresh" => profile_refresh: Duration { default: DEFAULT_PROFILE_REFRESH; range: MIN_INTERVAL..; },
    }
}

/// A limit: a number, or `unlimited`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitValue(pub Option<u64>);

impl Setting for LimitValue {
    fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self> {
        match &node.value {
            Value::Text(word) if word == "unlimited" => Some(Self(None)),
            Value::Int(_) => <u64 as Read>::read(node, path, sink).map(|n| Self(Some(n))),
            _ => {
                sink.wrong_type(node, path, "a whole number or `unlimited`");
                None
            }
        }
    }

    fn kind() -> Kind {
        Kind::Either(Box::new([u64::kind(), Kind::Word(vec!["unlimited"])]))
    }
}
