//! Whether a tokenizer splits texts between words as [`Cuts`](crate::memo::Cuts) cuts them: before a space that follows
//! a word, and after a single line end between words.
//!
//! A cut there changes no ids if no match of the tokenizer's pattern crosses it and no part depends on what lies beyond
//! it. The pattern decides this. No match may contain a non-space character followed by a space, or a line end followed
//! by one. Every space and line end must be in a match. The only lookahead of known patterns, `\s+(?!\S)`, gives a
//! space back to the word after it, which no cut separates from it. Any other pattern is not trusted.

use regex_automata::meta::Regex;
use regex_syntax::hir::{Class, ClassUnicode, ClassUnicodeRange, Hir, HirKind};
use serde::Deserialize;
use serde_json::Value;

/// Normalisers that change neither spaces and line ends nor their neighbours.
const NORMALIZERS: &[&str] = &["NFC", "NFD", "NFKC", "NFKD", "Lowercase"];
/// GPT-2's pattern, which `ByteLevel` uses.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

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
}

/// Whether the tokenizer of a `tokenizer.json` is known to split between words.
pub(super) fn are_split(tokenizer_json: &[u8]) -> bool {
    let Ok(file) = serde_json::from_slice::<TokenizerFile>(tokenizer_json) else { return false };
    // Added tokens are found before anything is split.
    if file.added_tokens.iter().any(|token| token.content.contains(char::is_whitespace)) {
        return false;
    }
    let normalizers = steps(&file.normalizer, "normalizers");
    let known =
        |step: &&Value| step.get("type").and_then(Value::as_str).is_some_and(|kind| NORMALIZERS.contains(&kind));
    if !normalizers.iter().all(known) {
        return false;
    }
    let splits: Option<Vec<Split>> = steps(&file.pre_tokenizer, "pretokenizers").into_iter().map(Split::of).collect();
    splits.is_some_and(|splits| splits.contains(&Split::Everywhere))
}

/// Returns a step, or the steps of a sequence.
fn steps<'v>(step: &'v Value, inner: &str) -> Vec<&'v Value> {
    match (step.get("type").and_then(Value::as_str), step.get(inner).and_then(Value::as_array)) {
        _ if step.is_null() => Vec::new(),
        (Some("Sequence"), Some(all)) => all.iter().flat_map(|step| steps(step, inner)).collect(),
        _ => vec![step],
    }
}

/// How a step splits a text that may be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Split {
    /// At all positions where the text may be cut.
    Everywhere,
    /// At other positions, independently of a cut.
    Elsewhere,
}

impl Split {
    /// Returns `None` for a step that is not known to do either.
    fn of(step: &Value) -> Option<Self> {
        let is = |key: &str, value: bool| step.get(key).and_then(Value::as_bool) == Some(value);
        match step.get("type").and_then(Value::as_str)? {
            "Split" if step.get("behavior")?.as_str()? == "Isolated" && is("invert", false) => {
                Self::by_pattern(step.get("pattern")?.get("Regex")?.as_str()?)
            }
            "ByteLevel" if is("add_prefix_space", false) && is("use_regex", false) => Some(Self::Elsewhere),
            "ByteLevel" if is("add_prefix_space", false) => Self::by_pattern(GPT2),
            "Digits" | "Punctuation" => Some(Self::Elsewhere),
            _ => None,
        }
    }

    fn by_pattern(pattern: &str) -> Option<Self> {
        let pattern = pattern.replace(r"\s+(?!\S)", r"\s+");
        let hir = regex_syntax::parse(&pattern).ok()?;
        let class = |pattern: &str| match regex_syntax::parse(pattern).ok()?.into_kind() {
            HirKind::Class(Class::Unicode(class)) => Some(class),
            _ => None,
        };
        let solid = class(r"\S")?;
        let word = class(r"[\S&&[^/]]")?;
        let of = |c| ClassUnicode::new([ClassUnicodeRange::new(c, c)]);
        for (left, right) in [(&solid, &of(' ')), (&of('\n'), &word)] {
            if ClassEnds::of(&hir, left, right)?.joined {
                return None;
            }
        }
        let regex = Regex::new(&pattern).ok()?;
        let takes = |text: &str| regex.find(text).is_some_and(|found| found.len() == text.len());
        Some(if takes(" ") && takes("\n") { Self::Everywhere } else { Self::Elsewhere })
    }
}

/// Where a pattern's matches may contain a character of one class (`left`) followed by one of another (`right`).
#[derive(Clone, Copy, Debug)]
struct ClassEnds {
    /// Whether a match may be empty.
    empty: bool,
    /// Whether a match may begin with a character of `right`.
    begins: bool,
    /// Whether a match may end with a character of `left`.
    ends: bool,
    /// Whether a match may contain both, one after the other.
    joined: bool,
}

impl ClassEnds {
    const NOTHING: Self = Self { empty: true, begins: false, ends: false, joined: false };

