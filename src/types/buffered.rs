//! Memory of request bodies, accounted over all streams.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Memory that request bodies and unfinished messages take, over all streams.
#[derive(Debug, Default)]
pub struct Buffered(AtomicU64);

impl Buffered {
    /// Bytes held now.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.load(Relaxed)
    }

    /// Accounts for `bytes` more, until what it gives is dropped.
    #[must_use]
    pub fn hold(self: &Arc<Self>, bytes: u64) -> Held {
        let mut held = self.nothing();
        held.grow(bytes);
        held
    }

    /// A share of no bytes, which can grow.
    #[must_use]
    pub fn nothing(self: &Arc<Self>) -> Held {
        Held { bytes: 0, buffered: self.clone() }
    }
}

/// A share of [`Buffered`]. Gives it back on Drop.
#[derive(Debug)]
pub struct Held {
    bytes: u64,
    buffered: Arc<Buffered>,
}

impl Held {
    /// Its size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Adds `bytes` to it.
    pub fn grow(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.buffered.0.fetch_add(bytes, Relaxed);
    }

    /// Makes it this large.
    pub fn resize(&mut self, bytes: u64) {
        match bytes.checked_sub(self.bytes) {
            Some(more) => self.grow(more),
            None => {
                self.buffered.0.fetch_sub(self.bytes - bytes, Relaxed);
                self.bytes = bytes;
            }
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.buffered.0.fetch_sub(self.bytes, Relaxed);
    }
}
