//! Special tokens at which a text may be cut without changing its token ids.
//!
//! The library first finds all added tokens in a text (leftmost, longest), then normalises, splits and encodes each
//! part between them by itself. A cut at an added token therefore changes nothing, unless something looks beyond the
//! token: the token itself (`lstrip`, `rstrip`, `single_word`), a match in normalised text, or a step that treats the
//! start of a text differently. Only steps that are known to look at nothing but their part are trusted.

use serde::Deserialize;
use serde_json::Value;
use std::collections::HashSet;

/// Normalisers that treat a part the same at any position.
const NORMALIZERS: &[&str] =
    &["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Replace", "Nmt", "BertNormalizer", "ByteLevel"];
/// Pre-tokenizers that treat a part the same at any position.
const PRE_TOKENIZERS: &[&str] = &[
    "ByteLevel",
    "Split",
    "Digits",
    "Punctuation",
    "Whitespace",
    "WhitespaceSplit",
    "UnicodeScripts",
    "BertPreTokenizer",
    "CharDelimiterSplit",
];
/// Longest added token that is considered: longer ones would make the search for overlaps slow, and none is known.
const MAX_TOKEN_BYTES: usize = 128;

#[derive(Deserialize)]
struct TokenizerFile {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
}

#[derive(Deserialize)]
struct AddedToken {
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: bool,
}

/// Returns the marks of a `tokenizer.json`; `None` if there are none.
pub(super) fn of(tokenizer_json: &[u8]) -> Option<Vec<String>> {
    let file: TokenizerFile = serde_json::from_slice(tokenizer_json).ok()?;
    if !trusted(&file.normalizer, "normalizers", NORMALIZERS)
        || !trusted(&file.pre_tokenizer, "pretokenizers", PRE_TOKENIZERS)
    {
        return None;
    }
    let looks_around = |t: &AddedToken| t.single_word || t.lstrip || t.rstrip;
    if file.added_tokens.iter().any(|t| looks_around(t) || (t.normalized && !file.normalizer.is_null())) {
        return None;
    }
    let tokens: Vec<&str> = file.added_tokens.iter().map(|t| t.content.as_str()).filter(|t| !t.is_empty()).collect();
    if tokens.iter().any(|t| t.len() > MAX_TOKEN_BYTES) {
        return None;
    }
    let marks = without_overlaps(&tokens);
    (!marks.is_empty()).then_some(marks)
}

/// Whether a step, and every step in it, is one of `known`.
fn trusted(step: &Value, inner: &str, known: &[&str]) -> bool {
    if step.is_null() {
        return true;
    }
    match step.get("type").and_then(Value::as_str) {
        Some("Sequence") => step
            .get(inner)
            .and_then(Value::as_array)
            .is_some_and(|steps| steps.iter().all(|s| trusted(s, inner, known))),
        Some("Metaspace") => matches!(step.get("prepend_scheme").and_then(Value::as_str), Some("always" | "never")),
        Some(kind) => known.contains(&kind),
        None => false,
    }
}

/// Returns the tokens whose every occurrence in a text is a match, whatever surrounds it: no other token contains one,
/// and neither its start nor its end can be part of a match that began before it or begins in it.
fn without_overlaps(tokens: &[&str]) -> Vec<String> {
    let (mut heads, mut tails, mut inside) = (HashSet::new(), HashSet::new(), HashSet::new());
    for token in tokens {
        let ends: Vec<usize> = token.char_indices().map(|(i, _)| i).chain([token.len()]).collect();
        for (n, &from) in ends.iter().enumerate() {
            for &to in ends.iter().skip(n + 1) {
                let part = token.get(from..to).unwrap_or_default();
                match (from == 0, to == token.len()) {
                    (true, true) => continue,
                    (true, false) => heads.insert(part),
                    (false, true) => tails.insert(part),
                    (false, false) => false,
                };
                inside.insert(part);
            }
        }
    }
    let overlaps = |token: &&&str| {
        let mut cuts = token.char_indices().skip(1);
        inside.contains(**token)
            || cuts.any(|(i, _)| {
                let (head, tail) = token.split_at(i);
                tails.contains(head) || heads.contains(tail)
            })
    };
    tokens.iter().filter(|t| !overlaps(t)).map(|t| (*t).to_owned()).collect()
}
