//! Finds the end of a JSON value that arrives in chunks of any size, without looking at what is in it.
//!
//! A string costs one search for its closing quote, an object or array a few operations per 64 bytes.

use memchr::{memchr, memchr3};

/// Bytes that are processed together.
const STRIDE: usize = 64;

/// Position in a value whose end is searched, and whether the previous chunk ended with a backslash that escapes the
/// next byte.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ValueEnd {
    skip: Skip,
    escaped: bool,
}

/// Position in a value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Skip {
    #[default]
    Begin,
    Text,
    Scalar,
    /// Number of open brackets of the outer type: those of the other type match when these do.
    Nested {
        array: bool,
        outer: Outer,
    },
}

/// Position in an object or array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Outer {
    depth: u32,
    in_text: bool,
}

/// Position in an object or array, and whether the next byte is escaped.
#[derive(Clone, Copy, Debug)]
struct Nesting {
    outer: Outer,
    escaped: bool,
}

/// Effect of a block of bytes on its value.
enum ValueProgress {
    /// The value ends before this index.
    Ends(usize),
    /// The value continues; a quiet block has no bracket and no quote.
    Goes { quiet: bool },
}

impl Nesting {
    /// Processes the first [`STRIDE`] bytes of `bytes`, or all of them.
    fn block(&mut self, bytes: &[u8], open: u8, close: u8) -> ValueProgress {
        let mut last = [b' '; STRIDE];
        let block = bytes.first_chunk().unwrap_or_else(|| {
            last.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
            &last
        });
        let escaped = self.escapes(bits(block, b'\\'), bytes.len());
        let quotes = bits(block, b'"') & !escaped;
        // One bit for each byte of a string, including its opening quote.
        let mut texts = quotes;
        for shift in [1, 2, 4, 8, 16, 32] {
            texts ^= texts << shift;
        }
        texts ^= u64::from(self.outer.in_text).wrapping_neg();
        self.outer.in_text = texts >> (STRIDE - 1) == 1;
        let (opens, closes) = (bits(block, open) & !texts, bits(block, close) & !texts);
        if closes.count_ones() < self.outer.depth {
            self.outer.depth = self.outer.depth.saturating_add(opens.count_ones()) - closes.count_ones();
            return ValueProgress::Goes { quiet: (opens | closes | quotes) == 0 };
        }
        let mut brackets = opens | closes;
        while brackets != 0 {
            let at = brackets.trailing_zeros();
            brackets &= brackets - 1;
            if opens >> at & 1 == 1 {
                self.outer.depth = self.outer.depth.saturating_add(1);
            } else {
                self.outer.depth -= 1;
            }
            if self.outer.depth == 0 {
                return ValueProgress::Ends(at as usize + 1);
            }
        }
        ValueProgress::Goes { quiet: false }
    }

    /// Returns one bit for each byte that a backslash escapes, in a block of `length` bytes with these backslashes.
    fn escapes(&mut self, backslashes: u64, length: usize) -> u64 {
        let before = u64::from(self.escaped);
        if backslashes | before == 0 {
            return 0;
        }
        // In each run of backslashes, every second byte is escaped, and so is the byte after a run of odd length. The
        // carry of an addition runs through runs that begin at an odd position, and inverts their escaped bits.
        const EVEN: u64 = 0x5555_5555_5555_5555;
        let backslashes = backslashes & !before;
        let follows = backslashes << 1 | before;
        let odd = backslashes & !EVEN & !follows;
        let (carried, over) = odd.overflowing_add(backslashes);
        let escaped = (EVEN ^ (carried << 1)) & follows;
        self.escaped = if length < STRIDE { escaped >> length & 1 == 1 } else { over };
        escaped
    }
}

/// Returns the number of backslashes at the end of `text`.
fn backslashes(text: &[u8]) -> usize {
    text.iter().rev().take_while(|byte| **byte == b'\\').count()
}

