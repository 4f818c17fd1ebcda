//! What the index synchronises by: the standard library's atomics and parking_lot's mutex.
//!
//! All of [`crate::index`] takes them from here, so that `tests/interleavings` can build its very files upon others, which a test
//! schedules.

pub(crate) use parking_lot::Mutex;
pub(crate) use std::hint::spin_loop;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

/// A number that nobody else in this process has been given; never 0.
pub(crate) fn unique() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}
