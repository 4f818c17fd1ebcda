//! Ordinary text with tiktoken-rs's ids: English and code in two fifths of its time or less.
//!
//! tiktoken's patterns look ahead in one place: whitespace before a word leaves its last character to the word. An engine that looks ahead
//! backtracks, and that is most of what encoding costs. Here the pattern goes without: what the alternative that looks ahead would have given
//! back is given back afterwards, and a deterministic automaton finds the pieces. Nearly every piece is a token, found in a table whose keys
//! are the bytes themselves; another is merged by rank. Pieces that are long are left to tiktoken-rs.

use super::Encoding;
use ahash::{AHashMap, AHashSet};
use parking_lot::Mutex;
use regex_automata::meta::{Cache, Regex};
use regex_automata::{Anchored, Input};
use tiktoken_rs::CoreBPE;

/// Beyond 128 bytes tiktoken-rs merges faster: it keeps pairs in a heap, and here all are looked at for each merge.
const LONGEST_MERGED: usize = 128;
/// Ids of all encodings are below 2¹⁸.
const MAX_IDS: u32 = 1 << 18;
/// Tokens of up to 15 bytes, 97 of 100, have keys that need no memory of their own.
const SHORT: usize = 15;
/// No token.
const NONE: u32 = u32::MAX;

/// Tokens and the pattern of one encoding.
pub(super) struct Words {
    pattern: Regex,
    /// The pattern has whitespace end with its last line end, and such a piece gives nothing back.
    ends_lines: bool,
    short: AHashMap<u128, u32>,
    long: AHashMap<Box<[u8]>, u32>,
    /// Of the threads that encode, as many as there were at once.
    desks: Mutex<Vec<Desk>>,
}

/// What encoding works with.
struct Desk {
    cache: Cache,
    parts: Vec<Part>,
}

/// A part of a piece that is merged.
struct Part {
    start: usize,
    /// Of the token that it makes with the next part.
    rank: u32,
}

/// tiktoken's pattern without the alternative that looks ahead, and whether whitespace ends with its last line end.
fn pattern(encoding: Encoding) -> (String, bool) {
    const SUFFIX: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?";
    const UPPER: &str = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}";
    const LOWER: &str = r"\p{Ll}\p{Lm}\p{Lo}\p{M}";
    const FIRST: &str = r"[^\r\n\p{L}\p{N}]?";
    match encoding {
        Encoding::O200kBase | Encoding::O200kHarmony => {
            let word = format!("{FIRST}[{UPPER}]*[{LOWER}]+{SUFFIX}|{FIRST}[{UPPER}]+[{LOWER}]*{SUFFIX}");
            (format!(r"{word}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+"), true)
        }
        Encoding::Cl100kBase => {
            let word = format!(r"'(?i:[sdmt]|ll|ve|re)|{FIRST}\p{{L}}+");
            (format!(r"{word}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s+$|\s*[\r\n]|\s+"), true)
        }
        Encoding::P50kBase | Encoding::P50kEdit | Encoding::R50kBase => {
            (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+".to_owned(), false)
        }
    }
}

/// The bytes of a short token and how many they are.
fn key(bytes: &[u8]) -> Option<u128> {
    let mut key = [0; SHORT + 1];
    key.get_mut(..SHORT)?.get_mut(..bytes.len())?.copy_from_slice(bytes);
    Some(u128::from_le_bytes(key) | (bytes.len() as u128) << (8 * SHORT))
}

impl Words {
    /// Those of `bpe`, which is the table of `encoding`; `marks` are ids that ordinary text does not have.
    ///
    /// # Errors
    /// When the pattern is none.
    pub(super) fn new(encoding: Encoding, bpe: &CoreBPE, marks: impl Iterator<Item = u32>) -> Result<Self, String> {
        let (pattern, ends_lines) = pattern(encoding);
        let pattern = Regex::new(&pattern).map_err(|e| e.to_string())?;
        let marks: AHashSet<u32> = marks.collect();
        // As many as the largest encodings have, which would have it grow many times.
        let (mut short, mut long) = (AHashMap::with_capacity(MAX_IDS as usize / 4 * 3), AHashMap::new());
        for id in (0..MAX_IDS).filter(|id| !marks.contains(id)) {
            let Ok(bytes) = bpe.decode_bytes(&[id]) else { continue };
            match key(&bytes) {
                Some(key) => short.insert(key, id),
                None => long.insert(bytes.into_boxed_slice(), id),
            };
        }
        Ok(Self { pattern, ends_lines, short, long, desks: Mutex::default() })
    }

    fn id(&self, bytes: &[u8]) -> Option<u32> {
        match key(bytes) {
            Some(key) => self.short.get(&key).copied(),
            None => self.long.get(bytes).copied(),
        }
    }

    /// Appends the ids that [`CoreBPE::encode_ordinary`] of `bpe` gives for `text`.
    pub(super) fn encode(&self, bpe: &CoreBPE, text: &str, out: &mut Vec<u32>) {
        let desk = self.desks.lock().pop();
        let mut desk = desk.unwrap_or_else(|| Desk { cache: self.pattern.create_cache(), parts: Vec::new() });
        let mut rest = text;
        while !rest.is_empty() {
            let Some((piece, behind)) = self.piece(rest, &mut desk.cache) else {
                out.extend(bpe.encode_ordinary(rest));
                break;
            };
            match self.id(piece.as_bytes()) {
                Some(id) => out.push(id),
                None if piece.len() <= LONGEST_MERGED => self.merge(piece.as_bytes(), &mut desk.parts, out),
                None => out.extend(bpe.encode_ordinary(piece)),
            }
            rest = behind;
        }
        self.desks.lock().push(desk);
    }

    /// The first piece of `text`, and the rest of it.
    fn piece<'t>(&self, text: &'t str, cache: &mut Cache) -> Option<(&'t str, &'t str)> {
        let input = Input::new(text).anchored(Anchored::Yes);
        let end = self.pattern.search_half_with(cache, &input)?.offset();
        let (piece, rest) = text.split_at_checked(end).filter(|(piece, _)| !piece.is_empty())?;
        let last = piece.chars().next_back()?;
        let gives_back = last.is_whitespace() && !rest.is_empty() && !(self.ends_lines && matches!(last, '\n' | '\r'));
        let kept = end - if gives_back { last.len_utf8() } else { 0 };
        // One space alone has nothing to give.
        text.split_at_checked(if kept > 0 { kept } else { end })
    }

    /// The ids of a piece that is no token: of all neighbours that make one, those with the lowest rank are merged first.
    fn merge(&self, piece: &[u8], parts: &mut Vec<Part>, out: &mut Vec<u32>) {
        let id = |from: usize, to: usize| piece.get(from..to).and_then(|bytes| self.id(bytes)).unwrap_or(NONE);
        parts.clear();
        parts.extend((0..=piece.len()).map(|start| Part { start, rank: id(start, start + 2) }));
        while let Some((at, part)) = parts.iter().enumerate().min_by_key(|(_, part)| part.rank)
            && part.rank != NONE
        {
            parts.remove(at + 1);
            for at in [Some(at), at.checked_sub(1)].into_iter().flatten() {
                let end = parts.get(at + 2).map(|next| next.start);
                if let Some(part) = parts.get_mut(at) {
                    part.rank = end.map_or(NONE, |end| id(part.start, end));
                }
            }
        }
        let bounds = parts.iter().zip(parts.iter().skip(1));
        out.extend(bounds.map(|(part, next)| id(part.start, next.start)));
    }
}