/// Returns one bit for each byte of `block` that equals `wanted`.
#[inline]
fn bits(block: &[u8; STRIDE], wanted: u8) -> u64 {
    let flags = block.map(|byte| u8::from(byte == wanted).wrapping_neg());
    let (eights, _) = flags.as_chunks::<8>();
    // A multiplication collects one bit of each of eight flags in the top byte.
    let gather = |flags: &[u8; 8]| {
        (u64::from_le_bytes(*flags) & 0x8040_2010_0804_0201).wrapping_mul(0x0101_0101_0101_0101) >> 56
    };
    eights.iter().rev().fold(0, |bits, eight| bits << 8 | gather(eight))
}

impl ValueEnd {
    /// Returns the end of the value that continues with `rest`: the index after its last byte.
    pub(super) fn of_value(&mut self, rest: &[u8]) -> Option<usize> {
        let mut from = 0;
        if self.skip == Skip::Begin {
            from = 1;
            self.skip = match rest.first() {
                Some(b'"') => Skip::Text,
                Some(b'{') => Skip::Nested { array: false, outer: Outer { depth: 1, in_text: false } },
                Some(b'[') => Skip::Nested { array: true, outer: Outer { depth: 1, in_text: false } },
                _ => Skip::Scalar,
            };
        }
        match self.skip {
            Skip::Begin => None,
            Skip::Text => self.of_text(rest, from),
            Skip::Scalar => {
                let is_end = |byte: &u8| matches!(byte, b',' | b'}' | b']') || byte.is_ascii_whitespace();
                rest.get(from..)?.iter().position(is_end).map(|at| from + at)
            }
            Skip::Nested { array, outer } => self.of_nested(rest, from, array, outer),
        }
    }

    fn of_nested(&mut self, rest: &[u8], mut from: usize, array: bool, outer: Outer) -> Option<usize> {
        let (open, close) = if array { (b'[', b']') } else { (b'{', b'}') };
        let mut nesting = Nesting { outer, escaped: self.escaped };
        // Long runs of irrelevant bytes, such as numbers or prose, are searched at memory speed.
        let mut is_quiet = true;
        let end = loop {
            let Some(block) = rest.get(from..).filter(|block| !block.is_empty()) else { break None };
            if is_quiet && !nesting.escaped {
                let in_text = nesting.outer.in_text;
                let next = if in_text { memchr(b'"', block) } else { memchr3(b'"', open, close, block) };
                let run = block.get(..next.unwrap_or(block.len())).unwrap_or_default();
                let before = backslashes(run);
                if next.is_none() {
                    nesting.escaped = before % 2 == 1;
                    break None;
                }
                if run.len() >= STRIDE {
                    from += run.len() - before;
                }
            }
            let block = rest.get(from..).unwrap_or_default();
            match nesting.block(block, open, close) {
                ValueProgress::Ends(at) => break Some(from + at),
                ValueProgress::Goes { quiet } => is_quiet = quiet,
            }
            from += block.len().min(STRIDE);
        };
        self.escaped = end.is_none() && nesting.escaped;
        self.skip = Skip::Nested { array, outer: nesting.outer };
        end
    }

    /// Returns the end of the string that continues at `from`: the index after its closing quote.
    pub(super) fn of_text(&mut self, rest: &[u8], from: usize) -> Option<usize> {
        // An escaped byte is neither a closing quote nor a backslash that escapes.
        let mut begin = if self.escaped && from < rest.len() { from + 1 } else { from };
        self.escaped &= from >= rest.len();
        loop {
            let text = rest.get(begin..)?;
            let Some(at) = memchr(b'"', text) else {
                self.escaped |= backslashes(text) % 2 == 1;
                return None;
            };
            if backslashes(text.get(..at).unwrap_or_default()).is_multiple_of(2) {
                return Some(begin + at + 1);
            }
            begin += at + 1;
        }
    }
}
