//! Bounds on what one piece of a regex-split tokenizer can be.
//!
//! These tokenizers split text into pieces by a regular expression and merge bytes within each piece, at a cost that grows faster than the
//! piece. A *run* is text in which no piece is sure to end. Ordinary text has short ones; one that is longer than [`MAX_RUN_BYTES`] is cut
//! there, so its tokens differ from an unbounded tokenizer's at the cuts, and nowhere else.

/// A run is cut after 4 KiB: no word of any language is as long, and the regex engine overflows its stack only at 100 times that.
pub const MAX_RUN_BYTES: usize = 4 << 10;
/// Runs of 256 bytes and more count as long: tiktoken-rs merges them, in some three to six times the CPU time of ordinary text. Sentences of unspaced scripts stay below.
pub const LONG_RUN_BYTES: usize = 256;
/// 4 MiB in one text, some 0.1 s of CPU time: a context of a million tokens.
pub const DEFAULT_MAX_TEXT_BYTES: usize = 4 << 20;
/// 128 KiB in long runs in one text, some 20 ms of CPU time: more than the rulers and padding of a large document, less than an attack.
pub const DEFAULT_MAX_LONG_RUN_BYTES: usize = 128 << 10;

/// What the tokenizer is given at once: text without a run beyond the bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Window<'t> {
    pub(super) text: &'t str,
    /// Bytes of it in long runs.
    pub(super) long_bytes: usize,
}

/// A text in windows, usually one. One ends only where a run is cut.
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

/// The end of the first window of `text`, and how many of its bytes are in long runs. Looks at a few characters in [`LONG_RUN_BYTES`].
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

/// The last place between characters that is not behind `at`.
fn floor(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

/// The last place in `start+1..=far` where a piece is sure to end.
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

/// The first place in `from..cap` where a piece is sure to end.
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
    /// What the patterns put with letters and with symbols alike (combining marks), and all that is too rare to be told apart.
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

/// Says whether no piece of any of the encodings' patterns holds `left` and then `right`, but for the one character that a piece may
/// begin with. Pieces of symbols also take the line ends and slashes behind them, in any mixture.
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
