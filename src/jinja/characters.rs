//! Properties of characters as Python's `str` defines them.

use regex_syntax::hir::{Class, HirKind};
use std::sync::OnceLock;

/// Whether Python's `str.strip()` and `str.split()` count it as white space: Unicode's, and four control characters.
pub(crate) fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\x1c'..='\x1f')
}

/// As Python's `str.strip()`.
#[must_use]
pub fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// As Python's `str.rstrip()`.
#[must_use]
pub fn strip_end(text: &str) -> &str {
    text.trim_end_matches(is_space)
}

/// As Python's `str.lstrip()`.
pub(crate) fn strip_start(text: &str) -> &str {
    text.trim_start_matches(is_space)
}

/// Whether it ends a line for `str.splitlines()`.
pub(crate) fn ends_line(c: char) -> bool {
    matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

/// As Python's `str.splitlines()`.
pub(crate) fn lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let Some((at, c)) = rest.char_indices().find(|(_, c)| ends_line(*c)) else {
            lines.push(rest);
            break;
        };
        let length = if rest.get(at..).is_some_and(|end| end.starts_with("\r\n")) { 2 } else { c.len_utf8() };
        let (line, after) = rest.split_at(at + length);
        lines.push(if keep_ends { line } else { line.get(..at).unwrap_or_default() });
        rest = after;
    }
    lines
}

/// Whether Python's `repr` writes the character itself.
pub(crate) fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        return matches!(c, ' '..='~');
    }
    // The rule of `escape_debug` is Python's. It also escapes combining characters, but only at the start.
    let mut buffer = [b'a'; 5];
    let length = c.encode_utf8(&mut buffer[1..]).len();
    let text = buffer.get(..=length).and_then(|bytes| std::str::from_utf8(bytes).ok());
    text.is_some_and(|text| text.escape_debug().nth(1) == Some(c))
}

/// Whether the character has a case.
pub(crate) fn is_cased(c: char) -> bool {
    c.is_lowercase() || c.is_uppercase() || is_title(c)
}

/// Whether it is a title-case letter, a kind of its own.
pub(crate) fn is_title(c: char) -> bool {
    matches!(c, 'ǅ' | 'ǈ' | 'ǋ' | 'ǲ' | '\u{1f88}'..='\u{1f8f}' | '\u{1f98}'..='\u{1f9f}')
        || matches!(c, '\u{1fa8}'..='\u{1faf}' | 'ᾼ' | 'ῌ' | 'ῼ')
}

/// Appends the character in title case.
pub(crate) fn push_title(c: char, out: &mut String) {
    let single = match c {
        'Ǆ'..='ǆ' => 'ǅ',
        'Ǉ'..='ǉ' => 'ǈ',
        'Ǌ'..='ǌ' => 'ǋ',
        'Ǳ'..='ǳ' => 'ǲ',
        // Georgian letters have no title case.
        '\u{10d0}'..='\u{10fa}' | '\u{10fd}'..='\u{10ff}' => c,
        '\u{1f80}'..='\u{1f87}' | '\u{1f90}'..='\u{1f97}' | '\u{1fa0}'..='\u{1fa7}' => {
            char::from_u32(c as u32 + 8).unwrap_or(c)
        }
        'ᾳ' => 'ᾼ',
        'ῃ' => 'ῌ',
        'ῳ' => 'ῼ',
        c if is_title(c) => c,
        _ => {
            let mut upper = c.to_uppercase();
            out.extend(upper.next());
            // Letters that become several, such as ligatures; the iota of Greek letters becomes small.
            out.extend(upper.flat_map(char::to_lowercase));
            return;
        }
    };
    out.push(single);
}

/// As Python's `str.title()`.
pub(crate) fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let lower = text.to_lowercase();
    // A lower-case letter may be several characters, and a final sigma depends on its word.
    let same = lower.chars().count() == text.chars().count();
    let mut lower = lower.chars();
    let mut in_word = false;
    for c in text.chars() {
        let small = lower.next().filter(|_| same);
        match (in_word, small) {
            (false, _) => push_title(c, &mut out),
            (true, Some(small)) => out.push(small),
            (true, None) => out.extend(c.to_lowercase()),
        }
        in_word = is_cased(c);
    }
    out
}

/// As Python's `str.capitalize()`.
pub(crate) fn capitalize(text: &str) -> String {
    let mut chars = text.chars();
    let mut out = String::with_capacity(text.len());
    if let Some(first) = chars.next() {
        push_title(first, &mut out);
        // The context of the first letter matters for a final sigma.
        let lower = text.to_lowercase();
        let skipped: usize = first.to_lowercase().map(char::len_utf8).sum();
        out.push_str(lower.get(skipped..).unwrap_or_default());
    }
    out
}

/// As Python's `str.swapcase()`.
pub(crate) fn swap_case(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_uppercase() {
            out.extend(c.to_lowercase());
        } else if c.is_lowercase() {
            out.extend(c.to_uppercase());
        } else {
            out.push(c);
        }
    }
    out
}

/// Ranges of the characters in a Unicode category.
fn category(name: &str) -> Vec<(char, char)> {
    let parsed = regex_syntax::Parser::new().parse(&format!(r"\p{{{name}}}"));
    let class = parsed.ok().and_then(|hir| match hir.into_kind() {
        HirKind::Class(Class::Unicode(class)) => Some(class),
        _ => None,
    });
    class.into_iter().flat_map(|class| class.iter().map(|r| (r.start(), r.end())).collect::<Vec<_>>()).collect()
}

fn range_of(ranges: &[(char, char)], c: char) -> Option<(char, char)> {
    let at = ranges.partition_point(|(_, end)| *end < c);
    ranges.get(at).copied().filter(|(start, _)| *start <= c)
}

/// Whether it is a letter for `str.isalpha()`.
pub(crate) fn is_letter(c: char) -> bool {
    static LETTERS: OnceLock<Vec<(char, char)>> = OnceLock::new();
    if c.is_ascii() { c.is_ascii_alphabetic() } else { range_of(LETTERS.get_or_init(|| category("L")), c).is_some() }
}

/// Whether it is a number of any kind, so that Python's answer depends on a property that is not known here.
pub(crate) fn is_other_number(c: char) -> bool {
    static NUMBERS: OnceLock<Vec<(char, char)>> = OnceLock::new();
    !c.is_ascii()
        && decimal(c).is_none()
        // Some Chinese letters are numbers too.
        && (range_of(NUMBERS.get_or_init(|| category("N")), c).is_some() || matches!(c, '\u{3400}'..='\u{2ffff}'))
}

/// The value of a decimal digit of any script.
pub(crate) fn decimal(c: char) -> Option<u32> {
    static DIGITS: OnceLock<Vec<(char, char)>> = OnceLock::new();
    if c.is_ascii() {
        return c.to_digit(10);
    }
    // Each script has its ten digits in a row.
    range_of(DIGITS.get_or_init(|| category("Nd")), c).map(|(start, _)| (c as u32 - start as u32) % 10)
}
