//! Division of the process's file descriptors between its listeners.

use super::{ConnectionLimits, Connections};
use rustix::process::{Resource, getrlimit, setrlimit};
use std::sync::Arc;

/// Connections to the ext-proc port: a hundred gateways of 40 workers.
const MAX_EXT_PROC: usize = 4_096;
/// Connections to the central sockets for KV events: as many as a pool has endpoints at most.
const MAX_KV_EVENTS: usize = 4_096;
/// Connections to the health port: Envoy's and Kubernetes' checks.
const MAX_HEALTH: usize = 256;
/// Connections to the admin port: scrapers, probes and people.
const MAX_ADMIN: usize = 64;
/// Bytes that unfinished and queued KV events may hold over all pools, 64 MiB.
const MAX_KV_EVENT_BYTES: usize = 64 << 20;
/// The limit where the system does not name one.
const UNLIMITED: usize = 1 << 20;

/// Raises the soft limit of open files to the hard limit, as Go's runtime does, and returns
/// the limit that applies then.
#[must_use]
pub fn descriptor_limit() -> usize {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        let raised = rustix::process::Rlimit { current: limit.maximum, ..limit };
        if setrlimit(Resource::Nofile, raised).is_ok() {
            limit.current = limit.maximum;
        }
    }
    limit.current.and_then(|n| usize::try_from(n).ok()).unwrap_or(UNLIMITED)
}

/// The connections of every listener of the process.
#[derive(Clone, Debug)]
pub struct Listeners {
    /// Connections to the ext-proc port.
    pub ext_proc: Arc<Connections>,
    /// Connections to the gRPC health port.
    pub health: Arc<Connections>,
    /// Connections to the admin port: metrics and admin pages.
    pub admin: Arc<Connections>,
    /// Connections to all central sockets for KV events.
    pub kv_events: Arc<Connections>,
}

impl Listeners {
    /// Divides `descriptors`: half for ext-proc, an eighth for KV events, a sixteenth each for health and admin. The
    /// remaining quarter is for scrapes, files and the runtime. At most `streams` are open on the ext-proc port.
    #[must_use]
    pub fn of(descriptors: usize, streams: usize) -> Self {
        let share = |part: usize, most: usize| ConnectionLimits::of((descriptors / part).min(most));
        let kv_events = ConnectionLimits { held_bytes: MAX_KV_EVENT_BYTES, ..share(8, MAX_KV_EVENTS) };
        Self {
            ext_proc: Connections::new(ConnectionLimits { streams, ..share(2, MAX_EXT_PROC) }),
            health: Connections::new(share(16, MAX_HEALTH)),
            admin: Connections::new(share(16, MAX_ADMIN)),
            kv_events: Connections::new(kv_events),
        }
    }

    /// Returns each listener with its name in metrics.
    #[must_use]
    pub fn named(&self) -> [(&'static str, &Connections); 4] {
        [("ext-proc", &self.ext_proc), ("health", &self.health), ("admin", &self.admin), ("kv-events", &self.kv_events)]
    }
}
