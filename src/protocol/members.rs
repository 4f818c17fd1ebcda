//! Reads selected members of a JSON document that arrives in chunks of any size.
//!
//! Only members of the root object count, and members of one object below it. Deeper objects and strings are skipped,
//! so client text that a server repeats is never mistaken for a member of the server's own.
//!
//! - Of members with the same name, the last one counts, as in Python's `json`.
//! - Names are compared as they are written: a name with escapes is another name.
//! - A skipped value is not checked. After a bracket that does not match, nothing more is found.
//!
//! Memory: one value of at most `DEFAULT_MAX_VALUE_BYTES`, and only when a chunk boundary splits it. CPU: a string
//! costs one search for its closing quote, an object or array a few operations per 64 bytes.
//!
//! Called by [`super::usage`]. Imports nothing of the crate.

use memchr::{memchr, memchr3};

/// Longest value that is read, 64 KiB. A longer one is reported as unreadable.
pub(crate) const DEFAULT_MAX_VALUE_BYTES: usize = 64 << 10;

/// What to do with the value of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted<M> {
    /// Skip the value.
    No,
    /// Read the members of the object.
    Members,
    /// Deliver the value.
    Value(M),
}

/// Selects the members, and receives their values.
pub(super) trait Visitor {
    /// Identifies a selected member.
    type Member: Copy;
    /// Returns what to do with the value of the member `name`, of the root object or of an object below it (`inner`).
    /// Called for each member in order; a name that is too long is passed as an empty one.
    fn wants(&mut self, inner: bool, name: &[u8]) -> Wanted<Self::Member>;
    /// The root object begins, or one object of a list.
    fn begin(&mut self);
    /// The members of an object below the root follow, or its value is not an object.
    fn inner(&mut self);
    /// The value of a selected member as it is written; `None` when it is longer than `DEFAULT_MAX_VALUE_BYTES`.
    fn value(&mut self, inner: bool, member: Self::Member, value: Option<&[u8]>);
    /// The root object has ended, or one object of a list, numbered from 0.
    fn end(&mut self, number: usize);
}

/// Reads one document.
#[derive(Debug)]
pub(super) struct MemberReader<M> {
    /// Whether the root may be an array of objects.
    lists: bool,
    in_list: bool,
    /// Number of objects in the list that have ended.
    ended: usize,
    at: At,
    /// Number of open objects whose members are read: 0, 1 or 2.
    level: u8,
    wanted: Wanted<M>,
    skip: Skip,
    /// Whether the previous chunk ended with a backslash that escapes the next byte.
    escaped: bool,
    /// The start of a name or value that a chunk boundary splits.
    kept: Vec<u8>,
    too_long: bool,
}

/// The part of the document that comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Start,
    Element,
    FirstName,
    Name,
    InName,
    Colon,
    Value,
    InValue,
    Next,
    Done,
    Broken,
}

/// Position in a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Skip {
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

/// Bytes that are processed together.
const STRIDE: usize = 64;

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

impl<M: Copy> MemberReader<M> {
    /// Creates a reader of one object, or with `lists` of one object or an array of them.
    pub(super) fn new(lists: bool) -> Self {
        Self {
            lists,
            in_list: false,
            ended: 0,
            at: At::Start,
            level: 0,
            wanted: Wanted::No,
            skip: Skip::Begin,
            escaped: false,
            kept: Vec::new(),
            too_long: false,
        }
    }

    /// Whether the document has begun and not ended.
    pub(super) fn is_open(&self) -> bool {
        !matches!(self.at, At::Start | At::Done | At::Broken)
    }

    /// Starts another document.
    pub(super) fn restart(&mut self) {
        self.kept.clear();
        let kept = std::mem::take(&mut self.kept);
        *self = Self { kept, ..Self::new(self.lists) };
    }

    /// Processes the next bytes of the document. Bytes after its end are ignored.
    pub(super) fn push(&mut self, chunk: &[u8], visitor: &mut impl Visitor<Member = M>) {
        let mut rest = chunk;
        while let Some(byte) = rest.first() {
            let taken = match self.at {
                At::InName => self.name(rest, visitor),
                At::InValue => self.value(rest, visitor),
                At::Done | At::Broken => return,
                _ if byte.is_ascii_whitespace() => 1,
                _ => self.step(*byte, visitor),
            };
            rest = rest.get(taken..).unwrap_or_default();
        }
    }

