//! Accounting of the memory of request bodies over all streams.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Memory of request bodies and incomplete messages over all streams, in bytes.
#[derive(Debug, Default)]
pub struct Buffered(AtomicU64);

impl Buffered {
    /// Returns the bytes that are held now.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.load(Relaxed)
    }

    /// Accounts for `bytes` more, until the returned value is dropped.
    #[must_use]
    pub fn hold(self: &Arc<Self>, bytes: u64) -> Held {
        let mut held = self.nothing();
        held.grow(bytes);
        held
    }

    /// Returns a share of no bytes, which can grow.
    #[must_use]
    pub fn nothing(self: &Arc<Self>) -> Held {
        Held { bytes: 0, buffered: self.clone() }
    }
}

/// A share of [`Buffered`]; Drop releases it.
#[derive(Debug)]
pub struct Held {
    bytes: u64,
    buffered: Arc<Buffered>,
}

impl Held {
    /// Returns the size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Increases the share by `bytes`.
    pub fn grow(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.buffered.0.fetch_add(bytes, Relaxed);
    }

    /// Changes the share to `bytes`.
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
