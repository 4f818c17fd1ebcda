//! Error responses of one endpoint that a request can cause: a prompt that crashes a worker, an API that the model does
//! not serve.
//!
//! A run is the error responses of one API since its last success. A run ejects the endpoint when both conditions hold:
//!
//! - It has as many error responses as [`HealthPolicy::consecutive_failures`].
//! - For a period, the endpoint had no success in any API but the list of models. The period is
//!   [`HealthPolicy::error_period`] divided by the number of clients in the run, at most by `consecutive_failures`: a
//!   single failing client is likely the cause itself, five are not.
//!
//! Error responses of one client therefore never eject an endpoint that serves another client meanwhile. Clients that
//! invent identities gain at most a factor of five. Lists of models prove nothing: a server whose model has failed
//! still returns them.

use super::HealthPolicy;
use attache_protocol::Api;
use attache_types::clock::Timestamp;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// Number of clients that a run distinguishes by their hashes, more than any period is divided by.
const CLIENT_SLOTS: u64 = 64;

/// A client, as one of 64 slots: enough to distinguish one failing client from several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(transparent)]
pub struct ClientSlot(u8);

impl ClientSlot {
    /// The slot of the client with this identity. Clients without an identity share the default slot, 0.
    #[must_use]
    pub fn of(identity: &[u8]) -> Self {
        let slot = 1 + xxhash_rust::xxh3::xxh3_64(identity) % (CLIENT_SLOTS - 1);
        Self(u8::try_from(slot).unwrap_or_default())
    }

    fn bit(self) -> u64 {
        1 << (u64::from(self.0) % CLIENT_SLOTS)
    }
}

/// The runs of one endpoint, one for each API.
#[derive(Debug, Default)]
pub(super) struct ErrorRuns {
    /// One bit for each API that has a run, so that a success of another API takes no lock.
    failing: AtomicU32,
    /// Time of the last success in any API but the list of models, in nanoseconds.
    proven_at: AtomicU64,
    /// The clients whose probes have failed since the endpoint was ejected.
    probed_by: AtomicU64,
    runs: Mutex<Vec<Run>>,
}

#[derive(Debug)]
struct Run {
    api: Api,
    began: Timestamp,
    failures: u32,
    /// One bit for each client slot.
    clients: u64,
}

impl ErrorRuns {
    /// Adds an error response to the run of its API. Returns true when that run ejects the endpoint.
    pub(super) fn failed(&self, api: Api, client: ClientSlot, now: Timestamp, policy: &HealthPolicy) -> bool {
        let mut runs = self.runs.lock();
        let at = runs.iter().position(|run| run.api == api).unwrap_or_else(|| {
            runs.push(Run { api, began: now, failures: 0, clients: 0 });
            self.failing.fetch_or(bit(api), Relaxed);
            runs.len() - 1
        });
        let Some(run) = runs.get_mut(at) else { return false };
        run.failures = run.failures.saturating_add(1);
        run.clients |= client.bit();
        let clients = run.clients.count_ones().min(policy.consecutive_failures).max(1);
        let since = run.began.max(Timestamp(self.proven_at.load(Relaxed)));
        run.failures >= policy.consecutive_failures && now.since(since) >= policy.error_period / clients
    }

    /// Records a failed probe of this client. Returns true for the client's first failed probe of this ejection.
    pub(super) fn probed_by(&self, client: ClientSlot) -> bool {
        self.probed_by.fetch_or(client.bit(), Relaxed) & client.bit() == 0
    }

    /// Ends the run of an API after a success.
    pub(super) fn succeeded(&self, api: Api, now: Timestamp) {
        if api != Api::Models {
            self.proven_at.store(now.0, Relaxed);
        }
        if self.failing.load(Relaxed) & bit(api) != 0 {
            let mut runs = self.runs.lock();
            runs.retain(|run| run.api != api);
            self.failing.fetch_and(!bit(api), Relaxed);
        }
    }

    /// Clears all runs, and the probes of an ejection that has ended.
    pub(super) fn clear(&self) {
        self.runs.lock().clear();
        self.failing.store(0, Relaxed);
        self.probed_by.store(0, Relaxed);
    }
}

fn bit(api: Api) -> u32 {
    1 << (api as u32 % u32::BITS)
}
