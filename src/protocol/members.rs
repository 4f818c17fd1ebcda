//! Reads wanted members of a JSON document while it passes, cut into chunks anywhere.
//!
//! Only members of the root object count, and members of one object below it. Objects and strings deeper inside are
//! skipped whatever they hold, so text that a server repeats for a client is never mistaken for a member of the
//! server's own.
//!
//! - Of members with the same name, the last one counts, as in Python's `json`.
//! - Names are compared as they are written: a name with escapes is another name.
//! - A value that is skipped is not checked. A document whose brackets do not match yields nothing after the mismatch.
//!
//! Memory: one value of at most [`DEFAULT_MAX_VALUE_BYTES`], and only when a chunk boundary cuts it. CPU: a string
//! costs one search for its closing quote, an object or array a few operations for each 64 bytes.
//!
//! Called by [`super::usage`]. Imports nothing of the crate.

use memchr::{memchr, memchr3};

/// 64 KiB: the longest value that is read. A longer one is reported as unreadable.
pub const DEFAULT_MAX_VALUE_BYTES: usize = 64 << 10;

/// What to do with the value of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted<M> {
    /// Skip it.
    No,
    /// Read the members of the object that it is.
    Members,
    /// Hand it over.
    Value(M),
}

/// Says which members are wanted, and takes their values.
pub(super) trait Visitor {
    /// A wanted member.
    type Member: Copy;
    /// What to do with the value of the member `name`: of the root object, or of an object below it (`inner`). Asked for each member in turn; a
    /// name that is too long is given as an empty one.
    fn wants(&mut self, inner: bool, name: &[u8]) -> Wanted<Self::Member>;
    /// The root object begins; of a list, one of its objects.
    fn begin(&mut self);
    /// The members of an object below the root follow, or its value is no object.
    fn inner(&mut self);
    /// The value of a wanted member as it is written; `None` when it is longer than [`DEFAULT_MAX_VALUE_BYTES`].
    fn value(&mut self, inner: bool, member: Self::Member, value: Option<&[u8]>);
    /// The root object has ended; of a list, one of its objects, numbered from 0.
    fn end(&mut self, number: usize);
}

/// One document.
#[derive(Debug)]
pub(super) struct MemberReader<M> {
    /// The root may be an array of objects.
    lists: bool,
    in_list: bool,
    /// Objects of the list that have ended.
    ended: usize,
    at: At,
    /// Open objects whose members are read: 0, 1 or 2.
    level: u8,
    wanted: Wanted<M>,
    skip: Skip,
    /// The last byte of the chunk before was a backslash that escapes the next byte.
    escaped: bool,
    /// The beginning of a name or value that a chunk boundary has cut.
    kept: Vec<u8>,
    too_long: bool,
}

/// Which part of the document comes next.
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

/// Where in a value the reader is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Skip {
    Begin,
    Text,
    Scalar,
    /// Brackets of the outer kind that are open: those of the other kind match when these do.
    Nested {
        array: bool,
        outer: Outer,
    },
}

/// Where in an object or array the reader is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Outer {
    depth: u32,
    in_text: bool,
}

/// Where in an object or array the reader is, and whether the next byte is escaped.
#[derive(Clone, Copy, Debug)]
struct Nesting {
    outer: Outer,
    escaped: bool,
}

/// What a block of bytes does to the value that it belongs to.
enum Progress {
    /// The value ends at this index behind its last byte.
    Ends(usize),
    /// The value goes on; a quiet block has no bracket and no quote.
    Goes { quiet: bool },
}

/// Bytes that are looked at together.
const STRIDE: usize = 64;

