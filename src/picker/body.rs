//! The request body while it is held: pieces as they came, and one contiguous view for the parser.

use attache_types::error::{Reason, RequestError};
use std::sync::Arc;

pub use attache_types::buffered::{Buffered, Held};

/// Largest piece of a body that is sent in one message, bytes: Envoy advises to stay under 64 KiB, and 62,000
/// measured fastest.
pub const MAX_CHUNK_BYTES: usize = 62_000;
/// Pieces below 4 KiB are copied together: a piece of its own costs an allocation and [`PIECE_BYTES`], many times what
/// a single byte is worth.
const SMALL_PIECE_BYTES: usize = 4 << 10;
/// Memory that a piece takes beside its bytes.
const PIECE_BYTES: u64 = size_of::<Vec<u8>>() as u64;

/// A request body as far as it has come. Gives back its share of [`Buffered`] on Drop.
#[derive(Debug)]
pub struct Body {
    /// None is empty.
    pieces: Vec<Vec<u8>>,
    /// Whether the last piece is a small one, to which the next small one is added.
    gathers: bool,
    messages: usize,
    bytes: u64,
    /// The last byte that is no white space; 0 while there is none.
    last: u8,
    held: Held,
}

impl Body {
    /// An empty body that is accounted in `buffered`.
    #[must_use]
    pub fn new(buffered: &Arc<Buffered>) -> Self {
        Self { pieces: Vec::new(), gathers: false, messages: 0, bytes: 0, last: 0, held: buffered.nothing() }
    }

    /// Adds what came in one message. Accounts for the memory that it takes: more than its length where it is small.
    pub fn push(&mut self, piece: Vec<u8>) {
        self.messages += 1;
        self.bytes += piece.len() as u64;
        if piece.is_empty() {
            return;
        }
        self.last = piece.iter().rev().find(|b| !b.is_ascii_whitespace()).copied().unwrap_or(self.last);
        let small = piece.len() < SMALL_PIECE_BYTES;
        match self.pieces.last_mut() {
            Some(last) if small && self.gathers && last.len() + piece.len() <= MAX_CHUNK_BYTES => {
                let before = last.capacity();
                last.extend_from_slice(&piece);
                let grown = last.capacity() - before;
                if grown > 0 {
                    self.held.grow(grown as u64);
                }
            }
            _ => {
                self.held.grow(piece.capacity() as u64 + PIECE_BYTES);
                self.gathers = small;
                self.pieces.push(piece);
            }
        }
    }

    /// Its length so far, bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.bytes
    }

    /// Memory that it takes, bytes.
    #[must_use]
    pub fn memory(&self) -> u64 {
        self.held.bytes()
    }

    /// Whether nothing has come.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Whether it may be a whole JSON object: its last byte that is no white space closes one.
    #[must_use]
    pub fn may_be_whole(&self) -> bool {
        self.last == b'}'
    }

    /// Messages that it came in.
    #[must_use]
    pub fn messages(&self) -> usize {
        self.messages
    }

    /// The body in one piece: borrowed when it came so, copied into `scratch` otherwise.
    pub fn contiguous<'a>(&'a self, scratch: &'a mut Vec<u8>) -> &'a [u8] {
        match self.pieces.as_slice() {
            [] => &[],
            [only] => only,
            pieces => {
                scratch.reserve_exact(usize::try_from(self.bytes).unwrap_or_default());
                pieces.iter().for_each(|p| scratch.extend_from_slice(p));
                scratch
            }
        }
    }

    /// Takes the pieces out.
    #[must_use]
    pub fn take(&mut self) -> Vec<Vec<u8>> {
        self.bytes = 0;
        self.held.resize(0);
        std::mem::take(&mut self.pieces)
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn body_of_single_bytes_has_little_memory_overhead() {
        let buffered = Arc::<Buffered>::default();
        let mut body = Body::new(&buffered);
        for at in 0..1_000_000u32 {
            body.push(vec![at.to_le_bytes()[0]]);
        }
        assert_eq!((body.len(), body.messages()), (1_000_000, 1_000_000));
        assert_eq!(body.memory(), buffered.bytes());
        let memory: usize = body.pieces.iter().map(|p| p.capacity() + size_of::<Vec<u8>>()).sum();
        assert_eq!(buffered.bytes(), memory as u64);
        assert!(memory < 1_200_000, "{memory} bytes");
        assert_eq!(body.take().len(), 1_000_000_usize.div_ceil(MAX_CHUNK_BYTES));
        assert_eq!(buffered.bytes(), 0);
    }

    #[test]
    fn large_chunks_are_not_copied() {
        let mut body = Body::new(&Arc::default());
        let pieces = [vec![1; SMALL_PIECE_BYTES], vec![2; 16_384], vec![3; 10]];
        let places: Vec<_> = pieces.iter().map(|p| p.as_ptr()).collect();
        pieces.into_iter().for_each(|p| body.push(p));
        assert_eq!(body.take().iter().map(|p| p.as_ptr()).collect::<Vec<_>>(), places, "none was copied");
    }

    proptest! {
        #[test]
        fn body_does_not_depend_on_how_it_is_cut(
            sizes in prop::collection::vec(prop_oneof![0..3usize, 0..9_000usize, 60_000..63_000usize], 0..30),
        ) {
            let buffered = Arc::<Buffered>::default();
            let mut body = Body::new(&buffered);
            let mut sent = Vec::new();
            for (at, size) in sizes.iter().enumerate() {
                let piece = vec![u8::try_from(at).unwrap(); *size];
                sent.extend_from_slice(&piece);
                body.push(piece);
            }
            let mut scratch = Vec::new();
            prop_assert_eq!(body.contiguous(&mut scratch), &sent[..]);
            prop_assert_eq!((body.len(), body.messages()), (sent.len() as u64, sizes.len()));
            let pieces = body.take();
            prop_assert!(pieces.iter().all(|p| !p.is_empty()));
            prop_assert_eq!(pieces.concat(), sent);
            prop_assert_eq!(buffered.bytes(), 0);
        }
    }
}
