//! The tokens of a template, with the white space removed that `trim_blocks`, `lstrip_blocks` and the signs in tags
//! remove.

use crate::{Error, ErrorKind, Result, Value};
use std::borrow::Cow;

/// A token.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token<'s> {
    /// Text outside of tags.
    Data(Cow<'s, str>),
    /// `{{`.
    OpenOutput,
    /// `}}`.
    CloseOutput,
    /// `{%`.
    OpenBlock,
    /// `%}`.
    CloseBlock,
    Name(&'s str),
    Text(String),
    Number(Value),
    Mark(&'static str),
    /// The end of the template.
    End,
}

/// Operators; a longer one precedes those that it starts with.
const MARKS: [&str; 24] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<", "=", ".",
    ":", "|",
];

/// Operators that [`MARKS`] has no room for.
const SEPARATORS: [&str; 2] = [",", ";"];

/// The tokens of `source`, each with its line.
pub(super) fn tokens(source: &str) -> Result<Vec<(Token<'_>, u32)>> {
    let mut lexer = Lexer { source, at: 0, line: 1, counted: 0, line_start: true, tokens: Vec::new() };
    lexer.template()?;
    lexer.push(Token::End);
    Ok(lexer.tokens)
}

/// Line ends as Jinja2 sees them, without the last one.
pub(super) fn normalised(source: &str) -> Cow<'_, str> {
    let source = if source.contains('\r') {
        Cow::Owned(source.replace("\r\n", "\n").replace('\r', "\n"))
    } else {
        Cow::Borrowed(source)
    };
    match source {
        Cow::Borrowed(text) => Cow::Borrowed(text.strip_suffix('\n').unwrap_or(text)),
        Cow::Owned(mut text) => {
            if text.ends_with('\n') {
                text.pop();
            }
            Cow::Owned(text)
        }
    }
}

struct Lexer<'s> {
    source: &'s str,
    at: usize,
    line: u32,
    /// Lines are counted up to here.
    counted: usize,
    /// Whether the text before `at` ends a line.
    line_start: bool,
    tokens: Vec<(Token<'s>, u32)>,
}

