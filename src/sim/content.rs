//! Text that is known by name: prompts of traces are cut into blocks without making their tokens.
//!
//! A [`Piece`] stands for tokens whose values don't matter. Equal pieces are equal tokens, so equal beginnings of two
//! prompts are equal blocks, whatever the size of a block is. Called by `sim::engine` for what its cache holds and by
//! `replay` for the keys that a picker would make. Pure.

/// Tokens `from..from + tokens` of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Piece {
    /// Name of the whole text.
    pub name: u64,
    /// Where in the text the piece begins, tokens.
    pub from: u32,
    /// Length of the piece, tokens.
    pub tokens: u32,
}

impl Piece {
    /// The first `tokens` of the text `name`.
    #[must_use]
    pub fn new(name: u64, tokens: u32) -> Self {
        Self { name, from: 0, tokens }
    }
}

/// Pieces in, content hashes of full blocks out. What a block holds decides its hash, not in how many calls it came.
#[derive(Clone, Debug)]
pub struct Contents {
    block_size: u32,
    /// Tokens in the block that is not full.
    filled: u32,
    /// Of the pieces that are in it whole.
    hash: u64,
    /// The piece that may go on; no tokens when there is none.
    open: Piece,
}

impl Contents {
    /// Nothing yet; blocks of `block_size` tokens (at least 1).
    #[must_use]
    pub fn new(block_size: u32) -> Self {
        Self { block_size: block_size.max(1), filled: 0, hash: 0, open: Piece::new(0, 0) }
    }

    /// Tokens behind the last full block.
    #[must_use]
    pub fn partial(&self) -> u32 {
        self.filled
    }

    /// Adds a piece, and gives the contents of the blocks that it fills.
    pub fn push(&mut self, piece: Piece, mut full: impl FnMut(u64)) {
        let mut rest = piece;
        while rest.tokens > 0 {
            let taken = rest.tokens.min(self.block_size - self.filled);
            let Piece { name, from, tokens } = self.open;
            if tokens > 0 && name == rest.name && from.wrapping_add(tokens) == rest.from {
                self.open.tokens += taken;
            } else {
                self.close();
                self.open = Piece { tokens: taken, ..rest };
            }
            self.filled += taken;
            rest = Piece { from: rest.from.wrapping_add(taken), tokens: rest.tokens - taken, ..rest };
            if self.filled == self.block_size {
                self.close();
                full(std::mem::take(&mut self.hash));
                self.filled = 0;
            }
        }
    }

    fn close(&mut self) {
        let Piece { name, from, tokens } = std::mem::replace(&mut self.open, Piece::new(0, 0));
        if tokens > 0 {
            self.hash = mix(mix(self.hash ^ name).wrapping_add(u64::from(from) << 32 | u64::from(tokens)));
        }
    }
}

/// A bijection of 64 bits that leaves no pattern (the end of splitmix64).
#[must_use]
pub fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn contents(block_size: u32, pieces: &[Piece]) -> (Vec<u64>, u32) {
        let mut out = Vec::new();
        let mut contents = Contents::new(block_size);
        for piece in pieces {
            contents.push(*piece, |content| out.push(content));
        }
        (out, contents.partial())
    }

    #[test]
    fn equal_beginnings_are_equal_blocks_and_nothing_else_is() {
        let (a, rest) = contents(16, &[Piece::new(1, 40), Piece::new(2, 30)]);
        assert_eq!((a.len(), rest), (4, 6));
        let (b, _) = contents(16, &[Piece::new(1, 40), Piece::new(3, 30)]);
        assert_eq!(a[..2], b[..2]);
        assert!(a[2] != b[2] && a[3] != b[3]);
        let (c, _) = contents(16, &[Piece::new(1, 39), Piece::new(2, 31)]);
        assert_eq!(a[..2], c[..2]);
        assert!(a[2] != c[2], "another cut inside the block");
        let distinct: std::collections::HashSet<_> = contents(1, &[Piece::new(1, 1_000)]).0.into_iter().collect();
        assert_eq!(distinct.len(), 1_000, "places in a text differ");
    }

    proptest! {
        #[test]
        fn it_does_not_matter_in_how_many_calls_a_text_comes(
            cuts in prop::collection::vec(1u32..50, 1..20), block_size in 1u32..40
        ) {
            let whole = [Piece::new(7, 13), Piece::new(9, cuts.iter().sum())];
            let mut parts = vec![whole[0]];
            let mut from = 0;
            for tokens in cuts {
                parts.push(Piece { name: 9, from, tokens });
                from += tokens;
            }
            prop_assert_eq!(contents(block_size, &whole), contents(block_size, &parts));
        }
    }
}
