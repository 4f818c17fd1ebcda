//! Counters of one pool's remote tokenizers.

use attache_types::labels::Counts;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Upper bounds of the latency buckets in milliseconds; one more bucket has all longer calls.
pub const LATENCY_BOUNDS_MS: [u64; 12] = [1, 2, 5, 10, 20, 50, 100, 200, 400, 1_000, 2_000, 5_000];

attache_types::labels! {
    /// The reason for which a request got no tokens.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Reason {
        /// The tokenizer's API does not support the request.
        Unsupported => "unsupported",
        /// No server was available.
        NoEndpoint => "no_endpoint",
        /// The model's tokenizer has failed before, and no probe has succeeded since.
        Unhealthy => "unhealthy",
        /// The limit of models is reached.
        TooManyModels => "too_many_models",
        /// The limit of concurrent calls is reached.
        Busy => "busy",
        /// The tokens did not arrive in time for the decision.
        Late => "late",
        /// The server rejected the request (4xx).
        Refused => "refused",
        /// The connection could not be established.
        Connect => "connect",
        /// The response was not complete in time.
        Timeout => "timeout",
        /// The server returned an error (5xx, 429, no permission).
        Status => "status",
        /// The response was a redirect.
        Redirect => "redirect",
        /// The response exceeded the size limit.
        TooLarge => "too_large",
        /// The connection was interrupted.
        Broken => "broken",
        /// The response had no valid list of tokens.
        Garbled => "garbled",
    }
}

/// Counters since the process started, and two gauges.
#[derive(Debug, Default)]
pub struct RemoteStats {
    requests: AtomicU64,
    cache_hits: AtomicU64,
    shared: AtomicU64,
    calls: AtomicU64,
    failures: Counts<Reason>,
    probes: AtomicU64,
    failed_probes: AtomicU64,
    active_models: AtomicU64,
    unhealthy_models: AtomicU64,
    by_model: Mutex<BTreeMap<Arc<str>, ModelStats>>,
}

/// Counters of one model's tokenizer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelStats {
    /// How often it returned its first tokens: a model that was removed starts again.
    pub creations: u64,
    /// Calls and probes without tokens.
    pub failures: u64,
    /// Successful calls by duration: up to each of [`LATENCY_BOUNDS_MS`], and longer. Not cumulative.
    pub buckets: [u64; LATENCY_BOUNDS_MS.len() + 1],
    /// Total duration of the successful calls.
    pub took: Duration,
}

/// Stands for all models that have returned no tokens, since clients choose their names.
pub(crate) const UNPROVEN: &str = "other";

impl RemoteStats {
    /// Returns the number of requests for tokens.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.requests.load(Relaxed)
    }

    /// Returns how many of these the cache answered.
    #[must_use]
    pub fn cache_hits(&self) -> u64 {
        self.cache_hits.load(Relaxed)
    }

    /// Returns how many of these waited for the call of an equal request.
    #[must_use]
    pub fn shared(&self) -> u64 {
        self.shared.load(Relaxed)
    }

    /// Returns the number of calls to servers, including repeated attempts and probes.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.calls.load(Relaxed)
    }

    /// Returns the number of requests without tokens, for one reason.
    #[must_use]
    pub fn failures(&self, reason: Reason) -> u64 {
        self.failures.get(reason)
    }

    /// Returns the number of probes that have ended.
    #[must_use]
    pub fn probes(&self) -> u64 {
        self.probes.load(Relaxed)
    }

    /// Returns the number of probes without tokens.
    #[must_use]
    pub fn failed_probes(&self) -> u64 {
        self.failed_probes.load(Relaxed)
    }

    /// Returns the number of models in use.
    #[must_use]
    pub fn active_models(&self) -> u64 {
        self.active_models.load(Relaxed)
    }

    /// Returns the number of models whose tokenizer fails: their requests have no token keys.
    #[must_use]
    pub fn unhealthy_models(&self) -> u64 {
        self.unhealthy_models.load(Relaxed)
    }

    /// Returns the counters of each model's tokenizer; those that never returned tokens are `UNPROVEN` together.
    #[must_use]
    pub fn by_model(&self) -> BTreeMap<Arc<str>, ModelStats> {
        self.by_model.lock().clone()
    }

    /// Changes the counters of a model. Of removed models, at most `most` are kept.
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
        self.failures.count(reason);
    }

    pub(super) fn count_probe(&self, succeeded: bool) {
        self.probes.fetch_add(1, Relaxed);
        self.failed_probes.fetch_add(u64::from(!succeeded), Relaxed);
    }

    pub(super) fn set_models(&self, active: usize, unhealthy: usize) {
        self.active_models.store(active as u64, Relaxed);
        self.unhealthy_models.store(unhealthy as u64, Relaxed);
    }
}

impl ModelStats {
    /// Counts a successful call.
    pub(super) fn count_success(&mut self, took: Duration) {
        self.took += took;
        let bucket = LATENCY_BOUNDS_MS.iter().position(|bound| took <= Duration::from_millis(*bound));
        if let Some(count) = self.buckets.get_mut(bucket.unwrap_or(LATENCY_BOUNDS_MS.len())) {
            *count += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_fall_into_their_buckets() {
        let mut stats = ModelStats::default();
        for ms in [0, 1, 3, 400, 401, 5_000, 5_001, 60_000] {
            stats.count_success(Duration::from_millis(ms));
        }
        assert_eq!(stats.buckets, [2, 0, 1, 0, 0, 0, 0, 0, 1, 1, 0, 1, 2]);
        assert_eq!(stats.took, Duration::from_millis(70_806));
    }
}
