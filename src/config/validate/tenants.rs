//! The checks of `exchange.tenant`, `limits.tenants`, `limits.models`, `redis` and `telemetry.labels`.

use crate::schema;
use crate::settings::{
    CountIn, LabelSettings, NameSettings, PoolSettings, RedisSettings, TenantRule, TenantSettings, TenantSource,
    UserRecordSettings,
};
use attache_config_schema::decode::Sink;
use attache_config_schema::diagnostic::{At, Code, Diagnostic, Span};
use attache_quota::Limits;
use std::collections::BTreeMap;

/// Checks a header name, and converts it to lower case.
pub(super) fn header(at: &At<String>, path: &str, sink: &mut Sink) -> String {
    if at.value.parse::<http::HeaderName>().is_err() {
        let shown: String = at.value.chars().take(60).collect();
        sink.out_of_range(at.span, path, format!("`{shown}`"), "the name of a header");
    }
    at.value.to_ascii_lowercase()
}

/// Checks how a tenant is determined.
pub(super) fn rule(file: At<schema::Tenant>, sink: &mut Sink) -> Option<TenantRule> {
    const PATH: &str = "exchange.tenant";
    let At { value: file, span } = file;
    let named = file.header.as_ref().map(|at| header(at, &format!("{PATH}.header"), sink));
    if let Some(namespace) = file.metadata {
        let path: Vec<String> = file.path.into_iter().flat_map(|at| at.value).map(|at| at.value).collect();
        if path.is_empty() {
            let message = "`metadata` needs `path`: the keys that lead to the tenant's name";
            let help = "as in `{metadata: envoy.filters.http.jwt_authn, path: [payload, sub]}`";
            sink.push(Diagnostic::new(Code::MissingKey, format!("{PATH}.path"), message).at(namespace.span).help(help));
        }
        return Some(TenantRule { source: TenantSource::Metadata { namespace: namespace.value, path }, strip: named });
    }
    if let Some(at) = file.path {
        let message = "`path` has no effect without `metadata`";
        sink.push(Diagnostic::new(Code::NoEffect, format!("{PATH}.path"), message).at(at.span));
    }
    if named.is_none() {
        let message = "nothing says where the tenant's name is";
        let help = "give `header`, which a filter in front must set, or `metadata` and `path`";
        sink.push(Diagnostic::new(Code::MissingKey, PATH, message).at(span).help(help));
    }
    named.map(|name| TenantRule { source: TenantSource::Header(name), strip: None })
}

/// The limits in `file`, completed from `like`.
fn bounds(file: &schema::TenantLimits, like: &Limits) -> Limits {
    let or = |at: schema::Opt<schema::LimitValue>, like: Option<u64>| at.map_or(like, |at| at.value.0);
    Limits {
        requests_per_second: or(file.requests_per_second, like.requests_per_second),
        requests_per_minute: or(file.requests_per_minute, like.requests_per_minute),
        tokens_per_minute: or(file.tokens_per_minute, like.tokens_per_minute),
        concurrency: or(file.concurrency, like.concurrency),
        requests_per_day: or(file.requests_per_day, like.requests_per_day),
        tokens_per_day: or(file.tokens_per_day, like.tokens_per_day),
    }
}

/// The limits in `file`, unlimited where it names none.
fn bounds_or_none(file: Option<&At<schema::TenantLimits>>) -> Limits {
    file.map_or_else(Limits::default, |at| bounds(&at.value, &Limits::default()))
}

/// The limits by name, completed from `like`.
fn overrides(
    file: &schema::Opt<Vec<(At<String>, At<schema::TenantLimits>)>>,
    like: &Limits,
) -> BTreeMap<String, Limits> {
    let named = file.iter().flat_map(|at| &at.value);
    named.map(|(name, at)| (name.value.clone(), bounds(&at.value, like))).collect()
}

/// Checks the limits of tenants; `redis` is whether a Redis is configured.
pub(super) fn limits(
    file: At<schema::Tenants>,
    rule: Option<&TenantRule>,
    redis: bool,
    sink: &mut Sink,
) -> TenantSettings {
    const PATH: &str = "limits.tenants";
    let At { value: file, span } = file;
    let default = bounds_or_none(file.default.as_ref());
    if rule.is_none() {
        let message = "no source of tenants is configured, so all requests together are one tenant";
        let help = "give `exchange.tenant`";
        sink.push(Diagnostic::new(Code::NoEffect, PATH, message).at(span).help(help));
    }
    if let Some(at) = file.store.filter(|at| at.value == CountIn::Redis && !redis) {
        no_redis(at.span, &format!("{PATH}.store"), "`store: redis`", sink);
    }
    if let Some(at) = file.user_records.as_ref().filter(|_| !redis) {
        no_redis(at.span, &format!("{PATH}.userRecords"), "`userRecords`", sink);
    }
    let records = file.user_records.as_ref().map(|at| &at.value);
    TenantSettings {
        overrides: overrides(&file.overrides, &default),
        default,
        answer_tokens: file.answer_tokens(),
        unknown_paths: file.unknown_paths(),
        unknown_path_tokens: file.unknown_path_tokens(),
        store: file.store(),
        user_records: records.map(|r| UserRecordSettings { unknown: r.unknown(), ttl: r.ttl() }),
    }
}

