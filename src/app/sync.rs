//! State that is shared with other pickers over NATS, if `sync` is configured.

use attache_admin::Source;
use attache_admin::status::CertificateStatus;
use attache_config::Settings;
use attache_ext_proc::Processor;
use attache_picker::ActiveConfig;
use attache_sync::{Replica, Sessions, SharedPressure};
use attache_telemetry::sync::{LinkStatus, SyncCollector};
use attache_types::clock::Clock;
use std::sync::{Arc, Weak};

use attache_feeds::Feeds;
use attache_serving::health::Readiness;
pub(super) use over_nats::Sync;
use tokio_util::sync::CancellationToken;

#[cfg_attr(not(feature = "full"), path = "sync/absent.rs")]
mod over_nats;

/// Passes on the ends of sessions to the picker, which owns the replica.
#[derive(Debug)]
pub(super) struct PeerSessions(pub(super) Weak<Processor>);

impl Sessions for PeerSessions {
    fn ended(&self, session: u64) {
        if let Some(processor) = self.0.upgrade() {
            processor.picker.end_session_of_peer(session);
        }
    }
}
