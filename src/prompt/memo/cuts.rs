//! Where a text may be cut so that its parts encode independently: the ids of the whole are the ids of the parts, one after another.

use memchr::{memchr, memchr2};
use std::sync::Arc;

/// Where nothing else bounds a segment it ends at the first word after 4 KiB, some 80 µs of encoding: that much of a growing text is
/// encoded anew, and what keeping it costs is lost in it.
pub const DEFAULT_SEGMENT_BYTES: usize = 4 << 10;
/// Segments shorter than 256 bytes are joined with what follows: a cut in front of each mark of a template would keep one entry for
/// every role.
pub const MIN_SEGMENT_BYTES: usize = 256;

/// `\ud83d\ude00`: a character in two halves.
const LONGEST_ESCAPE: usize = 12;

/// The cuts that are true of an encoder.
#[derive(Clone, Debug, Default)]
pub struct Cuts {
    /// Sorted, so that those with a common beginning stand together.
    marks: Arc<[String]>,
    /// What all marks begin with; may be empty.
    common: Arc<str>,
    words: bool,
}

/// A part of a text that begins at a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Marked<'t> {
    pub(crate) mark: Option<&'t str>,
    pub(crate) text: &'t str,
}

impl Cuts {
    /// No cuts: for an encoder of which nothing is known.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// `marks` are texts that always become one id each and split what stands around them (special tokens); of two that begin at one
    /// place the longer counts. An encoder that strips or adds whitespace at a mark, or treats the beginning of a text otherwise than
    /// its middle, has no true marks. `words` says that the encoder splits as tiktoken's patterns do: no token reaches from the end of
    /// a word over the space behind it, and none looks back; and no mark holds a space or a line end.
    #[must_use]
    pub fn new(marks: impl IntoIterator<Item = String>, words: bool) -> Self {
        let mut marks: Vec<String> = marks.into_iter().filter(|m| !m.is_empty()).collect();
        marks.sort_unstable();
        marks.dedup();
        let common = common_prefix(marks.first(), marks.last());
        let words = words && !marks.iter().any(|m| m.contains(char::is_whitespace));
        Self { marks: marks.into(), common: common.into(), words }
    }

    /// The length of the first segment of `text`, 0 only for an empty one. Cutting a segment again gives it whole. Looks no further
    /// than about twice that length, so that cutting all of a text costs in proportion to it, whatever stands in it.
    #[must_use]
    pub fn first(&self, text: &str) -> usize {
        self.cut(text, |_| true)
    }

    /// As [`Cuts::first`] for the inside of a JSON string: no cut is within an escape or behind one, and what is cut off is a part of the
    /// text that encodes independently.
    #[must_use]
    pub fn first_escaped(&self, raw: &str) -> usize {
        let literal = |at: usize| {
            let before = raw.as_bytes().get(at.saturating_sub(LONGEST_ESCAPE)..at).unwrap_or_default();
            !before.contains(&b'\\')
        };
        self.cut(raw, literal)
    }

    /// The first segment that ends where `may` allows it.
    fn cut(&self, text: &str, may: impl Fn(usize) -> bool) -> usize {
        let mut window = 2 * DEFAULT_SEGMENT_BYTES;
        let (mut mark_from, mut word_from) = (0, DEFAULT_SEGMENT_BYTES);
        loop {
            let end = window.min(text.len());
            let word = if self.words { word_cut(text, word_from, end, &may) } else { None };
            while let Some((at, length)) = self.next_mark(text, mark_from, word.unwrap_or(end)) {
                if at >= MIN_SEGMENT_BYTES && may(at) {
                    return at;
                }
                mark_from = at + length;
            }
            if end == text.len() || word.is_some() {
                return word.unwrap_or(end);
            }
            mark_from = mark_from.max(end);
            word_from = end;
            window *= 2;
        }
    }

    /// The first mark in `text` that begins in `from..end`: its place and length.
    fn next_mark(&self, text: &str, mut from: usize, end: usize) -> Option<(usize, usize)> {
        if self.marks.is_empty() {
            return None;
        }
        let bytes = text.as_bytes();
        while let Some(rest) = bytes.get(from..end).filter(|rest| !rest.is_empty()) {
            if let Some(first) = self.common.bytes().next() {
                from += memchr(first, rest)?;
            }
            match self.longest_at(bytes.get(from..)?) {
                0 => from += 1,
                length => return Some((from, length)),
            }
        }
        None
    }

    /// The length of the longest mark that `text` begins with, or 0.
    fn longest_at(&self, text: &[u8]) -> usize {
        if !text.starts_with(self.common.as_bytes()) {
            return 0;
        }
        let mut within: &[String] = &self.marks;
        let mut longest = 0;
        for (depth, byte) in text.iter().enumerate() {
            let at = |mark: &String| mark.as_bytes().get(depth).copied();
            let all = |mark: Option<&String>| mark.and_then(at) == Some(*byte);
            if !(all(within.first()) && all(within.last())) {
                // Those that end here come first, having no byte; then those with a smaller one.
                let start = within.partition_point(|mark| at(mark) < Some(*byte));
                within = within.get(start..).unwrap_or_default();
                let end = within.partition_point(|mark| at(mark) == Some(*byte));
                within = within.get(..end).unwrap_or_default();
            }
            match within.first() {
                None => return longest,
                Some(mark) if mark.len() == depth + 1 => longest = depth + 1,
                Some(_) => {}
            }
        }
        longest
    }

    /// The text from mark to mark.
    pub(crate) fn at_marks<'t>(&self, text: &'t str) -> impl Iterator<Item = Marked<'t>> {
        let mut next = Some((0, 0));
        std::iter::from_fn(move || {
            let (at, length) = next?;
            next = self.next_mark(text, at + length, text.len());
            let end = next.map_or(text.len(), |(at, _)| at);
            Some(Marked {
                mark: text.get(at..at + length).filter(|m| !m.is_empty()),
                text: text.get(at + length..end).unwrap_or_default(),
            })
        })
    }
}

/// What the first and the last of sorted texts, and so all of them, begin with.
fn common_prefix(first: Option<&String>, last: Option<&String>) -> String {
    let (Some(first), Some(last)) = (first, last) else { return String::new() };
    first.chars().zip(last.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a).collect()
}

/// The first place, found by a space or line end in `from..end`, where one piece of tiktoken's patterns is sure to end, whatever follows, and the
/// pieces on both sides do not depend on each other: in front of a space behind a word, or behind a single line end between words.
///
/// Pieces hold whitespace only at their beginning, one character of it, or at their end, line ends behind symbols (with slashes among
/// them), or are nothing but whitespace; and what decides about a run of whitespace is the run and what follows it. So no piece goes
/// over the end of a word to a space, and none over a line end to a word.
fn word_cut(text: &str, mut from: usize, end: usize, may: impl Fn(usize) -> bool) -> Option<usize> {
    let solid = |c: Option<char>| c.is_some_and(|c| !c.is_whitespace());
    while let Some(at) = text.as_bytes().get(from..end).and_then(|rest| memchr2(b' ', b'\n', rest)) {
        let at = from + at;
        let (left, right) = text.split_at_checked(at)?;
        from = at + 1;
        if solid(left.chars().next_back()) && may(at) {
            let mut behind = right.chars();
            if behind.next() == Some(' ') {
                return Some(at);
            }
            let next = behind.next();
            if solid(next) && next != Some('/') {
                return Some(at + 1);
            }
        }
    }
    None
}