impl Nesting {
    /// Takes the first [`STRIDE`] bytes of `bytes`, or all of them.
    fn block(&mut self, bytes: &[u8], open: u8, close: u8) -> Progress {
        let mut last = [b' '; STRIDE];
        let block = bytes.first_chunk().unwrap_or_else(|| {
            last.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
            &last
        });
        let escaped = self.escapes(bits(block, b'\\'), bytes.len());
        let quotes = bits(block, b'"') & !escaped;
        // A bit for each byte of a string, its opening quote included.
        let mut texts = quotes;
        for shift in [1, 2, 4, 8, 16, 32] {
            texts ^= texts << shift;
        }
        texts ^= u64::from(self.outer.in_text).wrapping_neg();
        self.outer.in_text = texts >> (STRIDE - 1) == 1;
        let (opens, closes) = (bits(block, open) & !texts, bits(block, close) & !texts);
        if closes.count_ones() < self.outer.depth {
            self.outer.depth = self.outer.depth.saturating_add(opens.count_ones()) - closes.count_ones();
            return Progress::Goes { quiet: (opens | closes | quotes) == 0 };
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
                return Progress::Ends(at as usize + 1);
            }
        }
        Progress::Goes { quiet: false }
    }

    /// A bit for each byte that a backslash escapes, of a block of so many bytes in which these are backslashes.
    fn escapes(&mut self, backslashes: u64, length: usize) -> u64 {
        let before = u64::from(self.escaped);
        if backslashes | before == 0 {
            return 0;
        }
        // Of each run of backslashes every second byte is escaped, and what follows an odd run: the carry of an
        // addition runs through those that begin at an odd place, and turns what is escaped in them.
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

/// Backslashes at the end of `text`.
fn backslashes(text: &[u8]) -> usize {
    text.iter().rev().take_while(|byte| **byte == b'\\').count()
}

/// A bit for each byte of `block` that is `wanted`.
#[inline]
fn bits(block: &[u8; STRIDE], wanted: u8) -> u64 {
    let flags = block.map(|byte| u8::from(byte == wanted).wrapping_neg());
    let (eights, _) = flags.as_chunks::<8>();
    // Of eight flags one bit each, brought together in the top byte by a multiplication.
    let gather = |flags: &[u8; 8]| {
        (u64::from_le_bytes(*flags) & 0x8040_2010_0804_0201).wrapping_mul(0x0101_0101_0101_0101) >> 56
    };
    eights.iter().rev().fold(0, |bits, eight| bits << 8 | gather(eight))
}

impl<M: Copy> MemberReader<M> {
    /// A reader of one object, or with `lists` of one object or an array of them.
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

    /// Begins another document.
    pub(super) fn restart(&mut self) {
        self.kept.clear();
        let kept = std::mem::take(&mut self.kept);
        *self = Self { kept, ..Self::new(self.lists) };
    }

    /// Takes the next bytes of the document. What follows its end is ignored.
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

    /// Takes one byte between names and values, or none when it begins a value. Returns how many.
    fn step(&mut self, byte: u8, visitor: &mut impl Visitor<Member = M>) -> usize {
        self.at = match (self.at, byte) {
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

    /// Takes bytes of a name. Returns how many.
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

    /// Takes bytes of a value. Returns how many.
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

    /// Where the value ends that goes on with `rest`: the index behind its last byte.
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
        // A long run of bytes that mean nothing, such as numbers or prose, is searched at memory speed.
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
                Progress::Ends(at) => break Some(from + at),
                Progress::Goes { quiet } => is_quiet = quiet,
            }
            from += block.len().min(STRIDE);
        };
        self.escaped = end.is_none() && nesting.escaped;
        self.skip = Skip::Nested { array, outer: nesting.outer };
        end
    }

    /// Where the string ends that goes on at `from`: the index behind its closing quote.
    fn end_of_text(&mut self, rest: &[u8], from: usize) -> Option<usize> {
        // What is escaped is no quote, and no backslash that escapes.
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
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    /// Takes the member `a` of the root, the members of `o`, and the member `a` of that.
    #[derive(Debug, Default, PartialEq, Eq)]
    struct Seen(Vec<(bool, Option<String>)>, usize);

    impl Visitor for Seen {
        type Member = ();

        fn wants(&mut self, inner: bool, name: &[u8]) -> Wanted<()> {
            match name {
                b"a" => Wanted::Value(()),
                b"o" if !inner => Wanted::Members,
                _ => Wanted::No,
            }
        }

        fn begin(&mut self) {}

        fn inner(&mut self) {
            self.0.retain(|(inner, _)| !inner);
        }

        fn value(&mut self, inner: bool, (): (), value: Option<&[u8]>) {
            self.0.push((inner, value.map(|value| String::from_utf8_lossy(value).into_owned())));
        }

        fn end(&mut self, number: usize) {
            assert_eq!(number, self.1);
            self.1 += 1;
        }
    }

    fn seen<'c>(lists: bool, chunks: impl IntoIterator<Item = &'c [u8]>) -> Seen {
        let (mut reader, mut seen) = (MemberReader::new(lists), Seen::default());
        chunks.into_iter().for_each(|chunk| reader.push(chunk, &mut seen));
        seen
    }

    /// A document, the values that are handed over (of an inner object or of the root), and how many objects end.
    type Case = (&'static str, &'static [(bool, &'static str)], usize);

    #[test]
    fn members_are_found_at_their_place_and_nowhere_else() {
        let cases: &[Case] = &[
            (r#"{"a":1}"#, &[(false, "1")], 1),
            (
                " { \"b\" : {\"a\":1} ,\n\"a\" : \"}\\\"\\\\\" , \"o\":{\"a\":[{}]} } ",
                &[(false, r#""}\"\\""#), (true, "[{}]")],
                1,
            ),
            (r#"{"a":true,"a":{"a":2}}"#, &[(false, "true"), (false, r#"{"a":2}"#)], 1),
            (r#"{"o":{"a":1,"o":{"a":2}},"p":[{"a":3}],"q":"\"a\":4,"}"#, &[(true, "1")], 1),
            (r#"{"o":{"a":1},"o":{"b":1}}"#, &[], 1),
            (r#"{"o":{"a":1},"o":7}"#, &[], 1),
            (r#"{"\u0061":1}"#, &[], 1),
            (r#"{"o":[{"a":1}]}"#, &[], 1),
            (r#"{"a":1"#, &[], 0),
            (r#"{"a":"1"#, &[], 0),
            (r#"{"a":1]"#, &[(false, "1")], 0),
            (r#"{"a":1}{"a":2}"#, &[(false, "1")], 1),
            (r#"[{"a":1}]"#, &[], 0),
            ("[DONE]", &[], 0),
            ("", &[], 0),
        ];
        for (input, members, ended) in cases {
            let members = members.iter().map(|(inner, value)| (*inner, Some((*value).to_owned()))).collect();
            let expected = Seen(members, *ended);
            for size in 1..=input.len().max(1) {
                assert_eq!(seen(false, input.as_bytes().chunks(size)), expected, "{input} in chunks of {size}");
            }
        }
    }

    #[test]
    fn lists_have_an_end_for_each_object() {
        for (input, values, ended) in [
            (r#"[{"a":1},{"a":2}]"#, vec!["1", "2"], 2),
            (r#"[{"a":1},7,"{",[{"a":3}],{"b":2}] {"a":4}"#, vec!["1"], 2),
            (r#"{"a":1}"#, vec!["1"], 1),
            ("[]", vec![], 0),
            ("[DONE]", vec![], 0),
        ] {
            for size in 1..=input.len() {
                let found = seen(true, input.as_bytes().chunks(size));
                let expected = values.iter().map(|value| (false, Some((*value).to_owned()))).collect();
                assert_eq!(found, Seen(expected, ended), "{input}");
            }
        }
    }

    #[test]
    fn a_value_that_is_too_long_is_unreadable_and_what_follows_is_read() {
        let long = format!(r#"{{"a":{{"x":"{}"}},"o":{{"a":1}}}}"#, "x".repeat(DEFAULT_MAX_VALUE_BYTES));
        for size in [1_000, usize::MAX] {
            let found = seen(false, long.as_bytes().chunks(size));
            assert_eq!(found, Seen(vec![(false, None), (true, Some("1".to_owned()))], 1), "in chunks of {size}");
        }
        let name = format!(r#"{{"{}":1,"a":2}}"#, "x".repeat(DEFAULT_MAX_VALUE_BYTES + 1));
        assert_eq!(seen(false, name.as_bytes().chunks(999)), Seen(vec![(false, Some("2".to_owned()))], 1));
    }

    /// Documents with the wanted names everywhere, brackets and quotes in strings, runs of backslashes, and long runs
    /// of numbers and prose.
    fn document() -> impl Strategy<Value = Value> {
        let name = prop_oneof![Just("a"), Just("o"), Just("a\"b\\"), Just("\\"), Just("[{\"a\":1")];
        let leaf = prop_oneof![
            Just(json!(null)),
            Just(json!(-1.5e300)),
            Just(json!(true)),
            r#"([\\"{}\[\]a:,\n]|\\\\"a":){0,9}"#.prop_map(Value::from),
            (0usize..200).prop_map(|n| json!("\\".repeat(n))),
            (0usize..200).prop_map(|n| json!("x".repeat(n) + "\"")),
            (0usize..80).prop_map(|n| json!(vec![7; n])),
        ];
        leaf.prop_recursive(5, 60, 5, move |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
                prop::collection::btree_map(name.clone(), inner, 0..5)
                    .prop_map(|map| map.into_iter().map(|(name, value)| (name.to_owned(), value)).collect::<Value>()),
            ]
        })
    }

    proptest! {
        #[test]
        fn what_is_read_is_what_a_strict_parser_finds(
            document in document(),
            pretty: bool,
            sizes in prop::collection::vec(1usize..200, 1..5),
        ) {
            let text = if pretty { format!("{document:#}") } else { document.to_string() };
            let (mut rest, mut chunks) = (text.as_bytes(), Vec::new());
            for size in sizes.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (chunk, after) = rest.split_at((*size).min(rest.len()));
                chunks.push(chunk);
                rest = after;
            }
            let found = seen(false, chunks);
            let read = |inner: bool| {
                let values = found.0.iter().filter(move |value| value.0 == inner);
                values.filter_map(|(_, value)| value.as_ref()).next_back().map(|value| serde_json::from_str::<Value>(value).unwrap())
            };
            prop_assert_eq!(read(false), document.as_object().and_then(|root| root.get("a")).cloned());
            let inner = document.as_object().and_then(|root| root.get("o")).and_then(Value::as_object);
            prop_assert_eq!(read(true), inner.and_then(|inner| inner.get("a")).cloned());
            prop_assert_eq!(found.1, usize::from(document.is_object()));
        }

        #[test]
        fn any_bytes_are_read_alike_in_any_chunks(
            pieces in prop::collection::vec(prop::sample::select(vec![
                "{", "}", "[", "]", "\"", "\\", ":", ",", "\"a\":", "\"o\":{", "1", "null", " ", "\n", "x", "\"a\\",
            ]), 0..80),
            size in 1usize..70,
            lists: bool,
        ) {
            let input = pieces.concat();
            prop_assert_eq!(seen(lists, input.as_bytes().chunks(size)), seen(lists, [input.as_bytes()]));
        }
    }
}
