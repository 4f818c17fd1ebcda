//! Hashing of bytes block by block.

use attache_prefix::key::{BlockKey, KeySpace};
use smallvec::SmallVec;
use std::num::NonZeroUsize;

/// Divides bytes into blocks and hashes each in place; only a block that arrives in parts is copied.
#[derive(Clone, Debug)]
pub struct Chain {
    space: KeySpace,
    root: u64,
    block: usize,
    made: usize,
    partial: SmallVec<[u8; 64]>,
}

impl Chain {
    /// Creates a chain of blocks of `block` bytes under `root`.
    #[must_use]
    pub fn new(space: KeySpace, root: u64, block: NonZeroUsize) -> Self {
        Self { space, root, block: block.get(), made: 0, partial: SmallVec::new() }
    }

    /// Returns the number of keys made so far.
    #[must_use]
    pub fn made(&self) -> usize {
        self.made
    }

    /// Consumes `bytes` until `limit` keys have been made in total. Returns the number of bytes consumed.
    pub fn feed(&mut self, bytes: &[u8], limit: usize, out: &mut Vec<BlockKey>) -> usize {
        if self.made >= limit {
            return 0;
        }
        let missing = self.block - self.partial.len();
        let Some((head, mut rest)) = bytes.split_at_checked(missing) else {
            self.partial.extend_from_slice(bytes);
            return bytes.len();
        };
        let whole = (rest.len() / self.block).min(limit - self.made - 1);
        out.reserve(1 + whole);
        if self.partial.is_empty() {
            out.push(self.key(head));
        } else {
            self.partial.extend_from_slice(head);
            out.push(self.key(&self.partial));
            self.partial.clear();
        }
        self.made += 1;
        if let Some((full, behind)) = rest.split_at_checked(whole * self.block) {
            // A constant block size of 64 bytes is deliberately not used here: the compiler would put halves
            // of a block's words into vectors to add the seed and take them apart again to multiply, which
            // takes a third more time.
            let space = self.space;
            out.extend(full.chunks_exact(self.block).map(|block| space.next(block)));
            self.made += whole;
            rest = behind;
        }
        if self.made < limit {
            self.partial.extend_from_slice(rest);
            rest = &[];
        }
        bytes.len() - rest.len()
    }

    fn key(&self, block: &[u8]) -> BlockKey {
        if self.made == 0 { self.space.first(self.root, block) } else { self.space.next(block) }
    }

    /// Returns the bytes that do not fill a block yet.
    #[must_use]
    pub fn partial(&self) -> &[u8] {
        &self.partial
    }
}
