//! AIBrix's SLO strategies where its environment names them: the queue, and the Redis with the profiles, come with the name.

use crate::config::aibrix_env::AibrixDefaults;
use crate::config::diagnostic::{At, Span};
use crate::config::schema::{self, Opt};
use crate::config::settings::RedisSettings;
use crate::config::settings::tenants::{DEFAULT_PROFILE_REFRESH, DEFAULT_STORE_TIMEOUT};

/// The strategies that read profiles.
const NAMES: [&str; 4] = ["slo", "slo-least-load", "slo-least-load-pulling", "slo-pack-load"];
/// The one of them under which no request waits.
const NEVER_WAITS: &str = "slo-least-load";
/// Says that the pool is full when no server has time by its profile.
const DETECTOR: &str = "slo-load-detector";
/// Who can wait least goes first.
const ORDERING: &str = "slo-urgency";

fn at<T>(value: T) -> Opt<T> {
    Some(At { value, span: Span::default() })
}

/// The queue before a pool whose strategy AIBrix's environment names (`is_of_env`) and whose queue nobody describes.
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

/// The Redis of AIBrix's environment, where its strategy reads profiles there and the file names none.
pub(super) fn redis(env: &AibrixDefaults) -> Option<RedisSettings> {
    env.strategy.as_deref().filter(|name| NAMES.contains(name) && cfg!(feature = "redis"))?;
    let url = env.redis_url()?;
    Some(RedisSettings {
        url,
        timeout: DEFAULT_STORE_TIMEOUT,
        on_failure: Default::default(),
        profile_refresh: DEFAULT_PROFILE_REFRESH,
    })
}
