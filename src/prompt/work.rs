//! The bound on the work for one prompt: the bytes that it may hold, and whether anything still waits for its outcome.
//!
//! One [`Work`] goes from the request's body to the last block key. What builds values, renders or encodes charges the bytes that it holds and
//! checks between its steps. Work that is stopped ends at the next check.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// A prompt's work may hold 3 times the bytes of its body, beside the body itself: the copy that is worked on, its values, and the prompt.
pub const DEFAULT_WORK_FACTOR: usize = 3;
/// And 256 KiB more, which short requests with many small values take.
pub const DEFAULT_WORK_HEAD_ROOM: usize = 256 << 10;

/// Why work ended before it was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Stopped {
    /// Nothing waits for it any more.
    #[error("nothing waits for the prompt any more")]
    Cancelled,
    /// It would hold more bytes than it may.
    #[error("the prompt takes more memory than its body's size allows")]
    TooLarge,
}

/// The bound on one prompt's work. Clones share it.
#[derive(Clone, Debug)]
pub struct Work(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    left: AtomicUsize,
    cancelled: AtomicBool,
    overdrawn: AtomicBool,
}

impl Work {
    /// The work for a body of so many bytes: [`DEFAULT_WORK_FACTOR`] times as many, and [`DEFAULT_WORK_HEAD_ROOM`].
    #[must_use]
    pub fn for_body(bytes: usize) -> Self {
        Self::within(bytes.saturating_mul(DEFAULT_WORK_FACTOR).saturating_add(DEFAULT_WORK_HEAD_ROOM))
    }

    /// Work that may hold so many bytes.
    #[must_use]
    pub fn within(bytes: usize) -> Self {
        let (cancelled, overdrawn) = (AtomicBool::new(false), AtomicBool::new(false));
        Self(Arc::new(Shared { left: AtomicUsize::new(bytes), cancelled, overdrawn }))
    }

    /// Nothing waits for the outcome any more: the work ends at its next check.
    pub fn cancel(&self) {
        self.0.cancelled.store(true, Relaxed);
    }

    /// Whether the work is to go on.
    ///
    /// # Errors
    /// Why it is not.
    pub fn check(&self) -> Result<(), Stopped> {
        if self.0.overdrawn.load(Relaxed) {
            return Err(Stopped::TooLarge);
        }
        if self.0.cancelled.load(Relaxed) { Err(Stopped::Cancelled) } else { Ok(()) }
    }

    /// Bytes that it may still hold.
    #[must_use]
    pub fn left(&self) -> usize {
        self.0.left.load(Relaxed)
    }

    /// Whether `bytes` more would be within the bound. They are not held.
    ///
    /// # Errors
    /// As [`Work::charge`].
    pub fn fits(&self, bytes: usize) -> Result<(), Stopped> {
        if bytes > self.left() {
            self.0.overdrawn.store(true, Relaxed);
        }
        self.check()
    }

    /// Holds `bytes` more.
    ///
    /// # Errors
    /// [`Stopped::TooLarge`] when so many are not left, from then on; else as [`Work::check`].
    pub fn charge(&self, bytes: usize) -> Result<(), Stopped> {
        if self.0.left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(bytes)).is_err() {
            self.0.overdrawn.store(true, Relaxed);
        }
        self.check()
    }

    /// Holds `bytes` no longer, which were charged.
    pub fn release(&self, bytes: usize) {
        self.0.left.fetch_add(bytes, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_ends_at_its_bytes_or_when_it_is_cancelled() {
        let work = Work::within(10);
        assert_eq!(work.charge(6), Ok(()));
        work.release(2);
        assert_eq!((work.left(), work.charge(6)), (6, Ok(())));
        assert_eq!(work.charge(1), Err(Stopped::TooLarge));
        assert_eq!(work.check(), Err(Stopped::TooLarge), "it does not go on after that");
        let (work, other) = (Work::within(10), Work::within(10));
        work.clone().cancel();
        assert_eq!(
            (work.check(), work.charge(1), other.check()),
            (Err(Stopped::Cancelled), Err(Stopped::Cancelled), Ok(()))
        );
        assert_eq!(Work::for_body(1_000).left(), 3_000 + DEFAULT_WORK_HEAD_ROOM);
    }
}
