//! The shared Redis: connection, quota store, SLO profiles. Kept over reloads that do not change it.

use attache_config::Settings;
use attache_quota::Subject;
use attache_scheduling::Choices;
use attache_telemetry::metrics::Metrics;
use std::sync::Arc;

pub(super) use shared::Redis;

#[cfg_attr(not(feature = "full"), path = "redis/absent.rs")]
mod shared;