    /// Returns `None` for a pattern with lookaround or with bytes that are not text.
    fn of(hir: &Hir, left: &ClassUnicode, right: &ClassUnicode) -> Option<Self> {
        let holds = |class: &ClassUnicode, of: &ClassUnicode| {
            let mut both = class.clone();
            both.intersect(of);
            !both.ranges().is_empty()
        };
        match hir.kind() {
            HirKind::Empty => Some(Self::NOTHING),
            HirKind::Literal(literal) => {
                let text = std::str::from_utf8(&literal.0).ok()?;
                let one = |c| ClassUnicode::new([ClassUnicodeRange::new(c, c)]);
                let part =
                    |c| Self { empty: false, begins: holds(&one(c), right), ends: holds(&one(c), left), joined: false };
                Some(text.chars().map(part).fold(Self::NOTHING, Self::then))
            }
            HirKind::Class(class) => {
                let class = match class {
                    Class::Unicode(class) => class.clone(),
                    Class::Bytes(class) => class.to_unicode_class()?,
                };
                Some(Self { empty: false, begins: holds(&class, right), ends: holds(&class, left), joined: false })
            }
            HirKind::Look(_) => None,
            HirKind::Repetition(repetition) => {
                let once = Self::of(&repetition.sub, left, right)?;
                let many = if repetition.max == Some(1) { once } else { once.then(once) };
                Some(Self { empty: once.empty || repetition.min == 0, ..many })
            }
            HirKind::Capture(capture) => Self::of(&capture.sub, left, right),
            HirKind::Concat(parts) => {
                let mut all = Self::NOTHING;
                for part in parts {
                    all = all.then(Self::of(part, left, right)?);
                }
                Some(all)
            }
            HirKind::Alternation(parts) => {
                let mut any = Self { empty: false, ..Self::NOTHING };
                for part in parts {
                    let part = Self::of(part, left, right)?;
                    any = Self {
                        empty: any.empty || part.empty,
                        begins: any.begins || part.begins,
                        ends: any.ends || part.ends,
                        joined: any.joined || part.joined,
                    };
                }
                Some(any)
            }
        }
    }

    /// Combines a match of this pattern with one of `next` after it.
    fn then(self, next: Self) -> Self {
        Self {
            empty: self.empty && next.empty,
            begins: self.begins || (self.empty && next.begins),
            ends: next.ends || (next.empty && self.ends),
            joined: self.joined || next.joined || (self.ends && next.begins),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA3: &str = concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    );
    const O200K: &str = concat!(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    );
    const DEEPSEEK: &str = concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"##,
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    );

    #[test]
    fn patterns_of_known_models_split_between_words() {
        for pattern in [GPT2, LLAMA3, O200K, DEEPSEEK] {
            assert_eq!(Split::by_pattern(pattern), Some(Split::Everywhere), "{pattern}");
        }
        assert_eq!(Split::by_pattern(r"\p{N}{1,3}"), Some(Split::Elsewhere));
        assert_eq!(Split::by_pattern(r"[一-龥぀-ゟ゠-ヿ]+"), Some(Split::Elsewhere));
    }

    #[test]
    fn patterns_that_join_words_or_look_around_are_not_trusted() {
        for pattern in [
            r".+",
            r"[\s\S]{1,4}",
            r"\w+ ?",
            r"(?:\w| )+",
            r"\w+(?: \w+)?|\s+",
            r"\n\w+|\s+|\S+",
            r"^\w+|\s+|\S+",
            r"\b\w+|\s+",
            r"(?<=a)b|\s+",
            r"\w+(?= )|\s+",
            r"(",
        ] {
            assert_eq!(Split::by_pattern(pattern), None, "{pattern}");
        }
    }

    #[test]
    fn unknown_steps_are_not_trusted() {
        let split = |normalizer: Value, pre_tokenizer: Value| {
            are_split(
                serde_json::json!({"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}).to_string().as_bytes(),
            )
        };
        let regex = |pattern: &str| {
            let pattern = serde_json::json!({"Regex": pattern});
            serde_json::json!({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false})
        };
        let bytes = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": false});
        let sequence = |steps: &[&Value]| serde_json::json!({"type": "Sequence", "pretokenizers": steps});
        let (llama, digits) = (regex(LLAMA3), regex(r"\p{N}{1,3}"));
        assert!(split(Value::Null, sequence(&[&llama, &bytes])));
        assert!(split(serde_json::json!({"type": "NFC"}), sequence(&[&digits, &llama, &bytes])));
        assert!(split(Value::Null, serde_json::json!({"type": "ByteLevel", "add_prefix_space": false})));
        assert!(!split(Value::Null, serde_json::json!({"type": "ByteLevel", "add_prefix_space": true})));
        assert!(!split(Value::Null, sequence(&[&digits, &bytes])), "nothing splits at spaces");
        assert!(!split(serde_json::json!({"type": "Replace"}), llama.clone()));
        assert!(!split(Value::Null, sequence(&[&llama, &serde_json::json!({"type": "Metaspace"})])));
        let pattern = serde_json::json!({"Regex": LLAMA3});
        let behavior = "MergedWithPrevious";
        let merged = serde_json::json!({"type": "Split", "pattern": pattern, "behavior": behavior, "invert": false});
        assert!(!split(Value::Null, merged));
        assert!(!split(Value::Null, Value::Null));
    }
}
