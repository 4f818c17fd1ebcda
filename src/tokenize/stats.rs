//! What the remote tokenizers of one pool did.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Upper bounds of the latency buckets, milliseconds; one more bucket holds what took longer.
pub const LATENCY_BOUNDS_MS: [u64; 12] = [1, 2, 5, 10, 20, 50, 100, 200, 400, 1_000, 2_000, 5_000];

/// Why a request got no tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// A request that the tokenizer's API has no words for.
    Unsupported,
    /// No server to ask.
    NoEndpoint,
    /// The model's tokenizer failed before, and no probe has succeeded since.
    Unhealthy,
    /// Too many models.
    TooManyModels,
    /// Too many calls at once.
    Busy,
    /// Not in time for the decision.
    Late,
    /// The server refused the request (4xx).
    Refused,
    /// No connection.
    Connect,
    /// No answer in time.
    Timeout,
    /// An error of the server's (5xx, 429, no permission).
    Status,
    /// A redirect.
    Redirect,
    /// An answer larger than the cap.
    TooLarge,
    /// The connection broke.
    Broken,
    /// An answer without usable tokens.
    Garbled,
}

impl Reason {
    /// All of them, in the order of their counters.
    pub const ALL: [Reason; 14] = [
        Reason::Unsupported,
        Reason::NoEndpoint,
        Reason::Unhealthy,
        Reason::TooManyModels,
        Reason::Busy,
        Reason::Late,
        Reason::Refused,
        Reason::Connect,
        Reason::Timeout,
        Reason::Status,
        Reason::Redirect,
        Reason::TooLarge,
        Reason::Broken,
        Reason::Garbled,
    ];

    /// The name in metric labels and logs.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Reason::Unsupported => "unsupported",
            Reason::NoEndpoint => "no_endpoint",
            Reason::Unhealthy => "unhealthy",
            Reason::TooManyModels => "too_many_models",
            Reason::Busy => "busy",
            Reason::Late => "late",
            Reason::Refused => "refused",
            Reason::Connect => "connect",
            Reason::Timeout => "timeout",
            Reason::Status => "status",
            Reason::Redirect => "redirect",
            Reason::TooLarge => "too_large",
            Reason::Broken => "broken",
            Reason::Garbled => "garbled",
        }
    }
}

/// Counters since the process started, and two gauges.
#[derive(Debug, Default)]
pub struct RemoteStats {
    requests: AtomicU64,
    cache_hits: AtomicU64,
    shared: AtomicU64,
    calls: AtomicU64,
    failures: [AtomicU64; Reason::ALL.len()],
    probes: AtomicU64,
    failed_probes: AtomicU64,
    latency_nanos: AtomicU64,
    latency_buckets: [AtomicU64; LATENCY_BOUNDS_MS.len() + 1],
    active_models: AtomicU64,
    unhealthy_models: AtomicU64,
    by_model: Mutex<BTreeMap<Arc<str>, ModelStats>>,
}

/// What the tokenizer of one model did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelStats {
    /// How often it gave its first tokens: a model that was closed begins anew.
    pub creations: u64,
    /// Calls and probes without tokens.
    pub failures: u64,
    /// Calls that brought tokens, in the buckets of [`RemoteStats::latency_buckets`].
    pub buckets: [u64; LATENCY_BOUNDS_MS.len() + 1],
    /// What those calls took together.
    pub took: Duration,
}

/// Stands for all models that have given no tokens: their names are clients' words.
pub const UNPROVEN: &str = "other";

