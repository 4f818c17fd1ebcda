//! Limit on the work for one prompt: the memory that it may hold, and whether a request still waits for it.
//!
//! One [`WorkLimit`] covers the path from the request's body to the last block key. Code that builds values,
//! renders or encodes charges the bytes that it holds, and checks the limit between its steps. Stopped work
//! ends at the next check.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// Memory for a prompt, as a multiple of its body, besides the body itself: a copy, its
/// values, and the rendered prompt.
pub(crate) const DEFAULT_WORK_FACTOR: usize = 3;
/// Memory for a prompt beyond the multiple, 256 KiB, for short requests with many small values.
pub(crate) const DEFAULT_WORK_HEAD_ROOM: usize = 256 << 10;

/// The reason for which work ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Stopped {
    /// No request waits for it any more.
    #[error("nothing waits for the prompt any more")]
    Cancelled,
    /// It exceeded its memory limit.
    #[error("the prompt takes more memory than its body's size allows")]
    TooLarge,
}

/// The limit on one prompt's work. Clones share it.
#[derive(Clone, Debug)]
pub struct WorkLimit(Arc<WorkState>);

#[derive(Debug)]
struct WorkState {
    left: AtomicUsize,
    cancelled: AtomicBool,
    overdrawn: AtomicBool,
}

impl WorkLimit {
    /// Creates the work for a body of `bytes` bytes: `DEFAULT_WORK_FACTOR` times as many, plus
    /// `DEFAULT_WORK_HEAD_ROOM`.
    #[must_use]
    pub fn for_body(bytes: usize) -> Self {
        Self::within(bytes.saturating_mul(DEFAULT_WORK_FACTOR).saturating_add(DEFAULT_WORK_HEAD_ROOM))
    }

    /// Creates work that may hold this many bytes.
    #[must_use]
    pub fn within(bytes: usize) -> Self {
        let (cancelled, overdrawn) = (AtomicBool::new(false), AtomicBool::new(false));
        Self(Arc::new(WorkState { left: AtomicUsize::new(bytes), cancelled, overdrawn }))
    }

    /// Cancels the work, when no request waits for it: it ends at its next check.
    pub fn cancel(&self) {
        self.0.cancelled.store(true, Relaxed);
    }

    /// Checks whether the work may continue.
    ///
    /// # Errors
    /// [`Stopped`] with the reason if not.
    pub fn check(&self) -> Result<(), Stopped> {
        if self.0.overdrawn.load(Relaxed) {
            return Err(Stopped::TooLarge);
        }
        if self.0.cancelled.load(Relaxed) { Err(Stopped::Cancelled) } else { Ok(()) }
    }

    /// Returns the bytes that it may still hold.
    #[must_use]
    pub fn left(&self) -> usize {
        self.0.left.load(Relaxed)
    }

    /// Checks whether `bytes` more would be within the limit, without charging them.
    ///
    /// # Errors
    /// As [`WorkLimit::charge`].
    pub fn fits(&self, bytes: usize) -> Result<(), Stopped> {
        if bytes > self.left() {
            self.0.overdrawn.store(true, Relaxed);
        }
        self.check()
    }

    /// Charges `bytes` more.
    ///
    /// # Errors
    /// [`Stopped::TooLarge`] when fewer are left, also for all later calls; else as [`WorkLimit::check`].
    pub fn charge(&self, bytes: usize) -> Result<(), Stopped> {
        if self.0.left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(bytes)).is_err() {
            self.0.overdrawn.store(true, Relaxed);
        }
        self.check()
    }

    /// Releases `bytes` that were charged.
    pub fn release(&self, bytes: usize) {
        self.0.left.fetch_add(bytes, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_ends_at_its_limit_or_when_cancelled() {
        let work = WorkLimit::within(10);
        assert_eq!(work.charge(6), Ok(()));
        work.release(2);
        assert_eq!((work.left(), work.charge(6)), (6, Ok(())));
        assert_eq!(work.charge(1), Err(Stopped::TooLarge));
        assert_eq!(work.check(), Err(Stopped::TooLarge), "it stays stopped");
        let (work, other) = (WorkLimit::within(10), WorkLimit::within(10));
        work.clone().cancel();
        assert_eq!(
            (work.check(), work.charge(1), other.check()),
            (Err(Stopped::Cancelled), Err(Stopped::Cancelled), Ok(()))
        );
        assert_eq!(WorkLimit::for_body(1_000).left(), 3_000 + DEFAULT_WORK_HEAD_ROOM);
    }
}