    /// Consumes one byte between names and values, or none when it begins a value. Returns the number of bytes.
    fn step(&mut self, byte: u8, visitor: &mut impl Visitor<Member = M>) -> usize {
        self.at = match (self.at, byte) {
            // A byte order mark, which JSON readers remove.
            (At::Start, 0xEF | 0xBB | 0xBF) => At::Start,
            (At::Start | At::Element, b'{') => {
                self.level = 1;
                visitor.begin();
                At::FirstName
            }
            (At::Start, b'[') if self.lists => {
                self.in_list = true;
                At::Element
            }
            (At::FirstName | At::Name, b'"') => At::InName,
            (At::FirstName | At::Next, b'}') if self.level > 0 => self.close(visitor),
            (At::Colon, b':') => At::Value,
            (At::Next, b',') => {
                if self.level > 0 {
                    At::Name
                } else {
                    At::Element
                }
            }
            (At::Element | At::Next, b']') if self.level == 0 => At::Done,
            (At::Value, b'{') if self.level == 1 && matches!(self.wanted, Wanted::Members) => {
                self.level = 2;
                visitor.inner();
                At::FirstName
            }
            (At::Value | At::Element, b',' | b':' | b']' | b'}') => At::Broken,
            (At::Value, _) => {
                if matches!(self.wanted, Wanted::Members) {
                    visitor.inner();
                }
                self.skip = Skip::Begin;
                self.at = At::InValue;
                return 0;
            }
            (At::Element, _) => {
                (self.skip, self.wanted, self.at) = (Skip::Begin, Wanted::No, At::InValue);
                return 0;
            }
            _ => At::Broken,
        };
        1
    }

    fn close(&mut self, visitor: &mut impl Visitor<Member = M>) -> At {
        self.level -= 1;
        if self.level > 0 {
            return At::Next;
        }
        visitor.end(self.ended);
        self.ended += 1;
        if self.in_list { At::Next } else { At::Done }
    }

    /// Consumes bytes of a name. Returns how many.
    fn name(&mut self, rest: &[u8], visitor: &mut impl Visitor<Member = M>) -> usize {
        let end = self.end_of_text(rest, 0);
        let part = rest.get(..end.map_or(rest.len(), |end| end - 1)).unwrap_or_default();
        if end.is_none() || !self.kept.is_empty() || self.too_long {
            self.keep(part);
        }
        let Some(end) = end else { return rest.len() };
        let name = if self.kept.is_empty() && !self.too_long { part } else { &self.kept };
        self.wanted = visitor.wants(self.level == 2, if self.too_long { &[] } else { name });
        self.forget();
        self.at = At::Colon;
        end
    }

    /// Consumes bytes of a value. Returns how many.
    fn value(&mut self, rest: &[u8], visitor: &mut impl Visitor<Member = M>) -> usize {
        let end = self.end_of_value(rest);
        if let Wanted::Value(member) = self.wanted {
            let part = rest.get(..end.unwrap_or(rest.len())).unwrap_or_default();
            let whole = end.is_some() && self.kept.is_empty() && !self.too_long;
            if !whole || part.len() > DEFAULT_MAX_VALUE_BYTES {
                self.keep(part);
            }
            if end.is_some() {
                let value = if whole && !self.too_long { part } else { &self.kept };
                visitor.value(self.level == 2, member, Some(value).filter(|_| !self.too_long));
                self.forget();
            }
        }
        if end.is_some() {
            self.at = At::Next;
        }
        end.unwrap_or(rest.len())
    }

    fn keep(&mut self, part: &[u8]) {
        self.too_long |= self.kept.len() + part.len() > DEFAULT_MAX_VALUE_BYTES;
        if self.too_long {
            self.kept = Vec::new();
        } else {
            self.kept.extend_from_slice(part);
        }
    }

    fn forget(&mut self) {
        self.kept.clear();
        self.too_long = false;
    }

    /// Returns the end of the value that continues with `rest`: the index after its last byte.
    fn end_of_value(&mut self, rest: &[u8]) -> Option<usize> {
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
            Skip::Text => self.end_of_text(rest, from),
            Skip::Scalar => {
                let is_end = |byte: &u8| matches!(byte, b',' | b'}' | b']') || byte.is_ascii_whitespace();
                rest.get(from..)?.iter().position(is_end).map(|at| from + at)
            }
            Skip::Nested { array, outer } => self.end_of_nested(rest, from, array, outer),
        }
    }

    fn end_of_nested(&mut self, rest: &[u8], mut from: usize, array: bool, outer: Outer) -> Option<usize> {
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
    fn end_of_text(&mut self, rest: &[u8], from: usize) -> Option<usize> {
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

#[cfg(test)]
mod tests;
