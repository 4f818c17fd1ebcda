//! AIBrix's SLO strategies: the queue that its environment implies, the profiles in its Redis, and
//! warnings if profiles are missing.

use crate::aibrix_env::{AibrixDefaults, FROM_REDIS, PROFILES};
use crate::schema::{self, Opt};
use crate::settings::tenants::{DEFAULT_PROFILE_REFRESH, DEFAULT_STORE_TIMEOUT};
use crate::settings::{PoolSettings, RedisSettings};
use attache_config_schema::decode::Sink;
use attache_config_schema::diagnostic::{At, Code, Diagnostic, Span};
use attache_flow::PoolFlow;
use serde_json::Value;

/// The strategies that read profiles.
const NAMES: [&str; 4] = ["slo", "slo-least-load", "slo-least-load-pulling", "slo-pack-load"];
/// The only one of them that never queues requests.
const NEVER_WAITS: &str = "slo-least-load";
/// The detector that reports a full pool when no endpoint has time left by its profile.
const DETECTOR: &str = "slo-load-detector";
/// The ordering by which the request that can wait least goes first.
const ORDERING: &str = "slo-urgency";

fn at<T>(value: T) -> Opt<T> {
    Some(At { value, span: Span::default() })
}

/// Flow control of a pool whose strategy AIBrix's environment names (`is_of_env`) and whose queue is not configured.
pub(super) fn queue(name: &str, is_of_env: bool) -> Opt<schema::FlowControl> {
    let waits = is_of_env && NAMES.contains(&name) && name != NEVER_WAITS;
    let named =
        |name: &str| schema::Strategy { name: At { value: name.to_owned(), span: Span::default() }, parameters: None };
    let default_band = schema::Band { ordering: at(named(ORDERING)), ..schema::Band::default() };
    waits.then(|| {
        let queue = schema::FlowControl {
            enabled: at(true),
            detector: at(named(DETECTOR)),
            default_band: at(default_band),
            ..schema::FlowControl::default()
        };
        At { value: queue, span: Span::default() }
    })
}

/// The Redis in AIBrix's environment.
pub(super) fn redis(env: &AibrixDefaults) -> Option<RedisSettings> {
    if cfg!(not(feature = "full")) {
        return None;
    }
    let url = env.redis_url()?;
    Some(RedisSettings {
        url,
        timeout: DEFAULT_STORE_TIMEOUT,
        on_failure: Default::default(),
        profile_refresh: DEFAULT_PROFILE_REFRESH,
    })
}

/// Warns of strategies without profiles, and of those that requests may select without a queue. `places` are the
/// positions of the pools' strategies, in their order; `has_redis` is whether a Redis is configured.
pub(super) fn tell<'a>(
    pools: impl Iterator<Item = &'a PoolSettings>,
    places: &[(usize, Span)],
    has_redis: bool,
    sink: &mut Sink,
) {
    let has_profiles = |parameters: &Value| {
        let files = parameters.get(PROFILES).and_then(Value::as_array).is_some_and(|files| !files.is_empty());
        files || parameters.get(FROM_REDIS) == Some(&Value::Bool(true))
    };
    for (at, pool) in pools.enumerate() {
        let (position, span) = places.get(at).copied().unwrap_or_default();
        let bare = pool.strategies().find(|(name, parameters)| NAMES.contains(name) && !has_profiles(parameters));
        if let Some((name, _)) = bare {
            let message = format!("`{name}` has no profiles, so that the fewest requests decide");
            let help = if has_redis {
                "`parameters: {profilesFromRedis: true}` reads AIBrix's profiles in `redis`"
            } else {
                "name files in `parameters: {profiles: […]}`, or give `redis` and `parameters: {profilesFromRedis: \
                 true}`"
            };
            let diagnostic = Diagnostic::new(Code::NoEffect, format!("pools[{position}].strategy"), message);
            sink.push(diagnostic.at(span).help(help));
        }
        let waits = |name: &str| NAMES.contains(&name) && name != NEVER_WAITS;
        let named = pool.allowed_strategies().find(|(name, parameters)| waits(name) && has_profiles(parameters));
        let holds = pool.flow.as_ref().is_some_and(PoolFlow::queues_when_saturated);
        if let Some((name, _)) = named.filter(|_| !holds) {
            let message =
                format!("requests that name `{name}` do not wait: a request starts no queue, and the pool has none");
            let help = format!(
                "`flowControl: {{enabled: true, detector: {DETECTOR}, defaultBand: {{ordering: {ORDERING}}}}}` of \
                 the pool"
            );
            let diagnostic = Diagnostic::new(Code::NoEffect, format!("pools[{position}].requestStrategy"), message);
            sink.push(diagnostic.at(span).help(help));
        }
    }
}
