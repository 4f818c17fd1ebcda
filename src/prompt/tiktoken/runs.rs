//! Limits on the parts of a regex-split tokenizer.
//!
//! These tokenizers split text by a regular expression and merge bytes within each part, at a cost that grows faster
//! than the part. A *run* is text in which no part is certain to end. Ordinary text has short runs. A run longer than
//! `MAX_RUN_BYTES` is cut there, so its tokens differ from an unlimited tokenizer's at the cuts only.

/// A run is cut after 4 KiB: no word of any language is as long, and the regex engine overflows its stack
/// only at 100 times that.
pub(crate) const MAX_RUN_BYTES: usize = 4 << 10;
/// Runs of 256 bytes and more count as long: tiktoken-rs merges them in three to six times the CPU time of ordinary
/// text. Sentences of unspaced scripts are shorter.
pub(crate) const LONG_RUN_BYTES: usize = 256;
/// Default limit of one text, 4 MiB: a context of a million tokens, or some 0.1 s of CPU time.
pub(crate) const DEFAULT_MAX_TEXT_BYTES: usize = 4 << 20;
/// Default limit of bytes in long runs of one text, 128 KiB, or some 20 ms of CPU time: enough for the rulers and
/// padding of a large document, too little for an attack.
pub(crate) const DEFAULT_MAX_LONG_RUN_BYTES: usize = 128 << 10;

/// Input for one call of the tokenizer: text without a run over the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Window<'t> {
    pub(super) text: &'t str,
    /// Its bytes in long runs.
    pub(super) long_bytes: usize,
}

/// Divides a text into windows, usually one. A window ends only where a run is cut.
#[derive(Clone, Debug)]
pub(super) struct Windows<'t> {
    rest: &'t str,
}

impl<'t> Windows<'t> {
    pub(super) fn new(text: &'t str) -> Self {
        Self { rest: text }
    }
}

impl<'t> Iterator for Windows<'t> {
    type Item = Window<'t>;

    fn next(&mut self) -> Option<Window<'t>> {
        if self.rest.is_empty() {
            return None;
        }
        let (end, long_bytes) = window(self.rest);
        let (text, rest) = self.rest.split_at_checked(end).unwrap_or((self.rest, ""));
        self.rest = rest;
        Some(Window { text, long_bytes })
    }
}

/// Returns the end of the first window of `text`, and how many of its bytes are in long runs. Reads
/// a few characters per `LONG_RUN_BYTES`.
fn window(text: &str) -> (usize, usize) {
    let mut start = 0;
    let mut long_bytes = 0;
    loop {
        let far = floor(text, start + LONG_RUN_BYTES);
        if far == text.len() {
            return (far, long_bytes);
        }
        if let Some(at) = last_break(text, start, far) {
            start = at;
            continue;
        }
        let cap = floor(text, start + MAX_RUN_BYTES);
        let end = first_break(text, far, cap);
        long_bytes += end.unwrap_or(cap) - start;
        match end {
            Some(end) => start = end,
            None => return (cap, long_bytes),
        }
    }
}

/// Returns the last character boundary that is not after `at`.
fn floor(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

/// Returns the last position in `start+1..=far` where a part is certain to end.
fn last_break(text: &str, start: usize, far: usize) -> Option<usize> {
    let mut right = text.get(far..)?.chars().next()?;
    for (at, left) in text.get(start..far)?.char_indices().rev() {
        if ends_between(left, right) {
            return Some(start + at + left.len_utf8());
        }
        right = left;
    }
    None
}

/// Returns the first position in `from..cap` where a part is certain to end.
fn first_break(text: &str, from: usize, cap: usize) -> Option<usize> {
    let mut left = text.get(..from)?.chars().next_back()?;
    for (at, right) in text.get(from..cap)?.char_indices() {
        if ends_between(left, right) {
            return Some(from + at);
        }
        left = right;
    }
    None
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Space,
    Letter,
    Digit,
    Punctuation,
    /// Characters that the patterns treat as letters and as symbols (combining marks), and rare ones.
    Unsure,
}

fn class(c: char) -> Class {
    match c {
        'a'..='z' | 'A'..='Z' => Class::Letter,
        '0'..='9' => Class::Digit,
        '!'..='~' => Class::Punctuation,
        _ if c.is_whitespace() => Class::Space,
        // Latin, Greek and Cyrillic letters, kana, ideographs and hangul; then CJK and general punctuation.
        'à'..='ö' | 'ø'..='ÿ' | 'α'..='ω' | 'А'..='я' | 'ぁ'..='ゖ' | 'ァ'..='ヺ' | '一'..='鿿' | '가'..='힣' => {
            Class::Letter
        }
        '、'..='〃' | '〈'..='】' | '！'..='／' | '：'..='＠' | '‐'..='‧' => Class::Punctuation,
        _ => Class::Unsure,
    }
}

/// Whether no match of any encoding's pattern has `left` followed by `right`, except for the one character that a match
/// may begin with. Matches of symbols also include the line ends and slashes after them, in any mixture.
fn ends_between(left: char, right: char) -> bool {
    let tail = |c| matches!(c, '\n' | '\r' | '/');
    if tail(left) && tail(right) {
        return false;
    }
    let (left, right) = (class(left), class(right));
    if left == Class::Space || right == Class::Space {
        return left != right;
    }
    left != right && left != Class::Unsure && right != Class::Unsure
}