/// Checks the limits of models; `redis` is whether a Redis is configured.
pub(super) fn models(file: schema::Models, redis: bool, sink: &mut Sink) -> TenantSettings {
    let default = bounds_or_none(file.default.as_ref());
    if let Some(at) = file.store.filter(|at| at.value == CountIn::Redis && !redis) {
        no_redis(at.span, "limits.models.store", "`store: redis`", sink);
    }
    TenantSettings {
        overrides: overrides(&file.overrides, &default),
        default,
        answer_tokens: file.answer_tokens(),
        unknown_paths: Default::default(),
        unknown_path_tokens: 0,
        store: file.store(),
        user_records: None,
    }
}

/// Reports that `what` reads Redis and none is configured.
fn no_redis(span: Span, path: &str, what: &str, sink: &mut Sink) {
    let message = format!("{what} needs `redis`, which says where it is");
    let help = "as in `redis: {url: \"redis://localhost:6379/0\"}`, beside `limits` and `pools`";
    sink.push(Diagnostic::new(Code::MissingKey, path, message).at(span).help(help));
}

/// Checks that settings which read Redis have one. Returns whether Redis is read; `places` are the positions of the
/// pools' strategies, in their order.
pub(super) fn who_reads<'a>(
    given: Option<Span>,
    limits: [Option<&TenantSettings>; 2],
    pools: impl Iterator<Item = &'a PoolSettings>,
    places: &[(usize, Span)],
    sink: &mut Sink,
) -> bool {
    let counts = |l: &TenantSettings| l.store == CountIn::Redis || l.user_records.is_some();
    let mut read = limits.into_iter().flatten().any(counts);
    for (at, _) in pools.enumerate().filter(|(_, pool)| pool.reads_redis()) {
        read = true;
        if given.is_none() {
            let (position, span) = places.get(at).copied().unwrap_or_default();
            no_redis(span, &format!("pools[{position}].strategy"), "`profilesFromRedis`", sink);
        }
    }
    read
}

/// Warns of a configured Redis that is not read.
pub(super) fn tell_unread(span: Span, sink: &mut Sink) {
    let message = "nothing is read or counted in `redis`";
    let help = "`store: redis` and `userRecords` in `limits` do, and strategies with `profilesFromRedis`";
    sink.push(Diagnostic::new(Code::NoEffect, "redis", message).at(span).help(help));
}

/// Checks the connection to Redis.
pub(super) fn redis(file: At<schema::Redis>, sink: &mut Sink) -> Option<RedisSettings> {
    const PATH: &str = "redis";
    let At { value: file, span } = file;
    let (timeout, on_failure, profile_refresh) = (file.timeout(), file.on_failure(), file.profile_refresh());
    if cfg!(not(feature = "full")) {
        let message = "this build can't ask Redis (it lacks the feature `full`)";
        sink.push(Diagnostic::new(Code::Contradiction, PATH, message).at(span));
    }
    let Some(url) = file.url else {
        sink.push(Diagnostic::new(Code::MissingKey, format!("{PATH}.url"), "`url` is missing").at(span));
        return None;
    };
    let good =
        ["redis://", "rediss://"].iter().any(|scheme| url.value.len() > scheme.len() && url.value.starts_with(scheme));
    if !good {
        let message = "`url` is not the URL of a Redis";
        let help = "as in `redis://localhost:6379/0`, or `rediss://` over TLS";
        sink.push(Diagnostic::new(Code::BadUrl, format!("{PATH}.url"), message).at(url.span).help(help));
    }
    Some(RedisSettings { url: url.value, timeout, on_failure, profile_refresh })
}

/// The names that become labels of metrics.
pub(super) fn labels(file: schema::Labels) -> LabelSettings {
    let names = |file: schema::Opt<schema::Names>| {
        let file = file.map(|at| at.value).unwrap_or_default();
        let top = file.top();
        NameSettings { allow: file.allow.into_iter().flat_map(|at| at.value).map(|at| at.value).collect(), top }
    };
    LabelSettings { models: names(file.models), tenants: names(file.tenants) }
}