impl<'s> Lexer<'s> {
    fn rest(&self) -> &'s str {
        self.source.get(self.at..).unwrap_or_default()
    }

    fn line(&mut self) -> u32 {
        let passed = self.source.get(self.counted..self.at).unwrap_or_default();
        self.line += passed.bytes().filter(|b| *b == b'\n').count() as u32;
        self.counted = self.at.max(self.counted);
        self.line
    }

    fn push(&mut self, token: Token<'s>) {
        let line = self.line();
        self.tokens.push((token, line));
    }

    fn error(&mut self, message: impl Into<String>) -> Error {
        let line = self.line();
        Error::new(ErrorKind::Syntax, message).at(line)
    }

    /// Skips `length` bytes.
    fn skip(&mut self, length: usize) {
        let end = self.at + length;
        self.line_start = self.source.get(..end).is_some_and(|passed| passed.ends_with('\n'));
        self.at = end;
    }

    fn template(&mut self) -> Result<()> {
        loop {
            let rest = self.rest();
            let Some(open) = tag_start(rest) else {
                if !rest.is_empty() {
                    self.push(Token::Data(rest.into()));
                }
                self.at = self.source.len();
                return Ok(());
            };
            let inside = rest.get(open + 2..).unwrap_or_default();
            let kind = rest.as_bytes().get(open + 1).copied().unwrap_or_default();
            let sign = inside.bytes().next().filter(|b| matches!(b, b'-' | b'+'));
            self.data(rest.get(..open).unwrap_or_default(), sign, kind != b'{');
            self.skip(open);
            let skipped = 2 + usize::from(sign.is_some());
            match kind {
                b'#' => {
                    self.skip(skipped);
                    self.comment()?;
                }
                b'%' => {
                    let after = rest.get(open + skipped..).unwrap_or_default();
                    match raw_start(after) {
                        Some(length) => {
                            self.skip(skipped + length);
                            self.raw()?;
                        }
                        None => {
                            self.push(Token::OpenBlock);
                            self.skip(skipped);
                            self.tag("%}", Token::CloseBlock, true)?;
                        }
                    }
                }
                _ => {
                    self.push(Token::OpenOutput);
                    self.skip(skipped);
                    self.tag("}}", Token::CloseOutput, false)?;
                }
            }
        }
    }

    /// Text before a tag with this sign.
    fn data(&mut self, text: &'s str, sign: Option<u8>, is_block: bool) {
        let text = match sign {
            Some(b'-') => crate::strip_end(text),
            None if is_block => {
                let line = text.rfind('\n').map_or(0, |at| at + 1);
                let (before, last) = text.split_at(line);
                let starts = line > 0 || self.line_start;
                if starts && !last.is_empty() && crate::strip(last).is_empty() { before } else { text }
            }
            _ => text,
        };
        if !text.is_empty() {
            self.push(Token::Data(text.into()));
        }
    }

    /// The length of the end of a tag and what it removes, if `rest` starts with the end.
    fn closing(rest: &str, close: &str, trims: bool) -> Option<usize> {
        let (sign, length) = match rest.as_bytes().first()? {
            b'-' => (Some(b'-'), 1),
            b'+' if trims => (Some(b'+'), 1),
            _ => (None, 0),
        };
        let after = rest.get(length..)?.strip_prefix(close)?;
        let removed = match sign {
            Some(b'-') => after.len() - crate::characters::strip_start(after).len(),
            None if trims => usize::from(after.starts_with('\n')),
            _ => 0,
        };
        Some(length + close.len() + removed)
    }

    fn comment(&mut self) -> Result<()> {
        let rest = self.rest();
        let Some(end) = rest.find("#}") else { return Err(self.error("a comment has no end")) };
        let signed = end > 0 && matches!(rest.as_bytes().get(end - 1), Some(b'-' | b'+'));
        let end = end - usize::from(signed);
        let closing = Self::closing(rest.get(end..).unwrap_or_default(), "#}", true).unwrap_or(2);
        self.skip(end + closing);
        Ok(())
    }

    fn raw(&mut self) -> Result<()> {
        let rest = self.rest();
        let mut from = 0;
        while let Some(open) = rest.get(from..).and_then(|text| text.find("{%")).map(|at| from + at) {
            let inside = rest.get(open + 2..).unwrap_or_default();
            let sign = inside.bytes().next().filter(|b| matches!(b, b'-' | b'+'));
            let skipped = 2 + usize::from(sign.is_some());
            let word = crate::characters::strip_start(rest.get(open + skipped..).unwrap_or_default());
            if let Some(after) = word.strip_prefix("endraw") {
                let after = crate::characters::strip_start(after);
                if let Some(closing) = Self::closing(after, "%}", true) {
                    self.data(rest.get(..open).unwrap_or_default(), sign, true);
                    self.skip(rest.len() - after.len() + closing);
                    return Ok(());
                }
            }
            from = open + 2;
        }
        Err(self.error("a raw block has no end"))
    }

    /// The tokens of a tag up to its end.
    fn tag(&mut self, close: &str, end: Token<'s>, is_block: bool) -> Result<()> {
        let mut open: Vec<&'static str> = Vec::new();
        loop {
            let rest = self.rest();
            if open.is_empty()
                && let Some(length) = Self::closing(rest, close, is_block)
            {
                self.push(end);
                self.skip(length);
                return Ok(());
            }
            let Some(first) = rest.chars().next() else { return Err(self.error("a tag has no end")) };
            if crate::characters::is_space(first) {
                self.skip(first.len_utf8());
                continue;
            }
            let (token, length) = match first {
                '0'..='9' => number(rest, self.at > 0 && self.source.as_bytes().get(self.at - 1) == Some(&b'.'))
                    .ok_or_else(|| self.error("a number is too large"))?,
                '"' | '\'' => {
                    let (text, length) = text(rest).map_err(|message| self.error(message))?;
                    (Token::Text(text), length)
                }
                c if c == '_' || c.is_alphanumeric() => {
                    let length = rest.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(rest.len());
                    (Token::Name(rest.get(..length).unwrap_or_default()), length)
                }
                _ => {
                    let mut marks = MARKS.iter().chain(&SEPARATORS);
                    let Some(mark) = marks.find(|mark| rest.starts_with(**mark)) else {
                        return Err(self.error(format!("unexpected character {first:?}")));
                    };
                    match *mark {
                        "(" => open.push(")"),
                        "[" => open.push("]"),
                        "{" => open.push("}"),
                        ")" | "]" | "}" if open.pop() != Some(mark) => {
                            return Err(self.error(format!("unexpected {mark:?}")));
                        }
                        _ => {}
                    }
                    (Token::Mark(mark), mark.len())
                }
            };
            self.push(token);
            self.skip(length);
        }
    }
}

/// The position of the first tag.
fn tag_start(text: &str) -> Option<usize> {
    let mut from = 0;
    loop {
        let at = from + text.get(from..)?.find('{')?;
        if matches!(text.as_bytes().get(at + 1), Some(b'{' | b'%' | b'#')) {
            return Some(at);
        }
        from = at + 1;
    }
}

