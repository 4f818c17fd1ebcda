//! What discovery through Kubernetes counts.

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
    /// Changes of objects that the pool was told of.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.events.load(Relaxed)
    }

    /// Lists that the pool was given to their end.
    #[must_use]
    pub fn lists(&self) -> u64 {
        self.lists.load(Relaxed)
    }

    /// Objects that could not be read.
    #[must_use]
    pub fn unreadable(&self) -> u64 {
        self.unreadable.load(Relaxed)
    }

    /// 1 while the `InferencePool` can't be read as it is.
    #[must_use]
    pub fn is_pool_unreadable(&self) -> i64 {
        self.pool_unreadable.load(Relaxed).into()
    }

    /// Whether the `InferencePool` can't be read as it is.
    pub fn pool_unreadable(&self, is_so: bool) {
        self.pool_unreadable.store(is_so, Relaxed);
    }

    /// Whether there is no such `InferencePool`.
    #[must_use]
    pub fn pool_missing(&self) -> watch::Receiver<bool> {
        self.pool_missing.subscribe()
    }

    /// Whether there is no such `InferencePool`.
    pub fn set_pool_missing(&self, is_so: bool) {
        self.pool_missing.send_if_modified(|before| std::mem::replace(before, is_so) != is_so);
    }

    /// Endpoints that are not served, since there are too many.
    #[must_use]
    pub fn left_out(&self) -> i64 {
        self.left_out.load(Relaxed)
    }

    /// How many they are. Gives how many they were.
    pub fn set_left_out(&self, endpoints: usize) -> i64 {
        self.left_out.swap(i64::try_from(endpoints).unwrap_or(i64::MAX), Relaxed)
    }

    /// Questions that were not answered, or not with what was asked for.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.failures.load(Relaxed)
    }

    /// Those among them that were refused for want of a right.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused.load(Relaxed)
    }

    /// Kinds that are not followed at the moment, though they should be.
    #[must_use]
    pub fn out_of_touch(&self) -> i64 {
        self.out_of_touch.load(Relaxed)
    }

    /// Statuses of objects that were written.
    #[must_use]
    pub fn status_writes(&self) -> u64 {
        self.status_writes.load(Relaxed)
    }

    /// Statuses of objects that could not be written.
    #[must_use]
    pub fn status_failures(&self) -> u64 {
        self.status_failures.load(Relaxed)
    }

    /// A status was written, or could not be.
    pub fn status_written(&self, well: bool) {
        let counter = if well { &self.status_writes } else { &self.status_failures };
        counter.fetch_add(1, Relaxed);
    }

    /// A change was told.
    pub fn event(&self) {
        self.events.fetch_add(1, Relaxed);
    }

    /// A list came to its end.
    pub fn list(&self) {
        self.lists.fetch_add(1, Relaxed);
    }

    /// An object could not be read.
    pub fn unread(&self) {
        self.unreadable.fetch_add(1, Relaxed);
    }

    /// A question was not answered.
    pub fn failure(&self, refused: bool) {
        self.failures.fetch_add(1, Relaxed);
        if refused {
            self.refused.fetch_add(1, Relaxed);
        }
    }

    /// A kind is lost until what comes back is dropped.
    #[must_use]
    pub fn lose(self: &Arc<Self>) -> Loss {
        self.out_of_touch.fetch_add(1, Relaxed);
        Loss(self.clone())
    }
}

/// A kind that is not followed at the moment, though it should be.
#[derive(Debug)]
pub struct Loss(Arc<KubeStats>);

impl Drop for Loss {
    fn drop(&mut self) {
        self.0.out_of_touch.fetch_sub(1, Relaxed);
    }
}
