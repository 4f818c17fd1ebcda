//! Counters of discovery through Kubernetes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};
use tokio::sync::watch;

/// Counters of one pool.
#[derive(Debug, Default)]
pub struct KubeStats {
    events: AtomicU64,
    lists: AtomicU64,
    unreadable: AtomicU64,
    pool_unreadable: AtomicBool,
    pool_missing: watch::Sender<bool>,
    left_out: AtomicI64,
    failures: AtomicU64,
    refused: AtomicU64,
    out_of_touch: AtomicI64,
    status_writes: AtomicU64,
    status_failures: AtomicU64,
}

impl KubeStats {
    /// Number of object changes that the pool received.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.events.load(Relaxed)
    }

    /// Number of complete lists that the pool received.
    #[must_use]
    pub fn lists(&self) -> u64 {
        self.lists.load(Relaxed)
    }

    /// Number of invalid objects that the pool received.
    #[must_use]
    pub fn unreadable(&self) -> u64 {
        self.unreadable.load(Relaxed)
    }

    /// 1 while the `InferencePool` is invalid, else 0.
    #[must_use]
    pub fn is_pool_unreadable(&self) -> i64 {
        self.pool_unreadable.load(Relaxed).into()
    }

    /// Records whether the `InferencePool` is invalid.
    pub fn pool_unreadable(&self, is_so: bool) {
        self.pool_unreadable.store(is_so, Relaxed);
    }

    /// Whether the `InferencePool` does not exist.
    #[must_use]
    pub fn pool_missing(&self) -> watch::Receiver<bool> {
        self.pool_missing.subscribe()
    }

    /// Records whether the `InferencePool` does not exist.
    pub fn set_pool_missing(&self, is_so: bool) {
        self.pool_missing.send_if_modified(|before| std::mem::replace(before, is_so) != is_so);
    }

    /// Number of endpoints beyond the limit, which are not served.
    #[must_use]
    pub fn left_out(&self) -> i64 {
        self.left_out.load(Relaxed)
    }

    /// Records the number of endpoints beyond the limit; returns the previous one.
    pub fn set_left_out(&self, endpoints: usize) -> i64 {
        self.left_out.swap(i64::try_from(endpoints).unwrap_or(i64::MAX), Relaxed)
    }

    /// Number of failed lists and watches.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.failures.load(Relaxed)
    }

    /// Number of lists and watches that the API server refused for a missing right.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused.load(Relaxed)
    }

    /// Number of kinds that can't be followed at the moment, though they should be.
    #[must_use]
    pub fn out_of_touch(&self) -> i64 {
        self.out_of_touch.load(Relaxed)
    }

    /// Number of object statuses that were written.
    #[must_use]
    pub fn status_writes(&self) -> u64 {
        self.status_writes.load(Relaxed)
    }

    /// Number of object statuses that could not be written.
    #[must_use]
    pub fn status_failures(&self) -> u64 {
        self.status_failures.load(Relaxed)
    }

    /// Counts a write of a status, successful or not.
    pub fn status_written(&self, well: bool) {
        let counter = if well { &self.status_writes } else { &self.status_failures };
        counter.fetch_add(1, Relaxed);
    }

    /// Counts one object change.
    pub fn event(&self) {
        self.events.fetch_add(1, Relaxed);
    }

    /// Counts one complete list.
    pub fn list(&self) {
        self.lists.fetch_add(1, Relaxed);
    }

    /// Counts one invalid object.
    pub fn unread(&self) {
        self.unreadable.fetch_add(1, Relaxed);
    }

    /// Counts a failed list or watch, and whether it was refused.
    pub fn failure(&self, refused: bool) {
        self.failures.fetch_add(1, Relaxed);
        if refused {
            self.refused.fetch_add(1, Relaxed);
        }
    }

    /// Counts a kind as lost until the returned value is dropped.
    #[must_use]
    pub fn lose(self: &Arc<Self>) -> Loss {
        self.out_of_touch.fetch_add(1, Relaxed);
        Loss(self.clone())
    }
}

/// Counts a kind that can't be followed at the moment, while it exists.
#[derive(Debug)]
pub struct Loss(Arc<KubeStats>);

impl Drop for Loss {
    fn drop(&mut self) {
        self.0.out_of_touch.fetch_sub(1, Relaxed);
    }
}
