//! Encodes ordinary text with tiktoken-rs's ids, English and code in two fifths of its time or less.
//!
//! tiktoken's patterns have one lookahead: white space before a word leaves its last character to the word. A
//! regex engine with lookahead backtracks, which is most of the cost of encoding. Here the pattern has no
//! lookahead: the character is given back afterwards, and a deterministic automaton finds the parts. Nearly
//! every part is a token, found in a table whose keys are the bytes themselves; others are merged by rank. Long
//! parts are passed to tiktoken-rs.

use super::Encoding;
use ahash::{AHashMap, AHashSet};
use parking_lot::Mutex;
use regex_automata::meta::{Cache, Regex};
use regex_automata::{Anchored, Input};
use tiktoken_rs::CoreBPE;

/// Longest part that is merged here, in bytes. tiktoken-rs merges longer ones faster: it keeps pairs in a heap, while
/// here all are compared for each merge.
const LONGEST_MERGED: usize = 128;
/// Upper limit of the ids in all encodings.
const MAX_IDS: u32 = 1 << 18;
/// Longest token, in bytes, whose key needs no memory of its own: 97 of 100 tokens.
const SHORT: usize = 15;
/// Marks the absence of a token.
const NONE: u32 = u32::MAX;

/// Tokens and the pattern of one encoding.
pub(super) struct Words {
    pattern: Regex,
    /// Whether the pattern ends white space at its last line end; such a match gives nothing back.
    ends_lines: bool,
    short: AHashMap<u128, u32>,
    long: AHashMap<Box<[u8]>, u32>,
    /// Buffers of the threads that encode, as many as ever encoded at once.
    desks: Mutex<Vec<Desk>>,
}

/// Buffers of one thread.
struct Desk {
    cache: Cache,
    parts: Vec<MergePart>,
}

/// A part of a match that is merged.
struct MergePart {
    start: usize,
    /// Rank of the token that it forms with the next part.
    rank: u32,
}

/// Returns tiktoken's pattern without lookahead, and whether white space ends at its last line end.
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

/// Returns the bytes of a short token together with its length.
fn key(bytes: &[u8]) -> Option<u128> {
    let mut key = [0; SHORT + 1];
    key.get_mut(..SHORT)?.get_mut(..bytes.len())?.copy_from_slice(bytes);
    Some(u128::from_le_bytes(key) | (bytes.len() as u128) << (8 * SHORT))
}

impl Words {
    /// Creates the tokens of `bpe`, which is the table of `encoding`; `marks` are ids that ordinary text does not have.
    ///
    /// # Errors
    /// When the pattern is invalid.
    pub(super) fn new(encoding: Encoding, bpe: &CoreBPE, marks: impl Iterator<Item = u32>) -> Result<Self, String> {
        let (pattern, ends_lines) = pattern(encoding);
        let pattern = Regex::new(&pattern).map_err(|e| e.to_string())?;
        let marks: AHashSet<u32> = marks.collect();
        // As many as the largest encodings have, so that the table does not grow many times.
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

    /// Returns the first match in `text`, and the rest.
    fn piece<'t>(&self, text: &'t str, cache: &mut Cache) -> Option<(&'t str, &'t str)> {
        let input = Input::new(text).anchored(Anchored::Yes);
        let end = self.pattern.search_half_with(cache, &input)?.offset();
        let (piece, rest) = text.split_at_checked(end).filter(|(piece, _)| !piece.is_empty())?;
        let last = piece.chars().next_back()?;
        let gives_back = last.is_whitespace() && !rest.is_empty() && !(self.ends_lines && matches!(last, '\n' | '\r'));
        let kept = end - if gives_back { last.len_utf8() } else { 0 };
        // A single space has nothing to give back.
        text.split_at_checked(if kept > 0 { kept } else { end })
    }

    /// Appends the ids of a part that is not a token: of all neighbours that form one, those with the
    /// lowest rank are merged first.
    fn merge(&self, piece: &[u8], parts: &mut Vec<MergePart>, out: &mut Vec<u32>) {
        let id = |from: usize, to: usize| piece.get(from..to).and_then(|bytes| self.id(bytes)).unwrap_or(NONE);
        parts.clear();
        parts.extend((0..=piece.len()).map(|start| MergePart { start, rank: id(start, start + 2) }));
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
