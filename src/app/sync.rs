//! State that is shared with other pickers over NATS, if `sync` is configured.

use attache_admin::Source;
use attache_config::Settings;
use attache_picker::ActiveConfig;
use attache_sync::{Replica, SharedPressure};
use attache_telemetry::sync::{LinkStatus, SyncCollector};
use attache_types::clock::Clock;
use std::sync::Arc;

use attache_feeds::Feeds;
use attache_serving::health::Readiness;
pub(super) use over_nats::Sync;
use tokio_util::sync::CancellationToken;

#[cfg_attr(not(feature = "full"), path = "sync/absent.rs")]
mod over_nats;
