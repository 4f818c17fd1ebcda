//! The request body while it is held: pieces as they came, and one contiguous view for the parser.

use crate::error::{Reason, RequestError};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Bytes of request bodies held over all streams.
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
        self.0.fetch_add(bytes, Relaxed);
        Held { bytes, buffered: self.clone() }
    }
}

/// Bytes that are held beside bodies as they came. Gives back its share of [`Buffered`] on Drop.
#[derive(Debug)]
pub struct Held {
    bytes: u64,
    buffered: Arc<Buffered>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.buffered.0.fetch_sub(self.bytes, Relaxed);
    }
}

/// A request body as far as it has come. Gives back its share of [`Buffered`] on Drop.
#[derive(Debug)]
pub struct Body {
    pieces: Vec<Vec<u8>>,
    bytes: u64,
    buffered: Arc<Buffered>,
}

impl Body {
    /// An empty body that is accounted in `buffered`.
    #[must_use]
    pub fn new(buffered: Arc<Buffered>) -> Self {
        Self { pieces: Vec::new(), bytes: 0, buffered }
    }

    /// Adds a piece.
    pub fn push(&mut self, piece: Vec<u8>) {
        let bytes = piece.len() as u64;
        self.bytes += bytes;
        self.buffered.0.fetch_add(bytes, Relaxed);
        self.pieces.push(piece);
    }

    /// Its length so far, bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.bytes
    }

    /// Whether nothing has come.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Whether it may be a whole JSON object: its last byte that is no white space closes one.
    #[must_use]
    pub fn may_be_whole(&self) -> bool {
        self.pieces.iter().rev().flat_map(|p| p.iter().rev()).find(|b| !b.is_ascii_whitespace()) == Some(&b'}')
    }

    /// Messages that it came in.
    #[must_use]
    pub fn messages(&self) -> usize {
        self.pieces.len()
    }

    /// The body in one piece: borrowed when it came so, copied into `scratch` otherwise.
    pub fn contiguous<'a>(&'a self, scratch: &'a mut Vec<u8>) -> &'a [u8] {
        let mut full = self.pieces.iter().filter(|p| !p.is_empty());
        match (full.next(), full.next()) {
            (None, _) => &[],
            (Some(only), None) => only,
            _ => {
                scratch.reserve_exact(usize::try_from(self.bytes).unwrap_or_default());
                self.pieces.iter().for_each(|p| scratch.extend_from_slice(p));
                scratch
            }
        }
    }

    /// Takes the pieces out.
    #[must_use]
    pub fn take(&mut self) -> Vec<Vec<u8>> {
        self.release();
        std::mem::take(&mut self.pieces)
    }

    fn release(&mut self) {
        self.buffered.0.fetch_sub(std::mem::take(&mut self.bytes), Relaxed);
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        self.release();
    }
}

/// The refusal of a body of at least `got` bytes where `allowed` are.
#[must_use]
pub fn too_large(got: u64, allowed: u64) -> RequestError {
    RequestError::new(
        Reason::BodyTooLarge,
        format!("the request's body is at least {got} bytes, {allowed} are allowed"),
    )
}