/// The length of `raw -%}` with the white space that it removes.
fn raw_start(text: &str) -> Option<usize> {
    let after = crate::characters::strip_start(text).strip_prefix("raw")?;
    let after = crate::characters::strip_start(after);
    let end = match after.strip_prefix("-%}") {
        Some(end) => crate::characters::strip_start(end),
        None => after.strip_prefix("%}")?,
    };
    Some(text.len() - end.len())
}

/// Reads digits, with single underscores between them.
fn digits(text: &str, radix: u32) -> &str {
    let mut end = 0;
    for (at, c) in text.char_indices() {
        match c {
            '_' if end == at && at > 0 => {}
            c if c.is_digit(radix) => end = at + 1,
            _ => break,
        }
    }
    text.get(..end).unwrap_or_default()
}

/// Reads a number. After a point, `1.5` is two keys.
fn number<'s>(text: &'s str, after_point: bool) -> Option<(Token<'s>, usize)> {
    let whole = digits(text, 10);
    if !after_point {
        let mut length = whole.len();
        let after = text.get(length..)?;
        if let Some(fraction) = after.strip_prefix('.') {
            let fraction = digits(fraction, 10);
            length += if fraction.is_empty() { 0 } else { 1 + fraction.len() };
        }
        let after = text.get(length..)?;
        if let Some(exponent) = after.strip_prefix(['e', 'E']) {
            let sign = usize::from(exponent.starts_with(['+', '-']));
            let exponent = digits(exponent.get(sign..)?, 10);
            length += if exponent.is_empty() { 0 } else { 1 + sign + exponent.len() };
        }
        if length > whole.len() {
            let number: f64 = text.get(..length)?.replace('_', "").parse().ok()?;
            // Python has no literal of an infinite number.
            return number.is_finite().then_some((Token::Number(Value::Float(number)), length));
        }
    }
    let prefix = text.get(..2).unwrap_or_default().to_ascii_lowercase();
    for (start, radix) in [("0b", 2), ("0o", 8), ("0x", 16)] {
        if prefix == start {
            let after = text.get(2..)?;
            // An underscore may follow the prefix.
            let skipped = usize::from(after.starts_with('_'));
            let digits = digits(after.get(skipped..)?, radix);
            if !digits.is_empty() {
                let number = i128::from_str_radix(&digits.replace('_', ""), radix).ok()?;
                return Some((Token::Number(Value::from(number)), 2 + skipped + digits.len()));
            }
        }
    }
    // `07` is two numbers.
    let length = if whole.starts_with('0') {
        let zeros = whole.bytes().take_while(|b| matches!(b, b'0' | b'_')).count();
        whole.get(..zeros)?.trim_end_matches('_').len()
    } else {
        whole.len()
    };
    let number: i128 = whole.get(..length)?.replace('_', "").parse().ok()?;
    Some((Token::Number(Value::from(number)), length))
}

/// Reads a text in quotes with the escapes of Python; also returns its length in the source.
fn text(source: &str) -> Result<(String, usize), String> {
    let mut chars = source.char_indices();
    let quote = chars.next().map_or('"', |(_, c)| c);
    let mut out = String::new();
    while let Some((at, c)) = chars.next() {
        if c == quote {
            return Ok((out, at + 1));
        }
        if c != '\\' {
            out.push(c);
            continue;
        }
        let Some((_, escape)) = chars.next() else { break };
        let after = chars.as_str();
        let (digits, radix, least) = match escape {
            'x' => (2, 16, 2),
            'u' => (4, 16, 4),
            'U' => (8, 16, 8),
            '0'..='7' => (2, 8, 0),
            'N' => return Err("the escape \\N is not supported".to_owned()),
            _ => {
                match escape {
                    '\n' => {}
                    '\\' | '\'' | '"' => out.push(escape),
                    'a' => out.push('\x07'),
                    'b' => out.push('\x08'),
                    'f' => out.push('\x0c'),
                    'n' => out.push('\n'),
                    'r' => out.push('\r'),
                    't' => out.push('\t'),
                    'v' => out.push('\x0b'),
                    other => out.extend(['\\', other]),
                }
                continue;
            }
        };
        let count = after.chars().take(digits).take_while(|c| c.is_digit(radix)).count();
        let octal = escape.to_digit(8).filter(|_| radix == 8).unwrap_or(0);
        let digits = after.get(..count).unwrap_or_default();
        let code = digits
            .chars()
            .filter_map(|c| c.to_digit(radix))
            .fold(octal, |code, digit| code.wrapping_mul(radix).wrapping_add(digit));
        let character = char::from_u32(code).filter(|_| count >= least);
        out.push(character.ok_or_else(|| format!("the escape \\{escape}{digits} is no character"))?);
        for _ in 0..count {
            chars.next();
        }
    }
    Err("a text has no end".to_owned())
}
