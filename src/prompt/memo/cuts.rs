//! Where a text may be cut so that its parts encode independently: the ids of the whole are those of
//! the parts, one after another.

use memchr::{memchr, memchr2};
use std::sync::Arc;

/// A segment without another border ends at the first word after 4 KiB, some 80 µs of encoding. A growing text is
/// encoded again from its last cut, and the cost of caching is small in comparison.
pub(crate) const DEFAULT_SEGMENT_BYTES: usize = 4 << 10;
/// Segments shorter than 256 bytes are joined with what follows; otherwise every role name would be an entry.
pub(crate) const MIN_SEGMENT_BYTES: usize = 256;

/// Longest escape in bytes: `\ud83d\ude00`, a surrogate pair.
const LONGEST_ESCAPE: usize = 12;

/// The cuts that are valid for an encoder.
#[derive(Clone, Debug, Default)]
pub struct Cuts {
    /// Sorted, so that marks with a common prefix are adjacent.
    marks: Arc<[String]>,
    /// The common prefix of all marks; may be empty.
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
    /// No cuts, for an unknown encoder.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// Creates cuts at `marks`: texts that always become one id each and split the text around them (special tokens);
    /// of two at the same position, the longer one counts. An encoder that strips or adds white space at a mark, or
    /// treats the start of a text differently, has no valid marks.
    ///
    /// `words` means that the encoder splits as tiktoken's patterns do: no token extends from the end of a word over
    /// the space after it, none looks back, and no mark has a space or a line end.
    #[must_use]
    pub fn new(marks: impl IntoIterator<Item = String>, words: bool) -> Self {
        let mut marks: Vec<String> = marks.into_iter().filter(|m| !m.is_empty()).collect();
        marks.sort_unstable();
        marks.dedup();
        let common = common_prefix(marks.first(), marks.last());
        let words = words && !marks.iter().any(|m| m.contains(char::is_whitespace));
        Self { marks: marks.into(), common: common.into(), words }
    }

    /// Returns the length of the first segment of `text`, 0 only for an empty one. Cutting a segment again
    /// returns it whole. Reads at most about twice that length, so that cutting a whole text takes time in
    /// proportion to it, whatever its content.
    #[must_use]
    pub fn first(&self, text: &str) -> usize {
        self.cut(text, |_| true)
    }

    /// As [`Cuts::first`], for the inside of a JSON string: no cut is inside an escape or after one, and the segment is
    /// a part of the text that encodes independently.
    #[must_use]
    pub(crate) fn first_escaped(&self, raw: &str) -> usize {
        let literal = |at: usize| {
            let before = raw.as_bytes().get(at.saturating_sub(LONGEST_ESCAPE)..at).unwrap_or_default();
            !before.contains(&b'\\')
        };
        self.cut(raw, literal)
    }

    /// Returns the first segment that ends where `may` allows it.
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

    /// Returns the position and length of the first mark in `text` that begins in `from..end`.
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

    /// Returns the length of the longest mark at the start of `text`, or 0.
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
                // Marks that end here come first, then those with a smaller byte.
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

    /// Iterates over the text from mark to mark.
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

/// Returns the common prefix of the first and the last of sorted texts, and so of all of them.
fn common_prefix(first: Option<&String>, last: Option<&String>) -> String {
    let (Some(first), Some(last)) = (first, last) else { return String::new() };
    first.chars().zip(last.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a).collect()
}

/// Returns the first position near a space or line end in `from..end` where a match of tiktoken's patterns is certain
/// to end, whatever follows, and the parts on both sides are independent: before a space that follows a word, or after
/// a single line end between words.
///
/// Matches have white space only at their start (one character) or at their end (line ends after symbols, with slashes
/// among them), or consist of white space. A run of white space is split depending on the run and what follows it. No
/// match therefore extends from a word over a space, or from a line end over a word.
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
