//! Synchronisation primitives of the index: the standard library's atomics and parking_lot's mutex.
//!
//! All of [`crate::index`] imports them from here. `tests/interleavings` compiles the same files with model atomics
//! instead, whose order of events a test controls.

pub(crate) use parking_lot::Mutex;
pub(crate) use std::hint::spin_loop;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

/// Releases the lock to the thread that waits for it, if any. Otherwise a thread that takes the lock again and again
/// would keep the others waiting.
pub(crate) fn unlock_fair<T>(guard: parking_lot::MutexGuard<'_, T>) {
    parking_lot::MutexGuard::unlock_fair(guard);
}

/// Returns a number that is unique within this process and never 0.
pub(crate) fn unique() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}