impl RemoteStats {
    /// Requests for tokens.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.requests.load(Relaxed)
    }

    /// Of those, answered from the cache.
    #[must_use]
    pub fn cache_hits(&self) -> u64 {
        self.cache_hits.load(Relaxed)
    }

    /// Of those, that waited for the call of an equal request.
    #[must_use]
    pub fn shared(&self) -> u64 {
        self.shared.load(Relaxed)
    }

    /// Calls to servers, repeated attempts and probes included.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.calls.load(Relaxed)
    }

    /// Requests that got no tokens, for one reason.
    #[must_use]
    pub fn failures(&self, reason: Reason) -> u64 {
        self.failures.get(reason as usize).map_or(0, |n| n.load(Relaxed))
    }

    /// Probes that have ended.
    #[must_use]
    pub fn probes(&self) -> u64 {
        self.probes.load(Relaxed)
    }

    /// Of those, without tokens.
    #[must_use]
    pub fn failed_probes(&self) -> u64 {
        self.failed_probes.load(Relaxed)
    }

    /// Calls that brought tokens, in the bucket of their duration: up to each of [`LATENCY_BOUNDS_MS`], and longer. Not cumulative.
    #[must_use]
    pub fn latency_buckets(&self) -> [u64; LATENCY_BOUNDS_MS.len() + 1] {
        self.latency_buckets.each_ref().map(|n| n.load(Relaxed))
    }

    /// What those calls took together.
    #[must_use]
    pub fn latency_sum(&self) -> Duration {
        Duration::from_nanos(self.latency_nanos.load(Relaxed))
    }

    /// Models in use.
    #[must_use]
    pub fn active_models(&self) -> u64 {
        self.active_models.load(Relaxed)
    }

    /// Models in use whose tokenizer fails: their requests have no token keys.
    #[must_use]
    pub fn unhealthy_models(&self) -> u64 {
        self.unhealthy_models.load(Relaxed)
    }

    /// What the tokenizer of each model did; those that never gave tokens are [`UNPROVEN`] together.
    #[must_use]
    pub fn by_model(&self) -> BTreeMap<Arc<str>, ModelStats> {
        self.by_model.lock().clone()
    }

    /// Changes what is counted of a model. Of those that are closed, no more than `most` models are remembered.
    pub(super) fn of_model(&self, model: &str, most: usize, change: impl FnOnce(&mut ModelStats)) {
        let mut all = self.by_model.lock();
        let is_new = !all.contains_key(model);
        if is_new && all.len() > most && model != UNPROVEN {
            return;
        }
        change(all.entry(model.into()).or_default());
    }

    pub(super) fn count_request(&self) {
        self.requests.fetch_add(1, Relaxed);
    }

    pub(super) fn count_cache_hit(&self) {
        self.cache_hits.fetch_add(1, Relaxed);
    }

    pub(super) fn count_shared(&self) {
        self.shared.fetch_add(1, Relaxed);
    }

    pub(super) fn count_call(&self) {
        self.calls.fetch_add(1, Relaxed);
    }

    pub(super) fn count_failure(&self, reason: Reason) {
        if let Some(n) = self.failures.get(reason as usize) {
            n.fetch_add(1, Relaxed);
        }
    }

    pub(super) fn count_probe(&self, succeeded: bool) {
        self.probes.fetch_add(1, Relaxed);
        self.failed_probes.fetch_add(u64::from(!succeeded), Relaxed);
    }

    pub(super) fn count_latency(&self, took: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.latency_nanos.fetch_add(nanos, Relaxed);
        if let Some(n) = self.latency_buckets.get(bucket(took)) {
            n.fetch_add(1, Relaxed);
        }
    }

    pub(super) fn set_models(&self, active: usize, unhealthy: usize) {
        self.active_models.store(active as u64, Relaxed);
        self.unhealthy_models.store(unhealthy as u64, Relaxed);
    }
}

/// The bucket of a duration.
pub(super) fn bucket(took: Duration) -> usize {
    let bucket = LATENCY_BOUNDS_MS.iter().position(|bound| took <= Duration::from_millis(*bound));
    bucket.unwrap_or(LATENCY_BOUNDS_MS.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_has_its_own_counter_and_label() {
        let stats = RemoteStats::default();
        for (i, reason) in Reason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, i);
            stats.count_failure(reason);
            assert_eq!(stats.failures(reason), 1, "{}", reason.label());
        }
        let labels: std::collections::BTreeSet<_> = Reason::ALL.map(Reason::label).into();
        assert_eq!(labels.len(), Reason::ALL.len());
    }

    #[test]
    fn durations_fall_into_their_buckets() {
        let stats = RemoteStats::default();
        for ms in [0, 1, 3, 400, 401, 5_000, 5_001, 60_000] {
            stats.count_latency(Duration::from_millis(ms));
        }
        assert_eq!(stats.latency_buckets(), [2, 0, 1, 0, 0, 0, 0, 0, 1, 1, 0, 1, 2]);
        assert_eq!(stats.latency_sum(), Duration::from_millis(70_806));
    }
}
